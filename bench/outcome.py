"""What was measured of a verification: rows for the CSV file, a table for a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench import floors
from bench.cases import Case, Rows
from bench.floors import Bandwidth
from bench.harness import Measured
from bench.providers import Provider


class Result(NamedTuple):
    """What was measured of one provider."""

    provider: Provider
    measured: Measured
    rows: Rows
    mean_accepted: float


def csv_rows(
    case: Case,
    cache: str,
    copies: int,
    results: Sequence[Result],
    found: Mapping[str, Measured],
    bandwidth: Bandwidth,
) -> Iterator[dict[str, Any]]:
    """What goes to the CSV file, but for the environment."""
    shape = case.shape
    for provider, measured, rows, mean_accepted in results:
        row: dict[str, Any] = {
            "op": "verify",
            "provider": provider.name,
            "acceptance_wanted": case.acceptance_wanted,
            "cache": cache,
            "acceptance": case.acceptance,
            "mean_accepted": mean_accepted,
            "copies": copies,
            "bytes_all": shape.all_bytes,
            "bytes_full": rows.full * shape.row_bytes,
            "bytes_least": rows.least * shape.row_bytes,
            "sum_us": found[floors.SUM].time.median,
            "copy_us": found[floors.COPY].time.median,
        }
        yield row | shape.columns | bandwidth.columns(shape.all_bytes) | times(measured)


def times(measured: Measured) -> dict[str, Any]:
    """The columns that a measurement fills."""
    taken, host = measured.time, measured.host
    columns: dict[str, Any] = {
        "median_us": taken.median,
        "q20_us": taken.low,
        "q80_us": taken.high,
        "samples": taken.samples,
        "method": taken.method,
    }
    if host is not None:
        columns |= {"host_us": host.median, "host_q20_us": host.low, "host_q80_us": host.high}
    if measured.kernel is not None:
        columns["kernel_us"] = measured.kernel
    return columns


def table(case: Case, cache: str, results: Sequence[Result], found: Mapping[str, Measured]) -> str:
    """The case for a reader."""
    size, row_bytes = case.shape.all_bytes, case.shape.row_bytes
    read, copied = found[floors.SUM].time.median, found[floors.COPY].time.median
    ours = next((r.measured.time.median for r in results if r.provider.name == "cupyspec"), None)
    accepted = next((r.mean_accepted for r in results if r.provider.reads == "all"), float(case.accepted.mean()))
    lines = [
        f"{case.shape}, {cache} cache: acceptance {case.acceptance:.2f}, {accepted:.2f} of {case.shape.drafts} accepted; "
        f"{size / 1e6:.1f} MB of logits, plain sum {us(read)} us ({size / read / 1e3:.0f} GB/s), "
        f"copy {us(copied)} us ({2 * size / copied / 1e3:.0f} GB/s)",
        f"  {'provider':<27}{'us':>9}  {'[20 %, 80 %]':<20}{'host us':>9}{'x ours':>8}{'/full':>8}{'/least':>8}  by",
    ]
    for provider, measured, rows, _ in results:
        taken = measured.time
        relative = "-" if ours is None else f"{taken.median / ours:.2f}"
        full, least = (taken.median / (read * part * row_bytes / size) for part in (rows.full, rows.least))
        quantiles = f"[{us(taken.low)}, {us(taken.high)}]"
        host = "-" if measured.host is None else us(measured.host.median)
        method = taken.method if measured.kernel is None else f"{taken.method}; kernels alone {us(measured.kernel)}"
        lines.append(
            f"  {provider.name:<27}{us(taken.median):>9}  {quantiles:<20}{host:>9}{relative:>8}{full:>8.2f}{least:>8.2f}"
            f"  {method}"
        )
    return "\n".join(lines)


def us(value: float) -> str:
    """Microseconds for a reader."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
