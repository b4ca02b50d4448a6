"""The CUDA 11 libraries of ORT's wheel are detected, loaded in order, and named if missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule._internal.native import cuda_libraries

NAMES = [library.name for library in cuda_libraries.LIBRARIES]


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `nvidia` with every library, and a system without any."""
    for library in cuda_libraries.LIBRARIES:
        path = tmp_path / library.folder / "lib" / library.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(
        cuda_libraries, "_nvidia_folders_in_site_packages", lambda: iter([tmp_path])
    )
    monkeypatch.setattr(cuda_libraries, "_does_linker_find_library", lambda library: False)
    return tmp_path


def test_absent_libraries_are_named_with_their_package(nvidia: Path) -> None:
    """The check names the missing file and the command that installs it; it starts no process."""
    assert cuda_libraries.missing_cuda_libraries() == []
    (nvidia / "cudnn" / "lib" / "libcudnn.so.8").unlink()
    assert [library.name for library in cuda_libraries.missing_cuda_libraries()] == [
        "libcudnn.so.8"
    ]
    assert cuda_libraries.gpu_failure_reason_or_empty() == (
        "the CUDA libraries of onnxruntime-training are not installed (libcudnn.so.8). "
        'Type: pip install "ortmodule[cuda]" (or: pip install --no-deps nvidia-cudnn-cu11)'
    )


def test_libraries_are_loaded_by_path_in_the_order_of_their_needs(
    nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are loaded by path, in order; an absent one is left to the system's linker."""
    loaded: list[str] = []
    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    # One library that only the system may have.
    (nvidia / "curand" / "lib" / "libcurand.so.10").unlink()
    cuda_libraries.load_installed_cuda_libraries()
    assert [Path(path).name for path in loaded] == [
        name for name in NAMES if name != "libcurand.so.10"
    ]
    assert all(Path(path).is_absolute() for path in loaded)


def test_a_library_of_the_system_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LD_LIBRARY_PATH counts if no package has the library."""
    monkeypatch.setattr(cuda_libraries, "_nvidia_folders_in_site_packages", lambda: iter([]))
    for name in NAMES:
        (tmp_path / name).touch()
    assert cuda_libraries.missing_cuda_libraries() == list(cuda_libraries.LIBRARIES)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert cuda_libraries.missing_cuda_libraries() == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", ""),
        (
            "print('Failed to load library x.so with error: libcudart.so.11.0: cannot open'); exit(1)",
            "(exit status 1): Failed to load library x.so with error: libcudart.so.11.0: cannot open",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
            "cannot compute on this GPU (signal 6): no message",
        ),
    ],
)
def test_the_check_survives_an_abort(
    code: str, why: str, nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check reports the result of its process in one line, also if ONNX Runtime aborts it."""
    monkeypatch.setattr(cuda_libraries, "_CHECK_COMMAND", (sys.executable, "-c", code))
    assert cuda_libraries.gpu_failure_reason_or_empty().endswith(why)
    assert bool(cuda_libraries.gpu_failure_reason_or_empty()) == bool(why)


def test_the_toolkit_is_found_and_headers_come_from_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toolkit follows from CUDA_HOME or a link to nvcc, the headers from torch's CUDA."""
    for folder in (
        "toolkit/bin",
        "toolkit/include",
        "links",
        "nvidia/cu13/include",
        "nvidia/cublas/include",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "toolkit" / "include" / "cuda_runtime.h").touch()
    (tmp_path / "toolkit" / "bin" / "nvcc").touch(0o755)
    (tmp_path / "links" / "nvcc").symlink_to(tmp_path / "toolkit" / "bin" / "nvcc")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    # nvcc by a link, and in the toolkit itself.
    for folder in ("links", "toolkit/bin"):
        assert cuda_libraries.cuda_toolkit_folder_or_empty(str(tmp_path / folder)) == str(
            tmp_path / "toolkit"
        )
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert cuda_libraries.cuda_toolkit_folder_or_empty(str(tmp_path / "links")) == "/opt/cuda"
    monkeypatch.setattr(
        cuda_libraries, "_nvidia_folders_in_site_packages", lambda: iter([tmp_path / "nvidia"])
    )
    assert cuda_libraries.installed_cuda_include_folders("13.0") == [
        str(tmp_path / "nvidia" / "cu13" / "include")
    ]
    assert str(
        tmp_path / "nvidia" / "cublas" / "include"
    ) in cuda_libraries.installed_cuda_include_folders("12.6")


# The exact versions of the wheels that pyproject.toml pins.
_WHEEL = r'"((?:onnxruntime-training|nvidia-[a-z-]+-cu11)==[0-9.]+)'
_WHEELS = re.findall(_WHEEL, (Path(__file__).parents[3] / "pyproject.toml").read_text())
# The source of a CUDA driver without a GPU. It has the functions that ONNX Runtime loads, and
# cuGetProcAddress, by which the CUDA runtime loads its own. 100 is CUDA_ERROR_NO_DEVICE.
_DRIVER = """
#include <string.h>
#define NO_DEVICE(name) int cu##name(void) { return 100; }
NO_DEVICE(Init) NO_DEVICE(GetErrorName) NO_DEVICE(FuncSetAttribute) NO_DEVICE(LinkComplete) NO_DEVICE(ModuleUnload)
NO_DEVICE(LinkDestroy) NO_DEVICE(ModuleLoadData) NO_DEVICE(LinkCreate_v2) NO_DEVICE(ModuleGetFunction)
NO_DEVICE(LinkAddFile_v2) NO_DEVICE(LinkAddData_v2) NO_DEVICE(LaunchCooperativeKernel) NO_DEVICE(LaunchKernel)
NO_DEVICE(DeviceGetAttribute) NO_DEVICE(FuncSetCacheConfig)
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuGetProcAddress(const char *name, void **address, int version, unsigned long flags) {
  int own = !strcmp(name, "cuGetProcAddress"), number = !strcmp(name, "cuDriverGetVersion");
  *address = own ? (void *)cuGetProcAddress : number ? (void *)cuDriverGetVersion : (void *)cuInit;
  return 0;
}
"""
_CHECK = """
import sys
from ortmodule._internal.native import cuda_libraries
names = [library.name for library in cuda_libraries.missing_cuda_libraries()]
print(names, cuda_libraries.gpu_failure_reason_or_empty())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheels_libraries_resolve_without_a_gpu(tmp_path: Path) -> None:
    """Missing files are named; with all of them ORT fails only for lack of a driver or GPU."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver: the check computes here")
    site = tmp_path / "site"

    def install(*packages: str) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-compile",
            "--target",
            str(site),
            *packages,
        ]
        subprocess.run(pip, check=True, timeout=900)

    def checked(**environ: str) -> str:
        setup = f"import sys; sys.path.insert(0, {str(site)!r})\n"
        # By PYTHONPATH the check's process finds the CUDA wheel before this environment's CPU one.
        done = subprocess.run(
            [sys.executable, "-c", setup + _CHECK],
            env={
                "PYTHONPATH": str(site),
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return done.stdout

    # ORT's wheel alone: every library is missing.
    install(_WHEELS[0])
    assert checked().startswith(str(NAMES))
    install(*_WHEELS[1:])
    found = checked()
    # Signal 6: without a driver ORT aborts the process.
    assert found.startswith("[] ONNX Runtime cannot compute on this GPU (signal 6)"), found
    assert "cudaDriverWrapper.cc" in found
    build = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(build, input=_DRIVER, text=True, check=True, timeout=60)
    found = checked(LD_LIBRARY_PATH=str(tmp_path))
    cause = "(exit status 1): CUDA failure 100: no CUDA-capable device is detected"
    assert found.strip() == f"[] ONNX Runtime cannot compute on this GPU {cause}"
