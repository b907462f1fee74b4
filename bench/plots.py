"""Plots of results: time against B, K, V and acceptance, and the ratio to the read floor. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.tables import Results, Row, gpu_time, number

SIZE = (5.2, 3.6)  # inches
DOTS = 120  # an inch


def draw(results: Results, folder: Path) -> Iterator[Path]:
    """Draw what there are rows for; the files written."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install '.[bench]'") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"B": "batch", "K": "drafts", "V": "vocab"}
    for axis, column in columns.items():
        rows = sorted(results.of(f"scale {axis}"), key=lambda row, c=column: float(row[c]))
        if rows:
            yield _scale(rows, axis, column, folder / f"time-against-{axis}.svg")
    if _varied(results):
        yield _acceptance(results, folder / "time-against-acceptance.svg")
    if results.shapes():
        yield _floor(results, folder / "ratio-to-floor.svg")


def _figure(path: Path, fill: Callable[[Any], None]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
    fill(axes)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=DOTS)
    pyplot.close(figure)
    return path


def _scale(rows: list[Row], axis: str, column: str, path: Path) -> Path:
    def fill(axes: Any) -> None:
        sizes = [float(row[column]) for row in rows]
        lines = {"cupyspec": "median_us", "plain sum": "sum_us", "read floor": "floor_us"}
        for name, figures in lines.items():
            axes.loglog(sizes, [number(row, figures) for row in rows], marker="o", markersize=3, label=name)
        fixed = {"batch": "B", "drafts": "K", "vocab": "V"}
        others = ", ".join(f"{letter} = {rows[0][name]}" for name, letter in fixed.items() if name != column)
        axes.set(xlabel=axis, ylabel="µs", title=f"{others}, {rows[0]['dtype']}, all drafts accepted")

    return _figure(path, fill)


def _varied(results: Results) -> dict[tuple[str, ...], list[Row]]:
    """Cases that were timed at several acceptance rates: rows of cupyspec by shape."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in results.of("verify"):
        if row["provider"] == "cupyspec" and row["cache"] == "cold":
            found.setdefault((row["batch"], row["drafts"], row["vocab"], row["dtype"]), []).append(row)
    return {key: rows for key, rows in found.items() if len(rows) > 1}


def _acceptance(results: Results, path: Path) -> Path:
    def fill(axes: Any) -> None:
        for key, rows in _varied(results).items():
            rows = sorted(rows, key=lambda row: float(row["acceptance"]))
            rates = [float(row["acceptance"]) for row in rows]
            (line,) = axes.plot(rates, [number(row, "median_us") for row in rows], marker="o", label=", ".join(key))
            axes.plot(rates, [number(row, "sum_us") for row in rows], ":", color=line.get_color())
        axes.set(xlabel="acceptance rate", ylabel="µs", title="dotted: a plain sum of all rows", ylim=(0, None))

    return _figure(path, fill)


def _floor(results: Results, path: Path) -> Path:
    names = ("cupyspec", "torch", "torch compiled", "torch unfused", "hugging face", "vllm", "sglang", "flashinfer")

    def fill(axes: Any) -> None:
        shapes = results.shapes()
        for name in names:
            points = [
                (place, time / floor)
                for place, shape in enumerate(shapes)
                if (row := results.verify(shape, name))
                and (time := gpu_time(row))
                and (floor := number(row, "floor_us"))
            ]
            if points:
                axes.semilogy(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xticks(
            range(len(shapes)), [f"{s.batch}, {s.drafts}\n{s.vocab}\n{s.dtype}" for s in shapes], fontsize=6
        )
        axes.set(ylabel="time / read floor of all rows")

    return _figure(path, fill)
