"""`cupyspec doctor`: what is installed, what works, and for each thing that is missing one line that says what to do."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cupyspec
from cupyspec._segments import SEG

PACKAGES = ("numpy", "scipy", "ml_dtypes", "torch", "jax")
OLDEST_CUPY = (14, 2)  # the first that caches kernels with name expressions on disk


class Driver(NamedTuple):
    """What the NVIDIA driver says, without CuPy or a framework."""

    cuda: int  # the newest CUDA it can run, as 12080 for 12.8; 0 if there is no driver
    devices: list[str]
    problem: str


def ask_driver() -> Driver:
    """The driver's CUDA version and devices."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Driver(0, [], "")
    cuda, count, handle = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(cuda))
    if (error := driver.cuInit(0)) or (error := driver.cuDeviceGetCount(ctypes.byref(count))):
        return Driver(cuda.value, [], f"the CUDA driver answers with error {error}: look at `nvidia-smi`")
    devices = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(handle), index)
        driver.cuDeviceGetName(name, len(name), handle)
        devices.append(name.value.decode(errors="replace"))
    return Driver(cuda.value, devices, "")


def version_of(package: str) -> str | None:
    """The installed version, read without importing the package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cupy_wheels() -> dict[str, str]:
    """Every distribution that brings the module `cupy`, and its version."""
    found = {}
    for distribution in metadata.distributions():
        name: str | None = distribution.metadata["Name"]
        if name and (name == "cupy" or name.lower().startswith(("cupy-cuda", "cupy-rocm"))):
            found[name.lower()] = distribution.version
    return found


def kernels() -> tuple[Path | None, str]:
    """The folder of CUDA sources, and what is wrong if there should be one and is not."""
    if importlib.util.find_spec("cupyspec._sources") is None:
        return None, ""  # a version for the CPU alone
    try:
        folder: Path = importlib.import_module("cupyspec._sources").kernel_folder()
    except ImportError as error:
        return None, str(error)
    return folder, ""


def one_right_answer(xp: Any) -> str:
    """Call `verify()` where only one answer is possible, whatever the seed; what is wrong, or an empty string."""
    none = -np.inf
    # The target allows token 2, then token 3: the draft 2 is accepted, the draft 1 rejected and replaced by 3.
    target = np.array([[[none, none, 0, none], [none, none, none, 0], [0, 0, 0, 0]]], np.float32)
    draft = np.zeros((1, 2, 4), np.float32)
    drafts = np.array([[2, 1]], np.int32)
    answer = cupyspec.verify(xp.asarray(drafts), xp.asarray(target), xp.asarray(draft), seed=0)
    found = (answer.tokens.tolist(), answer.num_accepted.tolist(), answer.status.tolist())
    right = ([[2, 3, -1]], [1], [0])
    return "" if found == right else f"tokens, num_accepted, status are {found}, must be {right}"


def compiles(cupy: Any) -> str:
    """Compile cupyspec's kernels for the current device; raises what is wrong."""
    from cupyspec._compile import CupyBackend
    from cupyspec.rules._launch import chain_specialisation

    specialisation = chain_specialisation("chain_verify.cu", "float32", "float32", "int32", False, SEG, 256)
    CupyBackend().compile(specialisation, "chain_verify")
    return ""


def same_tokens(cupy: Any) -> str:
    """Compare a batch on the GPU with NumPy's answer; what is wrong, or an empty string."""
    generator = np.random.default_rng(0)
    draft = generator.normal(size=(8, 3, 5000)).astype(np.float32)
    target = np.concatenate([draft, draft[:, :1]], axis=1) + generator.normal(size=(8, 4, 5000)).astype(np.float32)
    drafts = np.argmax(draft + generator.gumbel(size=draft.shape), axis=-1).astype(
        np.int32
    )  # drawn from softmax(draft)
    host = cupyspec.verify(drafts, target, draft, seed=0)
    device = cupyspec.verify(*(cupy.asarray(array) for array in (drafts, target, draft)), seed=0)
    rows = int((device.tokens.get() != host.tokens).any(-1).sum())
    return f"{rows} of {len(drafts)} rows differ from NumPy's" if rows else ""


def _outcome(check: Callable[[Any], str], library: str) -> str:
    """What a check finds wrong with an array library, or an empty string. A diagnosis survives whatever is broken."""
    try:
        return check(importlib.import_module(library))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _line(label: str, text: str) -> None:
    print(f"{label:<12}{text}")


def _cupy_problems(wheels: dict[str, str], driver: Driver) -> list[str]:
    """What is wrong with the installed CuPy, by its names and versions."""
    newest = "13" if driver.cuda >= 13000 else "12"
    extra = f"pip install 'cupyspec[cuda{newest}]'"
    if not wheels:
        other = "" if driver.cuda else ", or 'cupyspec[cuda13]' where the driver is for CUDA 13"
        return [f"CuPy is not installed, CUDA arrays cannot be used: {extra}{other}"]
    if len(wheels) > 1:
        return [f"two CuPy wheels overwrite each other: pip uninstall -y {' '.join(sorted(wheels))} && {extra}"]
    ((name, version),) = wheels.items()
    problems = []
    made_for = re.fullmatch(r"cupy-cuda(\d+)x", name)
    if made_for and driver.cuda and int(made_for[1]) > driver.cuda // 1000:
        problems.append(f"{name} needs a newer driver than this one: update it, or pip uninstall -y {name} && {extra}")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_CUPY:
        problems.append(f"CuPy {version} is too old: pip install -U '{name}[ctk]>=14.2'")
    if version_of("ml_dtypes") is None:
        problems.append("CuPy takes bfloat16 arrays only with ml_dtypes: pip install ml_dtypes")
    return problems


def run_doctor() -> int:
    """Print the diagnosis; 0 if the CPU path works."""
    wheels, driver, (sources, missing) = cupy_wheels(), ask_driver(), kernels()
    _line("cupyspec", f"{cupyspec.__version__}, {Path(cupyspec.__file__).parent}")
    _line("python", f"{platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        _line(package, version_of(package) or "not installed")
    _line("cupy", ", ".join(f"{version} ({name})" for name, version in wheels.items()) or "not installed")
    _line("driver", f"for CUDA {driver.cuda // 1000}.{driver.cuda % 1000 // 10}" if driver.cuda else "no NVIDIA driver")
    _line("devices", ", ".join(["CPU", *driver.devices]))
    _line("kernels", str(sources) if sources else "none")

    to_do = _cupy_problems(wheels, driver)
    if missing:
        to_do.append(missing)
    if not driver.cuda:
        to_do.append("no NVIDIA driver, so no GPU: on a machine that has one, install its driver (nvidia.com/drivers)")
    elif not driver.devices:
        to_do.append(driver.problem or "the driver sees no GPU: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES")

    wrong = _outcome(one_right_answer, "numpy")
    _line("CPU call", wrong or "right")
    if wrong:
        to_do.insert(0, "the CPU path does not work: pip install --force-reinstall cupyspec, then report this output")
    if wheels and driver.devices and sources:
        advice = {
            "compile": "CuPy cannot compile the kernels: pip install 'cupy-cuda12x[ctk]' (or cuda13x) brings NVRTC",
            "GPU call": "the GPU path does not work: please report this output",
            "GPU = CPU": "GPU and CPU disagree: please report this output",
        }
        for label, check in zip(advice, (compiles, one_right_answer, same_tokens), strict=True):
            failed = _outcome(check, "cupy")
            _line(label, failed or "right")
            if failed:
                to_do.append(advice[label])
                break
    else:
        _line("GPU call", "not made: needs a GPU, CuPy and the kernels")

    if to_do:
        print("\nTo do")
        for problem in to_do:
            print(f"  {problem}")
    return 1 if wrong else 0
