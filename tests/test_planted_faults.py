"""Known mistakes, planted in the CPU path and in the kernels, are noticed; the library without them passes the same checks.

The table of what was noticed, how and by what number ends a run of pytest; docs/faults.md has it too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from cupyspec.testing import ErrorBudget
from experiments import experiments
from host_cuda import backend as host_backend
from machines import MACHINES, Machine, Patch, planted
from planted import FAULTS, statistic

NEEDS_COMPILER = pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")
BACK_ENDS = ("numpy", pytest.param("host_cuda", marks=NEEDS_COMPILER))
# CUPYSPEC_LAW_SEEDS=200, or the profile "deep", for more; kernels on the CPU take some two seconds a seed.
SEEDS = int(os.environ.get("CUPYSPEC_LAW_SEEDS", 0)) or (200 if settings.default is settings.get_profile("deep") else 5)
# Draws by those that find the planted faults.
TIMES = {"numpy": 5, "host_cuda": 1, "gpu": 100}
TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("name", BY_NAME)
def test_planted_fault_is_noticed(name: str, back_end: str, record_property: Callable[[str, object], None]) -> None:
    """Catches a check that would let a known mistake pass: one sample must reject it at 1e-9."""
    fault = BY_NAME[name]
    result = fault.check(back_end)
    record_property("planted fault", [name, fault.experiment, back_end, statistic(result)])
    assert result.rejected, str(result)


@pytest.fixture(scope="module", params=[*BACK_ENDS, pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, need_frontend: Callable[[str], object]) -> Machine:
    if request.param == "gpu":
        need_frontend("torch")
    return MACHINES[request.param]()


@pytest.mark.parametrize("name", experiments())
def test_library_follows_the_law(name: str, machine: Machine) -> None:
    """Catches a bias of any back end, and a check that rejects what is right; seeds 1, 2, ... of each experiment."""
    experiment = experiments()[name]
    size = experiment.draws * TIMES[machine.name]
    for seed in range(1, SEEDS + 1):

        def check(draws: int, stage: int, seed: int = seed) -> object:
            return experiment.check(machine, seed + stage * 1000, draws)

        result, failed = ErrorBudget().judge(check, size)
        assert not failed, f"seed {seed}: {result}"


def test_every_experiment_notices_a_fault() -> None:
    """Catches an experiment that proves nothing, and a table that has shrunk."""
    assert {fault.experiment for fault in FAULTS} == set(experiments())
    assert len(BY_NAME) == len(FAULTS) >= 20


def test_documented_table_is_this_one() -> None:
    """Catches docs that name faults which are not planted, or other experiments than those that notice them."""
    rows = [line.strip("| ").split(" | ")[:2] for line in PAGE.splitlines() if line.count(" | ") == 3]
    assert rows[1:] == [[fault.name, fault.experiment] for fault in FAULTS]


def test_documented_tests_exist() -> None:
    """Catches a fault of the field that nothing covers any more: F1 to F28, each with tests that are there, or later."""
    rows = re.findall(r"^\| (F\d+): .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert [number for number, _ in rows] == [f"F{n}" for n in range(1, 29)]
    for number, tests in rows:
        named = re.findall(r"`(\w+\.py)::(\w+)`", tests)
        assert named or tests == "later", number
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), (number, file, test)


@pytest.mark.parametrize("old", ["nothing like this", "return"])
def test_a_patch_that_does_not_match_once_is_an_error(old: str) -> None:
    """Catches a fault that is no longer planted because the code around it changed."""
    with pytest.raises(LookupError, match="must match in one place"):
        planted({"a": "return 1\nreturn 2", "b": "return 3"}, [Patch(old, "")])


def test_a_planted_fault_does_not_stay() -> None:
    """Catches a patch that reaches the library itself, where it would spoil the tests that follow."""
    fault = FAULTS[0]
    assert fault.check("numpy").rejected
    assert not experiments()[fault.experiment].check(Machine(), 0).rejected
