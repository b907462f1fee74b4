"""For tuning: the same calls by other launch plans, timed beside each other and beside a plain sum.

    python bench/sweep.py --device cuda
    python bench/sweep.py --shapes 64,5,128256,bfloat16 --plans "" "pairs_known=0 blocks_per_row=4" --rule sigmoid

A plan is what `cupyspec.rules._launch.forced` takes; "" is the default one. Its tokens must equal the default plan's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import floors, harness, session
from bench.cases import MAIN_SHAPES, Case, Shape, make_case, rows_read
from bench.harness import Call, CudaSweep
from bench.ours import OURS, forced, plan_fields
from bench.outcome import us
from bench.providers import Provider, named
from cupyspec.rules import _launch

Plan = Mapping[str, int]

DEFAULT_PLANS = (
    "",
    "overlap=0",
    "pairs_known=1",
    "pairs_known=0",
    "pairs_known=0 blocks_per_row=2",
    "pairs_known=0 blocks_per_row=4",
    "pairs_known=0 blocks_per_row=8",
    "pairs_known=0 blocks_per_row=8 positions_at_once=3",
)
RULES = {
    "token": "cupyspec",
    "draft-lse": "cupyspec draft lse",
    "both-lse": "cupyspec both lse",
    "sigmoid": "cupyspec sigmoid rejecting",
    "one-hot": "cupyspec one-hot",
    "greedy": "cupyspec greedy",
}
BUDGET = 0.06  # seconds for each plan of a shape
COPIES = 8  # for a small batch, if the cache does not ask for more


def parse_plan(text: str) -> dict[str, int]:
    """``pairs_known=0 blocks_per_row=4``; only what the plan's maker looks up."""
    plan, known = {}, plan_fields()
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"a plan's fields are {', '.join(known)}, got {text!r}")
        try:
            plan[name] = int(value)
        except ValueError as error:
            raise ValueError(f"a plan is such as {known[0]}=1, got {text!r}") from error
    return plan


def parser() -> argparse.ArgumentParser:
    """Command line."""
    p = argparse.ArgumentParser(prog="bench/sweep.py", description="Time launch plans beside each other.")
    p.add_argument("--device", choices=("cpu", "cuda"), help="cpu: to try the script; plans change nothing there")
    p.add_argument("--shapes", nargs="+", metavar="B,K,V,dtype", help="default: the seven main shapes")
    p.add_argument("--plans", nargs="+", metavar="PLAN", default=DEFAULT_PLANS, help=f"of {', '.join(plan_fields())}")
    p.add_argument("--rule", choices=tuple(RULES), default="token")
    p.add_argument("--acceptance", type=float, default=0.7)
    p.add_argument("--budget", type=float, default=BUDGET, help="seconds for each plan; default: %(default)s")
    p.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return p


class _Watched:
    """The plan function, with the last plan that it made."""

    def __init__(self, function: Any) -> None:
        self.function, self.last = function, None

    def __call__(self, **arguments: Any) -> Any:
        self.last = self.function(**arguments)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def describe(call: Call, plan: Plan) -> str:
    """Launches of a call under a plan: kernel, grid x block, c cluster, o overlap."""
    original = getattr(_launch, "plan_chain", None)
    if original is None:
        return "?"
    watched = _Watched(original)
    _launch.plan_chain = watched
    try:
        with forced(**plan, described=1):  # which nothing looks up: so that a call like one before is planned anew too
            call()
    finally:
        _launch.plan_chain = original
    if watched.last is None:
        return "-"
    text = [
        f"{launch.name.removeprefix('chain_')} {launch.grid}x{launch.block}"
        f"{f' c{launch.cluster}' if launch.cluster > 1 else ''}{' o' if launch.overlap else ''}"
        for launch in watched.last.launches
    ]
    return f"{', '.join(text)}; {watched.last.positions_at_once} at once"


def answers(provider: Provider, case: Case, calls: Sequence[Call], plan: Plan) -> list[Any]:
    """Tokens and accepted of all copies under a plan."""
    with forced(**plan):
        made = [provider.unpack(inputs, call()) for inputs, call in zip(case.copies, calls, strict=True)]
    return [np.stack(parts) for parts in zip(*made, strict=True)]


def sweep_shape(shape: Shape, plans: Sequence[str], options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Check and time all plans on one case; prints a table. Plans that fail or give other tokens have no time."""
    (provider,) = named(OURS, [RULES[options.rule]])
    copies = harness.copies_for(shape.all_bytes, device, max(1, COPIES // shape.batch))
    case = make_case(shape, device, options.acceptance, copies)
    calls = [provider.bind(inputs, number) for number, inputs in enumerate(case.copies)]
    wanted = answers(provider, case, calls, {})
    rows = rows_read(provider.reads, wanted[1], shape.drafts)
    sweeps: dict[str, Any] = {}
    notes = {}
    for text in plans:
        plan = parse_plan(text)
        try:
            notes[text] = describe(calls[0], plan)
            if not all(
                np.array_equal(*pair) for pair in zip(wanted, answers(provider, case, calls, plan), strict=True)
            ):
                notes[text] = f"WRONG TOKENS: {notes[text]}"
                continue
            with forced(**plan):  # during the capture: a replay repeats what was launched then
                sweeps[text] = CudaSweep(calls, True) if device == "cuda" else list(calls)
        except (RuntimeError, ValueError) as error:
            notes[text] = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}"
    sums = floors.sum_calls([inputs.scores for inputs in case.copies])
    sweeps[floors.SUM] = CudaSweep(sums, True) if device == "cuda" else sums
    timed = harness.time_on_cuda if device == "cuda" else harness.time_on_cpu
    found = timed(sweeps, options.budget)
    read = found[floors.SUM].median
    full, least = (read * part / shape.score_rows for part in rows)
    print(
        f"\n{shape} {options.rule}, {wanted[1].mean():.2f} accepted, {copies} copies; plain sum {us(read)} us; "
        f"of the rows without early exit {us(full)}, of those needed {us(least)}"
    )
    results = []
    for text in plans:
        line = f"  {text or '(default)':<52}"
        if text in found:
            taken = found[text]
            line += f"{us(taken.median):>8} [{us(taken.low)}, {us(taken.high)}] {taken.median / least:>6.2f} x least  "
            results.append({"shape": str(shape), "rule": options.rule, "plan": text, "us": taken.median, "sum": read})
        print(line + notes[text], flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep; 1 if a plan gave other tokens than the default one, or failed."""
    p = parser()
    options = p.parse_args(arguments)
    try:
        for text in options.plans:
            parse_plan(text)
        shapes = [Shape.parse(text) for text in options.shapes or []]
    except ValueError as error:
        p.error(str(error))
    device = session.choose_device(options.device, 1)
    start, results, wrong = time.perf_counter(), [], False
    plans = tuple(dict.fromkeys(("", *options.plans)))
    for shape in shapes or MAIN_SHAPES[device]:
        found = sweep_shape(shape, plans, options, device)
        wrong |= len(found) < len(plans)
        results += found
    print(f"\n{time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
