"""Settings and fixtures that every test shares: Hypothesis profiles, `--frontends`, the `gpu` marker, the kernel cache."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
from hypothesis import settings

# No deadlines: the first call of a kernel or a jitted function may take seconds. max_examples is set here, in no test.
settings.register_profile("dev", max_examples=25, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True, derandomize=True)
settings.register_profile("deep", max_examples=3000, deadline=None, print_blob=True)
# pytest's own --hypothesis-profile is read later and wins.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

FRONTENDS = ("numpy", "torch", "jax", "cupy")
REQUESTED = pytest.StashKey[frozenset[str]]()
KERNEL_CACHE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frontends",
        default="",
        metavar="NAMES",
        help=f"comma-separated array libraries ({', '.join(FRONTENDS)}) that must be there: a missing one fails the run. "
        "Without it, tests of libraries that are not installed are skipped.",
    )


def pytest_configure(config: pytest.Config) -> None:
    names = frozenset(filter(None, config.getoption("--frontends").replace(" ", "").split(",")))
    if unknown := names - set(FRONTENDS):
        raise pytest.UsageError(f"--frontends: unknown {sorted(unknown)}, allowed {list(FRONTENDS)}")
    # At once and for the whole run: a test that skips by itself where its library is missing is then covered too.
    if missing := sorted(name for name in names if importlib.util.find_spec(name) is None):
        raise pytest.UsageError(f"--frontends: requested but not installed: {', '.join(missing)}")
    config.stash[REQUESTED] = names

    # JAX would take three quarters of a GPU's memory at its first array, PyTorch and CuPy share the rest.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the variable, and so share one cache
        if kept := os.environ.get("CUPYSPEC_KERNEL_CACHE"):  # a folder that may be filled beforehand, and is left there
            os.environ["CUPY_CACHE_DIR"] = kept
        else:
            config.stash[KERNEL_CACHE] = os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cupyspec-kernels-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(KERNEL_CACHE, None):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    installed = [name for name in FRONTENDS if importlib.util.find_spec(name) is not None]
    requested = sorted(config.stash[REQUESTED]) or "none"
    return f"frontends: installed {installed}, required {requested}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of planted faults, after a run of test_planted_faults.py."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for key, value in getattr(report, "user_properties", []):
                if key == "planted fault" and report.when == "call":
                    name, experiment, back_end, statistic = value
                    note = statistic if outcome == "passed" else f"NOT NOTICED: {statistic}"
                    found.setdefault((name, experiment), {})[back_end] = note
    if not found:
        return
    terminalreporter.section(f"{len(found)} planted faults, and what noticed them")
    lines = [("fault", "noticed by", "CPU path", "kernels")]
    lines += [(*names, notes.get("numpy", "-"), notes.get("host_cuda", "-")) for names, notes in found.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        terminalreporter.write_line("  ".join(map(str.ljust, line, widths)).rstrip())


@cache
def missing_gpu() -> str:
    """Why there is no CUDA device to test on, or an empty string. Asks the driver alone: no framework is imported."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "needs a GPU: no CUDA driver on this machine"
    count = ctypes.c_int(0)
    if (error := driver.cuInit(0)) or (error := driver.cuDeviceGetCount(ctypes.byref(count))):
        return f"needs a GPU: the CUDA driver answers with error {error}"
    return "" if count.value else "needs a GPU: the CUDA driver sees no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := missing_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


def import_frontend(name: str, *, required: bool) -> ModuleType:
    """The array library; where it is missing the test fails if it was required, and is skipped if not."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if required:
            pytest.fail(f"--frontends requires {name}, which cannot be imported: {error}")
        pytest.skip(f"{name} is not installed (--frontends {name} makes this a failure): {error}")


@pytest.fixture(scope="session")
def need_frontend(request: pytest.FixtureRequest) -> Callable[[str], ModuleType]:
    """`need_frontend("torch")` is the imported library; the test is skipped, or fails if required, without it."""
    required = request.config.stash[REQUESTED]

    def need(name: str) -> ModuleType:
        if name not in FRONTENDS:
            raise ValueError(f"frontend must be one of {FRONTENDS}, got {name!r}")
        return import_frontend(name, required=name in required)

    return need


@pytest.fixture(params=FRONTENDS)
def frontend(request: pytest.FixtureRequest, need_frontend: Callable[[str], ModuleType]) -> str:
    """The name of each array library in turn, imported."""
    need_frontend(request.param)
    return str(request.param)
