"""Time against B, K and V with every draft accepted, so that every score row counts, and the largest sizes.

python bench/bench_scale.py --device cuda
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

import cupyspec
from bench import floors, harness, session
from bench.cases import Case, Inputs, Shape, make_case, rows_read, to_numpy
from bench.checks import WrongAnswerError
from bench.harness import Sweep
from bench.ours import OURS
from bench.outcome import times, us
from bench.session import Session, Step

OP = "scale"
ACCEPTANCE = 1.0
AXES = {
    "cpu": {
        "B": tuple(Shape(b, 3, 4000, "float32") for b in (1, 4, 16, 64)),
        "K": tuple(Shape(2, k, 4000, "float32") for k in (1, 4, 16, 64)),
        "V": tuple(Shape(2, 3, v, "float32") for v in (1000, 4000, 16000, 64000)),
    },
    "cuda": {
        "B": tuple(Shape(b, 5, 32000, "bfloat16") for b in (1, 4, 16, 64, 256, 1024)),
        "K": tuple(Shape(16, k, 32000, "bfloat16") for k in (1, 4, 16, 64, 255)),
        "V": tuple(Shape(16, 5, v, "bfloat16") for v in (1000, 8000, 64000, 256000, 1000000)),
    },
}
# Many rows; the longest chain; the largest vocabulary; more than 2^32 target scores, in 16 GB.
LIMITS = (
    Shape(70000, 3, 512, "bfloat16"),
    Shape(4, 255, 128256, "bfloat16"),
    Shape(1, 5, 1000000, "bfloat16"),
    Shape(720, 5, 1000000, "bfloat16"),
)
QUICK_LIMITS = LIMITS[:1]
LINEAR = 1.15  # largest power of its size that a time may grow with, to be called linear
FAR_FROM_CACHE = 8  # last-level caches that one copy of the inputs fills, which is then never found there
MOST_COPIES = {"cpu": 16, "cuda": harness.MAX_COPIES}  # what a small call costs on the CPU is not memory
SPARE = 1.3  # memory beyond the scores
LEGEND = "size: bytes of the scores; power: how the time grew from the row above, 1 is linear."


def check_options(options: argparse.Namespace) -> None:
    """None of its own."""


def steps(run: Session) -> list[Step]:
    """One for each axis, and one for each of the largest sizes."""
    run.explain(LEGEND)
    axes = {name: shapes[:: 2 if run.quick else 1] for name, shapes in AXES[run.device].items()}
    limits = () if run.device == "cpu" else QUICK_LIMITS if run.quick else LIMITS
    if run.device == "cpu":
        run.explain(
            "left out without a GPU: the largest sizes (B = 70,000, K = 255, V = 1,000,000, more than 2^32 scores)"
        )
    return [
        *(Step(f"scale: {axis}", partial(run_axis, run, axis, shapes)) for axis, shapes in axes.items()),
        *(Step(f"scale: {shape}", partial(run_axis, run, "limits", (shape,))) for shape in limits),
    ]


def run_axis(run: Session, axis: str, shapes: Sequence[Shape]) -> None:
    """Time ours and a plain sum along one axis."""
    lines = [f"scale {axis}:  {'shape':<40}{'MB':>10}{'us':>11}{'/sum':>8}{'power':>8}"]
    before: tuple[float, float] | None = None
    powers = []
    for shape in shapes:
        if reason := too_large(shape, run.device):
            run.say(f"left out: {shape} ({reason})")
            continue
        taken, read = run_shape(run, axis, shape)
        power = math.log(taken / before[1]) / math.log(shape.all_bytes / before[0]) if before else math.nan
        before = (shape.all_bytes, taken)
        powers.append(power)
        lines.append(
            f"  {'':<8}{shape!s:<40}{shape.all_bytes / 1e6:>10.1f}{us(taken):>11}{taken / read:>8.2f}"
            f"{'-' if math.isnan(power) else f'{power:.2f}':>8}"
        )
    run.show("\n".join(lines))
    if len(powers) > 1 and powers[-1] > LINEAR:
        run.say(f"scale {axis}: NOT LINEAR, the last time grew with the {powers[-1]:.2f}th power of the size")


def too_large(shape: Shape, device: str) -> str:
    """Why a shape does not fit the memory that is free, or an empty string."""
    if device == "cpu":
        return ""
    import torch

    torch.cuda.empty_cache()
    free, needed = torch.cuda.mem_get_info()[0], SPARE * shape.all_bytes
    return f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free" if needed > free else ""


def run_shape(run: Session, axis: str, shape: Shape) -> tuple[float, float]:
    """Medians of ours and of a plain sum."""
    cached = FAR_FROM_CACHE * harness.last_level_cache(run.device)
    copies = (
        1 if shape.all_bytes > cached else min(MOST_COPIES[run.device], harness.copies_for(shape.all_bytes, run.device))
    )
    case = make_case(shape, run.device, ACCEPTANCE, copies)
    if int(case.accepted.min()) < shape.drafts:
        raise WrongAnswerError(f"{shape}: drafts from the target's own law were rejected")
    check_rows_alone(case.copies[0])
    provider = OURS[0]
    calls = [provider.bind(inputs, number) for number, inputs in enumerate(case.copies)]
    sums = floors.sum_calls([inputs.scores for inputs in case.copies])
    found = run.measure({provider.name: Sweep(calls, host=False), floors.SUM: Sweep(sums, host=False)})
    taken, read = found[provider.name].time.median, found[floors.SUM].time.median
    _keep(run, axis, case, provider.name, found)
    return taken, read


def _keep(run: Session, axis: str, case: Case, name: str, found: dict[str, harness.Measured]) -> None:
    shape = case.shape
    rows = rows_read("all", case.accepted, shape.drafts)
    size, copies = shape.all_bytes, len(case.copies)
    run.add(
        op=f"{OP} {axis}",
        provider=name,
        acceptance_wanted=ACCEPTANCE,
        acceptance=case.acceptance,
        mean_accepted=float(case.accepted.mean()),
        cache=harness.cache_of(size, copies, run.device),
        copies=copies,
        bytes_all=size,
        bytes_full=rows.full * shape.row_bytes,
        bytes_least=rows.least * shape.row_bytes,
        sum_us=found[floors.SUM].time.median,
        **shape.columns,
        **run.bandwidth.columns(size),
        **times(found[name]),
    )


def check_rows_alone(inputs: Inputs) -> None:
    """Rows far apart get the tokens that they get alone: offsets and the grid are right at any size."""
    tokens, target, draft, _ = inputs
    batch = tokens.shape[0]
    if isinstance(tokens, np.ndarray):
        seeds: Any = np.arange(batch)
    else:
        import torch

        seeds = torch.arange(batch, device=tokens.device)
    whole = cupyspec.verify(tokens, target, draft, seed=seeds, step=1)
    if (to_numpy(whole.status) != 0).any():
        raise WrongAnswerError("a status that is not 0")
    for row in sorted({0, batch // 2, max(0, batch - 2), batch - 1}):
        one = slice(row, row + 1)
        alone = cupyspec.verify(tokens[one], target[one], draft[one], seed=seeds[one], step=1)
        if not np.array_equal(to_numpy(whole.tokens)[one], to_numpy(alone.tokens)):
            raise WrongAnswerError(f"row {row} of {batch} gets other tokens than alone")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = session.parser("bench_scale.py", "Time against B, K and V, and the largest sizes.")
    return session.main(p, [sys.modules[__name__]], arguments)


if __name__ == "__main__":
    sys.exit(main())
