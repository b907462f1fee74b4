"""Structs of the kernels as Python's `struct` packs them: several times quicker than a NumPy record."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

_FORMATS = {"u8": "Q", "i8": "q", "i4": "i", "f8": "d"}


def _leaves(dtype: np.dtype[Any], prefix: str = "", start: int = 0) -> Iterator[tuple[str, int, np.dtype[Any]]]:
    """Dotted name, offset and dtype of every number in a struct."""
    for name, (field, offset) in ((n, dtype.fields[n][:2]) for n in dtype.names or ()):  # type: ignore[index]
        if field.names:
            yield from _leaves(field, f"{prefix}{name}.", start + offset)
        else:
            yield f"{prefix}{name}", start + offset, field


@cache
def packer(dtype: np.dtype[Any]) -> struct.Struct:
    """Packs a struct's numbers, flat and in order: ``packer(CHAIN_PARAMS).pack(...)``; gaps are filled with zeros."""
    form, end = "=", 0
    for name, offset, field in _leaves(dtype):
        if field.str[1:] not in _FORMATS:
            raise TypeError(f"{name} has a dtype that is not packed: {field}")
        form += "x" * (offset - end) + _FORMATS[field.str[1:]]
        end = offset + field.itemsize
    return struct.Struct(form + "x" * (dtype.itemsize - end))


@cache
def offsets(dtype: np.dtype[Any]) -> dict[str, int]:
    """Bytes from the start of a struct to each of its numbers, by dotted name: ``"target.temperature.data"``."""
    return {name: offset for name, offset, _ in _leaves(dtype)}
