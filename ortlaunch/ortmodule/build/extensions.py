"""Build ORT's torch C++ extensions once for each combination of versions, and cache them.

The module owns the extensions' folder in the cache, and determines which ORT wheel is installed.
The control side of ortlaunch imports this module, so torch is not imported here; it runs only in
the compiler's process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ortlaunch import machine
from ortlaunch.cache import (
    cache_root,
    make_cache_folder,
    reason_seal_is_invalid,
    require_not_writable_by_others,
    seal_files,
)
from ortlaunch.errors import MissingDependency, OrtlaunchError
from ortlaunch.ortmodule.build import cuda_libraries, extension_sources

ORT_VERSION = "1.19.2"
EXTRA_OF = {"onnxruntime-training-cpu": "ort-cpu", "onnxruntime-training": "ort-cuda"}
_OTHER_WHEELS = ("onnxruntime", "onnxruntime-gpu")
NEWEST_PYTHON = (3, 11)
# The first major version of CUDA whose nvcc does not compile for compute capability 7.0.
_FIRST_WITHOUT_VOLTA = 13

# Without this extension custom autograd functions are refused; everything else works.
INTEROP = "torch_interop_utils"


def ort_package() -> str:
    """Return the name of the installed onnxruntime-training wheel; read package metadata only.

    Raises:
        MissingDependency: no wheel is installed, its version is wrong, or several wheels provide
            the module `onnxruntime`. The message has the command to type.
    """
    training = versions(EXTRA_OF)
    others = versions(_OTHER_WHEELS)
    if not training:
        raise MissingDependency(_install_hint())
    name, found = next(iter(training.items()))
    if len(training) + len(others) > 1:
        raise MissingDependency(_clash_hint({**training, **others}, EXTRA_OF[name]))
    if found != ORT_VERSION:
        raise MissingDependency(
            f"the repairs of ORTModule are for {name} {ORT_VERSION}, and {found} is installed. "
            f'Type: pip install "ortlaunch[{EXTRA_OF[name]}]"'
        )
    return name


@functools.cache
def version(package: str) -> str | None:
    """Return the version of an installed package from its metadata; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return those of the packages that are installed, with their versions."""
    return {package: found for package in packages if (found := version(package))}


def cache_dir() -> Path:
    """Return the extensions' folder for this Python, torch, ORT and machine; it may not exist."""
    return cache_root() / "extensions" / _key()


def required_names() -> list[str]:
    """Return the names of the extensions that ORT uses with the installed versions."""
    names = ["aten_op_executor", INTEROP]
    if _cuda_versions() is not None:
        names += ["torch_gpu_allocator", "fused_ops"]
    return names


def missing() -> list[str]:
    """Return the names of the required extensions that are absent from the cache or damaged.

    torch_interop_utils is left out if its build failed for this torch.
    """
    refusal = interop_refusal()
    return [name for name in _unbuilt() if not (name == INTEROP and refusal)]


def interop_refusal() -> str:
    """Return why torch_interop_utils could not be built for this torch.

    The text is empty if the extension is built, or if no build was tried.
    """
    folder = cache_dir()
    note = folder / f"{INTEROP}.refused"
    return note.read_text() if note.is_file() and not (folder / f"{INTEROP}.so").is_file() else ""


def _unbuilt() -> list[str]:
    """Return the names of all required extensions that are absent from the cache or damaged."""
    return [name for name in required_names() if _damage(name)]


def damage() -> list[str]:
    """Return a description of each built extension that changed after the build."""
    return [
        why
        for name in required_names()
        if (cache_dir() / f"{name}.so").exists() and (why := _damage(name))
    ]


def _damage(name: str) -> str:
    """Return why an extension must not be loaded; empty if it may be.

    Loading a truncated library would end the process by SIGBUS.

    Raises:
        FileError: another user could have replaced the library.
    """
    folder = cache_dir()
    # Folders that do not exist yet cannot belong to another user.
    for path in filter(Path.is_dir, (cache_root(), folder.parent, folder)):
        require_not_writable_by_others(path)
    return reason_seal_is_invalid(folder / f"{name}.seal")


def build() -> list[str]:
    """Build the missing extensions into the cache and return their names.

    A file lock makes two builders of one cache wait for each other.

    Raises:
        MissingDependency: a tool is absent, the cache cannot be written or the compiler fails.
    """
    import filelock

    if not _unbuilt():
        return []
    _require_tools()
    folder = cache_dir()
    try:
        make_cache_folder("extensions", folder.name)
        with filelock.FileLock(folder / ".lock"):
            # Another process may have built them while this one waited for the lock.
            names = _unbuilt()
            _compile(names, folder)
            for library in (folder / f"{name}.so" for name in names):
                if library.exists():
                    seal_files(library.with_suffix(".seal"), [library])
    except OSError as error:
        raise MissingDependency(
            f"cannot write the cache folder {folder}: {error}. "
            "Set ORTLAUNCH_CACHE to a folder you can write"
        ) from error
    return names


def main() -> int:
    """Run the build of `ortlaunch setup`, in a process of its own; return the exit status."""
    try:
        _announce_and_build()
    except OrtlaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _announce_and_build() -> None:
    names = _unbuilt()
    folder = cache_dir()
    start = time.monotonic()
    if not names:
        print(f"{', '.join(required_names())}: already built in {folder}")
        return
    for why in damage():
        print(f"{why}; building it again")
    print(
        f"building {', '.join(names)} for torch {_torch_version()} and {ort_package()} "
        f"{ORT_VERSION} ...",
        flush=True,
    )
    build()
    print(f"built in {time.monotonic() - start:.0f} s: {folder}")
    if interop_refusal():
        print(
            f"{INTEROP} could not be built, so ORTModule refuses custom autograd functions: "
            f"{interop_refusal()}"
        )


# ------------------------------------------------------------------------------- installed versions


def _torch_version() -> str:
    found = version("torch")
    if found is None:
        raise MissingDependency("torch is not installed. Type: pip install torch")
    return found


def _install_hint() -> str:
    if sys.version_info[:2] > NEWEST_PYTHON:
        return (
            "onnxruntime-training has no wheel for a Python newer than 3.11, and this is "
            f"Python {sys.version_info[0]}.{sys.version_info[1]}. Use Python 3.10 or 3.11"
        )
    return (
        "ORTModule needs ONNX Runtime Training. "
        'Type: pip install "ortlaunch[ort-cpu]" (on a GPU machine: "ortlaunch[ort-cuda]")'
    )


def _clash_hint(found: dict[str, str], extra: str) -> str:
    listed = " and ".join(f"{name} {version}" for name, version in found.items())
    return (
        f"{listed} are installed together, and each overwrites the other's files: keep one. "
        f'Type: pip uninstall -y {" ".join(found)} && pip install "ortlaunch[{extra}]"'
    )


def _package(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise MissingDependency(
            f"the package {name} is listed as installed, but its folder does not exist: "
            "install it again"
        )
    return Path(folders[0])


def _constant(file: Path, name: str) -> str | None:
    """Return a string constant at the top level of a file, read without importing its package."""
    found = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", file.read_text(), re.MULTILINE)
    return found[1] if found else None


def _cuda_versions() -> tuple[str, str] | None:
    """Return the CUDA versions of torch and of ORT if both are CUDA builds, else None."""
    if ort_package() != "onnxruntime-training":
        return None
    torch_cuda = _constant(_package("torch") / "version.py", "cuda")
    ort_cuda = _constant(
        _package("onnxruntime") / "capi" / "build_and_package_info.py", "cuda_version"
    )
    return (torch_cuda, ort_cuda) if torch_cuda and ort_cuda else None


def _key() -> str:
    # If ORT and torch are both absent, the error about ORT is the more useful one, because ORT has
    # wheels for few versions of Python. So its package is determined first.
    ort = f"{ort_package()}-{ORT_VERSION}"
    python = sys.implementation.cache_tag or "python"
    cuda = _cuda_versions()
    gpus = (re.sub(r"[^\w.+]+", "-", _architectures(cuda[0])),) if cuda else ()
    platform = sysconfig.get_platform()
    return "_".join(
        (python, f"torch-{_torch_version()}", ort, platform, extension_sources.revision(), *gpus)
    )


# ---------------------------------------------------------------------------------------- the build


def _search_path() -> str:
    # In a virtual environment that was not activated, ninja is beside python and not on PATH.
    here = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))
    return os.pathsep.join((*here, os.environ.get("PATH", os.defpath)))


def _require_tools() -> None:
    if lacking := list(_lacking_tools()):
        raise MissingDependency(
            f"building ORT's torch extensions needs: {'; '.join(lacking)}. "
            "Then type: ortlaunch setup"
        )


def _lacking_tools() -> Iterator[str]:
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler, path=_search_path()) is None:
        yield f"a C++ compiler ({compiler} was not found; apt-get install g++, or set CXX)"
    if shutil.which("ninja", path=_search_path()) is None:
        yield "ninja (pip install ninja)"
    if importlib.util.find_spec("setuptools") is None:
        yield "setuptools (pip install setuptools)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "Python's C headers (apt-get install python3-dev)"
    if _cuda_versions() and not cuda_libraries.toolkit(_search_path()):
        yield (
            f"CUDA's compiler (nvcc {(_cuda_versions() or ('',))[0]} was not found; set CUDA_HOME)"
        )


def _compile(names: list[str], folder: Path) -> None:
    """Compile the extensions in parallel in a temporary folder, then copy each into `folder`."""
    with tempfile.TemporaryDirectory(prefix="ortlaunch-") as temporary:
        works = {name: Path(temporary) / name for name in names}
        failed = {
            name: problem for name, work in works.items() if (problem := _copy_sources(name, work))
        }
        started = {name: _start(work) for name, work in works.items() if name not in failed}
        failed.update(
            {
                name: _failure(name, works[name])
                for name, process in started.items()
                if process.wait() != 0
            }
        )
        # Training without torch_interop_utils works, so its failure is recorded and not raised.
        if required := [problem for name, problem in failed.items() if name != INTEROP]:
            raise MissingDependency(required[0])
        for name in names:
            if name in failed:
                (folder / f"{name}.refused").write_text(
                    _refusal(failed[name], folder / f"{name}.log")
                )
            else:
                _publish(next(works[name].glob(f"build/lib*/{name}*.so")), folder / f"{name}.so")


def _copy_sources(name: str, work: Path) -> str:
    """Copy an extension's sources out of the wheel and adapt them; return an error, or ""."""
    source = next(_package("onnxruntime").glob(f"training/ortmodule/torch_cpp_extensions/*/{name}"))
    shutil.copytree(source, work, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        extension_sources.adapt(name, work)
    except extension_sources.UnknownSource as error:
        return (
            f"{error}. Type: pip install --force-reinstall --no-deps {ort_package()}=={ORT_VERSION}"
        )
    return ""


def _start(work: Path) -> subprocess.Popen[bytes]:
    with open(work / "build.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "setup.py", "build"],
            cwd=work,
            env={**os.environ, **_build_environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _build_environment() -> dict[str, str]:
    values = {
        "PATH": _search_path(),
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(machine.usable_core_count()),
    }
    # Newer setuptools use CFLAGS in place of Python's flags and older ones add CFLAGS to them, so
    # CFLAGS has Python's flags too. Both CPU extensions only forward calls, so -O1 costs nothing.
    # The other extensions set -O3 themselves; it comes later on the command line and wins.
    values["CFLAGS"] = (
        f"{sysconfig.get_config_var('CFLAGS') or ''} {os.environ.get('CFLAGS', '')} -O1 -g0"
    )
    cuda = _cuda_versions()
    if cuda is not None:
        # torch_cpp_extensions/install.py sets these variables for the extensions' setup.py.
        values["ONNXRUNTIME_CUDA_VERSION"] = cuda[1]
        values["TORCH_CUDA_ARCH_LIST"] = _architectures(cuda[0])
        values["CUDA_HOME"] = cuda_libraries.toolkit(_search_path())
        # Searched last, for toolkits without the headers of cuBLAS, cuSPARSE and cuSOLVER.
        values["CPATH"] = os.pathsep.join(
            filter(None, (os.environ.get("CPATH"), *cuda_libraries.headers(cuda[0])))
        )
        values["ONNXRUNTIME_ROCM_VERSION"] = ""
        values["ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS"] = "-lineinfo,-O3,--use_fast_math,--threads,0"
    return values


def _architectures(cuda: str) -> str:
    """Return the GPU architectures to compile for.

    They are TORCH_CUDA_ARCH_LIST, else all that this CUDA supports.
    """
    # All of them, because a login node has no GPU whose capability could be read.
    oldest = "7.0;7.5" if int(cuda.partition(".")[0]) < _FIRST_WITHOUT_VOLTA else "7.5"
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or f"{oldest};8.0;8.6;9.0+PTX"


def _publish(built: Path, destination: Path) -> None:
    # Copied beside the destination, then renamed: a reader never sees half a file, and the
    # temporary folder may be on another file system.
    arriving = destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        shutil.copyfile(built, arriving)
        os.replace(arriving, destination)
    finally:
        with contextlib.suppress(FileNotFoundError):
            arriving.unlink()


def _failure(name: str, work: Path) -> str:
    """Return the compiler's last lines and the final error, without setuptools' traceback."""
    log = (work / "build.log").read_text(errors="replace")
    compiler, _, traceback = log.partition("Traceback (most recent call last):")
    lines = compiler.splitlines()[-30:] + traceback.strip().splitlines()[-1:]
    return f"building {name} for torch {_torch_version()} failed. The last lines:\n" + "\n".join(
        lines
    )


def _refusal(problem: str, log: Path) -> str:
    """Write a failed build's output to `log`; return its error line and the path of the log."""
    log.write_text(problem)
    lines = problem.splitlines()
    return (
        f"{next((line for line in lines if ' error: ' in line), lines[-1]).strip()} "
        f"(complete output: {log})"
    )


if __name__ == "__main__":
    sys.exit(main())
