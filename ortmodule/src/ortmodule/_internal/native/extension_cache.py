"""The folder of the built extensions, and who may write to it. Standard library only.

The folder is `$ORT_EXTENSIONS_DIR`, else `$XDG_CACHE_HOME/ortmodule/extensions`, else
`~/.cache/ortmodule/extensions`. Its libraries are executed. So they must belong to this user or
root, nobody else may write to them, and each library has its SHA-256 beside it. A group may write
if it is the user's private group, recognized by its name (as with umask 002).
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import shlex
import stat
from pathlib import Path

from ortmodule._internal.errors import MissingDependency

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_root_without_creating() -> Path:
    """Return the cache folder, without creating it.

    Raises:
        MissingDependency: this user has no home folder, and no variable sets another one.
    """
    explicit_folder = os.environ.get("ORT_EXTENSIONS_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(explicit_folder or f"{base}/ortmodule/extensions").expanduser()
    # Such as in a container whose user has no entry in /etc/passwd.
    except RuntimeError:
        raise MissingDependency(
            f"no folder for built extensions: HOME is not set, and user {os.geteuid()} has no home "
            "folder; set ORT_EXTENSIONS_DIR to a folder of your own"
        ) from None


def create_private_folder_or_refuse(folder: Path) -> None:
    """Create a folder of the cache if it is absent.

    Raises:
        MissingDependency: another user could write to it or to a folder around it in the cache.
    """
    root = cache_root_without_creating()
    root.parent.mkdir(parents=True, exist_ok=True)
    for path in reversed([folder, *folder.parents]):
        if path.is_relative_to(root):
            path.mkdir(mode=0o755, exist_ok=True)
            require_not_writable_by_others(path)


def require_not_writable_by_others(path: Path) -> None:
    """Check that nobody else could have written a file or folder.

    Raises:
        MissingDependency: the path belongs to another user, or others may write to it.
    """
    if reason := _reason_others_can_write_or_empty(path):
        advice = (
            "set ORT_EXTENSIONS_DIR to a folder of your own"
            if reason.startswith("belongs")
            else f"type: rm -r {shlex.quote(str(path))} (its contents are rebuilt)"
        )
        owner_text = f"who could place programs there that this user ({os.geteuid()}) runs"
        raise MissingDependency(f"{path}: {reason}, {owner_text}; {advice}")


def write_checksum_and_protect_library(library: Path) -> None:
    """Write a library's checksum beside it, and remove the write permission of others."""
    with library.open("rb") as opened:
        # Otherwise a power failure could leave a checksum without the contents of its file.
        os.fsync(opened.fileno())
    for path in (library, _checksum_path(library)):
        if path != library:
            path.write_text(_checksum(library), encoding="ascii")
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITABLE_BY_OTHERS)


def library_damage_reason_or_empty(library: Path) -> str:
    """Return why a library is not the one that was built; empty if it is."""
    for path in (_checksum_path(library), library):
        if not path.exists():
            return f"{path}: is gone"
        if reason := _reason_others_can_write_or_empty(path):
            return f"{path}: {reason}"
    if _checksum_path(library).read_text(errors="replace") != _checksum(library):
        return f"{library}: differs from the recorded checksum"
    return ""


def _checksum_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _reason_others_can_write_or_empty(file_or_folder: Path) -> str:
    status = file_or_folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    others = stat.S_IWOTH if _is_private_group(status.st_gid) else _WRITABLE_BY_OTHERS
    return "is writable by others" if status.st_mode & others else ""


def _is_private_group(group_id: int) -> bool:
    """Return whether a group is this user's private one: primary, and with the user's name."""
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid == group_id and grp.getgrgid(group_id).gr_name == user.pw_name
    return False
