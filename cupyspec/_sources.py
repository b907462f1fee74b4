"""Find the CUDA sources and make one self-contained text of a kernel file.

CuPy's disk cache does not look at included files, so an edited header would bring back a stale binary. Expanded
includes are part of the text it does look at, and need no include path.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'#include "([^"]+)"')


def _find(candidates: tuple[Path, ...]) -> Path:
    for folder in candidates:
        if (folder / "chain_verify.cu").is_file():
            return folder
    looked = " nor ".join(str(folder) for folder in candidates)
    raise ImportError(
        f"cupyspec's CUDA sources are missing: chain_verify.cu is neither in {looked}; reinstall cupyspec"
    )


@cache
def kernel_folder() -> Path:
    """Folder of the CUDA sources: inside an installed package, beside it in a checkout."""
    return _find((_PACKAGE / "kernels", _PACKAGE.parent / "kernels"))


def expand(folder: Path, name: str) -> str:
    """Text of `folder/name` with every ``#include "..."`` replaced by that file, each once; lines keep their numbers."""
    seen = {name}

    def lines_of(file: str) -> list[str]:
        lines = [f'#line 1 "{file}"']
        for number, line in enumerate((folder / file).read_text(encoding="utf-8").splitlines(), 1):
            include = _INCLUDE.match(line)
            if include and include[1] not in seen:
                seen.add(include[1])
                lines += [*lines_of(include[1]), f'#line {number + 1} "{file}"']
            elif include or line.startswith("#pragma once"):
                lines.append("")  # keeps the numbers of the lines below
            else:
                lines.append(line)
        return lines

    return "\n".join(lines_of(name)) + "\n"


@cache
def source(name: str) -> str:
    """Expanded text of a kernel file, read once per process."""
    return expand(kernel_folder(), name)
