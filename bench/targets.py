"""What the kernels aim for, and what other engines took on the same kind of GPU: NVIDIA H200, one verification from logits.

The engines were measured on 2026-12-01 in another run (driver 580, CUDA 13, PyTorch 2.11, Triton 3.6), not in the one
whose rows are reported: they cannot be installed everywhere. Microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.cases import MAIN_SHAPES, Shape


class Aim(NamedTuple):
    """Of a shape."""

    target: float
    vllm: float  # 0.33
    sglang: float | None  # blockwise
    flashinfer: float  # its chain with a softmax before it


H200: dict[Shape, Aim] = dict(
    zip(
        MAIN_SHAPES["cuda"],
        (
            Aim(5, 16.0, 15.2, 62),
            Aim(5, 15.4, None, 31),
            Aim(8, 22.1, None, 207),
            Aim(6, 15.7, 14.6, 105),
            Aim(11, 29.3, 26.6, 156),
            Aim(48, 109, 102, 744),
            Aim(140, 338, 318, 1957),
        ),
        strict=True,
    )
)
