"""CUDA 11 libraries of onnxruntime-training 1.19.2: finding and loading them, and a check that ORT runs on the GPU.

The wheel for CUDA is a CUDA 11.8 + cuDNN 8 build, and torch's wheels do not bring those libraries. They come from
packages of their own (extra `ort-cuda`) or the system. They are loaded by path before onnxruntime, beside a torch of
CUDA 12 or 13, whose libraries have other names and versioned symbols. Without them ORT computes on the CPU.
Also finds the toolkit and the headers that extensions are compiled with.
The control side imports this: nothing but the standard library at the top.
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

from ortlaunch import start

PROVIDER = "CUDAExecutionProvider"
_CHECK_SECONDS = (
    300  # a first use may compile kernels for a GPU that the wheel has no machine code for
)


class Library(NamedTuple):
    """A shared library, the folder of site-packages/nvidia that may have it, and the package that brings it."""

    name: str
    folder: str
    package: str


# In the order in which they need one another (readelf -d libonnxruntime_providers_cuda.so).
LIBRARIES = (
    Library("libcudart.so.11.0", "cuda_runtime", "nvidia-cuda-runtime-cu11"),
    Library("libcublasLt.so.11", "cublas", "nvidia-cublas-cu11"),
    Library("libcublas.so.11", "cublas", "nvidia-cublas-cu11"),
    Library("libcurand.so.10", "curand", "nvidia-curand-cu11"),
    Library("libcufft.so.10", "cufft", "nvidia-cufft-cu11"),
    Library("libcudnn.so.8", "cudnn", "nvidia-cudnn-cu11"),
)


def missing() -> list[Library]:
    """Libraries that are neither in an installed package nor where the dynamic linker looks; nothing is loaded."""
    return [
        library for library in LIBRARIES if _installed(library) is None and not _in_system(library)
    ]


def hint(absent: list[Library]) -> str:
    """The command that installs what is missing."""
    packages = " ".join(dict.fromkeys(library.package for library in absent))
    return f'pip install "ortlaunch[ort-cuda]" (or: pip install --no-deps {packages})'


def preload() -> None:
    """Load the libraries for this process, so that onnxruntime's CUDA provider finds them; absent ones are skipped."""
    for library in LIBRARIES:
        path = _installed(library)
        if path is not None:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def check() -> str:
    """Why ONNX Runtime does not run on this process's GPU; empty where it does.

    Runs one Relu on CUDA in a process of its own: where a library or the driver is absent, ORT may abort the process.
    """
    absent = missing()
    if absent:
        names = ", ".join(library.name for library in absent)
        return f"the CUDA libraries of onnxruntime-training are not installed ({names}). Type: {hint(absent)}"
    command = start.command("ortlaunch.ortmodule.build.cuda_libraries")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"one Relu of ONNX Runtime on CUDA was not computed in {_CHECK_SECONDS} s"
    if done.returncode == 0:
        return ""
    output = done.stdout + done.stderr
    ending = (
        f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    )
    causes = (
        re.findall(r"CUDA failure \d+: [^;\n]*|.*Failed to load library.*", output)
        + output.strip().splitlines()[-1:]
    )
    return f"ONNX Runtime cannot compute on this GPU ({ending}): {causes[0].strip() if causes else 'no message'}"


def toolkit(search_path: str) -> str:
    """Folder of the CUDA toolkit: the user's, else nvcc's (which may be a link or a script), else the usual one."""
    nvcc = Path(shutil.which("nvcc", path=search_path) or "/usr/local/cuda/bin/nvcc")
    homes = (nvcc.parents[1], nvcc.resolve().parents[1], Path("/usr/local/cuda"))
    whole = (str(home) for home in homes if (home / "include" / "cuda_runtime.h").is_file())
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or next(whole, "")


def headers(cuda: str) -> list[str]:
    """Folders of headers that the wheels of a torch for this version of CUDA bring."""
    name = "c*" if cuda.startswith("12.") else f"cu{cuda.partition('.')[0]}"
    return [str(path) for folder in _folders() for path in sorted(folder.glob(f"{name}/include"))]


def _installed(library: Library) -> Path | None:
    paths = (folder / library.folder / "lib" / library.name for folder in _folders())
    return next((path for path in paths if path.exists()), None)


def _folders() -> Iterator[Path]:
    """The folders `nvidia` of site-packages: a namespace that several packages share."""
    spec = importlib.util.find_spec("nvidia")
    yield from map(Path, (spec.submodule_search_locations or []) if spec else [])


def _in_system(library: Library) -> bool:
    """Whether the dynamic linker finds it: in LD_LIBRARY_PATH, the wheel's own run path, or its cache."""
    folders = [
        *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)),
        "/usr/local/cuda-11.8/lib",
    ]
    return any(Path(folder, library.name).exists() for folder in folders) or _in_linker_cache(
        library
    )


def _in_linker_cache(library: Library) -> bool:
    stem, _, version = library.name.removeprefix("lib").partition(".so.")
    found = ctypes.util.find_library(stem)
    return found is not None and found.endswith(f".so.{version}")


def _relu() -> bytes:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def main() -> int:
    """Compute one Relu on CUDA; 0 where ONNX Runtime did it there."""
    preload()
    import numpy
    import onnxruntime

    session = onnxruntime.InferenceSession(_relu(), providers=[PROVIDER])
    if session.get_providers()[0] != PROVIDER:
        print(f"the session runs on {session.get_providers()[0]}")
        return 1
    (result,) = session.run(None, {"x": numpy.array([-1, 2], numpy.float32)})
    print(result.tolist())
    return int(result.tolist() != [0.0, 2.0])


if __name__ == "__main__":
    sys.exit(main())
