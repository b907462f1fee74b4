"""`verify()` beside its peers, from logits to tokens: one case is a shape, a dtype and an acceptance rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

import cupyspec
from bench import harness
from bench.checks import Certain, WrongAnswerError, check_law, check_shape
from bench.harness import Call, CudaSweep, Timing
from bench.peers import Inputs, Provider, to_numpy

OP = "verify"
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
LOGIT_SPREAD = 3.0  # standard deviation of the target's logits: a few tokens hold most of the mass, as in language
LEAST_COPIES = 16  # so that rows of small batches stop at many positions; less where a batch has many rows anyway
_GAP = 128  # scores between target and draft in memory: the second starts aligned, as an allocation of its own would


class Shape(NamedTuple):
    """Sizes and dtype of a case."""

    batch: int
    drafts: int
    vocab: int
    dtype: str

    def __str__(self) -> str:
        return f"B={self.batch} K={self.drafts} V={self.vocab} {self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``1,5,32000,float32``."""
        try:
            batch, drafts, vocab, dtype = (part.strip() for part in text.split(","))
            shape = cls(int(batch), int(drafts), int(vocab), dtype)
        except ValueError as error:
            raise ValueError(f"a shape must be B,K,V,dtype such as 1,5,32000,float32, got {text!r}") from error
        if min(shape[:3]) < 1 or shape.vocab < 2 or dtype not in ITEMSIZE:
            raise ValueError(f"a shape needs B, K >= 1, V >= 2 and dtype {' or '.join(ITEMSIZE)}, got {text!r}")
        return shape

    @property
    def row_bytes(self) -> int:
        return self.vocab * ITEMSIZE[self.dtype]

    @property
    def all_bytes(self) -> int:
        """Every score row once: 2 K + 1 rows of V."""
        return (2 * self.drafts + 1) * self.batch * self.row_bytes


SHAPES = {
    "cpu": (
        Shape(1, 5, 32000, "float32"),
        Shape(1, 5, 151936, "float32"),
        Shape(1, 5, 151936, "float16"),
        Shape(8, 5, 32000, "float32"),
    ),
    "cuda": (
        Shape(1, 5, 51865, "float16"),
        Shape(1, 5, 32000, "float32"),
        Shape(1, 5, 256000, "float32"),
        Shape(1, 5, 128256, "bfloat16"),
        Shape(8, 5, 128256, "bfloat16"),
        Shape(64, 5, 128256, "bfloat16"),
        Shape(256, 3, 151936, "bfloat16"),
    ),
}
QUICK_SHAPES = {"cpu": SHAPES["cpu"][:2], "cuda": (SHAPES["cuda"][1], *SHAPES["cuda"][3:6:2])}
ACCEPTANCES = {"cpu": (0.8, 0.5), "cuda": (0.7,)}
PROVIDER_BUDGET = {"cpu": 0.8, "cuda": 0.25}  # seconds for each provider of a case


@dataclass(frozen=True)
class Case:
    """Copies of inputs, and what a verification of them has to do."""

    shape: Shape
    device: str
    acceptance_wanted: float
    acceptance: float  # mean over rows of the sum over ids of min(p, q)
    copies: list[Inputs]
    mean_accepted: float
    bytes_full: float  # per call: what a pass without early exit reads
    bytes_least: float  # per call: what the answer depends on


def make_case(shape: Shape, device: str, acceptance: float, least_copies: int = LEAST_COPIES) -> Case:
    """Random logits whose drafts are accepted at about the wanted rate."""
    least = max(2, least_copies // shape.batch)
    count = harness.copies_for(shape.all_bytes, device, least)
    # Noise of this deviation on the draft's logits: where many ids share the mass, sum min(p, q) = 2 Phi(-noise / 2).
    noise = -2 * NormalDist().inv_cdf(acceptance / 2)
    scores = _Scores(shape, device, noise)
    copies, rates = zip(*(scores.copy(number) for number in range(count)), strict=True)

    # Rows that stop at n: the answer depends on target rows 0..n and on draft rows 0..min(n, K - 1). A pass without early
    # exit reads all 2 K + 1 rows, and where a draft was rejected the pair of rows there once more.
    accepted = np.stack([_accepted(inputs, number) for number, inputs in enumerate(copies)])
    least_rows = (accepted + 1 + np.minimum(accepted + 1, shape.drafts)).sum(1).mean()
    full_rows = (2 * shape.drafts + 1) * shape.batch + 2 * (accepted < shape.drafts).sum(1).mean()
    return Case(
        shape,
        device,
        acceptance,
        float(np.mean(rates)),
        list(copies),
        float(accepted.mean()),
        float(full_rows) * shape.row_bytes,
        float(least_rows) * shape.row_bytes,
    )


def _accepted(inputs: Inputs, number: int) -> Any:
    return to_numpy(cupyspec.verify(*inputs[:3], seed=1, step=number).num_accepted)


class _Scores:
    """Makes copies of a case's inputs, with PyTorch, or with NumPy where that is all there is."""

    def __init__(self, shape: Shape, device: str, noise: float) -> None:
        self.shape, self.device, self.noise = shape, device, noise
        try:
            import torch
        except ImportError:
            if shape.dtype == "bfloat16":
                raise ValueError("bfloat16 needs PyTorch: NumPy has no such dtype") from None
            self.torch: Any = None
            self.random: Any = np.random.default_rng(0)
        else:
            self.torch = torch
            self.random = torch.Generator(device).manual_seed(0)

    def copy(self, number: int) -> tuple[Inputs, float]:
        """Inputs, and the mean acceptance rate of their rows."""
        batch, drafts, vocab, _ = self.shape
        size = batch * (drafts + 1) * vocab
        start = -(-size // _GAP) * _GAP
        scores = self._empty(start + batch * drafts * vocab)
        target, draft = scores[:size].reshape(batch, drafts + 1, vocab), scores[start:].reshape(batch, drafts, vocab)
        scores[size:start] = 0
        rates = []
        for b in range(batch):  # row by row: float32 noise for a whole large batch would need gigabytes
            clean = LOGIT_SPREAD * self._normal((drafts + 1, vocab))
            target[b] = clean
            draft[b] = clean[:drafts] + self.noise * self._normal((drafts, vocab))
            if b < 16:
                rates.append(self._rate(target[b, :drafts], draft[b]))
        # As a drafter would: each token drawn from its own row.
        ids = [cupyspec.sample(draft[:, i], seed=1, step=number, position=i).tokens for i in range(drafts)]
        if self.torch is None:
            return Inputs(np.stack(ids, 1).astype(np.int64), target, draft, scores), float(np.mean(rates))
        return Inputs(self.torch.stack(ids, 1).long(), target, draft, scores), float(np.mean(rates))

    def _empty(self, size: int) -> Any:
        if self.torch is None:
            return np.empty(size, self.shape.dtype)
        return self.torch.empty(size, dtype=getattr(self.torch, self.shape.dtype), device=self.device)

    def _normal(self, shape: tuple[int, int]) -> Any:
        if self.torch is None:
            return self.random.standard_normal(shape, np.float32)
        return self.torch.randn(shape, generator=self.random, device=self.device)

    def _rate(self, target: Any, draft: Any) -> float:
        if self.torch is None:
            p, q = (np.exp(x.astype(np.float32) - x.max(-1, keepdims=True)) for x in (target, draft))
            return float(np.minimum(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)).sum(-1).mean())
        p, q = (self.torch.softmax(x, -1, dtype=self.torch.float32) for x in (target, draft))
        return float(self.torch.minimum(p, q).sum(-1).mean())


class Result(NamedTuple):
    """What was measured of one provider."""

    provider: str
    time: Timing  # of the GPU; on the CPU of the whole call
    host: Timing | None
    kernel: float | None  # sum of kernel times, where a graph could not be made


class Floor(NamedTuple):
    """Plain passes over the memory of all score rows."""

    sum: Timing
    copy: Timing


def read_floor_calls(case: Case) -> tuple[list[Call], list[Call]]:
    """A plain sum of every score of a copy, and a copy of them to other memory."""
    flat = [inputs.scores for inputs in case.copies]
    if isinstance(flat[0], np.ndarray):
        others: list[Any] = [np.empty_like(x) for x in flat]
        return (
            [lambda x=x: x.sum(dtype=np.float32) for x in flat],
            [lambda x=x, y=y: np.copyto(y, x) for x, y in zip(flat, others, strict=True)],
        )
    import torch

    others = [torch.empty_like(x) for x in flat]
    return (
        [lambda x=x: x.sum(dtype=torch.float32) for x in flat],
        [lambda x=x, y=y: y.copy_(x) for x, y in zip(flat, others, strict=True)],
    )


def check(providers: Sequence[Provider], device: str, say: Callable[[str], None]) -> list[Provider]:
    """Those providers that keep the law; says which do not."""
    good = []
    for provider in providers:
        say(f"checking the law of {provider.name}")
        try:
            check_law(provider, device)
        except WrongAnswerError as error:
            say(f"NOT TIMED, WRONG: {error}")
        else:
            good.append(provider)
    return good


def run_case(
    case: Case, providers: Sequence[Provider], budget: float, clock: str, say: Callable[[str], None]
) -> tuple[list[Result], Floor]:
    """Check each provider at the case's own shape, then time all."""
    calls: dict[str, list[Call]] = {}
    by_name = {provider.name: provider for provider in providers}
    certain = Certain(*case.shape, case.device)
    for provider in providers:
        try:
            certain.check(provider)
            bound = [provider.bind(inputs, number) for number, inputs in enumerate(case.copies)]
            check_shape(provider, case.copies[0], bound[0](), case.shape.vocab)
        except WrongAnswerError as error:
            say(f"NOT TIMED, WRONG: {error}")
        else:
            calls[provider.name] = bound
    del certain
    floor_names = ("a plain sum", "a plain copy")
    floor_calls = dict(zip(floor_names, read_floor_calls(case), strict=True))
    if case.device == "cpu":
        timings = harness.time_on_cpu(calls | floor_calls, budget * len(calls), clock)
        results = [Result(name, timings[name], None, None) for name in calls]
        return results, Floor(*(timings[name] for name in floor_names))

    sweeps = {name: CudaSweep(bound, by_name[name].captures) for name, bound in calls.items()}
    for name, sweep in sweeps.items():
        if sweep.note:
            say(f"{name}: {sweep.note}")
    sweeps |= {name: CudaSweep(bound, True) for name, bound in floor_calls.items()}
    timings = harness.time_on_cuda(sweeps, budget * len(calls))
    results = []
    for name, bound in calls.items():
        if by_name[name].repeats and sweeps[name].method == "graph":
            _check_replay(by_name[name], case.copies[-1], sweeps[name], bound[-1])
        in_graph = sweeps[name].method == "graph"
        kernel = None if in_graph else harness.kernel_time(bound)
        results.append(Result(name, timings[name], harness.host_time(bound), kernel))
    return results, Floor(*(timings[name] for name in floor_names))


def _check_replay(provider: Provider, inputs: Inputs, sweep: CudaSweep, call: Call) -> None:
    replayed = provider.unpack(inputs, sweep.answer)
    if not all(np.array_equal(*pair) for pair in zip(replayed, provider.unpack(inputs, call()), strict=True)):
        raise WrongAnswerError(f"{provider.name}: a replayed graph and an eager call differ")


def rows(case: Case, results: Sequence[Result], floor: Floor) -> Iterator[dict[str, Any]]:
    """What goes to the CSV file, but for the environment."""
    batch, drafts, vocab, dtype = case.shape
    for result in results:
        row: dict[str, Any] = {
            "op": OP,
            "provider": result.provider,
            "batch": batch,
            "drafts": drafts,
            "vocab": vocab,
            "dtype": dtype,
            "acceptance_wanted": case.acceptance_wanted,
            "acceptance": case.acceptance,
            "mean_accepted": case.mean_accepted,
            "median_us": result.time.median,
            "q20_us": result.time.low,
            "q80_us": result.time.high,
            "samples": result.time.samples,
            "method": result.time.method,
            "copies": len(case.copies),
            "bytes_all": case.shape.all_bytes,
            "bytes_full": case.bytes_full,
            "bytes_least": case.bytes_least,
            "sum_us": floor.sum.median,
            "copy_us": floor.copy.median,
        }
        if result.host is not None:
            row |= {"host_us": result.host.median, "host_q20_us": result.host.low, "host_q80_us": result.host.high}
        if result.kernel is not None:
            row["kernel_us"] = result.kernel
        yield row


def table(case: Case, results: Sequence[Result], floor: Floor) -> str:
    """The case for a reader."""
    size = case.shape.all_bytes
    ours = next((result.time.median for result in results if result.provider == "cupyspec"), None)
    lines = [
        f"{case.shape}: acceptance {case.acceptance:.2f}, {case.mean_accepted:.2f} of {case.shape.drafts} accepted; "
        f"{size / 1e6:.1f} MB of logits, plain sum {_us(floor.sum.median)} us ({size / floor.sum.median / 1e3:.0f} GB/s), "
        f"copy {_us(floor.copy.median)} us ({2 * size / floor.copy.median / 1e3:.0f} GB/s)",
        f"  {'provider':<20}{'us':>9}  {'[20 %, 80 %]':<20}{'host us':>9}{'x ours':>8}{'/full':>8}{'/least':>8}  by",
    ]
    for result in results:
        taken = result.time
        relative = "-" if ours is None else f"{taken.median / ours:.2f}"
        full, least = (taken.median / (floor.sum.median * part / size) for part in (case.bytes_full, case.bytes_least))
        quantiles = f"[{_us(taken.low)}, {_us(taken.high)}]"
        host = "-" if result.host is None else _us(result.host.median)
        method = taken.method if result.kernel is None else f"{taken.method}; kernels alone {_us(result.kernel)}"
        lines.append(
            f"  {result.provider:<20}{_us(taken.median):>9}  {quantiles:<20}{host:>9}{relative:>8}{full:>8.2f}{least:>8.2f}"
            f"  {method}"
        )
    return "\n".join(lines)


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
