"""Every specialisation of the kernels compiles for every supported GPU, without spills; and what is said where CuPy cannot."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyspec import _compile
from cupyspec._compile import Launch, Specialisation
from cupyspec._segments import SEG
from cupyspec._sources import source
from cupyspec.rules._launch import CHAIN_PARAMS, chain_specialisation
from host_cuda import nvrtc

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
SCORES = ("float32", "float16", "bfloat16")
# What CuPy passes by itself, then what cupyspec asks for; ptxas' report goes to the log.
OPTIONS = ("-ftz=true", "--device-as-default-execution-space", "--std=c++17", "--ptxas-options=-v")
KERNELS = {"chain_stats.cu": ("chain_stats", "chain_totals"), "chain_verify.cu": ("chain_verify",)}


def threads_of(file: str, target: str, draft: str) -> int:
    """As `plan_chain` has it for large vocabularies."""
    return 0 if file == "chain_stats.cu" else 256 if "float32" in (target, draft) else 384


ALL = [
    chain_specialisation(file, target, draft, token, sigmoid, SEG, threads_of(file, target, draft))
    for file, target, draft, token, sigmoid in itertools.product(
        KERNELS, SCORES, SCORES, ("int32", "int64"), (False, True)
    )
]
# For small ones.
ALL += [chain_specialisation("chain_verify.cu", dtype, dtype, "int32", False, SEG, 128) for dtype in SCORES]


def cases() -> list[tuple[str, Specialisation]]:
    """float32 scores on every architecture, by each rule; each other pair of score dtypes on one of them.

    The dtype of tokens changes a load and a store: int64 is compiled for one architecture each. The product of dtypes
    and architectures takes minutes: CUPYSPEC_TEST_ALL_ARCHITECTURES=1 compiles it.
    """
    narrow = [s for s in ALL if "-DTOKEN_TYPE=int" in s.options]
    wide = [s for s in ALL if s not in narrow]
    if os.environ.get("CUPYSPEC_TEST_ALL_ARCHITECTURES"):
        return [*itertools.product(ARCHITECTURES, narrow), *dealt(wide)]
    plain = [s for s in narrow if s.options[:2] == ("-DTARGET_TYPE=float", "-DDRAFT_TYPE=float")]
    return [*itertools.product(ARCHITECTURES, plain), *dealt([s for s in narrow if s not in plain]), *dealt(wide[-1:])]


def dealt(specialisations: list[Specialisation]) -> list[tuple[str, Specialisation]]:
    """Each for one architecture, by turns."""
    return [(ARCHITECTURES[n % len(ARCHITECTURES)], specialisation) for n, specialisation in enumerate(specialisations)]


def case_name(case: tuple[str, Specialisation]) -> str:
    return "-".join(
        [case[1].file, f"sm_{case[0]}", *(value.replace("long long", "long") for _, value in case[1].macros[:4])]
    )


@pytest.mark.skipif(nvrtc.library() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("case", cases(), ids=case_name)
def test_compiles_without_spills(case: tuple[str, Specialisation]) -> None:
    architecture, specialisation = case
    options = (f"-arch=sm_{architecture}", *OPTIONS, *specialisation.options)
    kernels = KERNELS[specialisation.file]
    cubin, log = nvrtc.compile_cubin(source(specialisation.file), specialisation.file, options)
    assert cubin[:4] == b"\x7fELF"
    assert "warning" not in log, log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) >= len(kernels) and set(spills) == {("0", "0")}, log  # of functions that are called, too
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == len(kernels) and max(registers) <= 168, log  # a block of 384 threads fits
    for kernel in kernels:
        assert kernel.encode() in cubin


@pytest.mark.skipif(nvrtc.library() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("file", KERNELS)
def test_compiles_alone_and_errors_name_file_and_line(file: str) -> None:
    text = source(file)
    nvrtc.compile_cubin(text, file, ("-arch=sm_90", *OPTIONS))  # no macros: plain CUDA with defaults
    marked = text.replace("quiet_nan() {", "quiet_nan() { oops", 1)
    with pytest.raises(nvrtc.CompileError, match=r"segment\.cuh\(\d+\): error"):
        nvrtc.compile_cubin(marked, file, ("-arch=sm_90", *OPTIONS))


def test_module_is_importable_without_cupy() -> None:
    code = "import sys; sys.modules['cupy'] = None; import cupyspec._compile, cupyspec.rules._launch"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------ CuPy, played by a stand-in


class FakeCupy(types.ModuleType):
    """As much of CuPy as a launch touches, and a record of what was asked of it."""

    def __init__(self, *, capability: str = "90", failures: list[Exception] | None = None) -> None:
        super().__init__("cupy")
        self.compiled: list[tuple[str, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.failures = failures or []
        self.capturing = False
        fake = self

        class CompileException(Exception):
            pass

        class RawKernel:
            @property
            def kernel(self) -> Any:
                if fake.failures:
                    raise fake.failures.pop(0)
                return types.SimpleNamespace(ptr=4711)

        class RawModule:
            def __init__(self, *, code: str, options: tuple[str, ...], backend: str) -> None:
                assert '#include "' not in code
                fake.compiled.append(options)

            def get_function(self, name: str) -> RawKernel:
                return RawKernel()

        class Stream:
            ptr = 77

            def is_capturing(self) -> bool:
                return fake.capturing

        class Device:
            def __init__(self, ordinal: int) -> None:
                self.compute_capability = capability
                self.attributes = {"MultiProcessorCount": 132}

        self.RawModule = RawModule
        self.cuda = types.SimpleNamespace(
            Device=Device,
            compiler=types.SimpleNamespace(CompileException=CompileException),
            get_current_stream=Stream,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    cupy = FakeCupy()
    install(monkeypatch, cupy)
    return cupy


def install(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> None:
    api = types.ModuleType("cupy_backends.cuda.api")
    api.driver = types.SimpleNamespace(  # type: ignore[attr-defined]
        ctxGetCurrent=lambda: 1, launchKernel=lambda *args: cupy.launched.append(args)
    )
    api.runtime = types.SimpleNamespace(getDevice=lambda: 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy_backends", types.ModuleType("cupy_backends"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", types.ModuleType("cupy_backends.cuda"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    monkeypatch.setattr(_compile, "_modules", {})
    _compile._facts.cache_clear()


def launch(backend: _compile.CupyBackend, params: Any = None, **changes: Any) -> None:
    plain = Launch(ALL[0], "chain_stats", grid=3, block=128)
    backend.launch(plain._replace(**changes), np.zeros((), CHAIN_PARAMS) if params is None else params)


def test_launch_compiles_once_and_uses_the_current_stream(fake: FakeCupy) -> None:
    backend = _compile.CupyBackend()
    threads = [threading.Thread(target=launch, args=(backend,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launch(backend, name="chain_totals")
    assert fake.compiled == [("--std=c++17", *ALL[0].options)]
    assert len(fake.launched) == 9
    assert all(args[:9] == (4711, 3, 1, 1, 128, 1, 1, 0, 77) for args in fake.launched)


def test_launch_checks_its_argument(fake: FakeCupy) -> None:
    backend = _compile.CupyBackend()
    with pytest.raises(TypeError, match="takes one struct of"):
        launch(backend, params=np.zeros((), np.int64))
    with pytest.raises(TypeError, match="takes one struct of"):
        launch(backend, params=np.zeros(2, CHAIN_PARAMS))
    with pytest.raises(ValueError, match="cannot run as 0 blocks"):
        launch(backend, grid=0)
    with pytest.raises(ValueError, match="cannot run as 3 blocks of 128 threads in clusters of 2"):
        launch(backend, cluster=2)
    assert not fake.launched


def test_unsupported_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCupy(capability="70"))
    with pytest.raises(RuntimeError, match=r"compute capability 7\.0.*at least 7\.5"):
        launch(_compile.CupyBackend())


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCupy(failures=[RuntimeError("CuPy failed to load libnvrtc.so.12: OSError")]))
    with pytest.raises(ImportError, match=r"pip install 'cupyspec\[cuda12\]'"):
        launch(_compile.CupyBackend())


def test_compile_error_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    cupy.failures = [cupy.cuda.compiler.CompileException("chain_stats.cu(3): error")]
    install(monkeypatch, cupy)
    with pytest.raises(RuntimeError, match=r"do not compile.*chain_stats\.cu\(3\)"):
        launch(_compile.CupyBackend())


def test_read_only_cache_falls_back_to_a_folder_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy(failures=[PermissionError("kernel_cache")])
    install(monkeypatch, cupy)
    moved: list[bool] = []
    monkeypatch.setattr(_compile, "_use_temporary_cache", lambda error: moved.append(True))
    launch(_compile.CupyBackend())
    assert moved == [True] and len(cupy.compiled) == 2 and len(cupy.launched) == 1


def test_temporary_cache_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(_compile._temporary_cache())
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0
    assert Path(_compile._temporary_cache()) == folder
    folder.chmod(0o777)  # anybody could have put a kernel there
    assert Path(_compile._temporary_cache()) != folder


def test_cache_folder_that_cannot_be_made_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)  # the import itself fails: enough to see what came before
    monkeypatch.setenv("CUPY_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setattr(_compile, "_CUPY_WHEELS", ())
    assert not _compile._can_make(blocked / "cache") and _compile._can_make(tmp_path / "a" / "b")
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr("builtins.__import__", _without_cupy(__import__))
    with pytest.raises(ImportError, match="CUDA arrays need CuPy"):
        _compile.import_cupy()
    assert Path(os.environ["CUPY_CACHE_DIR"]).parent == tmp_path


def _without_cupy(real: Any) -> Any:
    def importer(name: str, *args: Any) -> Any:
        if name == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *args)

    return importer


def test_first_call_inside_a_capture(fake: FakeCupy) -> None:
    """A module loaded inside a capture, which invalidates it; a later replay of a compiled kernel is fine."""
    fake.capturing = True
    with pytest.raises(ValueError, match="make the same call once before"):
        launch(_compile.CupyBackend())
    assert not fake.compiled and not fake.launched
    fake.capturing = False
    launch(_compile.CupyBackend())
    fake.capturing = True
    launch(_compile.CupyBackend())
    assert len(fake.launched) == 2


def test_cache_that_cannot_be_moved_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version's private names: the reason for the move is raised, not the missing name."""
    install(monkeypatch, FakeCupy(failures=[PermissionError("kernel_cache is read-only")]))
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(PermissionError, match="kernel_cache is read-only"):
        launch(_compile.CupyBackend())


def test_two_cupy_wheels_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _compile.require_one_cupy.cache_clear()
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}.get(name) or _absent(),
    )
    with pytest.raises(ImportError, match=r"cupy-cuda12x 14\.2\.0, cupy-cuda13x 14\.2\.0"):
        _compile.import_cupy()


def _absent() -> str:
    raise importlib.metadata.PackageNotFoundError
