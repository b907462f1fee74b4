"""The benchmarks' way through a GPU, played by `fake_gpu`: the kernels run on the CPU, and the clock is the host's.

What is measured means nothing here. That every script gets through, checks, and keeps its rows does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from bench import (
    bench_host,
    bench_memory,
    bench_sample,
    bench_scale,
    bench_verify,
    cases,
    checks,
    floors,
    harness,
    ours,
    records,
    report,
    run,
    sweep,
)
from bench.cases import Shape
from bench.checks import WrongAnswerError
from cupyspec.rules import _launch
from host_cuda import backend as host_backend

pytest.importorskip("torch")
pytest.importorskip("cupy")
import torch

from fake_gpu import fake_gpu  # it needs CuPy

pytestmark = pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")

SMALL = Shape(2, 2, 1500, "bfloat16")
GIGABYTE = 1 << 30


class Event:
    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, stop: Event) -> float:
        return (stop.at - self.at) * 1e3 + 1e-3


class Graph:
    """Replays nothing: the answer is that of the capture."""

    def replay(self) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU for cupyspec and for the benchmarks."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    counters = {"allocation.all.allocated": 0}
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": contextlib.nullcontext,
        "Event": Event,
        "is_available": lambda: True,
        "get_device_name": lambda: "Stand-in",
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=40_000),
        "mem_get_info": lambda: (GIGABYTE, GIGABYTE),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": lambda: 5000,
        "memory_stats": lambda: counters,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(harness, "torch_device", lambda device: "cpu")
    monkeypatch.setattr(harness, "kernel_time", lambda calls: 12.5)
    monkeypatch.setattr(harness, "HOST_BUDGET", 0.0)
    monkeypatch.setattr(floors, "LARGE", {"cuda": 1 << 20})
    monkeypatch.setattr(checks, "LAW_ROWS", 300)
    monkeypatch.setattr(bench_sample, "LAW_ROWS", 300)
    monkeypatch.setattr(bench_memory, "has_cupy", lambda: False)
    monkeypatch.setattr(bench_host, "has_cupy", lambda: False)
    threads = torch.get_num_threads()
    with fake_gpu() as made, contextlib.ExitStack() as patches:
        for name in ("arange", "full", "ones", "zeros", "rand", "randn"):  # there is no such device
            real = getattr(torch, name)
            fake = mock.patch.object(torch, name, lambda *a, device=None, real=real, **k: real(*a, **k))
            patches.enter_context(fake)
        yield made
    ours.forget_verifiers()
    torch.set_num_threads(threads)


def test_all_benchmarks(gpu, monkeypatch, tmp_path, capsys):
    # Catches a script that first fails on a borrowed GPU.
    monkeypatch.setattr(bench_verify, "QUICK_SHAPES", {"cuda": (SMALL,)})
    monkeypatch.setattr(bench_sample, "QUICK_SHAPES", {"cuda": ((2, 1500, "bfloat16"),)})
    monkeypatch.setattr(bench_memory, "SHAPES", {"cuda": (SMALL,)})
    monkeypatch.setattr(bench_host, "SHAPE", Shape(1, 2, 1500, "float32"))
    monkeypatch.setattr(bench_host, "_process", lambda library, cache: {"import": 0.1, "first": 0.2, "second": 0.01})
    axes = {"B": (SMALL._replace(batch=1), SMALL._replace(batch=3)), "V": (SMALL, SMALL._replace(vocab=3000))}
    monkeypatch.setattr(bench_scale, "AXES", {"cuda": axes})
    monkeypatch.setattr(bench_scale, "QUICK_LIMITS", (Shape(70, 1, 64, "bfloat16"),))
    file = tmp_path / "stand-in.csv"
    options = ["--device", "cuda", "--quick", "--budget", "0.001", "--csv", str(file), "--skip", "hugging face"]
    assert run.main(options) == 0, capsys.readouterr()
    err = capsys.readouterr().err
    assert "left out: vllm (vllm not installed)" in err
    rows = records.read_csv(file)
    assert {row["device"] for row in rows} == {"Stand-in"}
    verified = [row for row in rows if row["op"] == "verify"]
    assert {row["cache"] for row in verified} == {"cold", "warm"}
    names = {provider.name for provider in ours.OURS if provider.name != "cupyspec out="}
    assert {row["provider"] for row in verified} == {*names, "torch", "torch unfused"}
    assert {row["method"] for row in verified} == {"graph"}
    assert all(row["host_us"] for row in verified if row["cache"] == "cold")
    assert {row["op"] for row in rows} == {
        *("verify", "sample", "host", "memory", "scale B", "scale V", "scale limits", "import"),
        *("graph replay, host", "graph replay, GPU", "first call, cold kernel cache", "first call, warm kernel cache"),
    }
    multinomial = next(row for row in rows if row["provider"] == "torch multinomial")
    assert (multinomial["method"], multinomial["kernel_us"]) == ("events", "12.5")
    assert report.main([str(file), "--all"]) == 0


def test_early_exit_is_off_where_it_says_so(gpu):
    # Catches a provider that times the default plan under another name.
    case = cases.make_case(SMALL._replace(batch=40), "cuda", 0.7, copies=1)
    launched: dict[str, list[str]] = {}
    for provider in ours.OURS:
        if provider.name in ("cupyspec", "cupyspec no early exit"):
            call = provider.bind(case.copies[0], 0)
            for _ in range(3):  # calls like one before take another way
                gpu.launches.clear()
                call()
                launched[provider.name] = [name for name, *_ in gpu.launches]
    assert launched == {"cupyspec": ["chain_verify"], "cupyspec no early exit": ["chain_stats", "chain_verify"]}
    assert not _launch.forced_plan


def test_sweep_runs_forced_plans_and_puts_them_back(gpu, tmp_path, capsys):
    plans = ["pairs_known=1", "pairs_known=0 blocks_per_row=2"]
    file = tmp_path / "sweep.json"
    options = ["--device", "cuda", "--shapes", "40,2,2500,bfloat16", "--budget", "0.001", "--json", str(file)]
    assert sweep.main([*options, "--plans", *plans]) == 0
    lines = capsys.readouterr().out.splitlines()
    by_plan = {line[2:54].strip(): line for line in lines if "x least" in line}
    assert set(by_plan) == {"(default)", *plans}
    assert "stats" in by_plan["pairs_known=1"] and "stats" not in by_plan[plans[1]]
    assert "verify 80x" in by_plan[plans[1]]  # two blocks for each of 40 rows
    assert "verify" in by_plan["(default)"]
    assert not _launch.forced_plan and _launch.plan_chain.__name__ == "plan_chain"
    assert '"plan": "pairs_known=1"' in file.read_text()


def test_sweep_finds_wrong_tokens_and_failures(gpu, monkeypatch, capsys):
    honest = ours.OURS[0]

    def bind(inputs: Any, number: int) -> Any:
        call = honest.bind(inputs, number)

        def step() -> Any:
            answer = call()
            if _launch.forced_plan.get("overlap") == 0:
                return [answer[0] + 1, answer[1]]
            if _launch.forced_plan.get("positions_at_once") == 2:
                raise RuntimeError("as planted\nmore")
            return answer

        return step

    planted = ours.Provider("cupyspec", bind, needs=())
    monkeypatch.setattr(sweep, "OURS", (planted,))
    options = ["--device", "cuda", "--shapes", "1,2,1500,bfloat16", "--budget", "0.001"]
    assert sweep.main([*options, "--plans", "overlap=0", "positions_at_once=2"]) == 1
    out = capsys.readouterr().out
    assert "overlap=0" in out and "WRONG TOKENS" in out
    assert "FAILED: RuntimeError: as planted" in out
    assert out.count("x least") == 1


@pytest.mark.parametrize("plan", ["nothing=1", "pairs_known=yes", "pairs_known"])
def test_sweep_refuses_unknown_plans(plan, capsys):
    # A misspelt field would silently time the default plan.
    with pytest.raises(SystemExit):
        sweep.main(["--device", "cpu", "--plans", plan])
    assert "a plan" in capsys.readouterr().err


def memory_session(said: list[str]) -> Any:
    """What `bench_memory.run_shape` needs."""
    rows: list[dict[str, Any]] = []
    return SimpleNamespace(
        device="cuda",
        say=said.append,
        show=said.append,
        problem=lambda text: said.append(f"problem: {text}"),
        add=lambda **row: rows.append(row),
        rows=rows,
    )


def test_memory_beyond_the_limit_is_a_problem(gpu, monkeypatch):
    assert bench_memory.limit(Shape(64, 16, 151936, "bfloat16")) == 8 * 64 * 33 * 149 + (1 << 20)
    said: list[str] = []
    session = memory_session(said)
    bench_memory.run_shape(session, SMALL)
    assert not [text for text in said if text.startswith("problem")]
    answer = 2 * 3 * 8 + 2 * 2 * 4
    peaks = {row["provider"]: row["peak_bytes"] for row in session.rows}
    assert peaks["cupyspec"] == 4000 - answer
    assert peaks["cupyspec Verifier"] > 4000  # its own scratch, which PyTorch's counter does not see
    allocations = iter(range(0, 10_000, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": next(allocations)})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1 << 21)
    bench_memory.run_shape(session, SMALL)
    problems = [text for text in said if text.startswith("problem")]
    assert any("MEMORY: cupyspec takes" in text for text in problems)
    assert any("cupyspec Verifier makes 100 allocations in 50 calls" in text for text in problems)
    assert not any("torch takes" in text for text in problems)  # peers may


def test_too_large_shapes_are_left_out(gpu, capsys):
    said: list[str] = []
    session = SimpleNamespace(device="cuda", say=said.append, show=said.append)
    bench_scale.run_axis(session, "limits", (Shape(720, 5, 1_000_000, "bfloat16"),))
    assert "left out: B=720 K=5 V=1000000 bfloat16 (needs 20.6 GB, 1.1 GB are free)" in said


def test_rows_that_depend_on_their_batch_are_found_out(gpu, monkeypatch):
    inputs = cases.make_case(SMALL._replace(batch=5), "cuda", 1.0, copies=1).copies[0]
    bench_scale.check_rows_alone(inputs)
    verify = bench_scale.cupyspec.verify

    def wrong(tokens: Any, *rest: Any, **options: Any) -> Any:
        answer = verify(tokens, *rest, **options)
        if tokens.shape[0] > 1:  # an offset that wrapped around
            answer.tokens[-1] = answer.tokens[0]
        return answer

    monkeypatch.setattr(bench_scale.cupyspec, "verify", wrong)
    with pytest.raises(WrongAnswerError, match="row 4 of 5 gets other tokens than alone"):
        bench_scale.check_rows_alone(inputs)


def test_a_replay_with_other_tokens_is_found_out(gpu, monkeypatch):
    # Catches a graph that reads what was freed, timed as if it were right.
    run_of = SimpleNamespace(device="cuda", say=print, show=print, add=lambda **row: None, quick=True)
    honest = ours.OURS[0]

    def changed(call: Any) -> Any:
        answer = call()
        return lambda: None, [answer[0] + 1, *answer[1:]]

    monkeypatch.setattr(bench_host, "SHAPE", Shape(1, 2, 1500, "float32"))
    monkeypatch.setattr(bench_host, "OURS", (honest,))
    monkeypatch.setattr(bench_host, "_torch_graph", changed)
    with pytest.raises(WrongAnswerError, match="a replayed graph and an eager call differ"):
        bench_host.run_graphs(run_of)
    inputs = cases.make_case(SMALL, "cuda", 0.7, copies=1).copies[0]
    call = honest.bind(inputs, 0)
    bench_verify.check_replay(honest, inputs, call(), call)
    with pytest.raises(WrongAnswerError, match="a replayed graph and an eager call differ"):
        bench_verify.check_replay(honest, inputs, honest.bind(inputs, 3)(), lambda: [np.zeros((2, 3)), np.zeros(2)])
