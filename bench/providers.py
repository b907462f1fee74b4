"""Who takes part in a benchmark: a name, how to make its call, and what its answers must be. `checks.py` asks first.

A provider binds to inputs and gives a call without arguments; all that is prepared once (seeds, outputs, generators) is
prepared there and not timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cases import Inputs, Ints, to_numpy
from bench.harness import Call


def verification(inputs: Inputs, answer: Any) -> tuple[Ints, Ints]:
    """Tokens [B, K + 1] and accepted [B] of an answer that starts with them, copied: a call may overwrite the last one's."""
    return to_numpy(answer[0]).copy(), to_numpy(answer[1]).copy()


@dataclass(frozen=True)
class Provider:
    """One way to do an op."""

    name: str
    bind: Callable[[Any, int], Call]  # inputs and the number of the call
    unpack: Callable[[Any, Any], Any] = verification  # inputs and answer -> NumPy
    needs: tuple[str, ...] = ("torch",)
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    one_row: bool = False  # takes B = 1 only
    captures: bool = True  # can be part of a CUDA graph
    repeats: bool = False  # the same call gives the same answer
    on_request: tuple[str, ...] = ()  # devices on which it is timed only where it is named, or in no hurry
    reads: str = "all"  # see `cases.rows_read`
    law: Mapping[str, Any] = field(default_factory=dict)  # of `cupyspec.testing.output_law`; empty: exact
    available: Callable[[], str] = lambda: ""  # why it cannot take part although `needs` are there

    @property
    def ours(self) -> bool:
        return self.name.startswith("cupyspec")

    def left_out(self, device: str, batch: int, dtype: str) -> str:
        """Why the provider cannot take part, or an empty string."""
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            return f"{', '.join(missing)} not installed"
        if device not in self.devices:
            return f"not for {device}"
        if dtype not in self.dtypes:
            return f"no {dtype}"
        if self.one_row and batch != 1:
            return "takes one row only"
        return self.available()


def named(providers: Sequence[Provider], names: Sequence[str]) -> list[Provider]:
    """Providers by name; an unknown name is a ValueError."""
    known = {provider.name: provider for provider in providers}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown provider {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]
