"""Benchmarks from a checkout: ``python bench/run.py --quick``. See README.md beside this file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import bench_verify, harness, peers, records
from bench.bench_verify import Shape

LEGEND = (
    "us: median time of a call; x ours: that over cupyspec's; /full: over a plain sum of all score rows and of the pairs\n"
    "where a row was rejected once more; /least: over a plain sum of the rows that the answer depends on. See bench/README.md."
)


def parser() -> argparse.ArgumentParser:
    """Command line."""
    p = argparse.ArgumentParser(prog="bench/run.py", description="Time cupyspec beside its peers, here and now.")
    p.add_argument("--quick", action="store_true", help="fewer shapes and shorter measurements")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where PyTorch sees a GPU, else cpu")
    p.add_argument(
        "--providers", metavar="NAMES", help=f"comma-separated: {', '.join(q.name for q in peers.PROVIDERS)}"
    )
    p.add_argument("--skip", metavar="NAMES", help="providers to leave out")
    p.add_argument("--shapes", nargs="+", metavar="B,K,V,dtype", help="such as 1,5,32000,float32")
    p.add_argument("--acceptance", metavar="RATES", help="comma-separated acceptance rates, such as 0.8,0.5")
    p.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="PyTorch's threads on the CPU; default: all"
    )
    p.add_argument(
        "--clock",
        choices=tuple(harness.CLOCKS),
        default="wall",
        help="on the CPU; cpu: processor time, which other work disturbs less (with --threads 1)",
    )
    p.add_argument("--budget", type=float, help="seconds for each provider of a case")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE; rows of the same key are replaced")
    p.add_argument("--save", action="store_true", help="the same to bench/results/<device>.csv")
    return p


def choose_device(wanted: str | None, threads: int) -> str:
    """The device, and what is left out for want of something."""
    try:
        import torch
    except ImportError:
        if wanted == "cuda":
            raise SystemExit(
                "--device cuda needs PyTorch, which makes and times its arrays; it is not installed"
            ) from None
        print("PyTorch is not installed: NumPy on the CPU alone, and no GPU")
        return "cpu"
    torch.set_num_threads(threads)
    if wanted != "cpu" and torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise SystemExit("--device cuda: PyTorch sees no GPU")
    if wanted is None:
        print("PyTorch sees no GPU: the CPU alone")
    return "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if a provider was wrong or failed."""
    p = parser()
    options = p.parse_args(arguments)
    try:
        skipped = {q.name for q in peers.named(_list(options.skip) or [])}
        chosen = [q for q in peers.named(_list(options.providers)) if q.name not in skipped]
        shapes = None if options.shapes is None else [Shape.parse(text) for text in options.shapes]
        rates = [float(text) for text in _list(options.acceptance) or []]
        if not all(0 < rate < 1 for rate in rates):
            raise ValueError(f"acceptance rates must be between 0 and 1, got {options.acceptance}")
        if options.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {options.threads}")
    except ValueError as error:
        p.error(str(error))

    device = choose_device(options.device, options.threads)
    shapes = shapes or list((bench_verify.QUICK_SHAPES if options.quick else bench_verify.SHAPES)[device])
    rates = rates or list(bench_verify.ACCEPTANCES[device][: 1 if options.quick else None])
    budget = options.budget or bench_verify.PROVIDER_BUDGET[device] * (0.4 if options.quick else 1)
    facts = records.environment(device) | {"clock": options.clock if device == "cpu" else ""}
    names = (
        "device",
        "driver",
        "cpu",
        "threads",
        "clock",
        "load",
        "python",
        "numpy",
        "torch",
        "cupy",
        "transformers",
        "revision",
    )
    print("; ".join(f"{name} {facts[name]}" for name in names if facts[name] != ""))

    start, problems = time.perf_counter(), []

    def say(text: str) -> None:
        if text.startswith("NOT TIMED"):
            problems.append(text)
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    present = []
    for provider in chosen:
        if reason := provider.left_out(device, 1, "float32"):
            say(f"left out: {provider.name} ({reason})")
        else:
            present.append(provider)
    present = bench_verify.check(present, device, say)
    rows: list[dict[str, Any]] = []
    cases = [(shape, rate) for shape in shapes for rate in rates]
    for number, (shape, rate) in enumerate(cases, 1):
        say(f"case {number} of {len(cases)}: {shape}, acceptance {rate}")
        taking = [q for q in present if not q.left_out(device, shape.batch, shape.dtype)]
        try:
            case = bench_verify.make_case(shape, device, rate)
            results, floor = bench_verify.run_case(case, taking, budget, options.clock, say)
        except (RuntimeError, MemoryError, ValueError, AssertionError) as error:  # the next case may still work
            say(f"NOT TIMED: {shape}: {type(error).__name__}: {error}")
            continue
        print(bench_verify.table(case, results, floor), flush=True)
        rows += [row | facts for row in bench_verify.rows(case, results, floor)]
        del case
    print(LEGEND)
    if len(cases) > 1:
        print(_overview(rows))
    for path in filter(None, (options.csv, records.default_path(facts["device"]) if options.save else None)):
        records.write_csv(path, rows)
        say(f"{len(rows)} rows written to {path}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _overview(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, one line a case and one column a provider."""
    names = list(dict.fromkeys(row["provider"] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        key = (row["batch"], row["drafts"], row["vocab"], row["dtype"], row["acceptance_wanted"])
        line = lines.setdefault(key, {"sum": f"{row['sum_us']:.1f}"})
        line[row["provider"]] = f"{row['median_us']:.1f}"
    columns = ["sum", *names]
    text = ["us       " + " " * 28 + "".join(f"{name:>{max(len(name), 8) + 3}}" for name in columns)]
    for (batch, drafts, vocab, dtype, rate), line in lines.items():
        head = f"{batch},{drafts},{vocab},{dtype} at {rate}"
        text.append(f"{head:<37}" + "".join(f"{line.get(name, '-'):>{max(len(name), 8) + 3}}" for name in columns))
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
