"""What importing the package pulls in, and what the test options promise about missing libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FRAMEWORKS = {"cupy", "cupy_backends", "cupyx", "jax", "jaxlib", "numba", "paddle", "tensorflow", "torch", "triton"}
# What an import needs neither at run time nor in every process: test tools, and SciPy's slow half.
NOT_AT_IMPORT = FRAMEWORKS | {"hypothesis", "matplotlib", "pytest", "scipy.stats"}

LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"
IMPORT_ALL = """
import importlib, pkgutil
import cupyspec
for module in pkgutil.walk_packages(cupyspec.__path__, "cupyspec."):
    if module.name not in ("cupyspec._cuda", "cupyspec._run_cuda"):  # CuPy's, imported with the first CUDA array
        importlib.import_module(module.name)
"""


def run(code: str) -> str:
    """What a fresh interpreter prints; the checkout is its first import path, installed or not."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def modules_after(code: str) -> set[str]:
    return set(json.loads(run(f"{code}\n{LOADED}")))


def test_import_pulls_in_no_framework_and_no_test_tool() -> None:
    loaded = modules_after("import cupyspec")
    assert "numpy" in loaded
    assert loaded & NOT_AT_IMPORT == set()


def test_no_module_of_the_package_imports_a_framework() -> None:
    """A framework at the top of any module would make an optional library a required one for whoever imports it."""
    assert modules_after(IMPORT_ALL) & FRAMEWORKS == set()


def test_import_takes_a_modest_time() -> None:
    """Processor time beyond NumPy's, the least of three and far above what is measured: a busy machine changes little."""
    code = "import time, numpy; start = time.process_time(); import cupyspec; print(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.5


def test_every_public_name_exists_once() -> None:
    code = """
import cupyspec
assert len(set(cupyspec.__all__)) == len(cupyspec.__all__)
print([name for name in cupyspec.__all__ if not hasattr(cupyspec, name)])
"""
    assert run(code).strip() == "[]"


PROBE = """
import pytest

def test_one(need_frontend):
    need_frontend("jax")

def test_all(frontend):
    pass

@pytest.mark.gpu
def test_gpu():
    raise RuntimeError("ran without a GPU")
"""


def run_pytest(tmp_path: Path, *options: str, hide: str = "") -> subprocess.CompletedProcess[str]:
    """A pytest run under this suite's conftest on a few small tests, with some libraries made unimportable."""
    test = tmp_path / "test_probe.py"
    test.write_text(PROBE)
    code = f"""
import sys
for name in {hide!r}.split():
    sys.modules[name] = None  # imports of it raise ImportError, find_spec finds nothing
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
    options = ("-p", "no:cacheprovider", "-p", "conftest", "-rs", "-q", *options)
    # An empty configuration file of its own: neither this repository's options nor a parent folder's apply.
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    return subprocess.run(
        [sys.executable, "-c", code, *options, str(test)],
        cwd=tmp_path,
        # -1 hides every device from the driver, so that a machine with a GPU answers like one without.
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": "", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_missing_library_skips_with_a_reason(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, hide="torch jax cupy")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 5 skipped" in result.stdout
    assert "jax is not installed (--frontends jax makes this a failure)" in result.stdout


def test_gpu_tests_skip_with_a_reason_where_no_device_is_visible(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "-m", "gpu", hide="torch jax cupy")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 skipped, 5 deselected" in result.stdout
    assert "needs a GPU: " in result.stdout


def test_a_missing_library_that_was_requested_fails_the_run(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "--frontends", "numpy,jax", hide="torch jax cupy")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "requested but not installed: jax" in result.stderr


def test_an_unknown_library_is_refused(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "--frontends", "numpy,jaxx")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown ['jaxx']" in result.stderr
