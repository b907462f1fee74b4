"""cupyspec's ways to verify a chain, as providers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

import cupyspec
from bench.cases import Inputs, seeds
from bench.harness import Call
from bench.providers import Provider
from cupyspec.rules import _launch

# A drafted id's logits lie around 9 here, see `cases.LOGIT_SPREAD`: with these constants about a third of the drafts
# have a target logit that counts as 0 and are rejected. With the published ones hardly any is.
REJECTING = cupyspec.Sigmoid(alpha=7.5, beta=20.0)
NO_EARLY_EXIT = {"pairs_known": 1}  # of the plan: all score rows are read before the first is judged


def log_normalizer(logits: Any) -> Any:
    """Log-sum-exp of rows, in float32."""
    if isinstance(logits, np.ndarray):
        top = logits.max(-1, keepdims=True).astype(np.float32)
        return top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return logits.float().logsumexp(-1)


def _bind(inputs: Inputs, number: int, **options: Any) -> Call:
    tokens, target, draft, _ = inputs
    arguments = seeds(number, tokens.shape[0], tokens) | options
    return lambda: cupyspec.verify(tokens, target, draft, **arguments)


def _with(**options: Any) -> Callable[[Inputs, int], Call]:
    return lambda inputs, number: _bind(inputs, number, **options)


def _bind_out(inputs: Inputs, number: int) -> Call:
    return _bind(inputs, number, out=_bind(inputs, number)())


def _bind_draft_lse(inputs: Inputs, number: int) -> Call:
    return _bind(inputs, number, draft_log_normalizer=log_normalizer(inputs.draft_logits))


def _bind_both_lse(inputs: Inputs, number: int) -> Call:
    both = {
        "draft_log_normalizer": log_normalizer(inputs.draft_logits),
        "target_log_normalizer": log_normalizer(inputs.target_logits),
    }
    return _bind(inputs, number, **both)


def _bind_one_hot(inputs: Inputs, number: int) -> Call:
    return _bind(inputs._replace(draft_logits=None), number)


def forced(**fields: int) -> Any:
    """A context in which calls are run by another plan, see `cupyspec.rules._launch.forced`; without fields none."""
    return _launch.forced(**fields) if fields else nullcontext()


def plan_fields() -> list[str]:
    """What of a plan can be forced: the names that its maker looks up."""
    return sorted(set(re.findall(r"""forced_plan(?:\.get\(|\[)\s*["'](\w+)["']""", inspect.getsource(_launch))))


def _bind_no_early_exit(inputs: Inputs, number: int) -> Call:
    call = _bind(inputs, number)

    def every_position() -> Any:
        with forced(**NO_EARLY_EXIT):
            return call()

    return every_position


_verifiers: dict[tuple[Any, ...], Any] = {}


def verifier(inputs: Inputs) -> Any:
    """A `Verifier` for inputs of this kind. One serves all copies: a stream's calls come one after another."""
    tokens, target, _, _ = inputs
    batch, drafts = tokens.shape
    token_dtype, target_dtype = (str(x.dtype).removeprefix("torch.") for x in (tokens, target))
    device = getattr(target, "device", "cpu")
    key = (batch, drafts, target.shape[-1], target_dtype, token_dtype, str(device))
    if key not in _verifiers:
        _verifiers.clear()
        _verifiers[key] = cupyspec.Verifier(
            batch, drafts, target.shape[-1], target_dtype, token_dtype=token_dtype, device=device
        )
    return _verifiers[key]


def forget_verifiers() -> None:
    """Free what they own."""
    _verifiers.clear()


def _bind_verifier(inputs: Inputs, number: int) -> Call:
    tokens, target, draft, _ = inputs
    bound = verifier(inputs)
    arguments = seeds(number, tokens.shape[0], tokens)
    return lambda: bound(tokens, target, draft, **arguments)


def _no_forced_plan() -> str:
    known = plan_fields() if hasattr(_launch, "forced") else []
    return "" if set(NO_EARLY_EXIT) <= set(known) else f"this version's plans cannot be forced to {NO_EARLY_EXIT}"


_ours: dict[str, Any] = {"needs": (), "repeats": True}
OURS = (
    Provider("cupyspec", _bind, **_ours),
    Provider("cupyspec Verifier", _bind_verifier, **_ours),
    Provider("cupyspec out=", _bind_out, on_request=("cpu", "cuda"), **_ours),
    Provider("cupyspec no early exit", _bind_no_early_exit, devices=("cuda",), available=_no_forced_plan, **_ours),
    Provider("cupyspec draft lse", _bind_draft_lse, reads="draft known", **_ours),
    Provider("cupyspec both lse", _bind_both_lse, reads="known", **_ours),
    Provider(
        "cupyspec sigmoid",
        _with(rule=cupyspec.Sigmoid()),
        reads="known",
        law={"rule": cupyspec.Sigmoid()},
        **_ours,
    ),
    Provider("cupyspec sigmoid rejecting", _with(rule=REJECTING), reads="known", law={"rule": REJECTING}, **_ours),
    Provider("cupyspec one-hot", _bind_one_hot, reads="one-hot", law={"one_hot_drafts": True}, **_ours),
    Provider(
        "cupyspec greedy",
        _with(sampling=cupyspec.Sampling(temperature=0.0)),
        reads="greedy",
        law={"greedy": True},
        **_ours,
    ),
)
