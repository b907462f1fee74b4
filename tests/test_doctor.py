"""`cupyspec doctor`: what it reports of installations that lack something, and its exit code."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

import cupyspec
from cupyspec import _doctor
from cupyspec.__main__ import main
from cupyspec._doctor import Driver

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Run the doctor on a machine made up: its CuPy wheels, its driver, whether there are kernels."""

    def set_up(wheels: dict[str, str], driver: Driver = Driver(0, [], ""), kernels: Path | None = None) -> None:  # noqa: B008
        monkeypatch.setattr(_doctor, "cupy_wheels", lambda: wheels)
        monkeypatch.setattr(_doctor, "ask_driver", lambda: driver)
        monkeypatch.setattr(_doctor, "kernels", lambda: (kernels, ""))

    return set_up


def diagnosis(capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(["doctor"]) == code
    return capsys.readouterr().out


def to_do(output: str) -> list[str]:
    return [line.strip() for line in output.partition("\nTo do\n")[2].splitlines()]


def test_real_machine(capsys):
    output = diagnosis(capsys)
    for label in ("cupyspec", "python", "numpy", "scipy", "cupy", "torch", "jax", "ml_dtypes", "driver", "devices"):
        assert f"\n{label} " in "\n" + output
    assert "\nCPU call    right\n" in output
    assert cupyspec.__version__ in output


def test_imports_no_framework():
    # Catches versions read by importing: PyTorch alone takes seconds, and a broken one would end the diagnosis.
    code = (
        "import sys; from cupyspec import _doctor; _doctor.ask_driver = lambda: _doctor.Driver(0, [], '');"
        "_doctor.run_doctor(); print('loaded', {'torch', 'jax', 'cupy', 'ml_dtypes', 'scipy.stats'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "loaded set()" in result.stdout


@pytest.mark.parametrize(
    ("cuda", "advice"),
    [
        (0, "pip install 'cupyspec[cuda12]', or 'cupyspec[cuda13]' where the driver is for CUDA 13"),
        (12080, "pip install 'cupyspec[cuda12]'"),
        (13000, "pip install 'cupyspec[cuda13]'"),
    ],
)
def test_missing_cupy_is_named_with_the_extra_for_this_driver(capsys, machine, cuda, advice):
    machine({}, Driver(cuda, ["NVIDIA X"] if cuda else [], ""))
    output = diagnosis(capsys)
    assert "cupy        not installed" in output
    assert to_do(output)[0] == f"CuPy is not installed, CUDA arrays cannot be used: {advice}"
    assert "GPU call    not made" in output


def test_two_wheels_are_found_and_named(capsys, monkeypatch, tmp_path):
    # On disk, as pip leaves them: their modules overwrite each other and pip says nothing.
    for name, version in (("cupy_cuda11x", "13.6.0"), ("cupy_cuda12x", "14.2.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        name = name.replace("_", "-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert _doctor.cupy_wheels() == {"cupy-cuda11x": "13.6.0", "cupy-cuda12x": "14.2.0"}
    (problem,) = _doctor._cupy_problems(_doctor.cupy_wheels(), Driver(12080, [], ""))
    assert problem == (
        "two CuPy wheels overwrite each other: pip uninstall -y cupy-cuda11x cupy-cuda12x && pip install 'cupyspec[cuda12]'"
    )


@pytest.mark.parametrize(
    ("wheels", "driver", "advice"),
    [
        ({"cupy-cuda12x": "13.6.0"}, Driver(12080, ["X"], ""), "pip install -U 'cupy-cuda12x[ctk]>=14.2'"),
        ({"cupy-cuda13x": "14.2.0"}, Driver(12080, ["X"], ""), "pip install 'cupyspec[cuda12]'"),
        ({"cupy-cuda12x": "14.2.0"}, Driver(12080, [], "driver error 999"), "driver error 999"),
        ({"cupy-cuda12x": "14.2.0"}, Driver(12080, [], ""), "CUDA_VISIBLE_DEVICES"),
        ({"cupy-cuda12x": "14.2.0"}, Driver(0, [], ""), "install its driver"),
    ],
)
def test_each_problem_is_one_line_with_what_to_do(capsys, monkeypatch, machine, wheels, driver, advice):
    monkeypatch.setattr(_doctor, "version_of", lambda package: "1.0")
    machine(wheels, driver)
    (problem,) = to_do(diagnosis(capsys))
    assert advice in problem


def test_healthy_cupy_has_no_problem(monkeypatch):
    monkeypatch.setattr(_doctor, "version_of", lambda package: "1.0")
    assert _doctor._cupy_problems({"cupy-cuda12x": "14.10.1"}, Driver(13000, ["X"], "")) == []
    monkeypatch.setattr(_doctor, "version_of", lambda package: None)
    (problem,) = _doctor._cupy_problems({"cupy-cuda12x": "14.2.0rc1"}, Driver(12080, ["X"], ""))
    assert "pip install ml_dtypes" in problem


def wrong_answer(draft_tokens, *arrays, **given):
    return cupyspec.Verification(draft_tokens, draft_tokens[:, 0] * 0, draft_tokens[:, 0] * 0)


def raises(*arrays, **given):
    raise RuntimeError("cannot\nwork")


@pytest.mark.parametrize(
    ("broken", "shown"), [(wrong_answer, "must be ([[2, 3, -1]]"), (raises, "RuntimeError: cannot")]
)
def test_a_broken_cpu_path_fails_the_command(capsys, monkeypatch, machine, broken, shown):
    machine({})
    monkeypatch.setattr(cupyspec, "verify", broken)
    output = diagnosis(capsys, code=1)
    (line,) = (line for line in output.splitlines() if line.startswith("CPU call"))
    assert shown in line
    assert "the CPU path does not work" in to_do(output)[0]


@pytest.mark.parametrize(
    ("broken", "advice"),
    [
        ("compiles", "brings NVRTC"),
        ("one_right_answer", "the GPU path does not work"),
        ("same_tokens", "GPU and CPU disagree"),
    ],
)
def test_gpu_checks_run_in_turn_and_stop_at_the_first_fault(capsys, monkeypatch, machine, tmp_path, broken, advice):
    cupy = types.ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(_doctor, "version_of", lambda package: "1.0")
    machine({"cupy-cuda12x": "14.2.0"}, Driver(12080, ["NVIDIA X"], ""), tmp_path)
    for name in ("compiles", "one_right_answer", "same_tokens"):
        fault = "it broke" if name == broken else ""
        monkeypatch.setattr(_doctor, name, lambda library, fault=fault: fault if library is cupy else "")
    output = diagnosis(capsys)
    assert "NVIDIA X" in output
    assert output.count("it broke") == 1
    (problem,) = to_do(output)
    assert advice in problem


def test_missing_kernels_are_a_problem_only_where_there_should_be_some(capsys, monkeypatch, machine):
    def nothing_there() -> Path:
        raise ImportError("chain.cu is missing; reinstall cupyspec")

    real = _doctor.kernels
    machine({})
    monkeypatch.setattr(_doctor, "kernels", real)
    sources = types.ModuleType("cupyspec._sources")
    sources.kernel_folder = nothing_there
    sources.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "cupyspec._sources", sources)
    assert "chain.cu is missing; reinstall cupyspec" in to_do(diagnosis(capsys))
    sources.kernel_folder = lambda: ROOT / "kernels"
    assert f"\nkernels     {ROOT / 'kernels'}\n" in diagnosis(capsys)
    monkeypatch.setitem(sys.modules, "cupyspec._sources", None)
    assert real() == (None, "")


@pytest.mark.gpu
def test_gpu_machine(capsys):
    output = diagnosis(capsys)
    for label in ("compile", "GPU call", "GPU = CPU"):
        assert f"\n{label:<12}right\n" in output
