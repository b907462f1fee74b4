"""`cupyspec check`: the statistical proof on the user's own machine, as a table and a JSON report."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

import cupyspec
from cupyspec._check_cases import Case, Floats, cases
from cupyspec._demo import Device, OptionError
from cupyspec._doctor import cupy_wheels, version_of
from cupyspec.testing import CannotDecide, CheckResult, ErrorBudget, chi_square

BUDGET = ErrorBudget()
NEEDED = 0.25  # a check that finds no total variation of this size shows nothing

# On a CPU the large vocabulary is about thirty times as dear. All together take about 20 seconds, on a GPU less.
DEFAULT_DRAWS = {"cpu": {False: 1_000_000, True: 40_000}, "cuda": {False: 20_000_000, True: 20_000_000}}
BATCH = {"cpu": {False: 1 << 15, True: 1 << 10}, "cuda": {False: 1 << 21, True: 1 << 21}}


@dataclass
class Outcome:
    """What one law of a case showed."""

    check: str
    counted: str
    seed: int
    verdict: str  # "ok", "WRONG" or "too few"
    draws: int = 0
    statistic: float | None = None
    cells: int = 0
    p_value: float | None = None
    distance: float | None = None
    detectable: float | None = None
    seconds: float = 0.0
    note: str = ""
    rejected_before: list[float] = field(default_factory=list)  # p-values that a fresh sample had to confirm

    def line(self) -> str:
        """A row of the table."""
        line = f"{self.check + ': ' + self.counted:<58}{self.draws:>13,}"
        if self.p_value is not None:
            line += f"{self.statistic:>11.1f}{self.cells:>7}{self.p_value:>10.2g}"
            line += f"{self.distance:>10.2g}{self.detectable:>10.2g}{self.seconds:>8.1f}"
        return f"{line}  {self.verdict}" + (f": {self.note}" if self.note else "")


HEADER = (
    f"{'check':<58}{'draws':>13}{'chi-square':>11}{'cells':>7}{'p':>10}{'TV seen':>10}{'finds TV':>10}{'seconds':>8}"
)


class Progress:
    """One line that is written over, on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self.last = 0.0
        self.place = ""

    def show(self, text: str) -> None:
        """Write the line, ten times a second at most."""
        if self.shown and time.monotonic() - self.last > 0.1:
            self.last = time.monotonic()
            print(f"\r{(self.place + text)[:100]:<100}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self.shown:
            print(f"\r{'':<100}\r", end="", file=sys.stderr, flush=True)


def count(
    case: Case, device: Device, draws: int, seed: int, seconds: float | None, show: Callable[[str], None]
) -> list[Any]:
    """Counts for each law of a case after so many draws, or fewer if the time is over; never none."""
    xp = device.xp
    draw = case.prepare(device.array)
    counts = [xp.zeros(law.size + 1, np.int64) for law in case.laws.values()]
    batch = BATCH["cuda" if device.on_gpu else "cpu"][case.large]
    start, done, step = time.monotonic(), 0, 0
    while done < draws and (seconds is None or not done or time.monotonic() - start < seconds):
        rows = min(batch, draws - done)
        for total, cell in zip(counts, draw(xp, rows, seed, step), strict=True):
            total += xp.bincount(cell, minlength=total.size)  # a fault in the tokens would lengthen it, and raise
        device.synchronize()
        done, step = done + rows, step + 1
        show(f"{case.name}: {done:.3g}" + (f" of {draws:.3g} draws" if draws < 2**62 else " draws"))
    return [device.host(total)[:-1] for total in counts]


def run_case(
    number: int,
    case: Case,
    device: Device,
    draws: int,
    base_seed: int,
    seconds: float | None,
    show: Callable[[str], None],
) -> list[Outcome]:
    """Outcomes of a case; what is rejected is drawn again, more often and with a new seed, before it counts as wrong.

    A law that only the larger sample rejects has its own fresh sample then, unless the case is wrong anyway.
    """
    outcomes: list[Outcome] = []
    before: dict[str, list[float]] = {name: [] for name in case.laws}
    rejections = dict.fromkeys(case.laws, 0)  # of the last samples, without one that passed in between
    for stage in range(BUDGET.confirmations + len(case.laws) + 1):
        # Each check and each confirmation has its own seed, so that the steps may start at 0.
        seed = int(np.random.SeedSequence([base_seed % 2**64, number, stage]).generate_state(1, np.uint64)[0])
        times = BUDGET.growth ** min(stage, BUDGET.confirmations)
        wanted, limit = draws * times, seconds and seconds * times
        start = time.monotonic()
        try:
            counts = count(case, device, wanted, seed, limit, show)
        except ValueError as error:
            return [Outcome(case.name, "tokens", seed, "WRONG", note=f"ids that do not exist ({error})")]
        spent = time.monotonic() - start
        outcomes = [
            _judge(case.name, name, seed, found, law, spent / len(counts), before[name])
            for (name, law), found in zip(case.laws.items(), counts, strict=True)
        ]
        wrong = [outcome for outcome in outcomes if outcome.verdict == "WRONG"]
        rejected = {outcome.counted for outcome in wrong}
        rejections = {name: (times_before + 1) * (name in rejected) for name, times_before in rejections.items()}
        impossible = any(outcome.note for outcome in wrong)
        if impossible or not wrong or max(rejections.values()) > BUDGET.confirmations:
            break
        for outcome in wrong:
            if outcome.p_value is not None:
                before[outcome.counted].append(outcome.p_value)
    return outcomes


def _judge(
    case: str, counted: str, seed: int, counts: Any, law: Floats, seconds: float, before: list[float]
) -> Outcome:
    outcome = Outcome(case, counted, seed, "ok", int(counts.sum()), seconds=seconds, rejected_before=list(before))
    try:
        result: CheckResult = chi_square(counts, law, alpha=BUDGET.alpha, power=BUDGET.power)
    except CannotDecide as error:
        outcome.verdict, outcome.note = "too few", str(error)
        return outcome
    outcome.statistic, outcome.cells, outcome.p_value = result.statistic, result.cells, result.p_value
    outcome.distance, outcome.detectable = result.distance, result.detectable
    if result.rejected:
        outcome.verdict = "WRONG"
        outcome.note = f"{result.impossible} impossible draws" if result.impossible else ""
    elif result.detectable > NEEDED:
        outcome.verdict = "too few"
        outcome.note = f"finds no total variation of {NEEDED:g}"
    return outcome


def versions(device: Device) -> dict[str, str]:
    """What ran: versions of everything that takes part."""
    found = {"cupyspec": cupyspec.__version__, "python": platform.python_version(), "platform": platform.platform()}
    found |= {name: version for name in ("numpy", "scipy", "ml_dtypes") if (version := version_of(name))}
    if device.on_gpu:
        found |= cupy_wheels()
        runtime = device.xp.cuda.runtime
        found |= {"CUDA driver": str(runtime.driverGetVersion()), "CUDA runtime": str(runtime.runtimeGetVersion())}
    return found


def bfloat16() -> Any:
    """The dtype, or None without ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return ml_dtypes.bfloat16


def run_check(options: Namespace) -> int:
    """Print the table; 0 if every check passes. OptionError for a value that cannot be used."""
    device, kind = Device(options.device), bfloat16()
    if options.json is not None:
        try:
            Path(options.json).open("a").close()  # before the work, not after it
        except OSError as error:
            raise OptionError("--json", f"cannot write {options.json}: {error.strerror}") from None
    every = cases(kind)
    try:
        selected = [case for case in every if re.search(options.only, case.name, re.IGNORECASE)]
    except re.error as error:
        raise OptionError("--only", f"{options.only!r} is no regular expression: {error}") from None
    if not selected:
        raise OptionError("--only", f"must match a part of one of: {'; '.join(case.name for case in every)}")
    began = datetime.now(timezone.utc)
    start = time.monotonic()
    deadline = None if options.minutes is None else start + 60 * options.minutes
    print(f"cupyspec {cupyspec.__version__} on the {device.name}, seed {options.seed}\n\n{HEADER}")
    if kind is None:
        print("bfloat16 is left out: it needs ml_dtypes (pip install ml_dtypes)")
    progress, outcomes = Progress(), []
    for number, case in enumerate(selected):
        draws = options.draws
        if draws is None:
            draws = DEFAULT_DRAWS[options.device][case.large] if deadline is None else 2**62
        seconds = None
        if deadline is not None:
            seconds = max(0.0, deadline - time.monotonic()) / (len(selected) - number)
        progress.place = f"[{number + 1}/{len(selected)}] "
        found = run_case(number, case, device, draws, options.seed, seconds, progress.show)
        progress.clear()
        for outcome in found:
            print(outcome.line(), flush=True)
        outcomes += found
    passed = all(outcome.verdict == "ok" for outcome in outcomes)
    print(f"\n{summary(outcomes, time.monotonic() - start)}")
    if options.json is not None:
        report = {
            "passed": passed,
            "device": device.name,
            "versions": versions(device),
            "seed": options.seed,
            "date": began.isoformat(timespec="seconds"),
            "alpha": BUDGET.alpha,
            "confirmations": BUDGET.confirmations,
            "false_alarm_rate": BUDGET.false_alarm_rate(len(outcomes)),
            "seconds": round(time.monotonic() - start, 3),
            "checks": [asdict(outcome) for outcome in outcomes],
        }
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


def summary(outcomes: list[Outcome], seconds: float) -> str:
    """The last lines."""
    wrong = [outcome for outcome in outcomes if outcome.verdict == "WRONG"]
    few = [outcome for outcome in outcomes if outcome.verdict == "too few"]
    rate = BUDGET.false_alarm_rate(len(outcomes))
    lines = [
        f"{len(outcomes)} checks in {seconds:.0f} s. `finds TV`: a law so far away, in total variation over the cells, is "
        "found with 99 %.",
        f"A right library fails such a run with a probability below {rate:.1g}: p below {BUDGET.alpha:g}, and again on a fresh "
        f"sample {BUDGET.growth} times as large.",
    ]
    if few:
        lines.append(f"{len(few)} checks cannot decide with so few draws: give more --draws or --minutes.")
    if wrong:
        lines.append(
            f"WRONG: {len(wrong)} checks found that tokens do not follow their law. Please report this output."
        )
    elif not few:
        lines.append("Tokens follow each rule's own exact law in every check.")
    return "\n".join(lines)
