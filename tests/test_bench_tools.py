"""The small parts of the benchmarks: progress, Nsight Compute's output, the first call of a process."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from bench import bench_host, ncu
from bench.progress import Progress


def walk(progress: Progress) -> None:
    for label in ("first", "second"):
        progress.begin(label)
        progress.say(f"in the {label}")
        progress.end()
    progress.clear()


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    # Catches control characters in a log, and a bar that overwrites what is said.
    plain = io.StringIO()
    walk(Progress(2, plain))
    assert [line.split("] ")[1] for line in plain.getvalue().splitlines()] == [
        "1 of 2: first",
        "in the first",
        "2 of 2: second",
        "in the second",
    ]
    assert "\x1b" not in plain.getvalue()
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    walk(Progress(2, terminal))
    text = terminal.getvalue()
    assert "[############............] 1/2" in text and "s more  second" in text
    assert text.endswith("\r\x1b[K")
    assert all(part.startswith("[") for part in text.split("\r\x1b[K") if part)


OUTPUT = """==PROF== Connected to process 1
something that the program printed
==PROF== Disconnected
"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","chain_verify(ChainParams)","(128, 1, 1)","(8, 1, 1)","Command line","gpu__time_duration.sum","nsecond","9,999"
"1","1","chain_stats(ChainParams)","(128, 1, 1)","(924, 1, 1)","Command line","gpu__time_duration.sum","nsecond","3,520"
"1","1","chain_stats(ChainParams)","(128, 1, 1)","(924, 1, 1)","Command line","dram__bytes_read.sum","Mbyte","2.82"
"2","1","chain_verify(ChainParams)","(384, 1, 1)","(8, 1, 1)","Command line","gpu__time_duration.sum","usecond","3.1"
"2","1","chain_verify(ChainParams)","(384, 1, 1)","(8, 1, 1)","Command line","dram__bytes_read.sum","Kbyte","513"
"2","1","chain_verify(ChainParams)","(384, 1, 1)","(8, 1, 1)","Command line","launch__registers_per_thread","register/thread","64"
"""


def test_nsight_compute_is_read():
    # Catches the kernels of an earlier call, and units that change with the size of a figure.
    kernels = list(ncu.read(OUTPUT))
    assert ncu.last_call(kernels) == [
        {"kernel": "chain_stats", "blocks x threads": "924 x 128", "us": "3.52", "MB read": "2.82"},
        {"kernel": "chain_verify", "blocks x threads": "8 x 384", "us": "3.1", "MB read": "0.513", "registers": "64"},
    ]
    assert ncu.last_call(kernels[:1]) == kernels[:1]
    assert list(ncu.read("==ERROR== no permission\n")) == []


def test_without_nsight_compute(monkeypatch, capsys):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    assert ncu.main([]) == 1
    assert "ncu is not on the PATH" in capsys.readouterr().out


def test_first_call_in_a_new_process(tmp_path):
    found = bench_host._process("numpy", str(tmp_path))
    assert set(found) == {"import", "first", "second"}
    assert all(0 < seconds < 60 for seconds in found.values())


def test_a_first_call_that_fails_says_why(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: no CuPy\n")
    monkeypatch.setattr(bench_host.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(RuntimeError, match="ImportError: no CuPy"):
        bench_host._process("cupy", "nowhere")
