"""How the benchmarks call serving engines, which are not here: functions with their arguments play them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from bench import cases, checks, engines, peers, providers
from bench.checks import Certain, check_law, check_shape

pytest.importorskip("torch")
import torch


def by_numpy(target_probs: Any, draft_probs: Any, ids: Any) -> tuple[Any, Any]:
    """Tokens and accepted for probabilities."""
    logs = (torch.log(x) for x in (target_probs, draft_probs))
    tokens, accepted = peers._bind_numpy(cases.Inputs(ids.long(), *logs, None), by_numpy_calls.pop())()
    return torch.from_numpy(tokens), torch.from_numpy(accepted).int()


by_numpy_calls = list(range(1000))


def play_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejection_sample(
        target_logits,
        draft_logits,
        draft_sampled,
        cu_num_logits,
        pos,
        idx_mapping,
        expanded_idx_mapping,
        expanded_local_pos,
        temperature,
        seed,
        num_speculative_steps,
        use_fp64=False,
    ):
        batch, drafts = cu_num_logits.shape[0] - 1, num_speculative_steps
        assert cu_num_logits.tolist() == [b * (drafts + 1) for b in range(batch + 1)]
        assert pos.shape == expanded_idx_mapping.shape == expanded_local_pos.shape == draft_sampled.shape
        assert (expanded_idx_mapping.reshape(batch, -1) == idx_mapping[:, None]).all()
        assert (expanded_local_pos.reshape(batch, -1) == expanded_local_pos[: drafts + 1]).all()
        assert (temperature == 1).all() and seed.unique().numel() == batch
        target = target_logits.reshape(batch, drafts + 1, -1).softmax(-1)
        tokens, accepted = by_numpy(target, draft_logits.softmax(-1), draft_sampled.reshape(batch, -1)[:, 1:])
        return tokens.where(tokens >= 0, 12345), accepted + 1  # what lies behind is not written

    place(monkeypatch, "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils", rejection_sample=rejection_sample)


def play_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain_speculative_sampling_triton(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    ):
        tokens, accepted = by_numpy(target_probs, draft_probs, candidates[:, 1:])
        accept_token_num.copy_(accepted)
        for b, slots in enumerate(retrive_index):
            for i in range(int(accepted[b]) + 1):
                accept_index[b, i] = slots[i]
                predicts[slots[i]] = tokens[b, i]

    place(
        monkeypatch,
        "sglang.srt.speculative.reject_sampling",  # not the first place that is looked at
        chain_speculative_sampling_triton=chain_speculative_sampling_triton,
    )


def play_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, deterministic=True, seed=None):
        assert draft_token_ids.dtype == torch.int32
        tokens, accepted = by_numpy(target_probs, draft_probs, draft_token_ids)
        return tokens, accepted + 1, accepted  # the second counts drafts behind a rejection too

    place(
        monkeypatch,
        "flashinfer.sampling",
        chain_speculative_sampling=chain_speculative_sampling,
        softmax=lambda logits: logits.softmax(-1),
    )


def place(monkeypatch: pytest.MonkeyPatch, path: str, **contents: Any) -> None:
    """A module with its packages."""
    parts = path.split(".")
    module = ModuleType(path)
    for name, value in contents.items():
        setattr(module, name, value)
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(sys.modules[path.rpartition(".")[0]], parts[-1], module, raising=False)


@pytest.mark.parametrize("play", [play_vllm, play_sglang, play_flashinfer])
def test_engines_are_called_as_they_want(play, monkeypatch):
    # Catches arguments in the wrong layout: the law of the answers would show it, but only where the engine is.
    play(monkeypatch)
    monkeypatch.setattr(checks, "LAW_ROWS", 3000)
    (engine,) = providers.named(engines.ENGINES, [play.__name__.removeprefix("play_")])
    check_law(engine, "cpu")
    certain = Certain(5, 3, 40, "float16", "cpu")
    certain.check(engine)
    check_shape(engine, certain.inputs, engine.bind(certain.inputs, 0)(), 40)


def test_an_engine_of_another_signature_is_left_out(monkeypatch, capsys):
    def rejection_sample(target_logits, draft_logits, something_new):
        raise AssertionError

    with pytest.raises(
        engines.UnknownSignatureError, match="rejection_sample of this version also wants something_new"
    ):
        engines.with_known(rejection_sample, ("target_logits", "draft_logits"))
    for name in engines.SGLANG_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="no chain_speculative_sampling_triton"):
        engines.sglang_function()
