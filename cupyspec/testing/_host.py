"""Answers of other people's samplers, from any array library, as NumPy integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def integers(name: str, answer: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Integers of a wanted shape from a NumPy, PyTorch, JAX, CuPy or other array, or a list; on any device."""
    if answer is None:
        raise TypeError(f"{name} must be an integer array of shape {shape}, got None")
    if hasattr(answer, "detach"):  # PyTorch
        answer = answer.detach().cpu().numpy()
    elif type(answer).__module__.partition(".")[0] == "cupy":
        answer = answer.get()
    try:
        array = np.asarray(answer)
    except Exception as error:
        raise TypeError(f"{name} must be an integer array, got {type(answer).__name__}: {error}") from None
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {type(answer).__name__} of dtype {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array.astype(np.int64)
