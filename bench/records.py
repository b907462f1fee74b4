"""What a row of results says besides its time, and the CSV files that keep rows."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

KEY = ("op", "provider", "batch", "drafts", "vocab", "dtype", "acceptance_wanted", "threads", "clock")
COLUMNS = (
    *KEY,
    *("acceptance", "mean_accepted", "median_us", "q20_us", "q80_us", "samples", "method", "copies"),
    *("host_us", "host_q20_us", "host_q80_us", "kernel_us"),
    *("bytes_all", "bytes_full", "bytes_least", "sum_us", "copy_us"),
    *("device", "driver", "cpu", "load", "python", "numpy", "torch", "cupy", "transformers"),
    *("revision", "date", "command"),
)


def environment(device: str) -> dict[str, Any]:
    """The machine, the versions and the revision, for every row."""
    facts: dict[str, Any] = {
        "device": "cpu",
        "driver": "",
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "threads": 1,
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "",
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "cupy": next(filter(None, map(_version, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), ""),
        "transformers": _version("transformers"),
        "revision": revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "command": " ".join(["python", "bench/run.py", *sys.argv[1:]]),
    }
    if facts["torch"]:
        import torch

        facts["torch"] = torch.__version__  # with its build, such as +cpu
        facts["threads"] = torch.get_num_threads()
        if device == "cuda":
            facts |= {
                "device": torch.cuda.get_device_name(),
                "driver": _driver(),
                "threads": "",
            }  # threads do not matter
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def revision() -> str:
    """The checkout's commit, marked where code of the library or of the benchmarks differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "cupyspec", "kernels", "bench/*.py"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def default_path(device_name: str) -> Path:
    """``results/<device>.csv``."""
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.csv"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put rows into a file; of what it holds, only rows of the same key are replaced."""
    kept: list[Mapping[str, Any]] = []
    new_keys = {_key(row) for row in rows}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if _key(row) not in new_keys]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="raise", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_text(row[name]) for name in KEY)
