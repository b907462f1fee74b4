"""`cupyspec check`: passes here, fails where something is wrong, says what it saw and what it could not see."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupyspec
from cupyspec import Sampling, _check
from cupyspec.__main__ import main
from cupyspec._check_cases import LARGE, PAIRS, cases

ALL = {case.name: case for case in cases(None)}


def only(*names: str) -> Any:
    """Within it the command runs these cases alone."""
    return mock.patch("cupyspec._check.cases", lambda bfloat16: [ALL[name] for name in names])


def changed(name: str, change: Callable[..., Any]) -> Any:
    """Within it the cases call a wrong `verify` or `sample`."""
    return mock.patch(f"cupyspec._check_cases.cupyspec.{name}", change)


def test_it_passes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a law that is not that of its draws, a check without its power, and a report without what repeats it."""
    file = tmp_path / "report.json"
    assert main(["check", "--draws", "4000", "--seed", "7", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "Tokens follow each rule's own exact law in every check." in shown and "finds TV" in shown
    report = json.loads(file.read_text())
    assert report["passed"] and report["seed"] == 7 and report["device"] == "CPU"
    assert {"cupyspec", "python", "numpy", "scipy"} <= report["versions"].keys()
    checks = report["checks"]
    assert report["false_alarm_rate"] == pytest.approx(len(checks) * 1e-6, rel=1e-3)
    assert (
        len({check["seed"] for check in checks}) == len({check["check"] for check in checks}) == len(cases(np.float16))
    )
    for check in checks:
        assert check["verdict"] == "ok" and 0 < check["detectable"] <= 0.25 and check["p_value"] > 1e-6
        assert check["check"] in shown
    for rule in ("Token", "Token, lenience 0.5", "Sigmoid"):
        assert any(check["check"].startswith(f"verify, {rule}, float32") for check in checks)
    for kind in ("float32", "float16", "bfloat16"):
        assert any(check["check"] == f"sample, {kind}" for check in checks)


def test_laws_are_laws_and_every_segment_counts() -> None:
    """Catches a large vocabulary whose tail holds nothing, in which a dropped last segment cannot be seen."""
    for case in ALL.values():
        for law in case.laws.values():
            assert law.sum() == pytest.approx(1, abs=1e-6)
    law = ALL["sample, float32"].laws["token"]
    assert law.size == LARGE and law[-5:].sum() == pytest.approx(0.04, abs=1e-3)
    assert all(part.sum() > 0.01 for part in np.split(law[:-5], 3))
    for case in ALL.values():
        assert all(part[part > 0].min() > 1.5e-7 for part in case.laws.values() if case.large)


def hot(*arrays: Any, sampling: Sampling = Sampling(), **options: Any) -> Any:
    return cupyspec.chain.verify(*arrays, sampling=Sampling(np.asarray(sampling.temperature) * 1.05), **options)


def biased_sample(logits: Any, **options: Any) -> Any:
    got = cupyspec.sampling.sample(logits, **options)
    return got._replace(tokens=np.where(got.tokens >= LARGE - 5, 0, got.tokens))


@pytest.mark.parametrize(
    ("name", "wrong", "case"),
    [
        ("verify", hot, "chain, Token"),
        ("verify", hot, "chain, Token, lenience 0.5"),
        ("sample", biased_sample, "sample, float32"),
        (
            "sample",
            lambda logits, *, seed, **options: cupyspec.sampling.sample(
                logits, seed=np.repeat(cupyspec.row_seeds(seed, len(logits) // 2), 2), **options
            ),
            "independence, neighbouring rows",
        ),
        (
            "sample",
            lambda logits, *, step, **options: cupyspec.sampling.sample(logits, step=step // 2, **options),
            "independence, consecutive steps",
        ),
    ],
    ids=[
        "temperature 1.05",
        "temperature 1.05 of a lossy rule",
        "last segment lost",
        "rows share seeds",
        "step halved",
    ],
)
def test_wrong_answers_are_found(
    name: str, wrong: Callable[..., Any], case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Catches a check that passes whatever is drawn."""
    file = tmp_path / "report.json"
    with only(case), changed(name, wrong):
        assert main(["check", "--draws", "40000", "--json", str(file)]) == 1
    assert "WRONG" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert not report["passed"]
    (found,) = [check for check in report["checks"] if check["verdict"] == "WRONG"]
    assert len(found["rejected_before"]) == 1 and found["p_value"] < 1e-6  # confirmed on a second sample
    assert found["draws"] == 160_000


def test_drafts_are_counted_too(tmp_path: Path) -> None:
    """Catches wrong drafts that look like a wrong verification, or the other way round."""

    def verdicts(name: str, wrong: Callable[..., Any]) -> dict[str, str]:
        file = tmp_path / "report.json"
        with only("verify, Token, float32"), changed(name, wrong):
            main(["check", "--draws", "4000", "--json", str(file)])
        return {check["counted"]: check["verdict"] for check in json.loads(file.read_text())["checks"]}

    drafts = verdicts("sample", biased_sample)
    assert drafts["draft"] == drafts["acceptance, token"] == "WRONG" and drafts["bonus"] == "ok"
    tokens = verdicts("verify", lambda *arrays, **options: hot(*arrays, **options | {"sampling": Sampling(1.4)}))
    assert tokens["draft"] == "ok" and tokens["acceptance, token"] == "WRONG"


def test_faulty_rows_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a token of -1, or a status, that is counted as another cell."""

    def faulty(*arrays: Any, **options: Any) -> Any:
        got = cupyspec.chain.verify(*arrays, **options)
        got.status[3] = 1
        return got

    with only("chain, Token", "verify, Token, float32"), changed("verify", faulty):
        assert main(["check", "--draws", "2000"]) == 1
    assert capsys.readouterr().out.count("ids that do not exist") == 2


def test_chance_is_not_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a first rejection that fails the run without a second sample."""
    real, calls = _check.count, []

    def unlucky(*arguments: Any) -> Any:
        counts = real(*arguments)
        calls.append(arguments[2])
        return [np.roll(c, 1) for c in counts] if len(calls) == 1 else counts

    with only("independence, neighbouring rows"), mock.patch("cupyspec._check.count", unlucky):
        assert main(["check", "--draws", "5000"]) == 0
    assert calls == [5000, 20_000]


def test_what_only_a_second_sample_rejects_has_a_third(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a law that is far off in a confirmation and passes, as another law's sample it was."""
    real = _check.count
    for at in ([0], [], [1]), ([0], [], [1, 2]):  # the samples that are wrong, of each law
        calls = []

        def spoilt(*arguments: Any, at: Any = at, calls: Any = calls) -> Any:
            counts = real(*arguments)
            calls.append(arguments[2])
            return [np.roll(c, 1) if len(calls) - 1 in a else c for c, a in zip(counts, at, strict=True)]

        with only("verify, Token, float32"), mock.patch("cupyspec._check.count", spoilt):
            assert main(["check", "--draws", "2000"]) == (2 in at[2])
        assert calls == [2000, 8000, 8000]
        assert capsys.readouterr().out.count("WRONG") == (2 if 2 in at[2] else 0)


def test_too_few_draws_are_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that passes because it saw nothing."""
    with only("chain, Token", "sample, float32"):
        assert main(["check", "--draws", "10"]) == 1
    shown = capsys.readouterr().out
    assert "too few" in shown and "2 checks cannot decide" in shown and "WRONG" not in shown
    with only("sample, float32"):
        assert main(["check", "--draws", "150"]) == 1
    assert "finds no total variation of 0.25" in capsys.readouterr().out


def test_minutes_end_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches a limit that one check uses up, or that is looked at only between checks."""
    file = tmp_path / "report.json"
    with only(*(f"independence, {name}" for name in PAIRS)):
        assert main(["check", "--draws", "1e12", "--minutes", "0.02", "--json", str(file)]) == 0
        report = json.loads(file.read_text())
        assert report["seconds"] < 10
        draws = [check["draws"] for check in report["checks"]]
        assert all(10_000 < n < 1e12 for n in draws) and max(draws) < 20 * min(draws)
        assert main(["check", "--minutes", "0.005"]) == 0


def test_the_seed_repeats_a_run(tmp_path: Path) -> None:
    """Catches draws that the report's seed does not give again, and a seed without effect."""
    statistics = []
    for seed in ("1", "1", "-2"):
        with only("independence, neighbouring rows"):
            main(["check", "--draws", "3000", "--seed", seed, "--json", str(tmp_path / "report.json")])
        statistics.append(json.loads((tmp_path / "report.json").read_text())["checks"][0]["statistic"])
    assert statistics[0] == statistics[1] != statistics[2]


def test_bfloat16_needs_ml_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an optional library that became required, and checks that are left out without a word."""
    with mock.patch.dict("sys.modules", ml_dtypes=None), only("independence, neighbouring rows"):
        assert main(["check", "--draws", "3000"]) == 0
    assert "bfloat16 is left out" in capsys.readouterr().out
    assert not any("bfloat16" in name for name in ALL)


@pytest.mark.parametrize(
    "wrong",
    [["--draws", "0"], ["--draws", "1.5"], ["--draws", "x"], ["--minutes", "0"], ["--minutes", "nan"], ["--seed", "x"]],
)
def test_wrong_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is truncated or ignored."""
    with pytest.raises(SystemExit, match="2"):
        main(["check", *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_only_some(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a filter that leaves nothing and passes."""
    assert main(["check", "--draws", "3000", "--only", "one-hot"]) == 0
    assert "\n1 checks in" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--only", "sigmoidal"])
    assert "must match a part of one of: sample, float32; " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--only", "sample|("])
    assert "--only: 'sample|(' is no regular expression" in capsys.readouterr().err


def test_the_documented_selection_is_the_nine_exact_laws() -> None:
    """Catches a renamed check that the documented command would no longer run."""
    page = (Path(__file__).parents[1] / "docs" / "testing.md").read_text()
    (pattern,) = re.findall(r"^cupyspec check --device cuda --draws 1e9 --only '(.*)'", page, re.MULTILINE)
    kinds = ("float32", "float16", "bfloat16")
    assert {case.name for case in cases(np.float16) if re.search(pattern, case.name, re.IGNORECASE)} == {
        f"{what}, {kind}" for what in ("sample", "verify, Token", "verify, Sigmoid") for kind in kinds
    }


def test_a_report_that_cannot_be_written_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an hour's work that is lost at the end."""
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--json", str(tmp_path / "missing" / "report.json")])
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], need_frontend: Callable[[str], Any]) -> None:
    """A bias of a GPU's kernels, at ten million verifications of each kind."""
    need_frontend("cupy")
    file = tmp_path / "report.json"
    code = main(["check", "--device", "cuda", "--draws", "1e7", "--json", str(file)])
    assert code == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert "CUDA" in report["device"] and all(check["detectable"] < 0.006 for check in report["checks"])
