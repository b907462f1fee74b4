"""Verification as serving engines and their libraries do it, where they are installed: vLLM, SGLang, FlashInfer.

Public functions only, called by keyword. Their names and arguments move between versions: one that cannot be called is
left out with its error, and all are checked for right answers like every other provider.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bench.cases import Inputs, Ints, to_numpy
from bench.harness import Call
from bench.providers import Provider

# SGLang has moved its kernels before.
SGLANG_MODULES = ("sglang.kernels.ops.speculative.reject_sampling", "sglang.srt.speculative.reject_sampling")


class UnknownSignatureError(TypeError):
    """A function of this version wants arguments that are not known here."""


def with_known(function: Any, names: Iterable[str]) -> Callable[[dict[str, Any]], Any]:
    """The function as one of a dict, from which it takes those of `names` that it has; it must need no other."""
    parameters = inspect.signature(function).parameters
    various = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in various]
    if unknown := sorted(set(required) - set(names)):
        raise UnknownSignatureError(f"{function.__name__} of this version also wants {', '.join(unknown)}")
    taken = [name for name in names if name in parameters]
    return lambda arguments: function(**{name: arguments[name] for name in taken})


def _softmaxes(inputs: Inputs) -> tuple[Any, Any]:
    import torch

    return (
        torch.softmax(inputs.target_logits, -1, dtype=torch.float32),
        torch.softmax(inputs.draft_logits, -1, dtype=torch.float32),
    )


# vLLM: the rejection sampler of its second GPU worker, logits in. Rows are flattened: K + 1 of each request.


def _bind_vllm(inputs: Inputs, number: int) -> Call:
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    tokens, target, draft, _ = inputs
    batch, drafts = tokens.shape
    ints = {"dtype": torch.int32, "device": target.device}
    request, position = torch.arange(batch, **ints), torch.arange(drafts + 1, **ints)
    arguments = {
        "target_logits": target.reshape(-1, target.shape[-1]),
        "draft_logits": draft,
        "draft_sampled": torch.nn.functional.pad(tokens, (1, 0))
        .reshape(-1)
        .long(),  # row 0 of a request: its last token
        "cu_num_logits": torch.arange(batch + 1, **ints) * (drafts + 1),
        "pos": position.long().repeat(batch),
        "idx_mapping": request,
        "expanded_idx_mapping": request.repeat_interleave(drafts + 1),
        "expanded_local_pos": position.repeat(batch),
        "temperature": torch.ones(batch, device=target.device),
        "seed": torch.arange(batch, device=target.device) + number * batch,
        "num_speculative_steps": drafts,
    }
    function = with_known(rejection_sample, arguments)
    return lambda: function(arguments)


def _unpack_vllm(inputs: Inputs, answer: Any) -> tuple[Ints, Ints]:
    tokens, accepted = to_numpy(answer[0]), to_numpy(answer[1]) - 1
    return np.where(np.arange(tokens.shape[1]) <= accepted[:, None], tokens, -1), accepted


# SGLang: its chain of topk = 1, from probabilities; the softmaxes belong to the step. Slot 0 is the last token.


def sglang_function() -> Any:
    """The function, wherever this version has it."""
    error: ImportError | None = None
    for name in SGLANG_MODULES:
        try:
            return importlib.import_module(name).chain_speculative_sampling_triton
        except (ImportError, AttributeError) as caught:
            error = ImportError(f"no chain_speculative_sampling_triton: {caught}")
    raise error or ImportError("no module to look in")


def _bind_sglang(inputs: Inputs, number: int) -> Call:
    import torch

    tokens = inputs.draft_tokens
    batch, drafts = tokens.shape
    ints = {"dtype": torch.int32, "device": tokens.device}
    slots = torch.arange(batch * (drafts + 1), **ints).reshape(batch, drafts + 1)
    fixed = {
        "candidates": torch.nn.functional.pad(tokens, (1, 0)).int(),
        "retrive_index": slots,
        "retrive_next_token": None,
        "retrive_next_sibling": None,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }
    made = ("predicts", "accept_index", "accept_token_num", "uniform_samples", "uniform_samples_for_final_sampling")
    function = with_known(sglang_function(), (*fixed, *made, "target_probs", "draft_probs"))

    def step() -> tuple[Any, Any]:
        target, draft = _softmaxes(inputs)
        arguments = {
            "predicts": torch.zeros(slots.numel(), **ints),
            "accept_index": torch.full_like(slots, -1),
            "accept_token_num": torch.zeros(batch, **ints),
            "uniform_samples": torch.rand(batch, drafts + 1, device=tokens.device),
            "uniform_samples_for_final_sampling": torch.rand(batch, device=tokens.device),
            "target_probs": target,
            "draft_probs": draft,
        }
        function(fixed | arguments)
        return arguments["predicts"].reshape(batch, drafts + 1), arguments["accept_token_num"]

    return step


def _unpack_sglang(inputs: Inputs, answer: Any) -> tuple[Ints, Ints]:
    tokens, accepted = to_numpy(answer[0]), to_numpy(answer[1])
    return np.where(np.arange(tokens.shape[1]) <= accepted[:, None], tokens, -1), accepted


# FlashInfer: from probabilities; its own softmax where it has one.


def _bind_flashinfer(inputs: Inputs, number: int) -> Call:
    import torch
    from flashinfer import sampling

    batch, drafts = inputs.draft_tokens.shape
    ids = inputs.draft_tokens.int()
    vocab = inputs.target_logits.shape[-1]

    def softmaxes() -> tuple[Any, Any]:
        if not hasattr(sampling, "softmax"):
            return _softmaxes(inputs)
        both = (inputs.target_logits, inputs.draft_logits)
        target, draft = (sampling.softmax(x.reshape(-1, vocab).float()) for x in both)
        return target.reshape(batch, drafts + 1, vocab), draft.reshape(batch, drafts, vocab)

    function = with_known(
        sampling.chain_speculative_sampling, ("draft_probs", "draft_token_ids", "target_probs", "uniform_samples")
    )

    def step() -> Any:
        target, draft = softmaxes()
        # Older versions are handed their uniform numbers.
        uniform = torch.rand(batch, drafts + 1, device=ids.device)
        arguments = {"draft_probs": draft, "draft_token_ids": ids, "target_probs": target, "uniform_samples": uniform}
        return function(arguments)

    return step


def _unpack_flashinfer(inputs: Inputs, answer: Any) -> tuple[Ints, Ints]:
    return to_numpy(answer[0]), to_numpy(answer[2])  # the second counts drafts as if each stood alone


_GPU = {"devices": ("cuda",)}
ENGINES = (
    Provider("vllm", _bind_vllm, _unpack_vllm, needs=("torch", "vllm"), repeats=True, **_GPU),
    Provider("sglang", _bind_sglang, _unpack_sglang, needs=("torch", "sglang"), **_GPU),
    Provider("flashinfer", _bind_flashinfer, _unpack_flashinfer, needs=("torch", "flashinfer"), **_GPU),
)
