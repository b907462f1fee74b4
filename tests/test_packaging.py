"""What is in the wheel and the sdist, and that each way of installing finds the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".cu", ".cuh")


def kernel_texts(folder: Path) -> dict[str, bytes]:
    """Every CUDA source below a folder, by its path there."""
    paths = (path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class Built(NamedTuple):
    source: Path  # a copy of the checkout, built from
    sdist: Path
    wheel: Path  # built from the sdist, so that it shows what the sdist lacks


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    # A copy: setuptools writes build/ and *.egg-info beside the sources, and takes stale files from them again.
    source = tmp_path_factory.mktemp("source") / "checkout"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=skipped)
    (source / "kernels" / "folder").mkdir()
    (source / "kernels" / "folder" / "probe.cuh").write_text(
        "// A later file, in a folder of its own, must travel too.\n"
    )
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(source, sdist, wheel)


def python(*arguments: str, cwd: Path | None = None) -> str:
    """What a fresh interpreter prints; PYTHONPATH is not handed on."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_carries_every_kernel_unchanged(built: Built) -> None:
    prefix = "cupyspec/kernels/"
    with zipfile.ZipFile(built.wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(prefix) and name.endswith(SUFFIXES)]
        shipped = {name.removeprefix(prefix): archive.read(name) for name in names}
    assert shipped == kernel_texts(built.source / "kernels")


def test_wheel_carries_every_module_and_py_typed(built: Built) -> None:
    """The packages are listed by hand in pyproject.toml: one that was forgotten there is missing here."""
    modules = {path.relative_to(built.source).as_posix() for path in (built.source / "cupyspec").rglob("*.py")}
    assert (modules | {"cupyspec/py.typed"}) - wheel_names(built.wheel) == set()


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    names = wheel_names(built.wheel)
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"cupyspec", info}
    assert {Path(name).suffix for name in names if name.startswith("cupyspec/")} <= {".py", ".typed", *SUFFIXES}
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.read(f"{info}/top_level.txt").decode().split() == ["cupyspec"]
        assert "cupyspec = cupyspec.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_wheel_metadata(built: Built) -> None:
    import cupyspec

    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == cupyspec.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"bench", "cuda12", "cuda13", "test"}
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in required) == ["numpy", "scipy"]
    # The test extra must fit beside either CuPy wheel, so it may name neither.
    assert not [line for line in metadata.get_all("Requires-Dist") if "cupy-" in line and 'extra == "cuda1' not in line]


def test_sdist_carries_what_a_build_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "cupyspec/py.typed"}
    needed |= {f"kernels/{name}" for name in kernel_texts(built.source / "kernels")}
    assert needed - names == set()


REPORT = """
import cupyspec
from cupyspec._sources import kernel_folder
print(cupyspec.__file__, kernel_folder(), sep="\\n")
"""


def found_by(*, first: Path, editable: bool = False) -> tuple[Path, Path]:
    """The package and the kernels' folder that an interpreter finds with `first` as its site folder.

    Started without its own site folders (-S), whose .pth files may lead to another installation of cupyspec; NumPy's
    folder is then put back as a plain path.
    """
    libraries = Path(np.__file__).parent.parent
    if editable and (libraries / "cupyspec").is_dir():
        pytest.skip(f"cupyspec is installed as a wheel in {libraries}: it comes before any editable installation")
    paths = f"import site, sys; sys.path.append({str(libraries)!r}); "
    paths += f"site.addsitedir({str(first)!r})" if editable else f"sys.path.insert(0, {str(first)!r})"
    package, kernels = python("-S", "-c", paths + REPORT, cwd=first).splitlines()
    return Path(package).parent, Path(kernels)


def test_installed_wheel_finds_its_kernels(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path)
    package, kernels = found_by(first=tmp_path)
    assert package == tmp_path / "cupyspec"
    assert kernels == package / "kernels"
    assert kernel_texts(kernels) == kernel_texts(built.source / "kernels")


def test_editable_installation_finds_the_checkouts_kernels(built: Built, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    # The hook that `pip install -e` calls; what pip would do then is to unpack this wheel.
    build = f"from setuptools.build_meta import build_editable; build_editable({str(wheels)!r})"
    python("-c", build, cwd=built.source)
    (wheel,) = wheels.glob("*.whl")
    site_folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_folder)
    package, kernels = found_by(first=site_folder, editable=True)
    assert package == built.source / "cupyspec"
    assert kernels.resolve() == built.source / "kernels"


def test_uninstalled_checkout_finds_its_kernels() -> None:
    package, kernels = found_by(first=ROOT)
    assert package == ROOT / "cupyspec"
    assert kernels.resolve() == ROOT / "kernels"
