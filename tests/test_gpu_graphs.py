"""On real hardware: `Verifier`, CUDA graphs of PyTorch and CuPy, streams, and memory in steady state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import cupyspec
from cupyspec import Sampling, Sigmoid, Token, Verifier
from cupyspec._segments import SEG, segment_count
from test_verifier import CASES, call, call_of, changes_of, layouts, on_device, same, verifier_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # of captures that are refused
]

REPLAYS = 1000
MODES = {"torch": ("global", "thread_local", "relaxed"), "cupy": ("Global", "ThreadLocal", "Relaxed")}
EVERY_MODE = [(name, mode) for name, modes in MODES.items() for mode in modes]


class Device:
    """What the tests do with a library: arrays on the GPU and back, capture and replay."""

    def __init__(self, name: str, library: ModuleType) -> None:
        self.name, self.library = name, library

    def array(self, values: Any) -> Any:
        values = np.array(values, order="K")
        if self.name == "cupy":
            return self.library.asarray(values)
        if values.dtype.name == "bfloat16":
            return self.library.from_numpy(values.view(np.int16)).cuda().view(self.library.bfloat16)
        return self.library.from_numpy(values).cuda()

    def values(self, array: Any) -> np.ndarray:
        return array.get() if self.name == "cupy" else array.cpu().numpy()

    def set(self, array: Any, values: Any) -> None:
        """Change an array's content, as an engine does between replays."""
        array[...] = self.array(np.asarray(values))

    def synchronize(self) -> None:
        if self.name == "cupy":
            self.library.cuda.Device().synchronize()
        else:
            self.library.cuda.synchronize()

    @contextmanager
    def side_stream(self) -> Iterator[Any]:
        """CuPy captures no default stream, so its tests run on another one throughout."""
        if self.name == "cupy":
            with self.library.cuda.Stream(non_blocking=True) as stream:
                yield stream
                stream.synchronize()
        else:
            yield None

    def capture(self, function: Callable[[], Any], mode: str) -> tuple[Callable[[], None], Any]:
        """(replay, what the captured call returned)."""
        if self.name == "cupy":
            stream = self.library.cuda.get_current_stream()
            stream.begin_capture(getattr(self.library.cuda.runtime, f"streamCaptureMode{mode}"))
            try:
                answer = function()
            except BaseException:
                stream.end_capture()
                raise
            graph = stream.end_capture()
            return (lambda: graph.launch(stream)), answer
        graph = self.library.cuda.CUDAGraph()
        with self.library.cuda.graph(graph, capture_error_mode=mode):
            answer = function()
        return graph.replay, answer


@pytest.fixture(params=sorted(MODES))
def device(request: pytest.FixtureRequest, need_frontend: Callable[[str], ModuleType]) -> Device:
    return Device(request.param, need_frontend(request.param))


def rows(batch: int, width: int, vocab: int, dtype: Any = np.float32) -> list[np.ndarray]:
    """Drafts, target's and draft's logits of rows that stop at every position."""
    rng = np.random.default_rng(batch + vocab)
    target = rng.normal(0, 2, (batch, width + 1, vocab))
    draft = target[:, :-1] + rng.normal(0, 1, (batch, width, vocab))
    tokens = (draft + rng.gumbel(size=draft.shape)).argmax(-1).astype(np.int32)
    return [tokens, target.astype(dtype), draft.astype(dtype)]


def functions(arrays: list[Any], numbers: dict[str, Any], out_of: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """Calls to capture, by name."""
    batch, width = arrays[0].shape
    verifier = Verifier(batch, width, arrays[1].shape[-1], arrays[1].dtype, device="cuda")
    out = cupyspec.Verification(*(out_of(x) for x in cupyspec.verify(*arrays, **numbers)[:3]))
    return {
        "Verifier": lambda: verifier(*arrays, **numbers),
        "verify": lambda: cupyspec.verify(*arrays, **numbers),
        "verify out=": lambda: cupyspec.verify(*arrays, **numbers, out=out),
        "sample": lambda: cupyspec.sample(arrays[1][:, 0], **numbers),
    }


# ------------------------------------------------------------------------------------------------ graphs


@pytest.mark.parametrize(("name", "mode"), EVERY_MODE)
@pytest.mark.parametrize("function", ["Verifier", "verify", "verify out=", "sample"])
def test_f23_replays_equal_eager_calls(
    name: str, mode: str, function: str, need_frontend: Callable[[str], ModuleType]
) -> None:
    """F23: seeds and steps frozen at the capture. 1,000 replays, whose numbers change in device memory."""
    device = Device(name, need_frontend(name))
    with device.side_stream():
        arrays = [device.array(x) for x in rows(4, 2, 3 * SEG + 5)]
        numbers = {"seed": device.array(np.zeros(4, np.int64)), "step": device.array(np.zeros(4, np.int64))}
        captured = functions(arrays, numbers, lambda x: x * 0)[function]
        eager = functions(arrays, numbers, lambda x: x * 0)[function]
        for _ in range(3):
            captured()  # in CuPy also fills this stream's pool
        device.synchronize()
        replay, answer = device.capture(captured, mode)
        seen, wrong = set(), 0
        for i in range(REPLAYS):
            device.set(numbers["step"], np.arange(4) * 1000 + i)
            device.set(numbers["seed"], np.arange(4) + i // 100)
            replay()
            got = [device.values(x) for x in answer if x is not None]
            want = [device.values(x) for x in eager() if x is not None]
            wrong += not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
            seen.add(got[0].tobytes())
        assert wrong == 0
        assert len(seen) > REPLAYS * 0.9


@pytest.mark.parametrize(("name", "mode"), EVERY_MODE)
def test_f23_replays_follow_the_law(name: str, mode: str, need_frontend: Callable[[str], ModuleType]) -> None:
    """F23: uniform rows of 50 ids, whose tokens over 1,000 replays must be uniform; the same step gives the same ones."""
    device = Device(name, need_frontend(name))
    with device.side_stream():
        batch, vocab = 64, 50
        arrays = [
            device.array(np.random.default_rng(0).integers(0, vocab, (batch, 2)).astype(np.int32)),
            device.array(np.zeros((batch, 3, vocab), np.float32)),
            device.array(np.zeros((batch, 2, vocab), np.float32)),
        ]
        numbers = {"seed": device.array(np.arange(batch)), "step": device.array(np.zeros(1, np.int64))}
        verifier = Verifier(batch, 2, vocab, "float32", device="cuda")
        replay, answer = device.capture(lambda: verifier(*arrays, **numbers), mode)
        counts, first = np.zeros(vocab, np.int64), []
        for step in [*range(REPLAYS), 0]:
            device.set(numbers["step"], [step])
            replay()
            tokens = device.values(answer.tokens)
            assert (device.values(answer.num_accepted) == 2).all()  # p = q: everything is accepted
            if step == 0:
                first.append(tokens)
            counts += np.bincount(tokens[:, 2], minlength=vocab)
        assert np.array_equal(*first)
        total = counts.sum()
        sigma = np.sqrt(total / vocab * (1 - 1 / vocab))
        assert (np.abs(counts - total / vocab) < 4.5 * sigma).all()


@pytest.mark.parametrize(("name", "mode"), EVERY_MODE)
def test_f24_a_verifiers_first_call_may_be_captured(
    name: str, mode: str, need_frontend: Callable[[str], ModuleType]
) -> None:
    """F24: compiling, loading or allocating inside a capture. All shapes, and inputs that change between replays."""
    device = Device(name, need_frontend(name))
    with device.side_stream():
        verifier = Verifier(32, 4, 2 * SEG + 77, np.float16, rule=Token(lenience=0.9), device="cuda")
        for batch, width, with_draft in ((1, 4, True), (3, 2, False), (17, 3, True), (32, 4, True), (2, 0, False)):
            source = [rows(batch, width, 2 * SEG + 77, np.float16) for _ in range(2)]
            source[1] = [np.roll(x, 1, axis=-1) for x in source[1]]
            source[1][0][...] = source[0][0]
            arrays = [device.array(x) for x in source[0]]
            if not with_draft:
                arrays[2] = None
            numbers = {"seed": device.array(np.arange(batch)), "step": device.array(np.arange(batch))}
            temperature = device.array(np.linspace(0, 1, batch).astype(np.float32))
            keywords = {**numbers, "sampling": Sampling(temperature)}
            device.synchronize()
            replay, answer = device.capture(lambda a=arrays, k=keywords: verifier(*a, **k), mode)
            for i in range(100):
                for array, values in zip(arrays[:3], source[i % 2], strict=True):
                    if array is not None:
                        device.set(array, values)
                device.set(numbers["step"], np.arange(batch) + i)
                replay()
                got = [device.values(x).copy() for x in answer[:3]]
                want = cupyspec.verify(*arrays, **keywords, rule=Token(lenience=0.9))
                assert all(np.array_equal(a, device.values(b)) for a, b in zip(got, want, strict=False))


_COLD = """
import numpy as np, sys
sys.path[:0] = {path!r}
import cupyspec
from test_gpu_graphs import Device, rows
import importlib
name, mode = {name!r}, {mode!r}
device = Device(name, importlib.import_module(name))
with device.side_stream():
    arrays = [device.array(x) for x in rows(4, 2, 3000)]
    numbers = dict(seed=device.array(np.arange(4)), step=device.array(np.arange(4)))
    device.synchronize()
    for _ in range(2):
        for function in (lambda: cupyspec.verify(*arrays, **numbers), lambda: cupyspec.sample(arrays[1][:, 0], **numbers)):
            try:
                device.capture(function, mode)
            except ValueError as error:
                assert "not compiled yet" in str(error) and "cupyspec.warm_up" in str(error), error
            else:
                raise SystemExit("a cold capture went through")
        for make in (lambda: cupyspec.warm_up("float32"), lambda: cupyspec.Verifier(4, 2, 3000, "float32", device="cuda")):
            try:
                device.capture(make, mode)
            except ValueError as error:
                assert "while a CUDA graph is recorded" in str(error), error
            else:
                raise SystemExit("compiled while capturing")
    # The device is usable, and so is the library.
    assert float((arrays[1] * 0 + 1).sum()) == arrays[1].size if name == "cupy" else float((arrays[1] * 0 + 1).sum()) == arrays[1].numel()
    assert cupyspec.warm_up("float32") > 0
    if name == "cupy":  # its pool gives this stream memory that was allocated before
        cupyspec.verify(*arrays, **numbers)
        cupyspec.sample(arrays[1][:, 0], **numbers)
    replay, answer = device.capture(lambda: cupyspec.verify(*arrays, **numbers), mode)
    replay()
    want = cupyspec.verify(*(device.values(x) for x in arrays), seed=np.arange(4), step=np.arange(4))
    assert (device.values(answer.tokens) == want.tokens).all()
print("fine")
"""


@pytest.mark.parametrize(("name", "mode"), EVERY_MODE)
def test_f24_cold_capture(name: str, mode: str, need_frontend: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """F24: in a fresh process with an empty kernel cache, the first call ever inside a capture: a clear error that names
    the warm-up function, and a device that stays usable."""
    need_frontend(name)
    here = Path(__file__).resolve().parent
    code = _COLD.format(path=[str(here), str(here.parent)], name=name, mode=mode)
    environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and "fine" in run.stdout, run.stdout + run.stderr


def test_host_numbers_are_refused_in_a_capture(device: Device) -> None:
    """F23: a seed by value, which every replay would repeat; `check=True`; lists."""
    with device.side_stream():
        arrays = [device.array(x) for x in rows(4, 2, 3000)]
        numbers = {"seed": device.array(np.arange(4)), "step": device.array(np.arange(4))}
        verifier = Verifier(4, 2, 3000, "float32", device="cuda")
        mode = MODES[device.name][0]
        for function in (verifier, cupyspec.verify):
            for keywords, words in (
                ({"seed": 5, "step": numbers["step"]}, "a host seed or step cannot be part of a CUDA graph"),
                ({**numbers, "check": True}, "check=True cannot be part of a CUDA graph"),
                ({**numbers, "num_draft_tokens": [1, 2, 1, 0]}, "an array of host values cannot be part"),
            ):
                function(*arrays, **keywords)
                function(*arrays, **keywords)
                device.synchronize()
                with pytest.raises(ValueError, match=words):
                    device.capture(lambda f=function, k=keywords: f(*arrays, **k), mode)
                function(*arrays, **keywords)
        device.synchronize()


def test_two_verifiers_on_two_streams(need_frontend: Callable[[str], ModuleType]) -> None:
    """Scratch or plans shared between streams, whose kernels then run into each other."""
    torch = need_frontend("torch")
    device = Device("torch", torch)
    arrays = [device.array(x) for x in rows(64, 3, 40 * SEG)]
    seeds = [torch.arange(64, device="cuda") + 1000 * i for i in range(2)]
    want = [cupyspec.verify(*arrays, seed=seed).tokens for seed in seeds]
    verifiers = [Verifier(64, 3, 40 * SEG, torch.float32, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]
    for _ in range(200):
        for i in range(2):
            with torch.cuda.stream(streams[i]):
                wrong[i] += (verifiers[i](*arrays, seed=seeds[i], step=0).tokens != want[i]).sum()
    torch.cuda.synchronize()
    assert [int(x) for x in wrong] == [0, 0]


# ------------------------------------------------------------------------------------------------ equal to verify()


@pytest.mark.parametrize("kind", CASES)
def test_verifier_equals_verify(device: Device, kind: str) -> None:
    """A packed call that differs from a checked one, on a GPU: twice, with arrays that lie elsewhere the second time."""

    @given(case=CASES[kind], layout=layouts)
    def run(case: Any, layout: tuple[bool, int]) -> None:
        if device.name == "cupy" and "bfloat16" in (
            case.target.dtype.name,
            getattr(case.draft, "dtype", case.target.dtype).name,
        ):
            return  # CuPy has it only where ml_dtypes is registered
        name, changes = changes_of(case, layout)
        arrays, keywords = call_of(case, changes)
        verifier = verifier_for(case, name, "cuda")
        for seed in (case.seed, 5):
            keywords["seed"] = seed
            moved, moved_keywords = on_device(arrays, keywords, device.array)
            want = [device.values(x) for x in cupyspec.verify(*moved, **moved_keywords)[:3]]
            for _ in range(3):
                moved, moved_keywords = on_device(arrays, keywords, device.array)
                assert same(call(verifier, moved, moved_keywords), want, device.values)
                assert same(cupyspec.verify(*moved, **moved_keywords), want, device.values)

    run()


def test_out_again_and_again(device: Device) -> None:
    """`out=` of the call before written to; arrays that are not contiguous, which a copy fills each time."""
    arrays = [device.array(x) for x in rows(5, 2, 3000)]
    seeds = device.array(np.arange(5))
    want = [device.values(x) for x in cupyspec.verify(*arrays, seed=seeds)[:3]]
    for spread in (False, True):
        for _ in range(4):
            wide = device.array(np.full((5, 7), 77, np.int32))
            tokens = wide[:, 1::2] if spread else device.array(np.full((5, 3), 77, np.int32))
            out = cupyspec.Verification(tokens, *(device.array(np.full(5, 77, np.int32)) for _ in range(2)))
            assert cupyspec.verify(*arrays, seed=seeds, out=out) is out
            assert same(out, want, device.values) and (device.values(wide)[:, ::2] == 77).all()


def test_verifier_on_other_streams_waits_for_nothing(need_frontend: Callable[[str], ModuleType]) -> None:
    """F22, F27: a quick call on another stream than PyTorch's current one, or one that synchronises."""
    torch = need_frontend("torch")
    scores = torch.zeros((1, 1, 5000), device="cuda")
    scores[..., 3] = 50
    drafts = torch.empty((1, 0), dtype=torch.int32, device="cuda")
    verifier = Verifier(1, 0, 5000, "float32", device="cuda")
    for _ in range(2):
        verifier(drafts, scores, seed=0, step=0)
    torch.cuda.synchronize()
    stream, read = torch.cuda.Stream(), []
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            scores.zero_()[..., 5] = 50
            answer = verifier(drafts, scores, seed=0, step=0)
            assert not stream.query(), "the call waited"
            scores.zero_()[..., 3] = 50
            read.append(answer.tokens * 1)
    torch.cuda.synchronize()
    assert {int(x) for x in read} == {5}


# ------------------------------------------------------------------------------------------------ memory


def test_no_allocation_in_steady_state(device: Device, need_frontend: Callable[[str], ModuleType]) -> None:
    """F24: memory that each call of a Verifier asks for, of PyTorch, of CuPy's pool or of the driver."""
    cp = need_frontend("cupy")

    class Count(cp.cuda.MemoryHook):
        name, count = "count", 0

        def malloc_preprocess(self, **kwargs: Any) -> None:
            self.count += 1

        def alloc_preprocess(self, **kwargs: Any) -> None:
            self.count += 1

    arrays = [device.array(x) for x in rows(8, 3, 20_000)]
    seeds, temperature = device.array(np.arange(8)), device.array(np.ones(8, np.float32))
    verifier = Verifier(8, 3, 20_000, "float32", device="cuda")

    def calls(count: int) -> None:
        for i in range(count):
            batch = 1 + i % 8
            parts = [x[:batch] for x in arrays]
            verifier(*parts, seed=seeds[:batch], step=i, sampling=Sampling(temperature[:batch]))
            verifier(*parts[:2], seed=i, step=i)

    calls(16)  # the driver may load a kernel at its first launch
    device.synchronize()
    free, _ = cp.cuda.runtime.memGetInfo()
    before = device.library.cuda.memory_stats() if device.name == "torch" else {}
    with Count() as hook:
        calls(200)
    device.synchronize()
    assert hook.count == 0
    assert cp.cuda.runtime.memGetInfo()[0] == free
    if device.name == "torch":
        after = device.library.cuda.memory_stats()
        assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
        assert after["allocated_bytes.all.peak"] == before["allocated_bytes.all.peak"]


@pytest.mark.parametrize("rule", [Token(), Sigmoid()], ids=str)
@pytest.mark.parametrize(
    ("batch", "width", "vocab"), [(1, 5, 128_256), (64, 5, 128_256), (256, 3, 151_936), (64, 16, 151_936)]
)
def test_memory_of_a_call(
    rule: Token | Sigmoid, batch: int, width: int, vocab: int, need_frontend: Callable[[str], ModuleType]
) -> None:
    """Memory of the size of the scores: by PyTorch's peak counter, at most 8 bytes for each score row and segment."""
    torch = need_frontend("torch")
    target = torch.randn((batch, width + 1, vocab), device="cuda", dtype=torch.bfloat16)
    draft = target[:, :width] + 0.5
    tokens = draft.argmax(-1).to(torch.int32)
    seeds = torch.arange(batch, device="cuda")
    for _ in range(3):
        cupyspec.verify(tokens, target, draft, seed=seeds, rule=rule)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cupyspec.verify(tokens, target, draft, seed=seeds, rule=rule)
    limit = 8 * batch * (2 * width + 1) * segment_count(vocab) + 2**20
    assert torch.cuda.max_memory_allocated() - before <= limit
    verifier = Verifier(batch, width, vocab, torch.bfloat16, rule=rule, device="cuda")
    assert verifier.scratch_bytes <= limit
