"""Who is timed: cupyspec, and other ways to the same answer. `checks.py` tests each before it is timed.

A provider binds to inputs and gives a call without arguments; all that is prepared once (seeds, outputs, generators) is
prepared there and not timed. Every call goes from logits to tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import cupyspec
from bench.harness import Call

Ints = npt.NDArray[np.signedinteger[Any]]


class Inputs(NamedTuple):
    """One copy of a case's arrays, of PyTorch, or of NumPy where that is all there is."""

    draft_tokens: Any  # [B, K]
    target_logits: Any  # [B, K + 1, V]
    draft_logits: Any  # [B, K, V]
    scores: Any  # flat: the memory that holds both logits, for the read floor


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """An array of either library, on the host."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def _answer(inputs: Inputs, answer: Any) -> tuple[Ints, Ints]:
    return to_numpy(answer[0]), to_numpy(answer[1])


@dataclass(frozen=True)
class Provider:
    """One way to verify a chain."""

    name: str
    bind: Callable[[Inputs, int], Call]  # inputs and the number of the copy
    unpack: Callable[[Inputs, Any], tuple[Ints, Ints]] = _answer  # tokens [B, K + 1], -1 at the end; accepted [B]
    needs: tuple[str, ...] = ("torch",)
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    one_row: bool = False  # takes B = 1 only
    captures: bool = True  # can be part of a CUDA graph
    repeats: bool = False  # the same call gives the same answer
    on_request: bool = False  # only timed where it is named

    def left_out(self, device: str, batch: int, dtype: str) -> str:
        """Why the provider cannot take part, or an empty string."""
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            return f"{', '.join(missing)} not installed"
        if device not in self.devices:
            return f"not for {device}"
        if dtype not in self.dtypes:
            return f"no {dtype}"
        return "takes one row only" if self.one_row and batch != 1 else ""


# cupyspec


def _random_arguments(inputs: Inputs, copy: int) -> dict[str, Any]:
    """Seed and step: on a GPU in device memory, as CUDA graphs ask for."""
    tokens = inputs.draft_tokens
    if not getattr(tokens, "is_cuda", False):
        return {"seed": 2024, "step": copy}
    import torch

    batch = tokens.shape[0]
    seeds = torch.arange(batch, dtype=torch.int64, device=tokens.device) + copy * batch
    return {"seed": seeds, "step": torch.full((1,), copy, dtype=torch.int64, device=tokens.device)}


def _bind_cupyspec(inputs: Inputs, copy: int, **options: Any) -> Call:
    arguments = _random_arguments(inputs, copy) | options
    tokens, target, draft, _ = inputs
    return lambda: cupyspec.verify(tokens, target, draft, **arguments)


def _bind_cupyspec_out(inputs: Inputs, copy: int) -> Call:
    return _bind_cupyspec(inputs, copy, out=_bind_cupyspec(inputs, copy)())


def _bind_cupyspec_lse(inputs: Inputs, copy: int) -> Call:
    draft = inputs.draft_logits
    if isinstance(draft, np.ndarray):
        top = draft.max(-1, keepdims=True).astype(np.float32)
        normalizer = top[..., 0] + np.log(np.exp(draft - top).sum(-1))
    else:
        normalizer = draft.float().logsumexp(-1)
    return _bind_cupyspec(inputs, copy, draft_log_normalizer=normalizer)


# Hugging Face: the function that generate() calls in assisted decoding. It is private, so its arguments are looked up.


def _bind_hugging_face(inputs: Inputs, copy: int) -> Call:
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


def _race(weights: Any) -> Any:
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
    return _assemble(draft_tokens, accepted, _race(weights)), accepted


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
    return _assemble(draft_tokens, accepted, _race(weights)), accepted


def _bind_torch(step: Callable[..., Any]) -> Callable[[Inputs, int], Call]:
    def bind(inputs: Inputs, copy: int) -> Call:
        tokens, target, draft, _ = inputs
        return lambda: step(tokens, target, draft)

    return bind


_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def _bind_compiled(inputs: Inputs, copy: int) -> Call:
    import torch

    tokens, target, draft, _ = inputs
    key = (tuple(target.shape), target.dtype, target.device)
    if key not in _compiled:
        # Afresh for each shape: many shapes of one function end in a fallback to eager code.
        torch._dynamo.reset()
        _compiled.clear()
        _compiled[key] = torch.compile(torch_batched, dynamic=False)
    step = _compiled[key]
    return lambda: step(tokens, target, draft)


# NumPy, batched


def _softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    weights = np.exp(logits.astype(np.float32) - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _bind_numpy(inputs: Inputs, copy: int) -> Call:
    x, target, draft = (to_numpy(array) for array in inputs[:3])
    batch, drafts = x.shape
    row, place = np.arange(batch), np.arange(drafts + 1)
    random = np.random.default_rng(copy)

    def step() -> tuple[Ints, Ints]:
        p, q = _softmax(target), _softmax(draft)
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


_OURS = {"needs": (), "repeats": True}
PROVIDERS = (
    Provider("cupyspec", _bind_cupyspec, **_OURS),
    Provider("cupyspec out=", _bind_cupyspec_out, devices=("cuda",), **_OURS),
    Provider("cupyspec draft lse", _bind_cupyspec_lse, **_OURS),
    Provider(
        "hugging face",
        _bind_hugging_face,
        _unpack_hugging_face,
        needs=("torch", "transformers"),
        one_row=True,
        captures=False,
    ),
    Provider("torch", _bind_torch(torch_batched)),
    Provider("torch compiled", _bind_compiled, on_request=True),
    Provider("torch unfused", _bind_torch(torch_unfused)),
    Provider("numpy", _bind_numpy, needs=(), devices=("cpu",), dtypes=("float32", "float16")),
)


def named(names: Sequence[str] | None) -> list[Provider]:
    """Providers by name; without names, all that are timed unasked. An unknown name is a ValueError."""
    if names is None:
        return [provider for provider in PROVIDERS if not provider.on_request]
    known = {provider.name: provider for provider in PROVIDERS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown provider {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
