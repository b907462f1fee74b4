"""On real hardware: the kernels against the oracle and the CPU path, streams, graphs, sizes, laws at scale.

`python3 -m pytest -m gpu` runs these from an uninstalled checkout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

import cupyspec
from cupyspec import Sampling, Sigmoid, Status, Token, Verification
from cupyspec._segments import SEG
from cupyspec.testing import chi_square, single_draft_law
from strategies import SIGMOIDS, TOKENS, ChainCase, assert_agrees, chain_cases

pytestmark = pytest.mark.gpu

LIBRARIES = ("torch", "cupy", "jax")


class OnGpu:
    """Arrays of one library on the GPU, and back."""

    def __init__(self, name: str, library: ModuleType) -> None:
        self.name, self.library = name, library

    def array(self, values: Any) -> Any:
        if values is None:
            return None
        values = np.asarray(values)
        if self.name == "torch":
            if values.dtype.name == "bfloat16":
                return self.library.from_numpy(values.view(np.int16)).cuda().view(self.library.bfloat16)
            return self.library.from_numpy(np.array(values)).cuda()
        if self.name == "cupy":
            return self.library.asarray(values)
        return self.library.device_put(values, self.library.devices("gpu")[0])

    def values(self, array: Any) -> np.ndarray:
        if self.name == "torch":
            assert array.device.type == "cuda"
            return array.cpu().numpy()
        if self.name == "cupy":
            return np.asarray(array.get())
        assert {device.platform for device in array.devices()} == {"gpu"}
        return np.asarray(array)

    def verify(self, case: ChainCase, **changes: Any) -> Verification:
        """The answer on the GPU, brought to the host; per-row parameters stay host values, which are copied."""
        arrays = ("draft_tokens", "target", "draft", "target_log_normalizer", "draft_log_normalizer")
        held = {name: changes.pop(name, getattr(case, name)) for name in arrays}
        if self.name == "jax":
            for name, values in held.items():
                if values is not None and values.dtype.name in ("int64", "float64"):
                    kept = values.astype(values.dtype.name.replace("64", "32"))
                    held[name] = (
                        np.where(values != kept, -2, kept).astype(kept.dtype) if "int" in kept.dtype.name else kept
                    )
        given = {name: self.array(values) for name, values in held.items()}
        answer = case.verify(**given, **changes)
        return Verification(*(self.values(x) for x in answer[:3]))


@pytest.fixture(params=LIBRARIES, scope="module")
def gpu(request: pytest.FixtureRequest, need_frontend: Callable[[str], ModuleType]) -> OnGpu:
    return OnGpu(request.param, need_frontend(request.param))


@pytest.fixture(scope="module")
def torch_gpu(need_frontend: Callable[[str], ModuleType]) -> OnGpu:
    return OnGpu("torch", need_frontend("torch"))


KINDS = {
    "token": chain_cases(rules=TOKENS),
    "sigmoid": chain_cases(rules=SIGMOIDS),
    "faults": chain_cases(rules=TOKENS + SIGMOIDS, faults=True),
    "normalizers": chain_cases(rules=TOKENS, normalizers=True, faults=True),
    "probs": chain_cases(rules=TOKENS, probs=True, faults=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_oracle(gpu: OnGpu, kind: str) -> None:
    """Any wrong token, count or status of a kernel, in any library, dtype, layout or rule."""
    mismatches, width = 0, 0.0

    @given(case=KINDS[kind], flat=st.booleans(), order=st.integers(0, 2**32 - 1))
    def run(case: ChainCase, flat: bool, order: int) -> None:
        nonlocal mismatches, width
        if gpu.name == "jax":  # without x64 it has no float64: hand over what it can hold
            lse = {n: getattr(case, n) for n in ("target_log_normalizer", "draft_log_normalizer")}
            held = {n: None if v is None else v.astype(np.float32) for n, v in lse.items()}
            case = dataclasses.replace(case, **held)
        changes = case.flattened(np.random.default_rng(order)) if flat else {}
        want = case.oracle()
        if flat and case.num_draft_tokens is not None:  # the lengths themselves were clamped before
            want.status[...] &= ~int(Status.LENGTH_OUT_OF_RANGE)
        got = gpu.verify(case, **changes)
        mismatches += assert_agrees(got, want)
        width += float(want.width.sum())

    run()
    assert mismatches <= width + 5 * np.sqrt(width) + 1


def test_small_segments_race(torch_gpu: OnGpu) -> None:
    """A fault in the race that only several segments show, at vocabularies small enough to enumerate by eye."""
    rng = np.random.default_rng(5)
    for vocab in (255, 256, 257, 1000):
        case = big_case(rng, batch=200, width=3, vocab=vocab, segment=256)
        assert_agrees(torch_gpu.verify(case), case.oracle())


def big_case(rng: np.random.Generator, *, batch: int, width: int, vocab: int, **changes: Any) -> ChainCase:
    """Plain float32 logits with drafts drawn from the draft."""
    target = rng.normal(0, 2, (batch, width + 1, vocab)).astype(np.float32)
    draft = (target[:, :-1] + rng.normal(0, 0.7, (batch, width, vocab))).astype(np.float32)
    seeds = rng.integers(0, 2**64, batch, dtype=np.uint64)
    drawn = [cupyspec.sample(draft[:, i], seed=seeds, position=i).tokens for i in range(width)]
    tokens = np.stack(drawn, axis=1) if drawn else np.empty((batch, 0), np.int32)
    return ChainCase(tokens, target, draft, vocab, seed=seeds, **changes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sample_equals_cpu(gpu: OnGpu, dtype: str) -> None:
    """sample() and its log-normalisers against the CPU path."""
    import ml_dtypes

    rng = np.random.default_rng(1)
    z = rng.normal(0, 3, (300, 3 * SEG + 5)).astype(np.float32)
    z = z.astype({"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype])
    temperature = rng.choice([0, 0.5, 1, 2], 300).astype(np.float32)
    arguments: dict[str, Any] = {"seed": 3, "position": 2, "draw": 1, "return_log_normalizer": True}
    want = cupyspec.sample(z, sampling=Sampling(temperature=temperature), **arguments)
    got = cupyspec.sample(gpu.array(z), sampling=Sampling(temperature=gpu.array(temperature)), **arguments)
    assert np.mean(gpu.values(got.tokens) != want.tokens) <= 0.01  # near ties of float32 alone
    np.testing.assert_allclose(gpu.values(got.log_normalizer), want.log_normalizer, rtol=2e-6, atol=2e-6)


def test_device_parameters_and_status(gpu: OnGpu) -> None:
    """Per-row parameters in device memory: read with their own dtype, and wrong values answered by a status."""
    rng = np.random.default_rng(2)
    case = big_case(rng, batch=6, width=3, vocab=500)
    temperature = np.array([1, np.nan, -1, np.inf, 0, 1], np.float32)
    lengths = np.array([3, 3, 3, 3, 9, -4], np.int32)
    answer = gpu.verify(
        case,
        sampling=Sampling(temperature=gpu.array(temperature)),
        num_draft_tokens=gpu.array(lengths),
        active=gpu.array(np.array([1, 1, 1, 1, 1, 1], np.uint8)),
    )
    assert answer.status.tolist() == [0, 32, 32, 32, 16, 16]
    assert (answer.tokens[1:4] == -1).all() and not answer.num_accepted[1:4].any()
    want = case.verify(sampling=Sampling(temperature=np.array([1, 1, 1, 1, 0, 1.0])), num_draft_tokens=lengths)
    kept = [0, 4, 5]
    assert (answer.tokens[kept] == want.tokens[kept]).all()
    for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32):
        again = gpu.verify(
            case,
            num_draft_tokens=gpu.array(np.array([3, 2, 1, 0, 3, 3], dtype)),
            seed=gpu.array(np.arange(6, dtype=dtype)),
        )
        expected = case.verify(num_draft_tokens=[3, 2, 1, 0, 3, 3], seed=np.arange(6))
        assert (again.tokens == expected.tokens).all()


def test_out_and_check(torch_gpu: OnGpu) -> None:
    """out= written in place, also where it is not contiguous; check=True reads the status."""
    torch = torch_gpu.library
    case = big_case(np.random.default_rng(3), batch=5, width=2, vocab=3000)
    want = case.verify()
    wide = torch.full((5, 7), 77, dtype=torch.int32, device="cuda")
    out = Verification(
        wide[:, 1:7:2],
        torch.empty(5, dtype=torch.int32, device="cuda"),
        torch.empty(5, dtype=torch.int32, device="cuda"),
    )
    arrays = [torch_gpu.array(x) for x in (case.draft_tokens, case.target, case.draft)]
    answer = cupyspec.verify(*arrays, seed=case.seed, out=out, check=True)
    assert answer is out and (out.tokens.cpu().numpy() == want.tokens).all()
    assert (wide[:, ::2] == 77).all()
    arrays[1][2, 0, 5] = torch.nan
    with pytest.raises(ValueError, match="row 2"):
        cupyspec.verify(*arrays, seed=case.seed, check=True)


def test_strided_scores_equal_contiguous(torch_gpu: OnGpu) -> None:
    """Strides ignored: a transposed, a stepped, a padded and a broadcast view of the scores."""
    torch = torch_gpu.library
    case = big_case(np.random.default_rng(4), batch=4, width=2, vocab=2500)
    tokens, target, draft = (torch_gpu.array(x) for x in (case.draft_tokens, case.target, case.draft))
    want = cupyspec.verify(tokens, target, draft, seed=case.seed)
    stepped = torch.empty((4, 3, 5000), device="cuda")
    stepped[..., ::2] = target
    padded = torch.full((4, 3, 2501), torch.nan, device="cuda")
    padded[..., 1:] = target
    transposed = target.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for view in (stepped[..., ::2], padded[..., 1:], transposed):
        got = cupyspec.verify(tokens, view, draft, seed=case.seed)
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
    one = cupyspec.verify(
        tokens[:1].expand(4, 2), target[:1].expand(4, 3, 2500), draft[:1].expand(4, 2, 2500), seed=case.seed
    )
    assert torch.equal(one.tokens[0], want.tokens[0])


def test_batch_of_70001_and_255_drafts(torch_gpu: OnGpu) -> None:
    """A grid dimension that ends at 65,535, or a limit on drafts."""
    torch = torch_gpu.library
    generator = torch.Generator("cuda").manual_seed(0)
    target = torch.randn((70_001, 3, 64), device="cuda", generator=generator)
    draft = target[:, :2] + 0.5
    tokens = torch.randint(0, 64, (70_001, 2), device="cuda", generator=generator)
    seeds = torch.arange(70_001, device="cuda")
    answer = cupyspec.verify(tokens, target, draft, seed=seeds)
    tail = cupyspec.verify(tokens[-3:], target[-3:], draft[-3:], seed=seeds[-3:])
    assert torch.equal(answer.tokens[-3:], tail.tokens) and not answer.status.any()
    long = torch.randn((2, 256, 3000), device="cuda", generator=generator)
    ids = long[:, :255].argmax(-1)
    assert cupyspec.verify(ids, long, seed=1, sampling=Sampling(temperature=0)).num_accepted.tolist() == [255, 255]
    assert not cupyspec.verify(ids, long, long[:, :255], seed=1).status.any()


@pytest.mark.parametrize(("rows", "vocab"), [(8_570, 250_880), (32_769, 131_072)])
def test_offsets_past_2_31_and_2_32(torch_gpu: OnGpu, rows: int, vocab: int) -> None:
    """F14: 32-bit row offsets."""
    torch = torch_gpu.library
    scores = torch.zeros((rows, vocab), dtype=torch.float16, device="cuda")
    scores[:, 1] = 1
    scores[-1, 1] = 0
    scores[-1, vocab - 3] = 1
    drawn = cupyspec.sample(scores, seed=0, scores="probs").tokens
    assert (drawn[:-1] == 1).all() and drawn[-1] == vocab - 3
    drafts = torch.ones((rows - 1,), dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0, rows - 1], dtype=torch.int32, device="cuda")
    answer = cupyspec.verify(
        drafts[:200],
        scores[-201:],
        seed=0,
        scores="probs",
        cu_num_draft_tokens=bounds.clamp(max=200),
        max_draft_tokens=200,
    )
    assert answer.num_accepted.tolist() == [200] and answer.tokens[0, 200] == vocab - 3


def test_repeats_are_bitwise_equal(torch_gpu: OnGpu) -> None:
    """A race between blocks: 10,000 launches of one call."""
    torch = torch_gpu.library
    case = big_case(np.random.default_rng(6), batch=16, width=3, vocab=5 * SEG + 3)
    tokens, target, draft = (torch_gpu.array(x) for x in (case.draft_tokens, case.target, case.draft))
    seeds = torch_gpu.array(case.seed.view(np.int64))
    first = cupyspec.verify(tokens, target, draft, seed=seeds)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        again = cupyspec.verify(tokens, target, draft, seed=seeds)
        changed += (again.tokens != first.tokens).sum() + (again.num_accepted != first.num_accepted).sum()
    assert changed.item() == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", [Token(), Token(lenience=0.5), Sigmoid(-10, 10)], ids=str)
def test_law_at_ten_million(torch_gpu: OnGpu, dtype: str, rule: Token | Sigmoid) -> None:
    """A bias of a few in ten thousand. One check in a million fails by chance; nine run here."""
    torch = torch_gpu.library
    vocab, batch, calls = 3 * SEG + 5, 100_000, 100
    ranks = torch.arange(vocab, device="cuda", dtype=torch.float64)
    z = (6 - 1.5 * torch.log1p(ranks)).to(getattr(torch, dtype))
    y = (z.double() + torch.sin(1.7 * ranks)).to(getattr(torch, dtype))
    exact_z, exact_y = z.double().cpu().numpy(), y.double().cpu().numpy()
    sides = (exact_z, exact_y) if isinstance(rule, Sigmoid) else (softmax(exact_z), softmax(exact_y))
    counts = torch.zeros(2 * vocab, dtype=torch.int64, device="cuda")
    target, draft = z.expand(batch, 2, vocab), y.expand(batch, 1, vocab)
    for call in range(calls):
        drafts = cupyspec.sample(draft[:, 0], seed=11, step=call).tokens
        answer = cupyspec.verify(drafts[:, None], target, draft, seed=11, step=call, rule=rule)
        counts += torch.bincount(answer.num_accepted.long() * vocab + answer.tokens[:, 0].long(), minlength=2 * vocab)
    result = chi_square(counts.cpu().numpy(), single_draft_law(rule, *sides).ravel())
    assert not result.rejected, str(result)


def test_the_check_finds_a_small_bias() -> None:
    """The law check itself: a temperature of 1.01 in the target must be found at ten million."""
    z = 6 - 1.5 * np.log1p(np.arange(3 * SEG + 5))
    counts = np.random.default_rng(0).multinomial(10_000_000, softmax(z / 1.01))
    assert chi_square(counts, softmax(z)).rejected


# Streams, memory and graphs.


@pytest.fixture
def long_work(torch_gpu: OnGpu) -> Iterator[Callable[[], None]]:
    torch = torch_gpu.library
    matrix = torch.randn((4096, 4096), device="cuda")

    def work() -> None:
        x = matrix
        for _ in range(20):
            x = x @ matrix
            x = x / x.norm()

    yield work


def test_side_stream(torch_gpu: OnGpu, long_work: Callable[[], None]) -> None:
    """F22: a kernel that does not wait for its producer, or an answer that its reader does not wait for."""
    torch = torch_gpu.library
    scores = torch.zeros((1, 1, 5000), device="cuda")
    scores[..., 3] = 50
    drafts = torch.empty((1, 0), dtype=torch.int32, device="cuda")
    cupyspec.verify(drafts, scores, seed=0)
    torch.cuda.synchronize()
    stream, read = torch.cuda.Stream(), []
    for _ in range(50):
        with torch.cuda.stream(stream):
            long_work()
            scores.zero_()[..., 5] = 50
            answer = cupyspec.verify(drafts, scores, seed=0)
            scores.zero_()[..., 3] = 50
            read.append(answer.tokens * 1)
    torch.cuda.synchronize()
    assert {int(x) for x in read} == {5}


def test_cupy_and_jax_streams(gpu: OnGpu) -> None:
    """The same for CuPy's current stream, and for JAX, whose stream nobody else sees."""
    for _ in range(20):
        if gpu.name == "cupy":
            cp = gpu.library
            with cp.cuda.Stream(non_blocking=True):
                matrix = cp.ones((3000, 3000), cp.float32)
                z = (matrix @ matrix @ matrix)[:1, :2000] * 0
                z[0, 5] = 50
                answer = cupyspec.sample(z, seed=0)
                z[...] = 0
                z[0, 6] = 50
                assert int(answer.tokens[0]) == 5
        elif gpu.name == "jax":
            jnp = gpu.library.numpy
            matrix = jnp.ones((3000, 3000))
            z = ((matrix @ matrix @ matrix)[:1, :2000] * 0).at[0, 5].set(50)
            tokens = cupyspec.sample(z, seed=0).tokens
            del z  # inputs may be dropped at once
            rubbish = [jnp.full((1, 2000), 7.0) for _ in range(4)]
            assert int(tokens[0]) == 5 and len(rubbish) == 4


def test_device_and_stream_are_restored(torch_gpu: OnGpu, need_frontend: Callable[[str], ModuleType]) -> None:
    """F25: a call that leaves another device or stream current."""
    torch, cp = torch_gpu.library, need_frontend("cupy")
    before = (cp.cuda.Device().id, cp.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream)
    with torch.cuda.stream(torch.cuda.Stream()):
        cupyspec.sample(torch.zeros((2, 10), device="cuda"), seed=0)
        with pytest.raises(ValueError, match="temperature"):
            cupyspec.sample(torch.zeros((2, 10), device="cuda"), seed=0, sampling=Sampling(temperature=[-1.0, 1]))
    after = (cp.cuda.Device().id, cp.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream)
    assert before == after


def test_no_synchronisation(torch_gpu: OnGpu) -> None:
    """F27: a call that waits for the device."""
    torch = torch_gpu.library
    target = torch.randn((4, 5, 152_000), device="cuda")
    drafts = target[:, :4].argmax(-1)
    seeds = torch.arange(4, device="cuda")
    temperature = torch.ones(4, device="cuda")
    arguments: dict[str, Any] = {"seed": seeds, "sampling": Sampling(temperature=temperature)}
    cupyspec.verify(drafts, target, **arguments)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second of device time
    cupyspec.verify(drafts, target, **arguments)
    assert not torch.cuda.current_stream().query(), "the device had finished: the call waited"
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of the capture that is refused
def test_torch_graph(torch_gpu: OnGpu) -> None:
    """F23: randomness frozen into a graph, or an allocation inside one."""
    torch = torch_gpu.library
    case = big_case(np.random.default_rng(8), batch=4, width=2, vocab=3000)
    tokens, target, draft = (torch_gpu.array(x) for x in (case.draft_tokens, case.target, case.draft))
    seeds = torch.zeros(4, dtype=torch.int64, device="cuda")
    step = torch.zeros(4, dtype=torch.int64, device="cuda")
    cupyspec.verify(tokens, target, draft, seed=seeds, step=step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = cupyspec.verify(tokens, target, draft, seed=seeds, step=step)
    with pytest.raises(ValueError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cupyspec.verify(tokens, target, draft, seed=0, step=step)
    torch.cuda.synchronize()
    seen = set()
    for i in range(100):
        step.fill_(i)
        seeds.copy_(torch.arange(4, device="cuda") + i // 10)
        graph.replay()
        eager = cupyspec.verify(tokens, target, draft, seed=seeds, step=step)
        assert torch.equal(answer.tokens, eager.tokens) and torch.equal(answer.num_accepted, eager.num_accepted)
        seen.add(tuple(answer.tokens.flatten().tolist()))
    assert len(seen) > 50


def test_cupy_graph(need_frontend: Callable[[str], ModuleType]) -> None:
    """The same with CuPy's capture."""
    cp = need_frontend("cupy")
    z = cp.random.default_rng(0).standard_normal((4, 3000), dtype=cp.float32)
    seeds, step = cp.zeros(4, cp.uint64), cp.zeros(1, cp.int64)
    out = cupyspec.Sample(cp.empty(4, cp.int32), cp.empty(4, cp.int32))
    cupyspec.sample(z, seed=seeds, step=step, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cupyspec.sample(z, seed=seeds, step=step, out=out)  # fills this stream's memory pool
        stream.synchronize()
        stream.begin_capture()
        cupyspec.sample(z, seed=seeds, step=step, out=out)
        graph = stream.end_capture()
        for i in range(20):
            step[...] = i
            graph.launch(stream)
            replayed = out.tokens.copy()
            assert (replayed == cupyspec.sample(z, seed=seeds, step=step).tokens).all()


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_mixed_devices_are_refused(name: str, need_frontend: Callable[[str], ModuleType]) -> None:
    """F25: a host array beside a device array is never copied in silence."""
    gpu = OnGpu(name, need_frontend(name))
    z = np.zeros((1, 2, 8), np.float32)
    with pytest.raises((ValueError, TypeError), match="draft_tokens"):
        cupyspec.verify(np.zeros((1, 1), np.int32), gpu.array(z), seed=0)


def test_doctor_and_demo_on_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line's GPU paths."""
    from cupyspec.__main__ import main

    assert main(["doctor"]) == 0
    assert "GPU" in capsys.readouterr().out
    assert main(["demo", "--device", "cuda", "--tokens", "30"]) == 0
    assert "Acceptance rate" in capsys.readouterr().out


def test_cupy_graph_keeps_its_memory(need_frontend: Callable[[str], ModuleType]) -> None:
    """Scratch of a captured call given back to CuPy's pool: arrays made later lie where each replay writes."""
    cp = need_frontend("cupy")
    case = big_case(np.random.default_rng(9), batch=64, width=3, vocab=40_000)
    tokens, target, draft = (cp.asarray(x) for x in (case.draft_tokens, case.target, case.draft))
    seeds, step = cp.asarray(case.seed), cp.zeros(1, cp.int64)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cupyspec.verify(tokens, target, draft, seed=seeds, step=step)
        stream.synchronize()
        stream.begin_capture()
        answer = cupyspec.verify(tokens, target, draft, seed=seeds, step=step)
        graph = stream.end_capture()
        for size in (1 << 8, 1 << 12, 1 << 17, 1 << 18, 1 << 19, 1 << 20):
            others = [cp.full(size, 7, cp.uint8) for _ in range(40)]
            graph.launch(stream)
            assert all(bool((x == 7).all()) for x in others)
        assert (answer.tokens == cupyspec.verify(tokens, target, draft, seed=seeds, step=step).tokens).all()
