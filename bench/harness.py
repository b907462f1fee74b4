"""Time calls on the CPU and on CUDA devices: what one sweep over prepared calls takes, per call.

A *sweep* runs each of a provider's calls once. With a cold cache each call has its own copy of the inputs, and the
copies together exceed twice the last-level cache; with a warm one all calls share one copy. Either way they stop at
different positions of the chain, so that a sweep is an average over where rows stop. One sample is one sweep's time
divided by the number of calls; reported are the median and the 20 and 80 % quantiles of the samples. Providers take
turns, sweep by sweep, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[], Any]

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # the second: of all threads of this process
MIN_ROUNDS, MAX_ROUNDS = 5, 400
MAX_COPIES = 256
HOST_CALLS = 64  # calls between synchronisations when host time is measured: far fewer than a stream's queue holds
HOST_BUDGET = 0.05  # seconds


class Timing(NamedTuple):
    """Microseconds of one call."""

    median: float
    low: float  # 20 % quantile
    high: float  # 80 % quantile
    samples: int
    method: str  # "wall", "cpu", "graph" (replays between CUDA events) or "events" (eager calls between CUDA events)


class Sweep(NamedTuple):
    """A provider's calls."""

    calls: Sequence[Call]
    captures: bool = True  # they can be part of a CUDA graph
    host: bool = True  # on a GPU: how long a call keeps the host is wanted too


class Measured(NamedTuple):
    """What `measure` found out about a sweep."""

    time: Timing  # of the GPU; on the CPU of the whole call
    host: Timing | None = None  # on a GPU
    kernel: float | None = None  # sum of the kernels' microseconds, where no graph could be made
    answer: Any = None  # of the last call, as a replay left it; None without a graph
    note: str = ""


def summary(seconds: Sequence[float], method: str) -> Timing:
    """Quantiles of samples in seconds."""
    low, median, high = np.quantile(np.asarray(seconds) * 1e6, (0.2, 0.5, 0.8))
    return Timing(float(median), float(low), float(high), len(seconds), method)


def torch_device(device: str) -> str:
    """What PyTorch calls the device. Tests put the CPU in the GPU's place here."""
    return device


def last_level_cache(device: str) -> int:
    """Bytes of the cache nearest to memory."""
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties("cuda").L2_cache_size)
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 32 << 20


def copies_for(size: int, device: str, least: int = 1) -> int:
    """How many copies of inputs of `size` bytes to rotate over: at least `least`, and twice the last-level cache.

    Tiny inputs are not worth thousands of copies: they stay in the cache, and `cache_of` says so.
    """
    return max(least, min(MAX_COPIES, -(-2 * last_level_cache(device) // size) + 1))


def cache_of(size: int, copies: int, device: str) -> str:
    """What a rotation over copies of `size` bytes finds: "cold" or "warm"."""
    return "cold" if size * copies >= last_level_cache(device) else "warm"


def measure(device: str, sweeps: Mapping[str, Sweep], budget: float, clock: str = "wall") -> dict[str, Measured]:
    """Time all sweeps, about `budget` seconds for each.

    Parameters
    ----------
    device : {"cpu", "cuda"}
    sweeps : mapping of str to Sweep
        By provider.
    budget : float
        Seconds for each; one sweep of it is at least `MIN_ROUNDS` samples.
    clock : {"wall", "cpu"}
        On the CPU.
    """
    if device == "cpu":
        timings = time_on_cpu({name: sweep.calls for name, sweep in sweeps.items()}, budget, clock)
        return {name: Measured(timing) for name, timing in timings.items()}
    prepared = {name: CudaSweep(sweep.calls, sweep.captures) for name, sweep in sweeps.items()}
    timings = time_on_cuda(prepared, budget)
    found = {}
    for name, ready in prepared.items():
        host = host_time(ready.calls, HOST_BUDGET) if sweeps[name].host else None
        kernel = None if ready.method == "graph" else kernel_time(ready.calls)
        if ready.method == "graph":
            ready.run()  # the host's eager calls came between: outputs that calls share are again a replay's
        found[name] = Measured(timings[name], host, kernel, ready.answer, ready.note)
    return found


def time_on_cpu(sweeps: Mapping[str, Sequence[Call]], budget: float, clock: str = "wall") -> dict[str, Timing]:
    """Time per call of each provider by a clock of `CLOCKS`."""
    now = CLOCKS[clock]

    def sampler(calls: Sequence[Call]) -> Callable[[], float]:
        def sample() -> float:
            start = now()
            _run(calls)
            return (now() - start) / len(calls)

        return sample

    samples = _take_turns({name: sampler(calls) for name, calls in sweeps.items()}, budget)
    return {name: summary(values, clock) for name, values in samples.items()}


def _take_turns(samplers: Mapping[str, Callable[[], float]], budget: float) -> dict[str, list[float]]:
    """Samples of each, by turns, until its share of time is used up; the first round warms up."""
    for sample in samplers.values():
        sample()
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    used = dict.fromkeys(samplers, 0.0)
    waiting = dict(samplers)
    while waiting:
        for name, sample in list(waiting.items()):
            start = time.perf_counter()
            samples[name].append(sample())
            used[name] += time.perf_counter() - start
            done = len(samples[name])
            if done >= MAX_ROUNDS or (done >= MIN_ROUNDS and used[name] > budget):
                del waiting[name]
    return samples


def _run(calls: Sequence[Call]) -> Any:
    answer = None
    for call in calls:
        answer = call()
    return answer


class CudaSweep:
    """One provider's calls on a GPU, as a CUDA graph where they can be captured."""

    def __init__(self, calls: Sequence[Call], capture: bool) -> None:
        import torch

        self.calls, self.method, self.answer, self.note = calls, "events", None, ""
        # Warm up on another stream, as capture asks for; all calls, so that allocators have seen every size.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _run(calls)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph: Any = None
        if capture:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self.answer = _run(calls)  # of the last call, filled in by each replay
            except Exception as error:  # of CUDA, of PyTorch's compiler, of a peer
                self.note = f"not captured: {str(error).splitlines()[0]}"
                torch.cuda.synchronize()
            else:
                self._graph, self.method = graph, "graph"

    def run(self) -> None:
        """Enqueue one sweep."""
        if self._graph is None:
            _run(self.calls)
        else:
            self._graph.replay()


def time_on_cuda(sweeps: Mapping[str, CudaSweep], budget: float) -> dict[str, Timing]:
    """GPU time per call of each provider."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sampler(sweep: CudaSweep) -> Callable[[], float]:
        def sample() -> float:
            if sweep.method == "graph":
                sweep.run()  # keeps the GPU busy while the host launches the replay that is timed
            start.record()
            sweep.run()
            stop.record()
            stop.synchronize()
            return start.elapsed_time(stop) / 1e3 / len(sweep.calls)

        return sample

    samples = _take_turns({name: sampler(sweep) for name, sweep in sweeps.items()}, budget)
    return {name: summary(values, sweeps[name].method) for name, values in samples.items()}


def host_time(calls: Sequence[Call], budget: float) -> Timing:
    """Time until an eager call returns to the host; for a call that synchronises, all of it."""
    import torch

    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 5 * MIN_ROUNDS or time.perf_counter() < end:
        torch.cuda.synchronize()
        for call in calls[:HOST_CALLS]:
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return summary(samples, "host")


def kernel_time(calls: Sequence[Call]) -> float:
    """Microseconds per call that kernels run, gaps between them left out, by PyTorch's profiler; NaN without one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    calls = calls[:HOST_CALLS]
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            _run(calls)
            torch.cuda.synchronize()
        return float(sum(event.self_device_time_total for event in profiler.key_averages())) / len(calls)
    except (RuntimeError, AttributeError):  # containers may forbid it, and its names have changed between versions
        return math.nan
