"""The fuzzer, bounded: see fuzz.py, which runs as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fuzz
from host_cuda import backend as host_backend
from machines import Patch
from planted import FAULTS

NEEDS_COMPILER = pytest.mark.skipif(host_backend.compiler() is None, reason="needs g++")
BACK_ENDS = ("numpy", pytest.param("host_cuda", marks=NEEDS_COMPILER))
CALLS = 1500


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_random_calls(back_end: str) -> None:
    """Catches a crash, an undocumented error, an impossible id, a stray write, and answers that are not the oracle's."""
    ended = fuzz.run(fuzz.machine_of(back_end), 0, range(CALLS))
    assert ended["answered"] > CALLS / 3 and ended["refused"] > CALLS / 10 and ended["refused by check"] > 0


@NEEDS_COMPILER
def test_random_calls_under_sanitizers() -> None:
    """Catches reads outside the caller's arrays and the kernels' own, and undefined behaviour."""
    if fuzz.sanitizer_environment() is None:
        pytest.skip("this g++ has no sanitizers")
    command = [sys.executable, fuzz.__file__, "--backend", "host_cuda", "--sanitize", "--seed", "0", "--calls", "150"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "150 calls" in done.stdout


STRAY_READ = """
import fuzz
from machines import Patch
patch = Patch("at + byte < end)", "at + byte < end + 2)")
fuzz.run(fuzz.machine_of("host_cuda", [patch]), 0, range(150))
"""


@NEEDS_COMPILER
def test_sanitizers_see_a_stray_read() -> None:
    """Catches memory with room behind it, in which a read of one id too many goes unseen."""
    environment = fuzz.sanitizer_environment()
    if environment is None:
        pytest.skip("this g++ has no sanitizers")
    folder = Path(fuzz.__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder.parent)])
    done = subprocess.run(
        [sys.executable, "-c", STRAY_READ], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


# (back end, patch, what the fuzzer says)
MISTAKES = {
    "scores as scratch": (
        "numpy",
        Patch(
            "w = self.scores - self.top[:, None]", "w = np.subtract(self.scores, self.top[:, None], out=self.scores)"
        ),
        "(target|draft): .* bytes changed|read-only",
    ),
    "an id that is not checked": (
        "numpy",
        Patch("(ids < 0) | (ids >= call.vocab_size)", "(ids < 0)"),
        "oracle|IndexError",
    ),
    "a column too many": ("numpy", Patch("columns = slice(self._vocab_size)", "columns = slice(None)"), "row"),
    "a token behind the last": (
        "host_cuda",
        Patch(
            "i <= p.num_drafts; i += LANES) {\n        tokens[i]",
            "i <= p.num_drafts + 1; i += LANES) {\n        tokens[i]",
        ),
        "bytes changed|no answer|oracle",
    ),
    "a status that is not written": ("host_cuda", Patch("p.status[row.b] = status;", "(void)status;"), "status"),
    "a scratch cell behind the last": (
        "host_cuda",
        Patch("p.arrived[mine.b] = 0;", "p.arrived[mine.b] = p.arrived[mine.b + 1] = 0;"),
        "uint8.* of the kernels: .* bytes changed",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_fuzzer_finds(name: str) -> None:
    """Catches a fuzzer that looks away: mistakes of the kinds that it is there for."""
    back_end, patch, says = MISTAKES[name]
    if back_end == "host_cuda" and host_backend.compiler() is None:
        pytest.skip("needs g++")
    with pytest.raises(AssertionError, match=says):
        fuzz.run(fuzz.machine_of(back_end, [patch]), 0, range(CALLS))


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if "residual" in fault.name or "row of" in fault.name])
def test_the_oracle_is_asked(name: str) -> None:
    """Catches answers that are looked at for their form alone."""
    (fault,) = (f for f in FAULTS if f.name == name)
    with pytest.raises(AssertionError, match="oracle"):
        fuzz.run(fuzz.machine_of("numpy", fault.numpy), 0, range(CALLS))


@pytest.mark.parametrize("layout", fuzz.LAYOUTS)
def test_layouts_hold_the_same_values(layout: str) -> None:
    """Catches a fuzzer that changes what it only means to move, and bands that are not there."""
    for shape in ((), (0,), (5,), (2, 0), (2, 3), (2, 3, 4), (0, 3, 4)):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        watch = fuzz.Watch()
        view = watch.place("x", values, layout, output=layout != "read-only")
        np.testing.assert_array_equal(view, values)
        if layout != "read-only":
            view[...] = 7
        watch.check()
        (_, buffer, _, _) = watch.seen[0]
        for at in (0, fuzz.BAND - 1, buffer.size - fuzz.BAND, buffer.size - 1):
            buffer[at] ^= 1
            with pytest.raises(fuzz.Wrong, match="x: 1 bytes changed"):
                watch.check()
            buffer[at] ^= 1
