"""Tables of results, as Markdown. `report.py` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from bench import targets
from bench.cases import MAIN_SHAPES, Shape

Row = Mapping[str, str]
Line = list[str]

MAIN_ACCEPTANCE = {"cpu": 0.8}
# Of the main table, heading -> provider. A column that no row fills is left out.
COLUMNS = {
    "cupyspec": "cupyspec",
    "sigmoid rule": "cupyspec sigmoid rejecting",
    "plain PyTorch, batched": "torch",
    "the same through torch.compile": "torch compiled",
    "ratio, residual and sum as matrices": "torch unfused",
    "vLLM": "vllm",
    "SGLang": "sglang",
    "FlashInfer": "flashinfer",
    "Hugging Face, its kernels": "hugging face",
    "plain NumPy": "numpy",
}
PEERS = ("torch", "torch compiled", "torch unfused", "vllm", "sglang", "flashinfer", "hugging face", "numpy")


def shape_of(row: Row) -> Shape:
    """Of a row."""
    return Shape(int(row["batch"]), int(row["drafts"]), int(row["vocab"]), row["dtype"])


def number(row: Row | None, column: str) -> float | None:
    """A figure, or None."""
    return float(row[column]) if row and row.get(column) not in (None, "", "nan") else None


def gpu_time(row: Row | None) -> float | None:
    """Of its kernels, where no graph of a provider could be made: eager calls take the host's time too."""
    return number(row, "kernel_us") or number(row, "median_us")


def figure(value: float | None) -> str:
    """Microseconds, or nothing."""
    return "" if value is None else f"{value:.1f}" if value < 1e4 else f"{value:.0f}"


def ratio(value: float | None, by: float | None) -> str:
    """value / by, or nothing."""
    return f"{value / by:.2f}" if value and by else ""


def markdown(heads: Sequence[str], lines: Iterable[Line]) -> str:
    """A table, without the columns that are empty."""
    body = list(lines)
    filled = [i for i in range(len(heads)) if any(line[i] for line in body)]
    rows = [f"| {' | '.join(line[i] for i in filled)} |" for line in (list(heads), *body)]
    return "\n".join([rows[0], "|" + "---|" * len(filled), *rows[1:]])


class Results:
    """Rows of a file, found by what they are about."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.device = "cpu" if rows and rows[0]["device"] == "cpu" else "cuda"

    def of(self, op: str) -> list[Row]:
        """Rows of an op."""
        return [row for row in self.rows if row["op"] == op]

    def verify(self, shape: Shape, provider: str, cache: str = "cold", acceptance: float | None = None) -> Row | None:
        """The row of a verification, at the main acceptance rate unless another is asked for."""
        wanted = MAIN_ACCEPTANCE.get(self.device, 0.7) if acceptance is None else acceptance
        for row in self.of("verify"):
            if (row["provider"], row["cache"], float(row["acceptance_wanted"])) == (provider, cache, wanted):
                if shape_of(row) == shape:
                    return row
        return None

    def any_of(self, shape: Shape, acceptance: float | None = None) -> Row | None:
        """A row of any provider: what belongs to the case is in each."""
        found = (self.verify(shape, row["provider"], acceptance=acceptance) for row in self.of("verify"))
        return next(filter(None, found), None)

    def shapes(self) -> list[Shape]:
        """Main shapes that there are rows of."""
        return [shape for shape in MAIN_SHAPES[self.device] if self.any_of(shape) is not None]


def label(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def main_table(results: Results) -> str:
    """One line for each main shape: all providers, a plain sum, and the read floor."""
    heads = ["B, K, V, dtype", *COLUMNS, "a plain sum of the logits", "read floor"]
    lines = []
    for shape in results.shapes():
        times = [gpu_time(results.verify(shape, provider)) for provider in COLUMNS.values()]
        case = results.any_of(shape)
        lines.append([label(shape), *map(figure, (*times, number(case, "sum_us"), number(case, "floor_us")))])
    return markdown(heads, lines)


def needed(row: Row) -> float | None:
    """Microseconds of a plain sum of the rows that a case's answer depends on, in the row's own run."""
    total, least, size = (number(row, column) for column in ("sum_us", "bytes_least", "bytes_all"))
    return total * least / size if total and least and size else None


def ratio_table(results: Results) -> str:
    """cupyspec against the best peer of the run, the target, other engines, a plain sum, and the read floor."""
    heads = [
        *("B, K, V, dtype", "cupyspec, us", "[20 %, 80 %]", "target", "over the target", "best peer here"),
        *("times faster", "than vLLM", "than SGLang", "over a plain sum of the rows needed", "over the read floor"),
    ]
    lines = []
    for shape in results.shapes():
        ours = results.verify(shape, "cupyspec")
        if ours is None:
            continue
        taken = number(ours, "median_us")
        peers = {name: time for name in PEERS if (time := gpu_time(results.verify(shape, name)))}
        best = min(peers, key=peers.__getitem__, default="")
        aim = targets.H200.get(shape) if "H200" in ours["device"] else None
        target, vllm, sglang, _ = aim or (None,) * 4
        lines.append(
            [
                *(label(shape), figure(taken), f"[{figure(number(ours, 'q20_us'))}, {figure(number(ours, 'q80_us'))}]"),
                *(figure(target), ratio(taken, target), best, ratio(peers.get(best), taken)),
                *(ratio(vllm, taken), ratio(sglang, taken)),
                *(ratio(taken, needed(ours)), ratio(taken, number(ours, "floor_us"))),
            ]
        )
    return markdown(heads, lines)


def variant_table(results: Results) -> str:
    """Every way of cupyspec at every case, with cold and warm caches, over the plain sum of the rows needed."""
    heads = [
        "B, K, V, dtype",
        "acceptance",
        "provider",
        "cold, us",
        "warm, us",
        "host, us",
        "over a sum of the rows needed",
    ]
    lines = []
    for row in results.of("verify"):
        if not row["provider"].startswith("cupyspec") or row["cache"] != "cold":
            continue
        shape, rate, taken = shape_of(row), float(row["acceptance_wanted"]), number(row, "median_us")
        warm = number(results.verify(shape, row["provider"], "warm", rate), "median_us")
        times = map(figure, (taken, warm, number(row, "host_us")))
        lines.append([label(shape), row["acceptance_wanted"], row["provider"], *times, ratio(taken, needed(row))])
    return markdown(heads, lines)


def exit_table(results: Results) -> str:
    """What early exit saves, by acceptance."""
    heads = [
        *("B, K, V, dtype", "acceptance", "accepted", "with early exit, us", "without, us"),
        *("a plain sum of all rows", "read floor of all rows"),
    ]
    lines = []
    for row in results.of("verify"):
        without = results.verify(shape_of(row), "cupyspec no early exit", acceptance=float(row["acceptance_wanted"]))
        if row["provider"] != "cupyspec" or row["cache"] != "cold" or without is None:
            continue
        times = (number(row, "mean_accepted"), number(row, "median_us"), number(without, "median_us"))
        floors = (number(row, "sum_us"), number(row, "floor_us"))
        lines.append([label(shape_of(row)), row["acceptance_wanted"], *map(figure, (*times, *floors))])
    return markdown(heads, lines)


def plain_table(op: str, heads: Mapping[str, str]) -> Callable[[Results], str]:
    """Columns of an op's rows as they are: heading -> column."""

    def table(results: Results) -> str:
        rows = [row for row in results.rows if row["op"] == op or row["op"].startswith(f"{op} ")]
        return markdown(list(heads), [[_cell(row, column) for column in heads.values()] for row in rows])

    return table


def _cell(row: Row, column: str) -> str:
    if column == "shape":
        return label(shape_of(row))
    if column.endswith("_bytes"):
        value = number(row, column)
        return "" if value is None else f"{value / 2**20:.3f}"
    return figure(number(row, column)) if column.endswith("_us") else row[column]


def host_table(results: Results) -> str:
    """Host times, graph replays, first calls."""
    ops = ("host", "graph replay, host", "graph replay, GPU", "import", "first call")
    rows = [row for row in results.rows if row["op"].startswith(ops)]
    return markdown(
        ["what", "of", "us", "20 %", "80 %"],
        [
            [row["op"], row["provider"], *(figure(number(row, c)) for c in ("median_us", "q20_us", "q80_us"))]
            for row in rows
        ],
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "Verification": main_table,
    "Against the target, the best peer and the floor": ratio_table,
    "Early exit": exit_table,
    "Every way": variant_table,
    "Sampling": plain_table(
        "sample",
        {"B, 0, V, dtype": "shape", "provider": "provider", "us": "median_us", "sum": "sum_us", "host us": "host_us"},
    ),
    "Host": host_table,
    "Memory, MiB beyond inputs and answer": plain_table(
        "memory",
        {
            "B, K, V, dtype": "shape",
            "provider": "provider",
            "peak": "peak_bytes",
            "limit": "limit_bytes",
            "allocations": "allocations",
        },
    ),
    "Scale": plain_table(
        "scale", {"axis": "op", "B, K, V, dtype": "shape", "us": "median_us", "sum": "sum_us", "read floor": "floor_us"}
    ),
}
