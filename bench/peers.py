"""Other ways to verify a chain, from logits to tokens: Hugging Face, plain PyTorch, the paper's baseline, NumPy.

Engines that may be installed are in `engines.py`. Every call goes from logits to tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cases import Inputs, Ints, to_numpy
from bench.engines import ENGINES
from bench.harness import Call
from bench.providers import Provider

# Hugging Face: the function that generate() calls in assisted decoding. It is private, so its arguments are looked up.


def _bind_hugging_face(inputs: Inputs, number: int) -> Call:
    from transformers.generation.utils import _speculative_sampling

    arguments = {
        "candidate_input_ids": inputs.draft_tokens,
        "candidate_logits": inputs.draft_logits,
        "candidate_length": inputs.draft_tokens.shape[1],
        "new_logits": inputs.target_logits,
    }
    if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters:
        arguments["is_done_candidate"] = False
    return lambda: _speculative_sampling(**arguments)


def _unpack_hugging_face(inputs: Inputs, answer: Any) -> tuple[Ints, Ints]:
    tokens = np.full((1, inputs.draft_tokens.shape[1] + 1), -1)
    valid = to_numpy(answer[0])
    tokens[0, : valid.shape[1]] = valid[0]
    return tokens, to_numpy(answer[1]).reshape(1)


# PyTorch, batched. Draws are races of exponentials: torch.multinomial checks its input on the host.


def race(weights: Any) -> Any:
    """An index for each row, drawn by its weights."""
    import torch

    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def _assemble(draft_tokens: Any, accepted: Any, token: Any) -> Any:
    """Accepted prefix, one more token, -1."""
    import torch

    place = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(place < accepted[:, None], tokens, -1)
    return torch.where(place == accepted[:, None], token[:, None], tokens)


def torch_batched(draft_tokens: Any, target_logits: Any, draft_logits: Any) -> tuple[Any, Any]:
    """The step as it is usually written: both softmaxes in full, the residual only where a row stops."""
    import torch

    batch, drafts = draft_tokens.shape
    p = torch.softmax(target_logits, -1, dtype=torch.float32)
    q = torch.softmax(draft_logits, -1, dtype=torch.float32)
    x = draft_tokens[..., None]
    p_x, q_x = p[:, :drafts].gather(2, x)[..., 0], q.gather(2, x)[..., 0]
    accept = torch.rand_like(p_x) * q_x < p_x
    accepted = accept.long().cumprod(1).sum(1)
    row = torch.arange(batch, device=p.device)
    p_n = p[row, accepted]
    q_n = torch.where(accepted[:, None] < drafts, q[row, accepted.clamp(max=drafts - 1)], 0.0)
    residual = (p_n - q_n).clamp(min=0)
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_n)
    return _assemble(draft_tokens, accepted, race(weights)), accepted


def torch_unfused(draft_tokens: Any, target_logits: Any, draft_logits: Any) -> tuple[Any, Any]:
    """The baseline of arXiv 2406.11016: ratio, residual and its normaliser as matrices of every position."""
    import torch

    batch, drafts = draft_tokens.shape
    p = torch.softmax(target_logits, -1, dtype=torch.float32)
    q = torch.softmax(draft_logits, -1, dtype=torch.float32)
    ratio = (p[:, :drafts] / q).clamp(max=1)  # [B, K, V]
    residual = (p[:, :drafts] - q).clamp(min=0)  # [B, K, V]
    mass = residual.sum(-1, keepdim=True)  # [B, K, 1]
    residual = torch.where(mass > 0, residual / mass, p[:, :drafts])
    chance = ratio.gather(2, draft_tokens[..., None])[..., 0]
    accepted = (torch.rand_like(chance) < chance).long().cumprod(1).sum(1)
    row = torch.arange(batch, device=p.device)
    at_end = accepted[:, None] == drafts
    weights = torch.where(at_end, p[:, drafts], residual[row, accepted.clamp(max=drafts - 1)])
    return _assemble(draft_tokens, accepted, race(weights)), accepted


def _bind_torch(step: Callable[..., Any]) -> Callable[[Inputs, int], Call]:
    def bind(inputs: Inputs, number: int) -> Call:
        tokens, target, draft, _ = inputs
        return lambda: step(tokens, target, draft)

    return bind


_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def compiled(step: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
    """`step` through torch.compile for arrays of these shapes."""
    import torch

    key = (step, *((tuple(x.shape), x.dtype, x.device) for x in arrays))
    if key not in _compiled:
        # Afresh for each shape: many shapes of one function end in a fallback to eager code.
        torch._dynamo.reset()
        _compiled.clear()
        _compiled[key] = torch.compile(step, dynamic=False)
    return _compiled[key]


def _bind_compiled(inputs: Inputs, number: int) -> Call:
    arrays = inputs[:3]
    step = compiled(torch_batched, *arrays)
    return lambda: step(*arrays)


# NumPy, batched


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """In float32, along the last axis."""
    weights = np.exp(logits.astype(np.float32) - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _bind_numpy(inputs: Inputs, number: int) -> Call:
    x, target, draft = (to_numpy(array) for array in inputs[:3])
    batch, drafts = x.shape
    row, place = np.arange(batch), np.arange(drafts + 1)
    random = np.random.default_rng(number)

    def step() -> tuple[Ints, Ints]:
        p, q = softmax(target), softmax(draft)
        p_x, q_x = (np.take_along_axis(v, x[..., None], 2)[..., 0] for v in (p[:, :drafts], q))
        accepted = np.cumprod(random.random((batch, drafts)) * q_x < p_x, axis=1).sum(1)
        p_n = p[row, accepted]
        q_n = np.where(accepted[:, None] < drafts, q[row, np.minimum(accepted, drafts - 1)], 0)
        residual = np.maximum(p_n - q_n, 0)
        running = np.cumsum(np.where(residual.sum(1, keepdims=True) > 0, residual, p_n), axis=1, dtype=np.float64)
        token = (running <= random.random((batch, 1)) * running[:, -1:]).sum(1)
        tokens = np.where(place < accepted[:, None], np.pad(x, ((0, 0), (0, 1))), -1)
        tokens[row, accepted] = token
        return tokens, accepted

    return step


PEERS = (
    Provider(
        "hugging face",
        _bind_hugging_face,
        _unpack_hugging_face,
        needs=("torch", "transformers"),
        one_row=True,
        captures=False,
    ),
    Provider("torch", _bind_torch(torch_batched)),
    Provider("torch compiled", _bind_compiled, on_request=("cpu",)),
    Provider("torch unfused", _bind_torch(torch_unfused)),
    *ENGINES,
    Provider("numpy", _bind_numpy, needs=(), devices=("cpu",), dtypes=("float32", "float16")),
)
