"""Explain a failed read or write of ortlaunch's own files in one line: file, reason, remedy.

The only module that renders an OSError for the user. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import site
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.base.cache import cache_root_without_creating
from ortlaunch.base.errors import FileError

_NO_SPACE = "free some space"
# Remedies; "": the system's own message is enough.
_REMEDY_BY_ERRNO = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EIO: "the disk or its server has a fault",
    errno.ESTALE: "the disk or its server has a fault",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "this machine has too many open files",
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    errno.E2BIG: "the variables of launch.env and your shell exceed the kernel's limit",
    errno.ENOLCK: (
        "a disk has no file locks (flock), which run folder, ORTLAUNCH_CACHE and TMPDIR need"
    ),
    errno.EROFS: "",
    errno.EACCES: "",
    errno.EPERM: "",
    errno.ENAMETOOLONG: "it is longer than the disk allows",
    errno.ENOTDIR: "a part of it is a file, not a folder",
    errno.EEXIST: "it is a file where a folder should be",
}
# Not the user's fault, so the exit status is 1 and not 2: a scheduler may try again.
_MACHINE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
)


def one_line_file_error_or_none(
    error: OSError, folder_option_name: str = "--run-dir"
) -> FileError | None:
    """Return an error as one line; None if it has neither a file nor a known cause.

    Args:
        error: the error of the system.
        folder_option_name: the option by which a user chooses another location, unless the file is in the cache.
    """
    # None means a bug, so the caller raises the error again with its traceback.
    if error.errno == errno.ENOENT and not _current_folder_exists():
        return FileError("the current folder no longer exists; cd to one that does", 2)
    cause = _REMEDY_BY_ERRNO.get(error.errno or 0)
    if error.filename is None and cause is None:
        return None
    path = None if error.filename is None else os.fsdecode(error.filename)
    path_and_reason = ": ".join(filter(None, (path, error.strerror or type(error).__name__)))
    # Nobody chooses another folder for the file of a package.
    movable = path is not None and not _is_below(path, *map(Path, site.getsitepackages()))
    message_parts = [
        path_and_reason,
        cause,
        _advice_for_other_folder(str(path), folder_option_name) if movable else None,
    ]
    return FileError(
        "; ".join(filter(None, message_parts)), 1 if error.errno in _MACHINE_ERRORS else 2
    )


@contextlib.contextmanager
def explain_errors_on_run_folder_or_cache_files(run_folder: Path) -> Iterator[None]:
    """Explain errors about files of the run folder and of the cache.

    All others, such as those of the user's code, keep their traceback.

    Raises:
        FileError: in place of such an OSError.
    """
    try:
        yield
    except OSError as error:
        path = error.filename
        is_own_file = (
            error.errno in _REMEDY_BY_ERRNO
            and isinstance(path, (str, Path))
            and _is_below(path, run_folder, *_cache_folder_or_none())
        )
        # ENOLCK has no file name.
        file_error = (
            one_line_file_error_or_none(error)
            if is_own_file or error.errno == errno.ENOLCK
            else None
        )
        if file_error is None:
            raise
        raise file_error from error


def _advice_for_other_folder(path: str, folder_option: str) -> str:
    """Return how to choose another location for a file."""
    is_cache = _is_below(path, *_cache_folder_or_none())
    return f"{'ORTLAUNCH_CACHE' if is_cache else folder_option} can name another folder"


def _cache_folder_or_none() -> list[Path]:
    """Return the cache folder; empty if this user has none."""
    with contextlib.suppress(FileError):
        return [cache_root_without_creating()]
    return []


def _is_below(path: str | Path, *folders: Path) -> bool:
    absolute_path = Path(os.path.abspath(path))
    return any(absolute_path.is_relative_to(os.path.abspath(folder)) for folder in folders)


def _current_folder_exists() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True
