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

REVISION_VARIABLE = "CUPYSPEC_BENCH_REVISION"  # what to call the code's revision on machines without Git

KEY = ("op", "provider", "batch", "drafts", "vocab", "dtype", "acceptance_wanted", "cache", "threads", "clock")
COLUMNS = (
    *KEY,
    *("acceptance", "mean_accepted", "median_us", "q20_us", "q80_us", "samples", "method", "copies"),
    *("host_us", "host_q20_us", "host_q80_us", "kernel_us"),
    *("bytes_all", "bytes_full", "bytes_least", "sum_us", "copy_us", "read_gbps", "copy_gbps", "floor_us"),
    *("peak_bytes", "limit_bytes", "allocations"),
    *("device", "driver", "cuda", "cpu", "load", "python", "numpy", "torch", "cupy", "transformers"),
    *("revision", "date", "command"),
)


def environment(device: str) -> dict[str, Any]:
    """The machine, the versions and the revision, for every row."""
    facts: dict[str, Any] = {
        "device": "cpu",
        "driver": "",
        "cuda": "",
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
        "command": " ".join(["python", _script(), *sys.argv[1:]]),
    }
    if facts["torch"]:
        import torch

        facts["torch"] = torch.__version__  # with its build, such as +cpu
        facts["threads"] = torch.get_num_threads()
        if device == "cuda":
            facts |= {
                "device": torch.cuda.get_device_name(),
                "driver": _driver(),
                "cuda": torch.version.cuda or "",
                "threads": "",  # they do not matter
            }
    return facts


def _script() -> str:
    path = Path(sys.argv[0]).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def revision() -> str:
    """The checkout's commit, marked where code of the library or of the benchmarks differs from it.

    The environment variable `REVISION_VARIABLE` goes first.
    """
    if given := os.environ.get(REVISION_VARIABLE, "").strip():
        return given
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


def read_csv(path: Path) -> list[dict[str, str]]:
    """All rows of a file; columns that it does not have are empty."""
    with path.open(newline="", encoding="utf-8") as file:
        return [dict.fromkeys(COLUMNS, "") | row for row in csv.DictReader(file)]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put rows into a file; of what it holds, only rows of the same key are replaced."""
    new_keys = {_key(row) for row in rows}
    kept = [row for row in read_csv(path) if _key(row) not in new_keys] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".new")  # a run that is killed leaves the old file or the new one
    with written.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="raise", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
    written.replace(path)


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_text(row.get(name, "")) for name in KEY)
