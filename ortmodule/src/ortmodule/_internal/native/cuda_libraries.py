"""Find and load the CUDA 11 libraries of onnxruntime-training 1.19.2, and check the GPU.

The CUDA wheel is a CUDA 11.8 + cuDNN 8 build, and torch's wheels do not include those libraries.
They come from separate packages (extra `ort-cuda`) or from the system. Without them ORT computes on
the CPU. They are loaded by path before onnxruntime is imported. A torch of CUDA 12 or 13 can be in
the same process, because its libraries have other names and versioned symbols.

The module also finds the CUDA toolkit and the headers that the extensions are compiled with. The
face imports this module, so only the standard library is imported at the top.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROVIDER = "CUDAExecutionProvider"
# The first use may compile kernels, for a GPU that the wheel has no machine code for.
_CHECK_SECONDS = 300
# -P: any numpy.py of the current folder must not be imported.
_CHECK_COMMAND = (sys.executable, "-P", "-m", __name__)


class CudaLibrary(NamedTuple):
    """A shared library, its folder in site-packages/nvidia, and the package that provides it."""

    name: str
    folder: str
    package: str


# In the order in which they need one another (readelf -d libonnxruntime_providers_cuda.so).
LIBRARIES = (
    CudaLibrary("libcudart.so.11.0", "cuda_runtime", "nvidia-cuda-runtime-cu11"),
    CudaLibrary("libcublasLt.so.11", "cublas", "nvidia-cublas-cu11"),
    CudaLibrary("libcublas.so.11", "cublas", "nvidia-cublas-cu11"),
    CudaLibrary("libcurand.so.10", "curand", "nvidia-curand-cu11"),
    CudaLibrary("libcufft.so.10", "cufft", "nvidia-cufft-cu11"),
    CudaLibrary("libcudnn.so.8", "cudnn", "nvidia-cudnn-cu11"),
)


def missing_cuda_libraries() -> list[CudaLibrary]:
    """Return the libraries that neither an installed package nor the dynamic linker provides.

    Nothing is loaded.
    """
    return [
        library
        for library in LIBRARIES
        if _installed_library_path_or_none(library) is None
        and not _does_linker_find_library(library)
    ]


def cuda_install_command_text(missing: list[CudaLibrary]) -> str:
    """Return the command that installs the missing libraries."""
    packages = " ".join(dict.fromkeys(library.package for library in missing))
    return f'pip install "ortmodule[cuda]" (or: pip install --no-deps {packages})'


def load_installed_cuda_libraries() -> None:
    """Load the libraries into this process, so that onnxruntime's CUDA provider finds them.

    Libraries without an installed package are skipped.
    """
    for library in LIBRARIES:
        path = _installed_library_path_or_none(library)
        if path is not None:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def gpu_failure_reason_or_empty() -> str:
    """Return why ONNX Runtime does not run on this process's GPU; empty if it does."""
    if absent := missing_cuda_libraries():
        names = ", ".join(library.name for library in absent)
        return (
            f"the CUDA libraries of onnxruntime-training are not installed ({names}). "
            f"Type: {cuda_install_command_text(absent)}"
        )
    # In a subprocess: where a library or the driver is absent, ORT may abort the process.
    try:
        result = subprocess.run(
            _CHECK_COMMAND, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"one Relu of ONNX Runtime on CUDA was not computed in {_CHECK_SECONDS} s"
    if result.returncode == 0:
        return ""
    output = result.stdout + result.stderr
    ending = (
        f"signal {-result.returncode}"
        if result.returncode < 0
        else f"exit status {result.returncode}"
    )
    causes = (
        re.findall(r"CUDA failure \d+: [^;\n]*|.*Failed to load library.*", output)
        + output.strip().splitlines()[-1:]
    )
    return (
        f"ONNX Runtime cannot compute on this GPU ({ending}): "
        f"{causes[0].strip() if causes else 'no message'}"
    )


def cuda_toolkit_folder_or_empty(executable_search_path: str) -> str:
    """Return the folder of the CUDA toolkit; empty if there is none.

    CUDA_HOME and CUDA_PATH come first, then nvcc's folder on `executable_search_path`, then /usr/local/cuda.
    """
    nvcc = Path(shutil.which("nvcc", path=executable_search_path) or "/usr/local/cuda/bin/nvcc")
    # nvcc on PATH may be a link or a script outside the toolkit.
    homes = (nvcc.parents[1], nvcc.resolve().parents[1], Path("/usr/local/cuda"))
    complete_homes = (
        str(home) for home in homes if (home / "include" / "cuda_runtime.h").is_file()
    )
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or next(complete_homes, "")


def installed_cuda_include_folders(cuda_version: str) -> list[str]:
    """Return the include folders that torch's wheels for this CUDA version provide."""
    folder_pattern = (
        "c*" if cuda_version.startswith("12.") else f"cu{cuda_version.partition('.')[0]}"
    )
    return [
        str(path)
        for folder in _nvidia_folders_in_site_packages()
        for path in sorted(folder.glob(f"{folder_pattern}/include"))
    ]


def _installed_library_path_or_none(cuda_library: CudaLibrary) -> Path | None:
    paths = (
        folder / cuda_library.folder / "lib" / cuda_library.name
        for folder in _nvidia_folders_in_site_packages()
    )
    return next((path for path in paths if path.exists()), None)


def _nvidia_folders_in_site_packages() -> Iterator[Path]:
    """Yield the folders `nvidia` of site-packages, a namespace that several packages share."""
    spec = importlib.util.find_spec("nvidia")
    yield from map(Path, (spec.submodule_search_locations or []) if spec else [])


def _does_linker_find_library(cuda_library: CudaLibrary) -> bool:
    folders = [
        *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)),
        # The run path of the wheel's CUDA provider.
        "/usr/local/cuda-11.8/lib",
    ]
    return any(
        Path(folder, cuda_library.name).exists() for folder in folders
    ) or _does_linker_cache_have_library(cuda_library)


def _does_linker_cache_have_library(cuda_library: CudaLibrary) -> bool:
    stem, _, version = cuda_library.name.removeprefix("lib").partition(".so.")
    library_name = ctypes.util.find_library(stem)
    return library_name is not None and library_name.endswith(f".so.{version}")


def _serialized_relu_model() -> bytes:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def compute_relu_on_cuda_print_and_get_exit_status() -> int:
    """Compute one Relu on CUDA; return 0 if ONNX Runtime ran it there."""
    load_installed_cuda_libraries()
    import numpy
    import onnxruntime

    session = onnxruntime.InferenceSession(_serialized_relu_model(), providers=[PROVIDER])
    if session.get_providers()[0] != PROVIDER:
        print(f"the session runs on {session.get_providers()[0]}")
        return 1
    (result,) = session.run(None, {"x": numpy.array([-1, 2], numpy.float32)})
    print(result.tolist())
    return int(result.tolist() != [0.0, 2.0])


if __name__ == "__main__":
    sys.exit(compute_relu_on_cuda_print_and_get_exit_status())
