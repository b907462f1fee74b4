"""`sample()` beside its peers: one token for each row of logits.

python bench/bench_sample.py --shapes 4,50257,bfloat16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

import cupyspec
from bench import floors, harness, session
from bench.cases import ITEMSIZE, LOGIT_SPREAD, Ints, seeds, to_numpy
from bench.checks import LAW_MEAN, LAW_ROWS, LAW_SPREAD, WrongAnswerError, compare, softmax
from bench.engines import with_known
from bench.harness import Call, Sweep
from bench.outcome import times, us
from bench.peers import race
from bench.peers import softmax as softmax32
from bench.providers import Provider
from bench.session import Session, Step

OP = "sample"
LEAST_COPIES = 4
SHAPES = {
    "cpu": ((1, 32000, "float32"), (8, 151936, "float32")),
    "cuda": ((1, 32000, "float32"), (1, 128256, "bfloat16"), (64, 128256, "bfloat16"), (256, 151936, "bfloat16")),
}
QUICK_SHAPES = {"cpu": SHAPES["cpu"][:1], "cuda": SHAPES["cuda"][1:3]}


class Rows(NamedTuple):
    """One copy of the inputs."""

    logits: Any  # [B, V]


def _tokens(inputs: Rows, answer: Any) -> Ints:
    return to_numpy(answer)


def _bind(inputs: Rows, number: int, **options: Any) -> Call:
    logits = inputs.logits
    arguments = seeds(number, logits.shape[0], logits) | options
    return lambda: cupyspec.sample(logits, **arguments)


def _bind_lse(inputs: Rows, number: int) -> Call:
    return _bind(inputs, number, return_log_normalizer=True)


def _bind_torch(inputs: Rows, number: int) -> Call:
    import torch

    # A race of exponentials: nothing waits for the GPU.
    return lambda: race(torch.softmax(inputs.logits, -1, dtype=torch.float32))


def _bind_multinomial(inputs: Rows, number: int) -> Call:
    import torch

    return lambda: torch.multinomial(torch.softmax(inputs.logits, -1, dtype=torch.float32), 1)[:, 0]


def _bind_flashinfer(inputs: Rows, number: int) -> Call:
    from flashinfer import sampling

    function = with_known(sampling.sampling_from_logits, ("logits",))
    return lambda: function({"logits": inputs.logits.float()})


def _bind_numpy(inputs: Rows, number: int) -> Call:
    logits, random = to_numpy(inputs.logits), np.random.default_rng(number)

    def step() -> Ints:
        running = np.cumsum(softmax32(logits), axis=1, dtype=np.float64)
        return (running <= random.random((logits.shape[0], 1)) * running[:, -1:]).sum(1)

    return step


def _ours(inputs: Rows, answer: Any) -> Ints:
    return to_numpy(answer.tokens)


PROVIDERS = (
    Provider("cupyspec", _bind, _ours, needs=(), repeats=True),
    Provider("cupyspec with lse", _bind_lse, _ours, needs=(), repeats=True),
    Provider("torch", _bind_torch, _tokens),
    Provider("torch multinomial", _bind_multinomial, _tokens, captures=False),
    Provider("flashinfer", _bind_flashinfer, _tokens, needs=("torch", "flashinfer"), devices=("cuda",)),
    Provider("numpy", _bind_numpy, _tokens, needs=(), devices=("cpu",), dtypes=("float32", "float16")),
)


def parse(text: str) -> tuple[int, int, str]:
    """``4,50257,bfloat16``."""
    try:
        batch, vocab, dtype = (part.strip() for part in text.split(","))
        shape = int(batch), int(vocab), dtype
    except ValueError as error:
        raise ValueError(f"a shape must be B,V,dtype such as 4,50257,bfloat16, got {text!r}") from error
    if min(shape[:2]) < 1 or dtype not in ITEMSIZE:
        raise ValueError(f"a shape needs B, V >= 1 and dtype {' or '.join(ITEMSIZE)}, got {text!r}")
    return shape


def check_options(options: argparse.Namespace) -> None:
    """ValueError for options that cannot be."""
    for text in getattr(options, "sample_shapes", None) or []:
        parse(text)


def steps(run: Session) -> list[Step]:
    """The law of each provider, then the cases."""
    good: list[Provider] = []
    given = [parse(text) for text in getattr(run.options, "sample_shapes", None) or []]
    shapes = given or (QUICK_SHAPES if run.quick else SHAPES)[run.device]
    return [
        Step("sample: laws of the providers", lambda: good.extend(right(run))),
        *(Step(f"sample: B={b} V={v} {d}", partial(run_case, run, b, v, d, good)) for b, v, d in shapes),
    ]


def logits_of(values: Any, dtype: str, device: str) -> Rows:
    """NumPy values on a device, PyTorch's where it is installed."""
    try:
        import torch
    except ImportError:
        return Rows(values.astype(dtype))
    return Rows(torch.from_numpy(values).to(harness.torch_device(device), getattr(torch, dtype)))


def right(run: Session) -> list[Provider]:
    """Those providers that take part and keep the law."""
    good = []
    for provider in PROVIDERS:
        if reason := provider.left_out(run.device, 1, "float32"):
            run.say(f"left out: {provider.name} ({reason})")
            continue
        try:
            check_law(provider, run.device)
        except WrongAnswerError as error:
            run.problem(f"NOT TIMED, WRONG: {error}")
        except Exception as error:  # whatever a peer raises: it is left out
            run.say(f"left out: {provider.name} ({type(error).__name__}: {error})")
        else:
            good.append(provider)
    return good


def check_law(provider: Provider, device: str) -> None:
    """Chi-square of the tokens of one row against its softmax."""
    row = np.random.default_rng(4).normal(LAW_MEAN, LAW_SPREAD, 11).astype(np.float32)
    inputs = logits_of(np.broadcast_to(row, (LAW_ROWS, row.size)).copy(), "float32", device)
    if "torch" in provider.needs:
        import torch

        torch.manual_seed(5)
    tokens = provider.unpack(inputs, provider.bind(inputs, 0)())
    if tokens.shape != (LAW_ROWS,) or not ((tokens >= 0) & (tokens < row.size)).all():
        raise WrongAnswerError(f"{provider.name}: not one id for each row")
    compare(f"{provider.name}: tokens", np.bincount(tokens, minlength=row.size), softmax(row))


def check_certain(provider: Provider, batch: int, vocab: int, dtype: str, device: str) -> None:
    """Rows with one likely id, at the shape and dtype that are timed."""
    random = np.random.default_rng(6)
    rows = min(batch, 8)
    values, wanted = random.standard_normal((rows, vocab), np.float32), random.integers(0, vocab, rows)
    values[np.arange(rows), wanted] = 80  # whatever else has a chance below 1e-28
    row = np.arange(batch) % rows
    inputs = Rows(logits_of(values, dtype, device).logits[row])
    if not np.array_equal(provider.unpack(inputs, provider.bind(inputs, 0)()), wanted[row]):
        raise WrongAnswerError(f"{provider.name}: not the only possible answer at B={batch}, V={vocab}, {dtype}")


def run_case(run: Session, batch: int, vocab: int, dtype: str, providers: Sequence[Provider]) -> None:
    """Make inputs, check, time, print, keep the rows."""
    size = batch * vocab * ITEMSIZE[dtype]
    count = harness.copies_for(size, run.device, LEAST_COPIES)
    make = _maker(batch, vocab, dtype, run.device)
    copies = [Rows(make()) for _ in range(count)]
    calls: dict[str, Sweep] = {}
    for provider in providers:
        if provider.left_out(run.device, batch, dtype):
            continue
        try:
            check_certain(provider, batch, vocab, dtype, run.device)
            bound = [provider.bind(inputs, number) for number, inputs in enumerate(copies)]
            bound[0]()
        except WrongAnswerError as error:
            run.problem(f"NOT TIMED, WRONG: {error}")
        except Exception as error:
            run.say(f"left out: {provider.name} ({type(error).__name__}: {error})")
        else:
            calls[provider.name] = Sweep(bound, provider.captures)
    found = run.measure(calls | floors.sweeps([x.logits for x in copies]))
    read, ours = found[floors.SUM].time.median, found["cupyspec"].time.median if "cupyspec" in found else None
    cache = harness.cache_of(size, count, run.device)
    lines = [
        f"sample, B={batch} V={vocab} {dtype}, {cache} cache: {size / 1e6:.1f} MB, plain sum {us(read)} us",
        f"  {'provider':<27}{'us':>9}{'host us':>9}{'x ours':>8}{'/sum':>8}  by",
    ]
    for name in calls:
        measured = found[name]
        taken, host = measured.time, measured.host
        relative = f"{taken.median / ours:.2f}" if ours else "-"
        kernels = "" if measured.kernel is None else f"; kernels alone {us(measured.kernel)}"
        lines.append(
            f"  {name:<27}{us(taken.median):>9}{us(host.median) if host else '-':>9}{relative:>8}"
            f"{taken.median / read:>8.2f}  {taken.method}{kernels}"
        )
        run.add(
            op=OP,
            provider=name,
            batch=batch,
            drafts=0,
            vocab=vocab,
            dtype=dtype,
            cache=cache,
            copies=count,
            bytes_all=size,
            sum_us=read,
            copy_us=found[floors.COPY].time.median,
            **run.bandwidth.columns(size),
            **times(measured),
        )
    run.show("\n".join(lines))


def _maker(batch: int, vocab: int, dtype: str, device: str) -> Callable[[], Any]:
    try:
        import torch
    except ImportError:
        random = np.random.default_rng(7)
        return lambda: (LOGIT_SPREAD * random.standard_normal((batch, vocab), np.float32)).astype(dtype)
    place = harness.torch_device(device)
    generator = torch.Generator(place).manual_seed(7)
    number = getattr(torch, dtype)
    return lambda: (LOGIT_SPREAD * torch.randn(batch, vocab, generator=generator, device=place)).to(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = session.parser("bench_sample.py", "Time sample() beside its peers.")
    p.add_argument("--shapes", dest="sample_shapes", nargs="+", metavar="B,V,dtype", help="such as 4,50257,bfloat16")
    return session.main(p, [sys.modules[__name__]], arguments)


if __name__ == "__main__":
    sys.exit(main())
