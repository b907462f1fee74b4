"""Achieved bandwidth, occupancy and registers of each kernel, by NVIDIA's Nsight Compute, as a Markdown table.

    python bench/ncu.py --shapes 1,5,128256,bfloat16 64,5,128256,bfloat16

Needs `ncu` on the PATH and the right to read hardware counters. Its times are of kernels alone, on a cold cache, at the
clocks that the GPU happens to have: compare them with each other, not with `run.py`'s.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench.cases import Shape, make_case
from bench.ours import OURS
from bench.providers import named
from bench.sweep import RULES
from bench.tables import markdown

METRICS = {
    "us": "gpu__time_duration.sum",
    "MB read": "dram__bytes_read.sum",
    "memory, % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy, %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
TO_US = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}
TO_MB = {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}
SHAPES = ("1,5,128256,bfloat16", "8,5,128256,bfloat16", "64,5,128256,bfloat16", "256,3,151936,bfloat16")


def command(shape: str, rule: str) -> list[str]:
    """Run Nsight Compute over one call in a process of its own."""
    return [
        *("ncu", "--csv", "--page", "details", "--clock-control", "none", "--kernel-name", "regex:^chain_"),
        *("--metrics", ",".join(METRICS.values())),
        *(sys.executable, str(Path(__file__).resolve()), "--one", shape, "--rule", rule),
    ]


def read(text: str) -> Iterator[dict[str, str]]:
    """Kernels of Nsight Compute's output, in order: name, shape, and the metrics by heading."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return
    kernels: dict[str, dict[str, str]] = {}
    headings = {metric: heading for heading, metric in METRICS.items()}
    for row in csv.DictReader(lines[start:]):
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        kernel["blocks x threads"] = f"{_first(row['Grid Size'])} x {_first(row['Block Size'])}"
        heading = headings.get(row["Metric Name"])
        if heading is not None:
            kernel[heading] = _figure(row["Metric Value"], row["Metric Unit"])
    yield from kernels.values()


def last_call(kernels: Sequence[dict[str, str]]) -> Sequence[dict[str, str]]:
    """Kernels of the last call: every call ends with the same one."""
    ends = [i for i, kernel in enumerate(kernels) if kernel["kernel"] == kernels[-1]["kernel"]]
    return kernels[ends[-2] + 1 if len(ends) > 1 else 0 :]


def _first(triple: str) -> str:
    return triple.strip("() ").partition(",")[0]


def _figure(value: str, unit: str) -> str:
    scale = TO_US.get(unit) or TO_MB.get(unit) or 1.0
    return f"{float(value.replace(',', '')) * scale:.4g}"


def one_call(shape: str, rule: str) -> None:
    """Two calls: the first compiles, the last one is reported."""
    (provider,) = named(OURS, [RULES[rule]])
    case = make_case(Shape.parse(shape), "cuda", 0.7, copies=1)
    call = provider.bind(case.copies[0], 0)
    call()
    call()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = argparse.ArgumentParser(prog="bench/ncu.py", description="Achieved bandwidth and occupancy of each kernel.")
    p.add_argument("--shapes", nargs="+", metavar="B,K,V,dtype", default=SHAPES)
    p.add_argument("--rule", choices=tuple(RULES), default="token")
    p.add_argument("--one", metavar="SHAPE", help=argparse.SUPPRESS)
    options = p.parse_args(arguments)
    if options.one:
        one_call(options.one, options.rule)
        return 0
    if shutil.which("ncu") is None:
        print("ncu is not on the PATH: nothing is measured")
        return 1
    lines = []
    columns = ["kernel", "blocks x threads", *METRICS]
    for shape in options.shapes:
        done = subprocess.run(command(shape, options.rule), capture_output=True, text=True)
        kernels = list(read(done.stdout))
        if not kernels:
            print(f"{shape}: no kernels in ncu's output: {(done.stdout + done.stderr).strip()[-500:]}")
            return 1
        lines += [[shape, *(kernel.get(column, "") for column in columns)] for kernel in last_call(kernels)]
    print(markdown(["B, K, V, dtype", *columns], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
