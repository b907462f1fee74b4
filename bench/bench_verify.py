"""`verify()` beside its peers, from logits to tokens, with cold and with warm caches.

python bench/bench_verify.py --shapes 4,7,50257,bfloat16 --acceptance 0.9,0.5 --providers cupyspec,torch
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import floors, harness, session
from bench.cases import LEAST_COPIES, MAIN_SHAPES, Case, Inputs, Shape, make_case, rows_read
from bench.checks import Certain, WrongAnswerError, check_law, check_shape
from bench.harness import Call, Sweep
from bench.ours import OURS
from bench.outcome import Result, csv_rows, table
from bench.peers import PEERS
from bench.providers import Provider, named
from bench.session import Session, Step

OP = "verify"
PROVIDERS = (*OURS, *PEERS)
CACHES = ("cold", "warm")
ACCEPTANCES = {"cpu": (0.8, 0.5), "cuda": (0.7,)}
QUICK_SHAPES = {"cpu": MAIN_SHAPES["cpu"][:2], "cuda": (MAIN_SHAPES["cuda"][1], *MAIN_SHAPES["cuda"][3:6:2])}
# Beside the main shapes on a GPU, cupyspec alone: what acceptance does, and rows that are not aligned.
VARIED = (
    *((Shape(64, 5, 128256, "bfloat16"), rate) for rate in (0.3, 0.5, 0.95)),
    *((Shape(256, 3, 151936, "bfloat16"), rate) for rate in (0.3, 0.95)),
    (Shape(256, 5, 128256, "bfloat16"), 0.7),
)
ODD = tuple(
    (Shape(batch, 5, vocab, dtype), 0.7)
    for batch, vocab, dtype in (
        (8, 128257, "bfloat16"),
        (64, 128257, "bfloat16"),
        (1, 50257, "float16"),
        (64, 50257, "float16"),
    )
)
VARIED_PROVIDERS = (
    *("cupyspec", "cupyspec no early exit", "cupyspec draft lse"),
    *("cupyspec both lse", "cupyspec sigmoid rejecting"),
)
LEGEND = (
    "us: median time of a call; x ours: that over cupyspec's; /full: over a plain sum of the rows that a pass without early\n"
    "exit reads; /least: over a plain sum of those that the answer depends on. cold: every call has other inputs, more than\n"
    "the cache holds. See bench/README.md."
)


class CaseSpec(NamedTuple):
    """What is timed."""

    shape: Shape
    acceptance: float
    providers: tuple[str, ...] | None = None  # None: all that were chosen
    caches: tuple[str, ...] = CACHES


def add_options(p: argparse.ArgumentParser) -> None:
    """This op's own."""
    p.add_argument("--providers", metavar="NAMES", help=f"comma-separated: {', '.join(q.name for q in PROVIDERS)}")
    p.add_argument("--skip", metavar="NAMES", help="providers to leave out")
    p.add_argument("--shapes", nargs="+", metavar="B,K,V,dtype", help="such as 1,5,32000,float32")
    p.add_argument(
        "--acceptance", metavar="RATES", help="comma-separated acceptance rates, such as 0.8,0.5; 1 is allowed"
    )
    p.add_argument("--cache", choices=CACHES, help="default: both, warm where a copy of the inputs fits the cache")


def check_options(options: argparse.Namespace) -> None:
    """ValueError for options that cannot be."""
    named(PROVIDERS, session.names(getattr(options, "providers", None)))
    named(PROVIDERS, session.names(getattr(options, "skip", None)))
    for text in getattr(options, "shapes", None) or []:
        Shape.parse(text)
    rates = [float(text) for text in session.names(getattr(options, "acceptance", None))]
    if not all(0 < rate <= 1 for rate in rates):
        raise ValueError(f"acceptance rates must be between 0 and 1, got {options.acceptance}")


def choose(run: Session) -> list[Provider]:
    """Providers that the options name, or all; without those that cannot take part, which is said."""
    chosen = named(PROVIDERS, session.names(getattr(run.options, "providers", None)))
    if not chosen:
        # In a hurry also without those that take their time to start.
        slow = ("torch compiled",) if run.quick else ()
        chosen = [p for p in PROVIDERS if run.device not in p.on_request and p.name not in slow]
    skipped = {p.name for p in named(PROVIDERS, session.names(getattr(run.options, "skip", None)))}
    present = []
    for provider in chosen:
        if provider.name in skipped:
            continue
        if reason := provider.left_out(run.device, 1, "float32"):
            run.say(f"left out: {provider.name} ({reason})")
        else:
            present.append(provider)
    return present


def specs(run: Session) -> list[CaseSpec]:
    """The cases that the options ask for."""
    options, device = run.options, run.device
    caches = CACHES if getattr(options, "cache", None) is None else (options.cache,)
    if run.quick and device == "cpu":
        caches = caches[:1]
    rates = [float(text) for text in session.names(getattr(options, "acceptance", None))]
    rates = rates or list(ACCEPTANCES[device][: 1 if run.quick else None])
    given = getattr(options, "shapes", None)
    shapes = [Shape.parse(text) for text in given or []] or (QUICK_SHAPES if run.quick else MAIN_SHAPES)[device]
    found = [CaseSpec(shape, rate, None, caches) for shape in shapes for rate in rates]
    if device == "cuda" and not (given or run.quick):
        found += [CaseSpec(shape, rate, VARIED_PROVIDERS, ("cold",)) for shape, rate in (*VARIED, *ODD)]
    return found


def steps(run: Session) -> list[Step]:
    """The law of each provider, then the cases."""
    run.explain(LEGEND)
    good: list[Provider] = []

    def check() -> None:
        _ = run.bandwidth
        good.extend(right(run, choose(run)))

    return [
        Step("verify: laws of the providers", check),
        *(
            Step(f"verify: {spec.shape} at {spec.acceptance}", partial(run_spec, run, spec, good))
            for spec in specs(run)
        ),
    ]


def right(run: Session, providers: Sequence[Provider]) -> list[Provider]:
    """Those providers that keep their law; which do not is a problem."""
    good = []
    for provider in providers:
        with _failures(run, provider):
            check_law(provider, run.device)
            good.append(provider)
    return good


class _failures:
    """A provider that is wrong, or that raises, is left out and said; others go on."""

    def __init__(self, run: Session, provider: Provider) -> None:
        self._run, self._provider = run, provider

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, WrongAnswerError):
            self._run.problem(f"NOT TIMED, WRONG: {error}")
        elif self._provider.ours:
            self._run.problem(f"NOT TIMED: {self._provider.name}: {type(error).__name__}: {error}")
        else:
            self._run.say(f"left out: {self._provider.name} ({type(error).__name__}: {error})")
        return True


def run_spec(run: Session, spec: CaseSpec, providers: Sequence[Provider]) -> None:
    """Make a case, check, time, print, keep the rows."""
    shape = spec.shape
    taking = [
        p
        for p in providers
        if not p.left_out(run.device, shape.batch, shape.dtype) and (spec.providers is None or p.name in spec.providers)
    ]
    case = make_case(shape, run.device, spec.acceptance)
    taking = checked(run, case, taking)
    size, copies = shape.all_bytes, len(case.copies)
    fits = harness.cache_of(size, copies, run.device) == "warm"
    if fits and "cold" in spec.caches:
        run.say(f"{shape}: {copies} copies of the inputs fit the cache: no cold times")
    if fits:
        run_cache(run, case, "warm", taking, case.copies)
        return
    if "cold" in spec.caches:
        run_cache(run, case, "cold", taking, case.copies)
    if "warm" in spec.caches and size <= harness.last_level_cache(run.device):
        run_cache(run, case, "warm", taking, case.copies[:1] * LEAST_COPIES)


def checked(run: Session, case: Case, providers: Sequence[Provider]) -> list[Provider]:
    """Those providers that are right at the case's own shape and dtype."""
    good = []
    certain: dict[bool, Certain] = {}
    for provider in providers:
        with _failures(run, provider):
            alone = Certain.needs_alone(provider)
            if alone not in certain:
                certain[alone] = Certain(*case.shape, case.device, alone)
            certain[alone].check(provider)
            inputs = case.copies[0]
            check_shape(provider, inputs, provider.bind(inputs, 0)(), case.shape.vocab)
            good.append(provider)
    return good


def run_cache(run: Session, case: Case, cache: str, providers: Sequence[Provider], copies: Sequence[Inputs]) -> None:
    """Time providers on copies of the inputs, the same one many times for a warm cache."""
    calls: dict[str, list[Call]] = {}
    accepted: dict[str, Any] = {}
    taking = []
    for provider in providers:
        with _failures(run, provider):
            bound = [provider.bind(inputs, number) for number, inputs in enumerate(copies)]
            # Where rows stop depends on the rule; peers follow the exact rule's law with other numbers.
            accepted[provider.name] = case.accepted
            if provider.repeats:
                accepted[provider.name] = np.stack(
                    [provider.unpack(inputs, call())[1] for inputs, call in zip(copies, bound, strict=True)]
                )
            calls[provider.name] = bound
            taking.append(provider)
    # How long eager calls keep the host does not depend on the cache.
    host = cache == "cold" or len(copies) == len(case.copies)
    sweeps = {p.name: Sweep(calls[p.name], p.captures, host) for p in taking}
    found = run.measure(sweeps | floors.sweeps([inputs.scores for inputs in copies]))
    results = []
    for provider in taking:
        measured, stops = found[provider.name], accepted[provider.name]
        if provider.repeats and measured.time.method == "graph":
            with _failures(run, provider):
                check_replay(provider, copies[-1], measured.answer, calls[provider.name][-1])
        rows = rows_read(provider.reads, stops, case.shape.drafts)
        results.append(Result(provider, measured, rows, float(stops.mean())))
    different = len({id(inputs) for inputs in copies})
    for row in csv_rows(case, cache, different, results, found, run.bandwidth):
        run.add(**row)
    run.show(table(case, cache, results, found))


def check_replay(provider: Provider, inputs: Inputs, replayed: Any, call: Call) -> None:
    """A replayed graph's last answer is that of an eager call."""
    before = provider.unpack(inputs, replayed)  # on the host: the eager call may write to the same arrays
    if not all(np.array_equal(*pair) for pair in zip(before, provider.unpack(inputs, call()), strict=True)):
        raise WrongAnswerError(f"{provider.name}: a replayed graph and an eager call differ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = session.parser("bench_verify.py", "Time verify() beside its peers.")
    add_options(p)
    return session.main(p, [sys.modules[__name__]], arguments)


if __name__ == "__main__":
    sys.exit(main())
