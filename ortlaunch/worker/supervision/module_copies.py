"""Copies of the user's own modules in the run folder, as they were when the run imported them."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import ortmodule
from ortlaunch.base.cache import cache_root_without_creating
from ortlaunch.base.errors import FileError
from ortlaunch.base.units import human_bytes
from ortlaunch.run_folder.folder import RunDir, write_text_atomically

# Bytes of one file, and of all: enough for source code, too little for data.
_MAX_FILE_BYTES = 1 << 20
_MAX_TOTAL_BYTES = 8 << 20
_INSTALLED = ("site-packages", "dist-packages")


def copy_user_modules_into_run_folder_and_list_notes(
    run: RunDir, keeps_existing: bool = False
) -> list[str]:
    """Copy the modules that are imported now from outside installed packages.

    Args:
        run: the run folder.
        keeps_existing: whether this run has copied before; then only newly imported modules are copied.

    Returns:
        Notes on modules that differ from an earlier start's, and on files that are too large.
    """
    notes = []
    remaining_bytes = _MAX_TOTAL_BYTES
    for module in imported_user_modules():
        source = Path(str(module.__file__))
        target = run.modules / relative_module_path(module)
        text = (
            source.read_bytes()
            if source.stat().st_size <= min(_MAX_FILE_BYTES, remaining_bytes)
            else None
        )
        if text is None:
            notes.append(
                f"{source} ({human_bytes(source.stat().st_size)}) is not copied into {run.modules}: "
                "too large"
            )
        elif not target.exists() or not keeps_existing:
            if target.exists() and target.read_bytes() != text:
                notes.append(
                    f"{source} differs from the version that an earlier start of this run imported"
                )
            write_text_atomically(target, text)
        remaining_bytes -= len(text or b"")
    return notes


def imported_user_modules() -> Iterator[ModuleType]:
    """Yield the user's modules by name: not Python's, ortlaunch's, installed or generated ones."""
    foreign_folders = _library_and_cache_folders()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # An alias in sys.modules is not copied again. __main__ is no importable module.
        if (
            not isinstance(file, str)
            or not file.endswith(".py")
            or not module.__name__ == name != "__main__"
        ):
            continue
        if _is_user_file(file, foreign_folders) and all(
            part.isidentifier() for part in name.split(".")
        ):
            yield module


def is_user_file(source_path: str) -> bool:
    """Return whether a source file is the user's, not Python's, ortlaunch's or a package's."""
    return _is_user_file(source_path, _library_and_cache_folders())


def _library_and_cache_folders() -> tuple[str, ...]:
    foreign = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(__file__).parents[2]),
        str(Path(ortmodule.__file__).parent),
    ]
    # TorchInductor writes the modules that it generates there.
    foreign.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    # Without a home folder there is no cache folder.
    with contextlib.suppress(FileError):
        foreign.append(str(cache_root_without_creating()))
    return tuple(
        f"{folder}{os.sep}" for path in foreign if path for folder in {path, os.path.realpath(path)}
    )


def _is_user_file(source_path: str, foreign_folders: tuple[str, ...]) -> bool:
    # The unresolved path first: resolving thousands of installed modules takes most of a second.
    return (
        not _is_foreign(source_path, foreign_folders)
        and not _is_foreign(os.path.realpath(source_path), foreign_folders)
        and os.path.isfile(source_path)
    )


def _is_foreign(source_path: str, foreign_folders: tuple[str, ...]) -> bool:
    parts = source_path.split(os.sep)
    return source_path.startswith(foreign_folders) or any(
        part in _INSTALLED or part.startswith("torchinductor_") for part in parts
    )


def relative_module_path(module: ModuleType) -> Path:
    """Return the path of a module below its folder on Python's path."""
    path = Path(*module.__name__.split("."))
    return path / "__init__.py" if hasattr(module, "__path__") else path.with_suffix(".py")
