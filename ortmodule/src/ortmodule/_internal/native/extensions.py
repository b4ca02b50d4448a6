"""Build ORT's torch C++ extensions once for each combination of versions, and cache them.

The module owns the extensions' folder in the cache, and determines which ORT wheel is installed.
Torch is not imported here; it runs only in the compiler's process.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from typing import NamedTuple

from ortmodule._internal.errors import MissingDependency
from ortmodule._internal.native import cuda_libraries, extension_sources
from ortmodule._internal.native.extension_cache import (
    cache_root_without_creating,
    create_private_folder_or_refuse,
    library_damage_reason_or_empty,
    require_not_writable_by_others,
    write_checksum_and_protect_library,
)

ORT_VERSION = "1.19.2"
SETUP_COMMAND = "python -m ortmodule setup"
EXTRA_BY_PACKAGE = {"onnxruntime-training-cpu": "cpu", "onnxruntime-training": "cuda"}
_OTHER_WHEELS = ("onnxruntime", "onnxruntime-gpu")
NEWEST_PYTHON = (3, 11)
# The first major version of CUDA whose nvcc does not compile for compute capability 7.0.
_FIRST_WITHOUT_VOLTA = 13

# Without this extension custom autograd functions are refused; everything else works.
INTEROP = "torch_interop_utils"


class CudaVersions(NamedTuple):
    """The versions of CUDA that two packages were built for."""

    torch: str
    ort: str


def installed_ort_package_name_or_refuse() -> str:
    """Return the name of the installed onnxruntime-training wheel; read package metadata only.

    Raises:
        MissingDependency: no wheel is installed, its version is wrong, or several wheels provide
            the module `onnxruntime`. The message has the command to type.
    """
    training = installed_version_by_package_name(EXTRA_BY_PACKAGE)
    others = installed_version_by_package_name(_OTHER_WHEELS)
    if not training:
        raise _missing_ort_error()
    name, found_version = next(iter(training.items()))
    if len(training) + len(others) > 1:
        raise _clashing_packages_error({**training, **others}, EXTRA_BY_PACKAGE[name])
    if found_version != ORT_VERSION:
        raise MissingDependency(
            f"the repairs of ORTModule are for {name} {ORT_VERSION}, and {found_version} is installed",
            f'pip install "ortmodule[{EXTRA_BY_PACKAGE[name]}]"',
        )
    return name


@functools.cache
def installed_version_or_none(package_name: str) -> str | None:
    """Return the version of an installed package from its metadata; None if it is not installed."""
    try:
        return importlib.metadata.version(package_name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_version_by_package_name(package_names: Iterable[str]) -> dict[str, str]:
    """Return those of the packages that are installed, with their versions."""
    return {
        package_name: package_version
        for package_name in package_names
        if (package_version := installed_version_or_none(package_name))
    }


def extension_cache_folder() -> Path:
    """Return the extensions' folder for this Python, torch, ORT and machine; it may not exist."""
    return cache_root_without_creating() / _extension_cache_key()


def required_extension_names() -> list[str]:
    """Return the names of the extensions that ORT uses with the installed versions."""
    names = ["aten_op_executor", INTEROP]
    if _cuda_versions_or_none() is not None:
        names += ["torch_gpu_allocator", "fused_ops"]
    return names


def missing_or_damaged_buildable_extension_names() -> list[str]:
    """Return the names of the required extensions that are absent from the cache or damaged.

    torch_interop_utils is left out if its build failed for this torch.
    """
    refusal = reason_interop_is_unbuildable_or_empty()
    return [
        name for name in _unbuilt_or_damaged_extension_names() if not (name == INTEROP and refusal)
    ]


def reason_interop_is_unbuildable_or_empty() -> str:
    """Return why torch_interop_utils could not be built for this torch.

    The text is empty if the extension is built, or if no build was tried.
    """
    folder = extension_cache_folder()
    refusal_file = folder / f"{INTEROP}.refused"
    return (
        refusal_file.read_text()
        if refusal_file.is_file() and not (folder / f"{INTEROP}.so").is_file()
        else ""
    )


def _unbuilt_or_damaged_extension_names() -> list[str]:
    """Return the names of all required extensions that are absent from the cache or damaged."""
    return [
        name
        for name in required_extension_names()
        if _extension_damage_reason_or_refuse_writable_cache(name)
    ]


def descriptions_of_extensions_changed_since_build() -> list[str]:
    """Return a description of each built extension that changed after the build."""
    return [
        description
        for name in required_extension_names()
        if (extension_cache_folder() / f"{name}.so").exists()
        and (description := _extension_damage_reason_or_refuse_writable_cache(name))
    ]


def _extension_damage_reason_or_refuse_writable_cache(extension_name: str) -> str:
    """Return why an extension must not be loaded; empty if it may be.

    Loading a truncated library would end the process by SIGBUS.

    Raises:
        MissingDependency: another user could have replaced the library.
    """
    folder = extension_cache_folder()
    # Folders that do not exist yet cannot belong to another user.
    for path in filter(Path.is_dir, (cache_root_without_creating(), folder.parent, folder)):
        require_not_writable_by_others(path)
    return library_damage_reason_or_empty(folder / f"{extension_name}.so")


def build_missing_extensions_under_lock_and_list_them() -> list[str]:
    """Build the missing extensions into the cache and return their names.

    A file lock makes two builders of one cache wait for each other.

    Raises:
        MissingDependency: a tool is absent, the cache cannot be written or the compiler fails.
    """
    if not _unbuilt_or_damaged_extension_names():
        return []
    _require_build_tools()
    folder = extension_cache_folder()
    try:
        create_private_folder_or_refuse(folder)
        with open(folder / ".lock", "wb") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            # Another process may have built them while this one waited for the lock.
            names = _unbuilt_or_damaged_extension_names()
            _compile_extensions_or_write_interop_refusal(names, folder)
            for library in (folder / f"{name}.so" for name in names):
                if library.exists():
                    write_checksum_and_protect_library(library)
    except OSError as error:
        raise MissingDependency(
            f"cannot write the cache folder {folder}: {error}. "
            "Set ORT_EXTENSIONS_DIR to a folder you can write"
        ) from error
    return names


def setup() -> int:
    """Build ORT's torch extensions for the installed versions, once; return an exit status.

    It prints what it does. A compiler is needed, and a minute or two."""
    try:
        _build_missing_extensions_and_print_progress()
    except MissingDependency as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _build_missing_extensions_and_print_progress() -> None:
    names = _unbuilt_or_damaged_extension_names()
    folder = extension_cache_folder()
    start = time.monotonic()
    if not names:
        print(f"{', '.join(required_extension_names())}: already built in {folder}")
        return
    for description in descriptions_of_extensions_changed_since_build():
        print(f"{description}; building it again")
    print(
        f"building {', '.join(names)} for torch {_installed_torch_version_or_refuse()} and "
        f"{installed_ort_package_name_or_refuse()} "
        f"{ORT_VERSION} ...",
        flush=True,
    )
    build_missing_extensions_under_lock_and_list_them()
    print(f"built in {time.monotonic() - start:.0f} s: {folder}")
    if reason_interop_is_unbuildable_or_empty():
        print(
            f"{INTEROP} could not be built, so ORTModule refuses custom autograd functions: "
            f"{reason_interop_is_unbuildable_or_empty()}"
        )


# ------------------------------------------------------------------------------- installed versions


def _installed_torch_version_or_refuse() -> str:
    torch_version = installed_version_or_none("torch")
    if torch_version is None:
        raise MissingDependency("torch is not installed", "pip install torch")
    return torch_version


def _missing_ort_error() -> MissingDependency:
    if sys.version_info[:2] > NEWEST_PYTHON:
        return MissingDependency(
            "onnxruntime-training has no wheel for a Python newer than 3.11, and this is "
            f"Python {sys.version_info[0]}.{sys.version_info[1]}. Use Python 3.11"
        )
    return MissingDependency(
        "ORTModule needs ONNX Runtime Training",
        'pip install "ortmodule[cpu]" (on a GPU machine: "ortmodule[cuda]")',
    )


def _clashing_packages_error(
    version_by_package: dict[str, str], pip_extra: str
) -> MissingDependency:
    packages_text = " and ".join(
        f"{name} {version}" for name, version in version_by_package.items()
    )
    return MissingDependency(
        f"{packages_text} are installed together, and each overwrites the other's files: keep one",
        f'pip uninstall -y {" ".join(version_by_package)} && pip install "ortmodule[{pip_extra}]"',
    )


def _installed_package_folder_or_refuse(package_name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package_name)
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise MissingDependency(
            f"the package {package_name} is listed as installed, but its folder does not exist: "
            "install it again"
        )
    return Path(folders[0])


def _read_string_constant_or_none(python_file: Path, constant_name: str) -> str | None:
    """Return a string constant at the top level of a file, read without importing its package."""
    match = re.search(
        rf"^{constant_name}\b[^=]*=\s*['\"]([^'\"]+)['\"]", python_file.read_text(), re.MULTILINE
    )
    return match[1] if match else None


def _cuda_versions_or_none() -> CudaVersions | None:
    """Return the CUDA versions of torch and of ORT if both are CUDA builds, else None."""
    if installed_ort_package_name_or_refuse() != "onnxruntime-training":
        return None
    torch_cuda = _read_string_constant_or_none(
        _installed_package_folder_or_refuse("torch") / "version.py", "cuda"
    )
    ort_cuda = _read_string_constant_or_none(
        _installed_package_folder_or_refuse("onnxruntime") / "capi" / "build_and_package_info.py",
        "cuda_version",
    )
    return CudaVersions(torch_cuda, ort_cuda) if torch_cuda and ort_cuda else None


def _extension_cache_key() -> str:
    # If ORT and torch are both absent, the error about ORT is the more useful one, because ORT has
    # wheels for few versions of Python. So its package is determined first.
    ort = f"{installed_ort_package_name_or_refuse()}-{ORT_VERSION}"
    python_tag = sys.implementation.cache_tag or "python"
    cuda = _cuda_versions_or_none()
    gpu_architectures = (
        (re.sub(r"[^\w.+]+", "-", _gpu_architectures_to_compile_for(cuda.torch)),) if cuda else ()
    )
    platform = sysconfig.get_platform()
    return "_".join(
        (
            python_tag,
            f"torch-{_installed_torch_version_or_refuse()}",
            ort,
            platform,
            extension_sources.checksum_of_source_changes(),
            *gpu_architectures,
        )
    )


# ---------------------------------------------------------------------------------------- the build


def _executable_search_path() -> str:
    # In a virtual environment that was not activated, ninja is beside python and not on PATH.
    python_folders = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))
    return os.pathsep.join((*python_folders, os.environ.get("PATH", os.defpath)))


def _require_build_tools() -> None:
    if lacking := list(_missing_build_tool_hints()):
        raise MissingDependency(
            f"building ORT's torch extensions needs: {'; '.join(lacking)}. Then type: {SETUP_COMMAND}"
        )


def _missing_build_tool_hints() -> Iterator[str]:
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler, path=_executable_search_path()) is None:
        yield f"a C++ compiler ({compiler} was not found; apt-get install g++, or set CXX)"
    if shutil.which("ninja", path=_executable_search_path()) is None:
        yield "ninja (pip install ninja)"
    if importlib.util.find_spec("setuptools") is None:
        yield "setuptools (pip install setuptools)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "Python's C headers (apt-get install python3-dev)"
    cuda = _cuda_versions_or_none()
    if cuda and not cuda_libraries.cuda_toolkit_folder_or_empty(_executable_search_path()):
        yield (f"CUDA's compiler (nvcc {cuda.torch} was not found; set CUDA_HOME)")


def _compile_extensions_or_write_interop_refusal(
    extension_names: list[str], cache_folder: Path
) -> None:
    """Compile the extensions in parallel in a temporary folder, then copy each into `cache_folder`."""
    with tempfile.TemporaryDirectory(prefix="ortmodule-") as temporary:
        build_folder_by_name = {name: Path(temporary) / name for name in extension_names}
        problem_by_name = {
            name: problem
            for name, build_folder in build_folder_by_name.items()
            if (problem := _copy_and_adapt_sources_or_error_text(name, build_folder))
        }
        process_by_name = {
            name: _start_build_process_writing_log(build_folder)
            for name, build_folder in build_folder_by_name.items()
            if name not in problem_by_name
        }
        problem_by_name.update(
            {
                name: _read_build_failure_message(name, build_folder_by_name[name])
                for name, process in process_by_name.items()
                if process.wait() != 0
            }
        )
        # Training without torch_interop_utils works, so its failure is recorded and not raised.
        if required_problems := [
            problem for name, problem in problem_by_name.items() if name != INTEROP
        ]:
            raise MissingDependency(required_problems[0])
        for name in extension_names:
            if name in problem_by_name:
                (cache_folder / f"{name}.refused").write_text(
                    _write_refusal_log_and_get_summary(
                        problem_by_name[name], cache_folder / f"{name}.log"
                    )
                )
            else:
                _copy_atomically_into_cache(
                    next(build_folder_by_name[name].glob(f"build/lib*/{name}*.so")),
                    cache_folder / f"{name}.so",
                )


def _copy_and_adapt_sources_or_error_text(extension_name: str, build_folder: Path) -> str:
    """Copy an extension's sources out of the wheel and adapt them; return an error, or ""."""
    source_folder = next(
        _installed_package_folder_or_refuse("onnxruntime").glob(
            f"training/ortmodule/torch_cpp_extensions/*/{extension_name}"
        )
    )
    shutil.copytree(source_folder, build_folder, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        extension_sources.adapt_copied_sources_and_append_loading_code(extension_name, build_folder)
    except extension_sources.UnknownSource as error:
        return (
            f"{error}. Type: pip install --force-reinstall --no-deps "
            f"{installed_ort_package_name_or_refuse()}=={ORT_VERSION}"
        )
    return ""


def _start_build_process_writing_log(build_folder: Path) -> subprocess.Popen[bytes]:
    with open(build_folder / "build.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "setup.py", "build"],
            cwd=build_folder,
            env={**os.environ, **_build_environment_variables()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _build_environment_variables() -> dict[str, str]:
    values = {
        "PATH": _executable_search_path(),
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0))),
    }
    # Newer setuptools use CFLAGS in place of Python's flags and older ones add CFLAGS to them, so
    # CFLAGS has Python's flags too. Both CPU extensions only forward calls, so -O1 costs nothing.
    # The other extensions set -O3 themselves; it comes later on the command line and wins.
    values["CFLAGS"] = (
        f"{sysconfig.get_config_var('CFLAGS') or ''} {os.environ.get('CFLAGS', '')} -O1 -g0"
    )
    cuda = _cuda_versions_or_none()
    if cuda is not None:
        # torch_cpp_extensions/install.py sets these variables for the extensions' setup.py.
        values["ONNXRUNTIME_CUDA_VERSION"] = cuda.ort
        values["TORCH_CUDA_ARCH_LIST"] = _gpu_architectures_to_compile_for(cuda.torch)
        values["CUDA_HOME"] = cuda_libraries.cuda_toolkit_folder_or_empty(_executable_search_path())
        # Searched last, for toolkits without the headers of cuBLAS, cuSPARSE and cuSOLVER.
        values["CPATH"] = os.pathsep.join(
            filter(
                None,
                (os.environ.get("CPATH"), *cuda_libraries.installed_cuda_include_folders(cuda[0])),
            )
        )
        values["ONNXRUNTIME_ROCM_VERSION"] = ""
        values["ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS"] = "-lineinfo,-O3,--use_fast_math,--threads,0"
    return values


def _gpu_architectures_to_compile_for(cuda_version: str) -> str:
    """Return the GPU architectures to compile for.

    They are TORCH_CUDA_ARCH_LIST, else all that this CUDA supports.
    """
    # All of them, because a login node has no GPU whose capability could be read.
    oldest = "7.0;7.5" if int(cuda_version.partition(".")[0]) < _FIRST_WITHOUT_VOLTA else "7.5"
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or f"{oldest};8.0;8.6;9.0+PTX"


def _copy_atomically_into_cache(built_file: Path, destination_file: Path) -> None:
    # Copied beside the destination, then renamed: a reader never sees half a file, and the
    # temporary folder may be on another file system.
    temporary_file = destination_file.with_name(f".{destination_file.name}.{os.getpid()}")
    try:
        shutil.copyfile(built_file, temporary_file)
        os.replace(temporary_file, destination_file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary_file.unlink()


def _read_build_failure_message(extension_name: str, build_folder: Path) -> str:
    """Return the compiler's last lines and the final error, without setuptools' traceback."""
    log = (build_folder / "build.log").read_text(errors="replace")
    compiler, _, traceback = log.partition("Traceback (most recent call last):")
    lines = compiler.splitlines()[-30:] + traceback.strip().splitlines()[-1:]
    return (
        f"building {extension_name} for torch {_installed_torch_version_or_refuse()} failed. The last lines:\n"
        + "\n".join(lines)
    )


def _write_refusal_log_and_get_summary(problem_text: str, log_file: Path) -> str:
    """Write a failed build's output to `log_file`; return its error line and the path of the log."""
    log_file.write_text(problem_text)
    lines = problem_text.splitlines()
    return (
        f"{next((line for line in lines if ' error: ' in line), lines[-1]).strip()} "
        f"(complete output: {log_file})"
    )
