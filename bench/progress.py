"""A progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Says what runs, how much of it is done, and for how long it will go on."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total, self._done, self._label = total, 0, ""
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._stream.isatty()
        self._start = time.perf_counter()

    def begin(self, label: str) -> None:
        """The next step begins."""
        self._label = label
        if self._bar:
            self._draw()
        else:
            self.say(f"{self._done + 1} of {self._total}: {label}")

    def end(self) -> None:
        """The step is done."""
        self._done += 1
        if self._bar:
            self._draw()

    def say(self, text: str) -> None:
        """A line, above the bar."""
        self.clear()
        print(f"[{time.perf_counter() - self._start:5.1f} s] {text}", file=self._stream, flush=True)
        if self._bar:
            self._draw()

    def clear(self) -> None:
        """Make room for other output on the terminal."""
        if self._bar:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _draw(self) -> None:
        filled = WIDTH * self._done // max(1, self._total)
        gone = time.perf_counter() - self._start
        rest = f", about {gone / self._done * (self._total - self._done):.0f} s more" if self._done else ""
        bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {self._done}/{self._total} {gone:.0f} s{rest}  {self._label}"
        print(f"\r\x1b[K{bar[:110]}", end="", file=self._stream, flush=True)
