"""The kernels' argument struct as `struct` packs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyspec.rules._launch import CHAIN_PARAMS
from cupyspec.rules._params_struct import offsets, packer


def flat(values: Any) -> list[Any]:
    return [x for value in values for x in (flat(value) if isinstance(value, tuple) else [value])]


def test_packed_bytes_are_those_of_numpy() -> None:
    """A field of another width, order or place than the kernels read."""
    names = offsets(CHAIN_PARAMS)
    values = [3 * i + 1 for i in range(len(names))]
    packed = packer(CHAIN_PARAMS).pack(*values)
    assert len(packed) == CHAIN_PARAMS.itemsize
    assert flat(np.frombuffer(packed, CHAIN_PARAMS)[0].item()) == values
    for name, offset in names.items():
        field: Any = np.frombuffer(packed, CHAIN_PARAMS)[0]
        for part in name.split("."):
            field = field[part]
        assert field.tobytes() == packed[offset : offset + field.itemsize], name


def test_gaps_are_zeros() -> None:
    """Alignment holes, here 4 bytes inside and 4 behind, that shift what comes after them."""
    dtype = np.dtype([("a", "i4"), ("b", [("c", "u8"), ("d", "i4")])], align=True)
    packed = packer(dtype).pack(-1, 2**64 - 1, 5)
    assert packed == b"\xff" * 4 + b"\0" * 4 + b"\xff" * 8 + b"\5\0\0\0" + b"\0" * 4
    assert offsets(dtype) == {"a": 0, "b.c": 8, "b.d": 16}


def test_a_dtype_without_a_format_is_named() -> None:
    """A field of a new type packed as something else."""
    with pytest.raises(TypeError, match=r"b\.c has a dtype that is not packed: float32"):
        packer(np.dtype([("b", [("c", "f4")])]))
