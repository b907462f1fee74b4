"""Tables and plots of results: what they take from which row, and that the README says what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import plots, records, report, tables
from bench.cases import MAIN_SHAPES, Shape
from bench.tables import Results

ROOT = Path(__file__).resolve().parent.parent
SHAPE = MAIN_SHAPES["cuda"][5]


def row(provider: str, median: float, **more: Any) -> dict[str, str]:
    """A row of a verification on a GPU."""
    facts = {"op": "verify", "provider": provider, "acceptance_wanted": 0.7, "cache": "cold", "device": "NVIDIA H200"}
    facts |= {
        "median_us": median,
        "q20_us": median - 1,
        "q80_us": median + 1,
        "revision": "abc",
        **SHAPE.columns,
        **more,
    }
    facts |= {"sum_us": 55.0, "bytes_all": 1000, "bytes_least": 400, "floor_us": 41.6}
    return dict.fromkeys(records.COLUMNS, "") | {name: str(value) for name, value in facts.items()}


@pytest.mark.parametrize("name", ["nvidia-h200.csv", "cpu.csv"])
def test_readme_says_what_the_file_says(name):
    # Catches a README whose figures nobody can find in a file, or that stayed behind when the file was made anew.
    path = ROOT / "bench" / "results" / name
    block = report.readme_block(path, tables.main_table(Results(records.read_csv(path))))
    assert block in (ROOT / "README.md").read_text(encoding="utf-8"), (
        f"run: python bench/report.py results/{name} --readme"
    )


def test_main_table_and_its_command(tmp_path, capsys, monkeypatch):
    rows = [
        row("cupyspec", 48.04),
        row("cupyspec", 20.0, cache="warm"),
        row("cupyspec", 30.0, acceptance_wanted=0.3),
        row("torch", 1028.3),
        row("hugging face", 900.0, kernel_us=188.9),
    ]
    results = Results(rows)
    expected = (
        "| B, K, V, dtype | cupyspec | plain PyTorch, batched | Hugging Face, its kernels | a plain sum of the logits "
        "| read floor |\n|---|---|---|---|---|---|\n| 64, 5, 128256, bfloat16 | 48.0 | 1028.3 | 188.9 | 55.0 | 41.6 |"
    )
    assert tables.main_table(results) == expected
    file = tmp_path / "some-gpu.csv"
    records.write_csv(file, rows)
    assert report.main([str(file)]) == 0
    assert capsys.readouterr().out == expected + "\n"
    # By its path in bench/, from anywhere.
    monkeypatch.chdir(tmp_path)
    assert report.main(["results/nvidia-h200.csv"]) == 0
    assert "1, 5, 51865, float16" in capsys.readouterr().out


def test_table_is_put_into_the_readme():
    path = Path("bench/results/gpu.csv")
    text = "before\n<!-- python bench/report.py results/gpu.csv -->\n\nold\n\n<!-- end of the table -->\nafter\n"
    new = report.into_readme(text, path, "new")
    assert new == text.replace("old", "new")
    assert report.into_readme(new, path, "new") == new
    with pytest.raises(ValueError, match="no place for the table"):
        report.into_readme("nothing", path, "new")


def test_ratios_are_to_the_best_peer_the_target_and_the_rows_needed():
    rows = [row("cupyspec", 50.0), row("torch", 500.0), row("torch compiled", 350.0), row("torch unfused", 900.0)]
    rows += [row("cupyspec no early exit", 60.0), row("torch compiled", 1.0, cache="warm")]
    line = tables.ratio_table(Results(rows)).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        *("64, 5, 128256, bfloat16", "50.0", "[49.0, 51.0]", "48.0", "1.04", "torch compiled", "7.00"),
        *("2.18", "2.04"),  # vLLM's 109 us, SGLang's 102
        *(f"{50 / (55 * 0.4):.2f}", f"{50 / 41.6:.2f}"),
    ]
    assert "| 50.0 | 60.0 | 55.0 | 41.6 |" in tables.exit_table(Results(rows))


def test_every_table_of_every_op(capsys, tmp_path):
    rows = [row("cupyspec", 50.0, host_us=7.0), row("cupyspec", 40.0, cache="warm")]
    rows += [row("cupyspec", 9.0, op="sample", host_us=5.0), row("cupyspec, PyTorch", 8.0, op="host")]
    rows += [
        row("CuPy", 150000.0, op="first call, warm kernel cache"),
        row("cupyspec", 1.0, op="scale B", revision="def"),
    ]
    rows += [row("cupyspec", 1.0, op="memory", peak_bytes=1 << 20, limit_bytes=3 << 20, allocations=4)]
    records.write_csv(tmp_path / "a.csv", rows)
    assert report.main([str(tmp_path / "a.csv"), "--all"]) == 0
    printed = capsys.readouterr().out
    assert "MIXED" not in printed  # another op's other revision is none
    assert "| 64, 5, 128256, bfloat16 | 0.7 | cupyspec | 50.0 | 40.0 | 7.0 | 2.27 |" in printed
    assert "| first call, warm kernel cache | CuPy | 150000 |" in printed
    assert "| 64, 5, 128256, bfloat16 | cupyspec | 1.000 | 3.000 | 4 |" in printed
    assert "| scale B | 64, 5, 128256, bfloat16 | 1.0 |" in printed
    assert "## Early exit" not in printed  # a table without rows
    mixed = [row("cupyspec", 50.0), row("torch", 50.0, revision="def")]
    assert "MIXED REVISIONS: verify: abc, def" in report.revisions(mixed)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere.csv"], "nowhere.csv"), (["empty.csv"], "empty.csv has no rows")]
)
def test_report_refuses(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("op\n")
    with pytest.raises(SystemExit):
        report.main(arguments)
    assert message in capsys.readouterr().err


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    scale = [row("cupyspec", us, op="scale V", vocab=vocab) for vocab, us in ((1000, 5.0), (100000, 50.0))]
    rates = [row("cupyspec", 40 + 10 * rate, acceptance_wanted=rate, acceptance=rate) for rate in (0.3, 0.7)]
    written = list(plots.draw(Results([*scale, *rates]), tmp_path / "plots"))
    assert [path.name for path in written] == [
        "time-against-V.svg",
        "time-against-acceptance.svg",
        "ratio-to-floor.svg",
    ]
    assert all(path.stat().st_size > 1000 for path in written)


def test_plots_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[bench\]'"):
        list(plots.draw(Results([]), tmp_path))


def test_targets_are_for_the_main_shapes():
    assert [shape for shape in tables.targets.H200 if not isinstance(shape, Shape)] == []
    assert tuple(tables.targets.H200) == MAIN_SHAPES["cuda"]
