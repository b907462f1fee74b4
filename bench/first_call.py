"""The first call of a process, as JSON on standard output. `bench_host.py` starts it, with a cold or a warm kernel cache.

python bench/first_call.py cupy 1,5,32000,float32
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

LIBRARIES = ("numpy", "torch", "cupy", "Verifier")  # the last: with PyTorch's arrays


def arrays(library: str, batch: int, drafts: int, vocab: int, dtype: str) -> tuple[list[Any], Callable[[], Any]]:
    """Draft tokens, target and draft logits, and what waits for the device."""
    random = np.random.default_rng(9)
    made: list[Any] = [random.integers(0, vocab, (batch, drafts))]
    made += [random.standard_normal((batch, rows, vocab), np.float32).astype(dtype) for rows in (drafts + 1, drafts)]
    if library == "numpy":
        return made, lambda: None
    if library == "cupy":
        import cupy

        on_device = [cupy.asarray(x) for x in made]
        cupy.cuda.Device().synchronize()
        return on_device, cupy.cuda.Device().synchronize
    import torch

    gpu = torch.cuda.is_available()
    return [
        torch.from_numpy(x).to("cuda" if gpu else "cpu") for x in made
    ], torch.cuda.synchronize if gpu else lambda: None


def main(arguments: Sequence[str]) -> int:
    """Time the import, the first call and the second; arrays and their device are there before."""
    library, shape = arguments
    if library not in LIBRARIES:
        raise SystemExit(f"a library must be one of {', '.join(LIBRARIES)}, got {library!r}")
    batch, drafts, vocab, dtype = shape.split(",")
    inputs, wait = arrays(library, int(batch), int(drafts), int(vocab), dtype)
    wait()
    found = {}
    start = time.perf_counter()
    import cupyspec

    found["import"] = time.perf_counter() - start

    def call() -> None:
        cupyspec.verify(*inputs, seed=1)

    if library == "Verifier":
        call = _with_verifier(inputs)
    for name in ("first", "second"):
        start = time.perf_counter()
        call()
        wait()
        found[name] = time.perf_counter() - start
    print(json.dumps(found))
    return 0


def _with_verifier(inputs: list[Any]) -> Callable[[], None]:
    """Makes its Verifier at the first call."""
    import torch

    import cupyspec

    tokens, target, _ = inputs
    kept: list[Any] = []
    number = {
        name: torch.ones(size, dtype=torch.int64, device=target.device)
        for name, size in (("seed", tokens.shape[0]), ("step", 1))
    }

    def call() -> None:
        if not kept:
            sizes = (*tokens.shape, target.shape[-1])
            dtype = str(target.dtype).removeprefix("torch.")
            kept.append(cupyspec.Verifier(*sizes, dtype, token_dtype="int64", device=target.device))
        kept[0](*inputs, **number)

    return call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
