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
    pass

from bench import bench_sample, bench_verify, cases, floors, harness, peers, providers, records, run
from bench.cases import Shape
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


@pytest.fixture(autouse=True)
def small_floor(monkeypatch):
    """Bandwidth is measured on little memory."""
    monkeypatch.setattr(floors, "LARGE", {"cpu": 1 << 20, "cuda": 1 << 20})


def provider(name: str) -> providers.Provider:
    (found,) = providers.named(bench_verify.PROVIDERS, [name])
    if reason := found.left_out("cpu", 1, "float32"):
        pytest.skip(f"{name}: {reason}")
    return found


@pytest.mark.parametrize(
    "name", [p.name for p in bench_verify.PROVIDERS if "cpu" in p.devices and p.name != "torch compiled"]
)
def test_providers_are_right(name):
    chosen = provider(name)
    check_law(chosen, "cpu")
    for batch, drafts, vocab, dtype in ((1, 5, 3001, "float32"), (21, 3, 700, "float16"), (1, 1, 2, "float32")):
        if not chosen.left_out("cpu", batch, dtype):
            certain = Certain(batch, drafts, vocab, dtype, "cpu", Certain.needs_alone(chosen))
            certain.check(chosen)
            check_shape(chosen, certain.inputs, chosen.bind(certain.inputs, 0)(), vocab)


# Planted faults, each a rewrite of the NumPy provider's answer or inputs.


def bent(change: Any) -> providers.Provider:
    honest = provider("numpy")
    random = np.random.default_rng(0)

    def bind(inputs: cases.Inputs, copy: int) -> Any:
        call = honest.bind(inputs, copy)
        return lambda: change(inputs, *call(), random)

    return dataclasses.replace(honest, name="bent", bind=bind)


def bonus_from_the_draft(inputs, tokens, accepted, random):
    q = peers.softmax(cases.to_numpy(inputs.draft_logits)[0, -1])
    full = accepted == tokens.shape[1] - 1
    tokens[full, -1] = random.choice(q.size, full.sum(), p=q / q.sum(dtype=np.float64))
    return tokens, accepted


def residual_is_the_target(inputs, tokens, accepted, random):
    rows = np.flatnonzero(accepted < tokens.shape[1] - 1)
    p = peers.softmax(cases.to_numpy(inputs.target_logits)[0]).astype(np.float64)
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


def test_a_rule_is_judged_by_its_own_law():
    # Catches a sigmoid rule whose answers are held against the target's law, or the other way round.
    sigmoid, exact = provider("cupyspec sigmoid rejecting"), provider("cupyspec")
    for chosen, law in (
        (sigmoid, exact.law),
        (exact, sigmoid.law),
        (exact, {"one_hot_drafts": True}),
        (exact, {"greedy": True}),
    ):
        with pytest.raises(WrongAnswerError, match="do not follow the law"):
            check_law(dataclasses.replace(chosen, law=law), "cpu")


def test_rows_read():
    # Catches bytes of rows that the answer does not depend on, or a stopping pair that is not counted again.
    accepted = np.array([[0, 2, 3]])  # of K = 3: rejected at once, rejected at the last draft, none rejected
    counted = {
        reads: cases.rows_read(reads, accepted, 3) for reads in ("all", "draft known", "known", "one-hot", "greedy")
    }
    assert counted["all"] == (3 * 7 + 2 * 2, (1 + 3 + 4) + (1 + 3 + 3))
    assert counted["draft known"] == (3 * 4 + 2 * 2, (1 + 3 + 4) + 2)
    assert counted["known"] == (3 + 2, 3 + 2)
    assert counted["one-hot"] == counted["greedy"] == (3 * 4, 1 + 3 + 4)
    twice = cases.rows_read("all", np.vstack([accepted, [[3, 3, 3]]]), 3)  # an average over copies
    assert twice == ((25 + 21) / 2, (15 + 21) / 2)


def test_cases_have_the_wanted_acceptance(monkeypatch):
    assert harness.copies_for(1 << 20, "cpu", 1) >= 2 * harness.last_level_cache("cpu") >> 20
    assert harness.cache_of(1 << 20, harness.copies_for(1 << 20, "cpu"), "cpu") == "cold"
    assert harness.cache_of(100, harness.copies_for(100, "cpu"), "cpu") == "warm"
    case = cases.make_case(Shape(32, 3, 4001, "float32"), "cpu", 0.7, copies=2)
    assert case.acceptance == pytest.approx(0.7, abs=0.1)
    assert case.accepted.shape == (2, 32)
    assert case.shape.all_bytes == 7 * 32 * 4 * 4001
    assert case.copies[0].scores.nbytes == pytest.approx(case.shape.all_bytes, abs=4 * 128)
    # A draft that is the target: no draft is rejected.
    sure = cases.make_case(Shape(8, 3, 101, "float32"), "cpu", 1.0, copies=1)
    assert (sure.accepted == 3).all() and sure.acceptance == pytest.approx(1)
    # Rows in several pieces are all filled in.
    monkeypatch.setattr(cases, "_AT_ONCE", 2000)
    pieces = cases.make_case(Shape(5, 1, 300, "float32"), "cpu", 0.7, copies=1).copies[0]
    assert (np.std(cases.to_numpy(pieces.target_logits), axis=2) > 2).all()
    assert (np.std(cases.to_numpy(pieces.draft_logits), axis=2) > 2).all()


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
    options += ["--ops", "verify"]
    skip = ["--skip", "hugging face"]  # its import takes seconds
    assert run.main([*options, *skip, "--acceptance", "0.6", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "B=1 K=2 V=500 float32" in printed
    assert "x ours" in printed
    with file.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert {row["provider"] for row in rows} >= {"cupyspec", "cupyspec Verifier", "cupyspec both lse", "numpy", "torch"}
    assert {row["cache"] for row in rows} == {"warm"}  # three copies of this size are no cold cache
    assert all(float(row["q20_us"]) <= float(row["median_us"]) <= float(row["q80_us"]) for row in rows)
    assert all(
        row[name]
        for row in rows
        for name in (
            "revision",
            "date",
            "cpu",
            "numpy",
            "command",
            "sum_us",
            "copy_us",
            "read_gbps",
            "floor_us",
            "method",
        )
    )
    # A second run of one provider replaces its rows and no other.
    assert run.main([*options, "--providers", "numpy", "--acceptance", "0.6", "--csv", str(file)]) == 0
    with file.open(newline="") as handle:
        again = list(csv.DictReader(handle))
    assert len(again) == len(rows)
    assert [row for row in again if row["provider"] != "numpy"] == [row for row in rows if row["provider"] != "numpy"]
    assert [row["date"] for row in again if row["provider"] == "numpy"]


def test_cold_and_warm_differ_in_their_inputs(monkeypatch):
    # Catches a warm time of rotating inputs, or a cold one of the same copy again and again.
    honest = provider("numpy")
    spec = bench_verify.CaseSpec(Shape(1, 1, 50, "float32"), 0.7)
    recorded: list[Any] = []

    def bind(inputs: cases.Inputs, number: int) -> Any:
        call = honest.bind(inputs, number)
        return lambda: (recorded.append(id(inputs.target_logits)), call())[1]

    def measure(sweeps: dict[str, harness.Sweep]) -> dict[str, harness.Measured]:
        recorded.clear()
        for sweep in sweeps.values():
            for call in sweep.calls:
                call()
        calls.append(list(recorded))
        return {name: harness.Measured(harness.summary([1e-6], "wall")) for name in sweeps}

    calls: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    session = SimpleNamespace(
        device="cpu",
        measure=measure,
        say=print,
        show=print,
        add=lambda **row: rows.append(row),
        bandwidth=floors.Bandwidth(1, 1),
        problem=lambda text: pytest.fail(text),
    )
    monkeypatch.setattr(harness, "last_level_cache", lambda device: 600)  # one copy, of 150 scores, fits
    bench_verify.run_spec(session, spec, [dataclasses.replace(honest, bind=bind)])
    cold, warm = calls
    assert len(set(cold)) == len(cold) >= 2
    assert len(warm) == cases.LEAST_COPIES and len(set(warm)) == 1
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    assert [row["copies"] for row in rows] == [len(cold), 1]


def test_run_fails_for_a_wrong_provider(monkeypatch, capsys):
    wrong = bent(residual_is_the_target)
    monkeypatch.setattr(harness, "MAX_COPIES", 3)
    monkeypatch.setattr(bench_verify, "choose", lambda session: [wrong])
    options = ["--ops", "verify", "--device", "cpu", "--threads", "1", "--budget", "0.01", "--shapes", "1,2,50,float32"]
    assert run.main(options) == 1
    assert "NOT TIMED, WRONG: bent" in capsys.readouterr().out


def test_a_step_that_fails_leaves_the_others(monkeypatch, capsys, tmp_path):
    # Catches rows that are lost because a later case ran out of memory.
    monkeypatch.setattr(harness, "MAX_COPIES", 3)
    make = cases.make_case

    def fails(shape: Shape, *rest: Any) -> Any:
        if shape.batch == 3:
            raise MemoryError("as planted")
        return make(shape, *rest)

    monkeypatch.setattr(bench_verify, "make_case", fails)
    file = tmp_path / "rows.csv"
    options = ["--ops", "verify", "--device", "cpu", "--threads", "1", "--budget", "0.01", "--csv", str(file)]
    shapes = ["--shapes", "1,2,50,float32", "3,2,50,float32", "2,2,50,float32", "--acceptance", "0.7"]
    assert run.main([*options, *shapes, "--providers", "cupyspec"]) == 1
    assert "NOT TIMED: verify: B=3 K=2 V=50 float32 at 0.7: MemoryError: as planted" in capsys.readouterr().out
    assert [row["batch"] for row in records.read_csv(file)] == ["1", "2"]


def test_a_peer_that_raises_is_left_out_and_ours_is_a_problem(capsys):
    def bind(inputs: cases.Inputs, number: int) -> Any:
        raise RuntimeError("as planted")

    session = SimpleNamespace(device="cpu", say=print, problem=lambda text: print("problem:", text))
    broken = [dataclasses.replace(provider("numpy"), name=name, bind=bind) for name in ("a peer", "cupyspec bent")]
    assert bench_verify.right(session, [*broken, provider("numpy")]) == [provider("numpy")]
    printed = capsys.readouterr().out
    assert "left out: a peer (RuntimeError: as planted)" in printed
    assert "problem: NOT TIMED: cupyspec bent: RuntimeError: as planted" in printed


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
        (["--ops", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_run_refuses(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run.main(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("script", ["run.py", "sweep.py", "report.py", "ncu.py"])
def test_scripts_run_from_a_checkout_elsewhere(script, tmp_path):
    answer = subprocess.run(
        [sys.executable, str(ROOT / "bench" / script), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert "--shapes" in answer.stdout or "--readme" in answer.stdout


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
    assert counts == {"a": 3 * (harness.MIN_ROUNDS + 1), "b": harness.MIN_ROUNDS + 1}  # one round to warm up
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


def test_slow_providers_take_no_time_from_quick_ones(monkeypatch):
    # Catches a handful of samples for a call of microseconds because a peer beside it takes milliseconds.
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> Any:
        def sample() -> float:
            now[0] += seconds
            return seconds

        return sample

    samples = harness._take_turns({"slow": takes(1.0), "quick": takes(0.01)}, budget=1.0)
    assert len(samples["slow"]) == harness.MIN_ROUNDS
    assert len(samples["quick"]) > 90


@pytest.mark.parametrize("name", [p.name for p in bench_sample.PROVIDERS if "cpu" in p.devices])
def test_samplers_are_right(name):
    (chosen,) = providers.named(bench_sample.PROVIDERS, [name])
    if reason := chosen.left_out("cpu", 1, "float32"):
        pytest.skip(f"{name}: {reason}")
    bench_sample.check_law(chosen, "cpu")
    bench_sample.check_certain(chosen, 9, 700, "float16", "cpu")


def test_wrong_samplers_are_found_out():
    (honest,) = providers.named(bench_sample.PROVIDERS, ["numpy"])

    def greedy(inputs: Any, number: int) -> Any:
        return lambda: cases.to_numpy(inputs.logits).argmax(1)

    with pytest.raises(WrongAnswerError, match="tokens do not follow the law"):
        bench_sample.check_law(dataclasses.replace(honest, bind=greedy), "cpu")
    with pytest.raises(WrongAnswerError, match="not the only possible answer"):
        bench_sample.check_certain(
            dataclasses.replace(honest, unpack=lambda inputs, answer: answer + 1), 2, 30, "float32", "cpu"
        )


def test_revision_may_be_given(monkeypatch):
    # Machines without Git: rows would say "unknown".
    monkeypatch.setenv(records.REVISION_VARIABLE, " abc123 ")
    assert records.revision() == "abc123"
    monkeypatch.delenv(records.REVISION_VARIABLE)
    assert records.revision() != "abc123"


def test_old_files_can_be_added_to(tmp_path):
    # A column that is new must not make a file unreadable.
    file = tmp_path / "old.csv"
    file.write_text("op,provider,batch,median_us\nverify,torch,1,5\n")
    records.write_csv(file, [{"op": "verify", "provider": "numpy", "median_us": 7.0}])
    assert [(row["provider"], row["median_us"], row["cache"]) for row in records.read_csv(file)] == [
        ("torch", "5", ""),
        ("numpy", "7", ""),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]
