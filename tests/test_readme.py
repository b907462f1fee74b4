"""The README's examples run as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"\*\*(\w+)\*\*\n\n```python\n(.*?)```", README, re.DOTALL))
LIBRARY_OF_HEADING = {"NumPy": "numpy", "PyTorch": "torch", "JAX": "jax", "CuPy": "cupy"}


LOOP = re.search(r"\*\*A decoding loop\.\*\*.*?```python\n(.*?)```", README, re.DOTALL)


def test_decoding_loop() -> None:
    """A loop that a reader copies and that does not run, or whose rows depend on each other."""
    assert LOOP is not None
    variables: dict[str, Any] = {}
    exec(LOOP[1], variables)
    assert [len(row) - 1 for row in variables["text"]] == variables["generated"].tolist()
    alone: dict[str, Any] = {}
    exec(
        LOOP[1].replace("[[3], [7]], np.array([11, 12]", "[[7]], np.array([12]").replace("np.zeros(2", "np.zeros(1"),
        alone,
    )
    size = min(len(alone["text"][0]), len(variables["text"][1]))
    assert alone["text"][0][:size] == variables["text"][1][:size]


def test_every_library_has_an_example() -> None:
    """A heading that changed would otherwise drop its example from the tests."""
    assert set(EXAMPLES) == set(LIBRARY_OF_HEADING)


def run(heading: str) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    exec(EXAMPLES[heading], variables)
    return variables


def check(tokens: Any, num_accepted: Any, status: Any) -> None:
    tokens, num_accepted, status = (np.asarray(x) for x in (tokens, num_accepted, status))
    assert tokens.shape == (8, 5) and not status.any()
    assert (np.sum(tokens >= 0, axis=1) == num_accepted + 1).all()


def test_numpy() -> None:
    """A name or a keyword in the README that does not exist."""
    variables = run("NumPy")
    check(variables["tokens"], variables["num_accepted"], variables["status"])


@pytest.mark.parametrize("heading", ["PyTorch", "JAX"])
def test_framework(heading: str, need_frontend: Callable[[str], ModuleType]) -> None:
    """The same for the frameworks, on the CPU where there is no GPU."""
    library = need_frontend(LIBRARY_OF_HEADING[heading])
    answer = run(heading)["answer"]
    kind = library.Tensor if heading == "PyTorch" else library.Array
    assert all(isinstance(x, kind) for x in answer[:3])
    check(*(x.cpu() if heading == "PyTorch" else x for x in answer[:3]))


@pytest.mark.gpu
@pytest.mark.parametrize("heading", ["PyTorch", "JAX", "CuPy"])
def test_on_gpu(heading: str, need_frontend: Callable[[str], ModuleType]) -> None:
    """The same on a GPU."""
    need_frontend(LIBRARY_OF_HEADING[heading])
    answer = run(heading)["answer"]
    host = {"PyTorch": lambda x: x.cpu().numpy(), "JAX": np.asarray, "CuPy": lambda x: x.get()}[heading]
    if heading == "JAX":
        assert {device.platform for x in answer[:3] for device in x.devices()} == {"gpu"}
    check(*(host(x) for x in answer[:3]))
