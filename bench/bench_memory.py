"""Memory that a call takes beyond its inputs and its answer, against 8 bytes per (score row, segment) and 1 MiB.

python bench/bench_memory.py --shapes 64,16,151936,bfloat16
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import harness, ours, session
from bench.bench_verify import PROVIDERS
from bench.cases import Inputs, Shape
from bench.providers import Provider
from bench.session import Session, Step
from cupyspec._segments import segment_count

OP = "memory"
SHAPES = {
    "cpu": (Shape(1, 5, 32000, "float32"), Shape(8, 5, 151936, "float32")),
    "cuda": (
        Shape(1, 5, 32000, "float32"),
        Shape(64, 5, 128256, "bfloat16"),
        Shape(64, 16, 151936, "bfloat16"),
        Shape(256, 3, 151936, "bfloat16"),
        Shape(4, 255, 32000, "bfloat16"),
        Shape(70000, 3, 512, "bfloat16"),
    ),
}
TAKING = ("cupyspec", "cupyspec Verifier", "torch", "torch unfused", "numpy")
STEADY_CALLS = 50


class Memory(NamedTuple):
    """Of a call."""

    peak: int  # bytes, beyond what was there before
    allocations: int


def check_options(options: argparse.Namespace) -> None:
    """ValueError for options that cannot be."""
    for text in getattr(options, "memory_shapes", None) or []:
        Shape.parse(text)


def steps(run: Session) -> list[Step]:
    """One for each shape."""
    given = [Shape.parse(text) for text in getattr(run.options, "memory_shapes", None) or []]
    shapes = given or SHAPES[run.device][: 2 if run.quick else None]
    return [Step(f"memory: {shape}", partial(run_shape, run, shape)) for shape in shapes]


def limit(shape: Shape) -> int:
    """Bytes that a call of ours may take on a GPU."""
    return 8 * shape.score_rows * segment_count(shape.vocab) + (1 << 20)


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Scores of no particular law: memory does not depend on them."""
    batch, drafts, vocab, dtype = shape
    random = np.random.default_rng(8)
    ids = random.integers(0, vocab, (batch, drafts))
    if device == "cpu":
        scores = (
            random.standard_normal((batch, rows, vocab), np.float32).astype(dtype) for rows in (drafts + 1, drafts)
        )
        return Inputs(ids, *scores, None)
    import torch

    place = harness.torch_device(device)
    made = (torch.randn(batch, rows, vocab, device=place, dtype=getattr(torch, dtype)) for rows in (drafts + 1, drafts))
    return Inputs(torch.from_numpy(ids).to(place), *made, None)


def run_shape(run: Session, shape: Shape) -> None:
    """Measure each provider by its allocator's own counters."""
    inputs = make_inputs(shape, run.device)
    allowed = limit(shape)
    lines = [
        f"memory, {shape}: {shape.all_bytes / 1e6:.1f} MB of logits; "
        f"8 bytes per (score row, segment) and 1 MiB: {allowed / 1e6:.2f} MB",
        f"  {'provider':<27}{'peak MB':>12}{'of the limit':>14}{'allocations':>13}  by",
    ]
    for name, method, is_ours, measure in _ways(run, inputs):
        try:
            memory = measure()
        except Exception as error:  # a peer may need more than there is
            run.say(f"left out: {name} ({type(error).__name__}: {error})")
            continue
        on_gpu = run.device == "cuda"
        share = f"{memory.peak / allowed:.2f}" if on_gpu else "-"
        lines.append(f"  {name:<27}{memory.peak / 1e6:>12.3f}{share:>14}{memory.allocations:>13}  {method}")
        figures = {"peak_bytes": memory.peak, "allocations": memory.allocations, "bytes_all": shape.all_bytes}
        figures["limit_bytes"] = allowed if on_gpu else ""
        run.add(op=OP, provider=name, method=method, **shape.columns, **figures)
        if is_ours and on_gpu and memory.peak > allowed:
            run.problem(f"MEMORY: {name} takes {memory.peak} bytes at {shape}, allowed are {allowed}")
        if "Verifier" in name and memory.allocations:
            run.problem(f"MEMORY: {name} makes {memory.allocations} allocations in {STEADY_CALLS} calls at {shape}")
    run.show("\n".join(lines))


def _ways(run: Session, inputs: Inputs) -> Iterator[tuple[str, str, bool, Callable[[], Memory]]]:
    """(name, counter, whether it is ours, how to measure)."""
    batch, dtype = inputs.draft_tokens.shape[0], str(inputs.target_logits.dtype).removeprefix("torch.")
    for provider in PROVIDERS:
        if provider.name not in TAKING or provider.left_out(run.device, batch, dtype):
            continue
        if run.device == "cpu":
            if not provider.needs:
                yield provider.name, "tracemalloc", provider.ours, partial(of_numpy, provider, inputs)
        elif provider.name == "cupyspec Verifier":
            yield provider.name, "torch and its own", True, partial(of_verifier, provider, inputs)
        else:
            yield provider.name, "torch", provider.ours, partial(of_torch, provider, inputs)
        if provider.name == "cupyspec" and run.device == "cuda" and has_cupy():
            yield "cupyspec, CuPy arrays", "cupy", True, partial(of_cupy, provider, inputs)


def has_cupy() -> bool:
    """Whether CuPy sees a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # not installed, no driver, no device: it has an error for each
        return False


def _answer_bytes(answer: Any) -> int:
    return sum(x.nbytes for x in answer if hasattr(x, "nbytes"))


def of_numpy(provider: Provider, inputs: Inputs) -> Memory:
    """By Python's own tracer, to which NumPy reports its arrays."""
    call = provider.bind(inputs, 0)
    call()
    tracemalloc.start()
    try:
        answer = call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return Memory(peak - _answer_bytes(answer), 0)


def of_torch(provider: Provider, inputs: Inputs) -> Memory:
    """By the peak counter of PyTorch's allocator."""
    call = provider.bind(inputs, 0)
    call()  # compiles, and makes what is kept
    peak, count, answer = _torch_counters(call)
    return Memory(peak - _answer_bytes(answer), count)


def _torch_counters(call: Callable[[], Any]) -> tuple[int, int, Any]:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, count = torch.cuda.memory_allocated(), _torch_allocations()
    answer = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, _torch_allocations() - count, answer


def _torch_allocations() -> int:
    import torch

    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def of_verifier(provider: Provider, inputs: Inputs) -> Memory:
    """What a Verifier owns but for its answer, which is its own memory too, and the allocations of later calls."""
    ours.forget_verifiers()
    call = provider.bind(inputs, 0)
    call()
    peak, count, _ = _torch_counters(lambda: [call() for _ in range(STEADY_CALLS)])
    owned = ours.verifier(inputs).scratch_bytes
    ours.forget_verifiers()
    return Memory(owned + peak, count)


@contextmanager
def cupy_counters() -> Iterator[list[int]]:
    """[bytes in use, peak, allocations] of CuPy's pool, from here on."""
    import cupy

    sizes: dict[int, int] = {}  # of what was allocated in here: what is freed may be older

    class Counter(cupy.cuda.MemoryHook):
        name = "bench"

        def malloc_postprocess(self, **facts: Any) -> None:
            sizes[facts["mem_ptr"]] = facts["mem_size"]
            counters[0] += facts["mem_size"]
            counters[1] = max(counters[1], counters[0])
            counters[2] += 1

        def free_postprocess(self, **facts: Any) -> None:
            counters[0] -= sizes.pop(facts["mem_ptr"], 0)

    counters = [0, 0, 0]
    with Counter():
        yield counters


def of_cupy(provider: Provider, inputs: Inputs) -> Memory:
    """By a hook of CuPy's pool, which counts whole blocks of 512 bytes."""
    import cupy

    arrays = (cupy.from_dlpack(x) for x in inputs[:3])
    call = provider.bind(Inputs(*arrays, None), 0)
    call()
    with cupy_counters() as counters:
        answer = call()
        cupy.cuda.get_current_stream().synchronize()
        return Memory(counters[1] - _answer_bytes(answer), counters[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = session.parser("bench_memory.py", "Peak memory of a call.")
    p.add_argument("--shapes", dest="memory_shapes", nargs="+", metavar="B,K,V,dtype", help="such as 1,5,32000,float32")
    return session.main(p, [sys.modules[__name__]], arguments)


if __name__ == "__main__":
    sys.exit(main())
