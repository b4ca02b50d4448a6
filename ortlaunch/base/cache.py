"""The cache: trained tokenizers, tokenized corpora and measured engines.

Its folder is `$ORTLAUNCH_CACHE`, else `$XDG_CACHE_HOME/ortlaunch`, else `~/.cache/ortlaunch`. Its
files are trained on. So they must belong to this user or root, nobody else may write
to them, and every file has a seal beside it with its size and SHA-256. A group may write if it is
the user's private group, recognized by its name (as with umask 002). Standard library, errors and
run.folder only.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import pwd
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from ortlaunch.base.errors import FileError
from ortlaunch.run_folder.folder import read_json_or_raise_damaged, write_json_atomically

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NOTES: list[str] = []


def cache_root_without_creating() -> Path:
    """Return the cache folder, without creating it.

    Raises:
        FileError: this user has no home folder, and no variable sets another one.
    """
    explicit_folder = os.environ.get("ORTLAUNCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return (
            Path(explicit_folder).expanduser()
            if explicit_folder
            else Path(base).expanduser() / "ortlaunch"
        )
    # Such as in a container whose user has no entry in /etc/passwd.
    except RuntimeError:
        reason = f"HOME is not set, and user {os.geteuid()} has no home folder"
        raise FileError(
            f"no folder for the cache: {reason}; set ORTLAUNCH_CACHE to a folder of your own", 2
        ) from None


def create_private_cache_folder_or_refuse(*sub_folder_names: str) -> Path:
    """Return a folder of the cache, and create it if it is absent.

    Raises:
        FileError: another user could write to it, or it cannot be created.
    """
    try:
        cache_root_without_creating().parent.mkdir(parents=True, exist_ok=True)
        for count in range(len(sub_folder_names) + 1):
            folder = cache_root_without_creating().joinpath(*sub_folder_names[:count])
            folder.mkdir(mode=0o755, exist_ok=True)
            require_not_writable_by_others(folder)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}; set ORTLAUNCH_CACHE to another folder"
        raise FileError(f"{cache_root_without_creating()}: cannot be made: {reason}", 2) from error
    return cache_root_without_creating().joinpath(*sub_folder_names)


def cache_file_path_by_hashed_key(record_folder_name: str, json_key: object) -> Path:
    """Return the file of the cache for the record of a kind that this key, of JSON values, has."""
    # Imported here, because every command imports this module.
    import hashlib

    text = json.dumps(json_key, sort_keys=True)
    return (
        cache_root_without_creating()
        / record_folder_name
        / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    )


def require_not_writable_by_others(path: Path) -> None:
    """Check that nobody else could have written a file or folder.

    Raises:
        FileError: the path belongs to another user, or others may write to it.
    """
    if reason := reason_others_can_write_or_empty(path):
        advice = (
            "set ORTLAUNCH_CACHE to a folder of your own"
            if reason.startswith("belongs")
            else f"type: rm -r {shlex.quote(str(path))} (its contents are rebuilt)"
        )
        owner_text = f"who could place programs there that this user ({os.geteuid()}) runs"
        raise FileError(f"{path}: {reason}, {owner_text}; {advice}", 2)


def reason_others_can_write_or_empty(file_or_folder: Path) -> str:
    """Return the reason why another user can write to a path; "" if none can."""
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


def single_file_checksum_record_path(file: Path) -> Path:
    """Return the path of the seal of a single file; a seal of several files replaces it."""
    return file.with_name(f"{file.name}.seal")


def merge_into_checksum_record_and_protect_files(
    checksum_record_path: Path, files: Sequence[Path]
) -> None:
    """Write a seal of files, and remove the write permission of others.

    Args:
        checksum_record_path: the path of the seal.
        files: files in the folder of the seal, or below it.
    """
    sums_by_name: dict[str, object] = {}
    for file in files:
        # A large file with a valid seal of its own need not be read again.
        single_seal = single_file_checksum_record_path(file)
        if (
            single_seal != checksum_record_path
            and single_seal.exists()
            and not reason_checksums_differ_refreshing_times_if_same(single_seal)
        ):
            sums_by_name |= read_json_or_raise_damaged(single_seal)
            continue
        with file.open("rb") as opened:
            # Otherwise a power failure could leave a seal without the contents of its file.
            os.fsync(opened.fileno())
        file.chmod(stat.S_IMODE(file.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
        sums_by_name[str(file.relative_to(checksum_record_path.parent))] = {
            "sha256": _sha256_of_file(file),
            **_size_times_and_inode(file),
        }
    write_json_atomically(checksum_record_path, sums_by_name)
    checksum_record_path.chmod(
        stat.S_IMODE(checksum_record_path.stat().st_mode) & ~_WRITABLE_BY_OTHERS
    )
    for single_seal in {*map(single_file_checksum_record_path, files)} - {checksum_record_path}:
        single_seal.unlink(missing_ok=True)


def reason_checksums_differ_refreshing_times_if_same(checksum_record_path: Path) -> str:
    """Return why a seal or one of its files is invalid; "" if all are as they were sealed."""
    reason = _reason_file_is_unsafe(checksum_record_path)
    if reason:
        return f"{checksum_record_path}: {reason}"
    try:
        stamps_by_file = {
            checksum_record_path.parent / name: dict(recorded_stamp)
            for name, recorded_stamp in read_json_or_raise_damaged(checksum_record_path).items()
        }
        reasons = (
            (
                file,
                _reason_file_is_unsafe(file)
                or _size_or_checksum_difference_or_empty(file, recorded_stamp),
            )
            for file, recorded_stamp in stamps_by_file.items()
        )
        reason = next((f"{file}: {reason}" for file, reason in reasons if reason), "")
        has_other_dates = not reason and any(
            _size_times_and_inode(file).items() - recorded_stamp.items()
            for file, recorded_stamp in stamps_by_file.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{checksum_record_path}: is not a checksum file"
    # Same contents with other dates, such as of a copied cache: the next check will be fast again.
    if has_other_dates:
        # The user may have no permission to write to the cache.
        with contextlib.suppress(OSError):
            merge_into_checksum_record_and_protect_files(checksum_record_path, [*stamps_by_file])
    return reason


def write_files_and_checksums_unless_they_match(
    checksum_record_path: Path, write_files: Callable[[], Sequence[Path]]
) -> None:
    """Call `write_files` to write the files of a seal, unless they are valid; note a change of theirs."""
    if reason := reason_checksums_differ_refreshing_times_if_same(checksum_record_path):
        if checksum_record_path.exists():
            _NOTES.append(f"{reason}; rebuilt")
        checksum_record_path.unlink(missing_ok=True)
        try:
            merge_into_checksum_record_and_protect_files(checksum_record_path, write_files())
        except OSError as error:
            # A write to a full disk fails without a file name.
            if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.filename = str(checksum_record_path)
            raise


def add_cache_note(text: str) -> None:
    """Add a note that the run prints once, from whichever rank it comes."""
    _NOTES.append(text)


def take_cache_notes() -> list[str]:
    """Return and clear the notes since the last call, such as changed files of the cache."""
    notes, _NOTES[:] = [*_NOTES], []
    return notes


def _reason_file_is_unsafe(path: Path) -> str:
    return reason_others_can_write_or_empty(path) if path.exists() else "is gone"


def _size_or_checksum_difference_or_empty(
    file_path: Path, recorded_size_times_and_checksum: dict[str, object]
) -> str:
    """Return how a file differs from its seal; "" if it does not."""
    # Its contents are read only if size, dates or inode differ.
    stamp = _size_times_and_inode(file_path)
    if stamp["bytes"] != recorded_size_times_and_checksum["bytes"]:
        return f"has {stamp['bytes']} bytes, and had {recorded_size_times_and_checksum['bytes']}"
    is_same = (
        all(recorded_size_times_and_checksum[name] == value for name, value in stamp.items())
        or _sha256_of_file(file_path) == recorded_size_times_and_checksum["sha256"]
    )
    return "" if is_same else "differs from the recorded checksum"


def _size_times_and_inode(file_path: Path) -> dict[str, int]:
    """Return properties of a file that change with its contents."""
    # A program can set mtime, but only the kernel sets ctime.
    status = file_path.stat()
    return {
        "bytes": status.st_size,
        "mtime": status.st_mtime_ns,
        "ctime": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _sha256_of_file(file_path: Path) -> str:
    # Imported here, because every command imports this module.
    import hashlib

    digest = hashlib.sha256()
    with file_path.open("rb") as opened:
        for piece in iter(lambda: opened.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()
