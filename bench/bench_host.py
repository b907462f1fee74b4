"""Host time: eager calls from each library, replays of a CUDA graph, and the first call of a process.

python bench/bench_host.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import harness, records, session
from bench.bench_memory import has_cupy
from bench.cases import Inputs, Shape, make_case
from bench.checks import WrongAnswerError
from bench.harness import HOST_CALLS, Call, Timing
from bench.ours import OURS
from bench.outcome import us
from bench.providers import Provider
from bench.session import Session, Step

OP = "host"
SHAPE = Shape(1, 5, 32000, "float32")
PROVIDERS = ("cupyspec", "cupyspec out=", "cupyspec Verifier")
BUDGET = 0.2  # seconds for each
REPLAYS = 200  # enqueued together, for their time on the GPU
FIRST_CALL_LIMIT = 120  # seconds for a process
WARM_PROCESSES = 2  # with CuPy's or NumPy's arrays; with PyTorch's, whose import takes seconds, one
LEGEND = "host: how long a call keeps the host, kernels left to run; first call: until its answer is there, in a new process."


def check_options(options: argparse.Namespace) -> None:
    """None of its own."""


def steps(run: Session) -> list[Step]:
    """Eager calls, graphs, first calls."""
    run.explain(LEGEND)
    found = [Step("host: eager calls", partial(run_eager, run))]
    if run.device == "cuda":
        found.append(Step("host: replays of a CUDA graph", partial(run_graphs, run)))
    return [*found, Step("host: first call of a process", partial(run_first_calls, run))]


def keep(run: Session, op: str, name: str, timing: Timing) -> None:
    """A row, and a line for a reader."""
    figures = {"median_us": timing.median, "q20_us": timing.low, "q80_us": timing.high, "samples": timing.samples}
    run.add(op=op, provider=name, **SHAPE.columns, **figures, method=timing.method)
    run.show(f"{op}, {name}: {us(timing.median)} us [{us(timing.low)}, {us(timing.high)}]")


class Library(NamedTuple):
    """Arrays of a library."""

    name: str
    inputs: Inputs


def libraries(run: Session) -> list[Library]:
    """The same inputs from each library that is there on the device; the others are said."""
    inputs = make_case(SHAPE, run.device, 0.7, copies=1).copies[0]
    if isinstance(inputs.draft_tokens, np.ndarray):
        return [Library("NumPy", inputs)]
    if run.device == "cpu":
        arrays = (x.numpy() for x in inputs[:3])
        return [Library("PyTorch", inputs), Library("NumPy", Inputs(*arrays, None))]
    found = [Library("PyTorch", inputs)]
    if has_cupy():
        import cupy

        arrays = (cupy.from_dlpack(x) for x in inputs[:3])
        found.append(Library("CuPy", Inputs(*arrays, None)))
    else:
        run.say("left out: CuPy arrays (CuPy is not installed or sees no GPU)")
    return found


def taking(run: Session) -> list[Provider]:
    """Ours that take part."""
    present = []
    for provider in OURS:
        if provider.name not in PROVIDERS:
            continue
        if reason := provider.left_out(run.device, SHAPE.batch, SHAPE.dtype):
            run.say(f"left out: {provider.name} ({reason})")
        else:
            present.append(provider)
    return present


def run_eager(run: Session) -> None:
    """How long an eager call keeps the host."""
    for library in libraries(run):
        for provider in taking(run):
            calls = [provider.bind(library.inputs, number) for number in range(HOST_CALLS)]
            calls[0]()
            if run.device == "cuda":
                timing = harness.host_time(calls, BUDGET)
            else:
                timing = harness.time_on_cpu({"": calls}, BUDGET, run.clock)[""]
            keep(run, OP, f"{provider.name}, {library.name}", timing)


def run_graphs(run: Session) -> None:
    """Replays of a graph of one call: what the host pays, and what the GPU does."""
    import torch

    for library in libraries(run):
        for provider in taking(run):
            if provider.name == "cupyspec out=":
                continue
            call = provider.bind(library.inputs, 0)
            eager = provider.unpack(library.inputs, _copied(call()))
            replay, answer = (_torch_graph if library.name == "PyTorch" else _cupy_graph)(call)
            replay()
            torch.cuda.synchronize()
            replayed = provider.unpack(library.inputs, answer)
            if not all(np.array_equal(*pair) for pair in zip(eager, replayed, strict=True)):
                raise WrongAnswerError(f"{provider.name}, {library.name}: a replayed graph and an eager call differ")
            name = f"{provider.name}, {library.name}"
            keep(run, "graph replay, host", name, harness.host_time([replay] * HOST_CALLS, BUDGET))
            sweep = harness.CudaSweep([replay] * REPLAYS, capture=False)
            keep(run, "graph replay, GPU", name, harness.time_on_cuda({"": sweep}, BUDGET)[""])


def _copied(answer: Any) -> Any:
    """Of an answer that the next call may overwrite."""
    return [x.clone() if hasattr(x, "clone") else x.copy() for x in answer[:2]]


def _torch_graph(call: Call) -> tuple[Call, Any]:
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        answer = call()
    return graph.replay, answer


def _cupy_graph(call: Call) -> tuple[Call, Any]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call()  # so that there is memory of this stream
        stream.synchronize()
        stream.begin_capture()
        answer = call()
        graph = stream.end_capture()
    current = cupy.cuda.get_current_stream()
    return lambda: graph.launch(current), answer


def run_first_calls(run: Session) -> None:
    """New processes, whose arrays are on the device before: a cold kernel cache, then warm ones."""
    if run.device == "cpu":
        each = [("NumPy", "numpy")]
    else:
        each = [("CuPy", "cupy")] if has_cupy() else []
        each += [("PyTorch", "torch"), ("Verifier, PyTorch", "Verifier")]
    for name, library in each:
        with tempfile.TemporaryDirectory(prefix="cupyspec-bench-") as cache:
            first = [_process(library, cache)]
            if run.device == "cpu":
                first += [_process(library, cache) for _ in range(WARM_PROCESSES)]
                keep(run, "import", name, harness.summary([found["import"] for found in first], "wall"))
                keep(run, "first call", name, harness.summary([found["first"] for found in first], "wall"))
                continue
            few = run.quick or library != "cupy"
            warm = [_process(library, cache) for _ in range(1 if few else WARM_PROCESSES)]
        keep(run, "import", name, harness.summary([found["import"] for found in (*first, *warm)], "wall"))
        keep(run, "first call, cold kernel cache", name, harness.summary([first[0]["first"]], "wall"))
        keep(run, "first call, warm kernel cache", name, harness.summary([found["first"] for found in warm], "wall"))


def _process(library: str, cache: str) -> dict[str, float]:
    command = [sys.executable, str(records.ROOT / "bench" / "first_call.py"), library, ",".join(map(str, SHAPE))]
    environment = os.environ | {"CUPY_CACHE_DIR": cache}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=FIRST_CALL_LIMIT)
    if done.returncode:
        raise RuntimeError(f"the first call failed in a new process: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = session.parser("bench_host.py", "Host time of calls, of graph replays, and of the first call.")
    return session.main(p, [sys.modules[__name__]], arguments)


if __name__ == "__main__":
    sys.exit(main())
