"""One run of benchmarks: options that all scripts share, the device, steps with progress, rows, and what went wrong."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bench import floors, harness, records
from bench.floors import Bandwidth
from bench.progress import Progress

BUDGET = {"cpu": 0.8, "cuda": 0.12}  # seconds for each provider of a case
QUICK = 0.4  # of the budget


class Step(NamedTuple):
    """A part of a benchmark that succeeds or fails by itself."""

    name: str
    run: Callable[[], None]


class Session:
    """What the steps of a run share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.quick, self.clock = options, bool(options.quick), options.clock
        self.device = choose_device(options.device, options.threads)
        self.budget = options.budget or BUDGET[self.device] * (QUICK if self.quick else 1)
        self.facts = records.environment(self.device) | {"clock": self.clock if self.device == "cpu" else ""}
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.legends: list[str] = []
        self.progress = Progress(0)

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """Of a plain sum and a plain copy of a large array, measured once a run."""
        found = floors.bandwidth(self.device, min(0.2, self.budget))
        self.show(f"on a large array: plain sum {found.read:.0f} GB/s, copy {found.copy:.0f} GB/s")
        return found

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line for whoever waits."""
        return self.progress.say

    def problem(self, text: str) -> None:
        """Something is wrong: the run goes on and ends with exit code 1."""
        self.problems.append(text)
        self.say(text)

    def show(self, text: str) -> None:
        """Prints a result."""
        self.progress.clear()
        print(text, flush=True)

    def explain(self, text: str) -> None:
        """What printed columns mean, once at the end."""
        if text not in self.legends:
            self.legends.append(text)

    def add(self, **row: Any) -> None:
        """A row of results, but for the environment."""
        self.rows.append(self.facts | row)

    def measure(self, sweeps: dict[str, harness.Sweep]) -> dict[str, harness.Measured]:
        """Time sweeps as the options say."""
        found = harness.measure(self.device, sweeps, self.budget, self.clock)
        for name, measured in found.items():
            if measured.note:
                self.say(f"{name}: {measured.note}")
        return found

    def files(self) -> list[Path]:
        """Where rows go."""
        saved = records.default_path(self.facts["device"]) if self.options.save else None
        return [path for path in (self.options.csv, saved) if path is not None]

    def run(self, steps: Sequence[Step]) -> int:
        """Run all; rows are written after each step, so that what is measured stays. 1 if something was wrong."""
        self.progress = Progress(len(steps))
        for step in steps:
            self.progress.begin(step.name)
            before = len(self.rows)
            try:
                step.run()
            except Exception as error:  # whatever it is, the next step may still work
                self.problem(f"NOT TIMED: {step.name}: {type(error).__name__}: {error}")
            if len(self.rows) > before:
                for path in self.files():
                    records.write_csv(path, self.rows[before:])
            self.progress.end()
        self.progress.clear()
        for text in (*self.legends, *self.problems):
            print(text)
        for path in self.files():
            print(f"{len(self.rows)} rows written to {path}")
        return 1 if self.problems else 0


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Options of every script."""
    p = argparse.ArgumentParser(prog=f"bench/{program}", description=description)
    p.add_argument("--quick", action="store_true", help="fewer cases and shorter measurements")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where PyTorch sees a GPU, else cpu")
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
        print("PyTorch sees no GPU: the CPU alone, nothing of the kernels")
    return "cpu"


def main(p: argparse.ArgumentParser, ops: Sequence[ModuleType], arguments: Sequence[str] | None) -> int:
    """Parse, and run the steps of all `ops`: modules with `steps(session)` and `check_options(parser, options)`."""
    options = p.parse_args(arguments)
    if options.threads < 1:
        p.error(f"--threads must be at least 1, got {options.threads}")
    if getattr(options, "ops", None):
        ops = [op for op in ops if op.OP in options.ops]
    for op in ops:
        try:
            op.check_options(options)
        except ValueError as error:
            p.error(str(error))
    session = Session(options)
    print(
        "; ".join(
            f"{name} {value}"
            for name, value in session.facts.items()
            if value != "" and name not in ("date", "command")
        )
    )
    return session.run([step for op in ops for step in op.steps(session)])


def names(text: str | None) -> list[str]:
    """Of a comma-separated option."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
