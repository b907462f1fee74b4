"""Devices, streams and lifetimes of the CUDA border, against a stand-in for CuPy with two devices."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest

from cupyspec import _cuda
from cupyspec._call import Array


class FakeCuda:
    """As much of `cupy` as the border uses of devices, streams and events; checks what CuPy checks."""

    def __init__(self) -> None:
        fake = self
        self.device, self.streams, self.capturing = 0, [0], False

        class Device:
            def __init__(self, ordinal: int | None = None) -> None:
                self.id = fake.device if ordinal is None else ordinal

            def __enter__(self) -> None:
                self.before, fake.device = fake.device, self.id

            def __exit__(self, *error: Any) -> None:
                fake.device = self.before

        class Stream:
            def __init__(self, handle: int, device: int) -> None:
                self.ptr, self.device = handle, device

            @staticmethod
            def from_external(stream: Any) -> Stream:
                return Stream(stream.__cuda_stream__()[1], fake.device)

            def __enter__(self) -> None:
                if self.device != fake.device:
                    raise RuntimeError("a stream of another device")
                fake.streams.append(self.ptr)

            def __exit__(self, *error: Any) -> None:
                fake.streams.pop()

            def is_capturing(self) -> bool:
                return fake.capturing

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                pass

            def record(self, stream: Stream) -> None:
                self.stream = stream.ptr

            @property
            def done(self) -> bool:
                return self.stream in fake.done_streams

        self.done_streams: set[int] = set()
        self.cuda = types.SimpleNamespace(
            Device=Device,
            Stream=Stream,
            Event=Event,
            get_current_stream=lambda: Stream(fake.streams[-1], fake.device),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(_cuda, "cupy", fake)
    monkeypatch.setattr(_cuda, "_in_flight", {})
    monkeypatch.setattr(_cuda, "_captured", [])
    clear = _cuda._stream_of.cache_clear
    clear()
    yield fake
    clear()


def test_default_stream_of_every_device(cuda: FakeCuda) -> None:
    """PyTorch's default stream has handle 0 on every device: a wrapper made for one served them all."""
    for ordinal in (0, 1, 0, 1):
        with _cuda.Guard(ordinal, 0):
            assert cuda.device == ordinal and cuda.streams == [0, 0]
        assert cuda.device == 0 and cuda.streams == [0]


def test_failed_entry_restores_the_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `with` whose enter fails never exits: device 1 would have stayed current."""
    stream = cuda.cuda.Stream(7, 0)
    monkeypatch.setattr(_cuda, "_stream_of", lambda ordinal, handle: stream)
    with pytest.raises(RuntimeError, match="another device"), _cuda.Guard(1, 7):
        pass
    assert cuda.device == 0


def test_slow_stream_holds_back_no_other(cuda: FakeCuda) -> None:
    """Inputs of one stream kept for as long as another is busy, or let go before they were read."""
    for handle in (5, 6, 5):
        with _cuda.Guard(0, handle):
            _cuda.keep_until_done(f"inputs on {handle}")
    assert [len(q) for q in _cuda._in_flight.values()] == [2, 1]
    cuda.done_streams = {6}
    for handle in (5, 6):
        with _cuda.Guard(0, handle):
            _cuda.keep_until_done("next inputs")
    assert [len(q) for q in _cuda._in_flight.values()] == [3, 1]


def test_no_copy_inside_a_capture(cuda: FakeCuda) -> None:
    """A copy of the scores made while a graph is recorded: its memory would be somebody else's at the replay."""
    cuda.capturing = True
    rows = Array(4096, (2, 3, 10), (60, 20, 2), "float32", None, None)
    with pytest.raises(ValueError, match=r"target_logits must have a contiguous last axis in a CUDA graph"):
        _cuda.with_unit_stride("target_logits", rows)
    fine = Array(4096, (2, 3, 10), (60, 20, 1), "float32", None, None)
    assert _cuda.with_unit_stride("target_logits", fine) is fine
