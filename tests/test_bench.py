"""The benchmarks: every peer is right, a wrong one is found out, timings and files are what they say."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

with contextlib.suppress(ImportError):  # at once, so that the threads it would use are known to every test
    import torch  # noqa: F401

from bench import bench_verify, harness, peers, records, run
from bench.bench_verify import Shape
from bench.checks import Certain, WrongAnswerError, check_law, check_shape

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def one_thread():
    """PyTorch on one thread, as the tests' other processes want the other cores; restored, since `run.main` sets it."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(1)
    yield
    if torch is not None:
        torch.set_num_threads(before)


def provider(name: str) -> peers.Provider:
    (found,) = peers.named([name])
    if reason := found.left_out("cpu", 1, "float32"):
        pytest.skip(f"{name}: {reason}")
    return found


@pytest.mark.parametrize("name", [p.name for p in peers.PROVIDERS if not p.on_request and "cpu" in p.devices])
def test_providers_are_right(name):
    chosen = provider(name)
    check_law(chosen, "cpu")
    for batch, drafts, vocab, dtype in ((1, 5, 3001, "float32"), (21, 3, 700, "float16"), (1, 1, 2, "float32")):
        if not chosen.left_out("cpu", batch, dtype):
            certain = Certain(batch, drafts, vocab, dtype, "cpu")
            certain.check(chosen)
            check_shape(chosen, certain.inputs, chosen.bind(certain.inputs, 0)(), vocab)


# Planted faults, each a rewrite of the NumPy provider's answer or inputs.


def bent(change: Any) -> peers.Provider:
    honest = provider("numpy")
    random = np.random.default_rng(0)

    def bind(inputs: peers.Inputs, copy: int) -> Any:
        call = honest.bind(inputs, copy)
        return lambda: change(inputs, *call(), random)

    return dataclasses.replace(honest, name="bent", bind=bind)


def bonus_from_the_draft(inputs, tokens, accepted, random):
    q = peers._softmax(peers.to_numpy(inputs.draft_logits)[0, -1])
    full = accepted == tokens.shape[1] - 1
    tokens[full, -1] = random.choice(q.size, full.sum(), p=q / q.sum(dtype=np.float64))
    return tokens, accepted


def residual_is_the_target(inputs, tokens, accepted, random):
    rows = np.flatnonzero(accepted < tokens.shape[1] - 1)
    p = peers._softmax(peers.to_numpy(inputs.target_logits)[0]).astype(np.float64)
    for row in rows:
        weights = p[accepted[row]]
        tokens[row, accepted[row]] = random.choice(weights.size, p=weights / weights.sum())
    return tokens, accepted


def one_in_fifteen_stops_early(inputs, tokens, accepted, random):
    short = random.random(accepted.size) < 1 / 15
    accepted = np.where(short, 0, accepted)
    tokens[short, 1:] = -1
    return tokens, accepted


@pytest.mark.parametrize("fault", [bonus_from_the_draft, residual_is_the_target, one_in_fifteen_stops_early])
def test_wrong_laws_are_found_out(fault):
    with pytest.raises(WrongAnswerError, match=r"bent: .* do not follow the law"):
        check_law(bent(fault), "cpu")


def test_wrong_tokens_are_found_out():
    certain = Certain(4, 3, 50, "float32", "cpu")
    with pytest.raises(WrongAnswerError, match="only possible answer at B=4, K=3, V=50"):
        certain.check(bent(lambda inputs, tokens, accepted, random: ((tokens + 1) % 50, accepted)))
    for wrong in (
        lambda inputs, tokens, accepted, random: (tokens[:, :-1], accepted),
        lambda inputs, tokens, accepted, random: (np.where(tokens < 0, 0, tokens), accepted),
        lambda inputs, tokens, accepted, random: (tokens, accepted + 1),
    ):
        faulty = bent(wrong)
        answer = faulty.bind(certain.inputs, 0)()
        with pytest.raises(WrongAnswerError):
            check_shape(faulty, certain.inputs, answer, 50)


def test_case_counts_bytes_and_acceptance(monkeypatch):
    # Catches bytes of rows that the answer does not depend on, or a stopping pair that is not counted again.
    assert harness.copies_for(1 << 20, "cpu", 1) >= 2 * harness.last_level_cache("cpu") >> 20
    monkeypatch.setattr(harness, "MAX_COPIES", 2)
    case = bench_verify.make_case(Shape(32, 3, 4001, "float32"), "cpu", 0.7)
    assert case.acceptance == pytest.approx(0.7, abs=0.1)
    row = 4 * 4001
    assert case.shape.all_bytes == 7 * 32 * row
    accepted = case.mean_accepted
    assert 0.5 < accepted < 3
    rejected = (case.bytes_full / (32 * row) - 7) / 2  # share of rows
    assert 0 < rejected < 1
    assert case.bytes_least == pytest.approx(32 * row * (2 * (accepted + 1) - (1 - rejected)))
    # Every draft accepted: the answer depends on all rows, once.
    sure = bench_verify.make_case(Shape(8, 3, 101, "float32"), "cpu", 1 - 1e-9)
    assert sure.mean_accepted == 3
    assert sure.bytes_least == sure.bytes_full == sure.shape.all_bytes


def test_run_prints_and_writes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")  # one of the providers looked for below
    monkeypatch.setattr(harness, "MAX_COPIES", 3)
    file = tmp_path / "times.csv"
    options = [
        "--device",
        "cpu",
        "--threads",
        "1",
        "--quick",
        "--budget",
        "0.01",
        "--shapes",
        "1,2,500,float32",
        "2,2,500,float32",
    ]
    skip = ["--skip", "hugging face"]  # its import takes seconds
    assert run.main([*options, *skip, "--acceptance", "0.6", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "B=1 K=2 V=500 float32" in printed
    assert "x ours" in printed
    with file.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert {row["provider"] for row in rows} >= {"cupyspec", "numpy", "torch"}
    assert all(float(row["q20_us"]) <= float(row["median_us"]) <= float(row["q80_us"]) for row in rows)
    assert all(
        row[name] for row in rows for name in ("revision", "date", "cpu", "numpy", "command", "sum_us", "method")
    )
    # A second run of one provider replaces its rows and no other.
    assert run.main([*options, "--providers", "numpy", "--acceptance", "0.6", "--csv", str(file)]) == 0
    with file.open(newline="") as handle:
        again = list(csv.DictReader(handle))
    assert len(again) == len(rows)
    assert [row for row in again if row["provider"] != "numpy"] == [row for row in rows if row["provider"] != "numpy"]
    assert [row["date"] for row in again if row["provider"] == "numpy"]


def test_run_fails_for_a_wrong_provider(monkeypatch, capsys):
    wrong = bent(residual_is_the_target)
    monkeypatch.setattr(harness, "MAX_COPIES", 3)
    monkeypatch.setattr(peers, "named", lambda names: [] if names == [] else [wrong])
    assert run.main(["--device", "cpu", "--threads", "1", "--budget", "0.01", "--shapes", "1,2,50,float32"]) == 1
    assert "NOT TIMED, WRONG: bent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--providers", "cupyspec,nobody"], "unknown provider 'nobody'; there are: cupyspec, "),
        (["--skip", "nobody"], "unknown provider 'nobody'"),
        (["--shapes", "1,5,32000"], "a shape must be B,K,V,dtype"),
        (["--shapes", "1,0,32000,float32"], "a shape needs B, K >= 1, V >= 2"),
        (["--shapes", "1,5,32000,float64"], "dtype float32 or float16 or bfloat16"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--acceptance", "1.5"], "acceptance rates must be between 0 and 1"),
    ],
)
def test_run_refuses(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run.main(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_run_from_a_checkout_elsewhere(tmp_path):
    answer = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert "--quick" in answer.stdout


def test_keys_of_files_survive_formatting(tmp_path):
    row = dict.fromkeys(records.KEY, 1) | {"acceptance_wanted": 0.7000000001, "median_us": 3.14159265}
    for _ in range(2):
        records.write_csv(tmp_path / "a" / "b.csv", [row])
    assert (tmp_path / "a" / "b.csv").read_text().count("3.1416") == 1
    assert records.default_path("NVIDIA H200").name == "nvidia-h200.csv"


def test_cpu_timing_is_per_call():
    counts = {"a": 0, "b": 0}

    def count(name: str) -> harness.Call:
        def call() -> None:
            counts[name] += 1

        return call

    timings = harness.time_on_cpu({"a": [count("a")] * 3, "b": [count("b")]}, budget=0)
    assert counts == {"a": 3 * (harness.MIN_ROUNDS + 1), "b": harness.MIN_ROUNDS + 1}  # taking turns, one to warm up
    assert all(t.samples == harness.MIN_ROUNDS and 0 < t.low <= t.median <= t.high < 1e4 for t in timings.values())


def test_cuda_timing_with_a_stand_in_for_the_device(monkeypatch):
    # What runs when, with events whose clock counts calls: no GPU is needed to see that.
    torch = pytest.importorskip("torch")
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(log)

        def synchronize(self) -> None: ...

        def elapsed_time(self, stop: Event) -> float:
            return stop.at - self.at

    class Graph:
        def replay(self) -> None:
            log.extend(["replay"] * 4)

    @contextlib.contextmanager
    def capture(graph: Graph) -> Any:
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_in = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def refuses() -> None:
        log.append("call")
        if log.count("call") > 2:
            log.append("refused")
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    captured = harness.CudaSweep([lambda: log.append("a"), lambda: 42], capture=True)
    eager = harness.CudaSweep([lambda: log.append("b")] * 2, capture=False)
    refused = harness.CudaSweep([refuses, refuses], capture=True)
    assert (captured.method, captured.answer, captured.note) == ("graph", 42, "")
    assert (eager.method, eager.note) == ("events", "")
    assert (refused.method, refused.note) == (
        "events",
        "not captured: operation not permitted when stream is capturing",
    )
    log.clear()
    timings = harness.time_on_cuda({"captured": captured, "eager": eager}, budget=0)
    # 4 "milliseconds" a replay of two calls, and one for each eager call; the replay before the first event is not timed.
    assert timings["captured"][:3] == (2000, 2000, 2000)
    assert timings["eager"][:3] == (1000, 1000, 1000)
    assert harness.host_time([lambda: None], budget=0).samples >= harness.MIN_ROUNDS
