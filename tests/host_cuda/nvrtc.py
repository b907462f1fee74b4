"""NVRTC called directly, from its wheel: compiles kernels where there is neither a GPU, nor a driver, nor CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path


class CompileError(Exception):
    """NVRTC's log."""


@cache
def library() -> ctypes.CDLL | None:
    """libnvrtc of the wheel nvidia-cuda-nvrtc-cu12, if installed."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        pattern = "bin/nvrtc64_*_0.dll" if sys.platform == "win32" else "lib/libnvrtc.so.*"
        for path in sorted(Path(folder).glob(pattern)):
            if ".alt." not in path.name:
                return ctypes.CDLL(str(path))
    return None


def compile_cubin(text: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """(cubin, log) of a kernel file's text; CompileError with the log if it does not compile."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("NVRTC's wheel is not installed")
    program = ctypes.c_void_p()

    def check(code: int, what: str) -> None:
        if code:
            raise CompileError(f"{what}: NVRTC error {code}\n{log()}")

    def log() -> str:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        nvrtc.nvrtcGetProgramLog(program, buffer)
        return buffer.value.decode(errors="replace")

    check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), "create program"
    )
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        check(nvrtc.nvrtcCompileProgram(program, len(options), encoded), name)
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "cubin size")
        cubin = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
        return cubin.raw, log()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
