"""The cache: built extensions, trained tokenizers, tokenized corpora and measured engines.

Its folder is `$ORTLAUNCH_CACHE`, else `$XDG_CACHE_HOME/ortlaunch`, else `~/.cache/ortlaunch`. Its
files are executed and trained on. So they must belong to this user or root, nobody else may write
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ortlaunch.errors import FileError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import read_json, write_json

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NOTES: list[str] = []


def cache_root() -> Path:
    """Return the cache folder, without creating it.

    Raises:
        FileError: this user has no home folder, and no variable sets another one.
    """
    own = os.environ.get("ORTLAUNCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(own).expanduser() if own else Path(base).expanduser() / "ortlaunch"
    # Such as in a container whose user has no entry in /etc/passwd.
    except RuntimeError:
        why = f"HOME is not set, and user {os.geteuid()} has no home folder"
        raise FileError(
            f"no folder for the cache: {why}; set ORTLAUNCH_CACHE to a folder of your own", 2
        ) from None


def cache_folder(*names: str) -> Path:
    """Return a folder of the cache, and create it if it is absent.

    Raises:
        FileError: another user could write to it, or it cannot be created.
    """
    try:
        cache_root().parent.mkdir(parents=True, exist_ok=True)
        for folder in _down_to(names):
            folder.mkdir(mode=0o755, exist_ok=True)
            require_own(folder)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}; set ORTLAUNCH_CACHE to another folder"
        raise FileError(f"{cache_root()}: cannot be made: {why}", 2) from error
    return cache_root().joinpath(*names)


def _down_to(names: Sequence[str]) -> Iterator[Path]:
    """Yield the cache folder and each folder on the path below it."""
    for count in range(len(names) + 1):
        yield cache_root().joinpath(*names[:count])


def record_file(kind: str, key: object) -> Path:
    """Return the file of the cache for the record of a kind that this key, of JSON values, has."""
    # Imported here, because every command imports this module.
    import hashlib

    text = json.dumps(key, sort_keys=True)
    return cache_root() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def require_own(path: Path) -> None:
    """Check that nobody else could have written a file or folder.

    Raises:
        FileError: the path belongs to another user, or others may write to it.
    """
    if why := foreign(path):
        mend = f"type: rm -r {shlex.quote(str(path))} (its contents are rebuilt)"
        if why.startswith("belongs"):
            mend = "set ORTLAUNCH_CACHE to a folder of your own"
        whom = f"who could place programs there that this user ({os.geteuid()}) runs"
        raise FileError(f"{path}: {why}, {whom}; {mend}", 2)


def foreign(path: Path) -> str:
    """Return the reason why another user can write to a path; "" if none can."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    others = stat.S_IWOTH if _private(found.st_gid) else _WRITABLE_BY_OTHERS
    return "is writable by others" if found.st_mode & others else ""


def _private(group: int) -> bool:
    """Return whether a group is this user's private one: primary, and with the user's name."""
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid == group and grp.getgrgid(group).gr_name == user.pw_name
    return False


def own_seal(file: Path) -> Path:
    """Return the path of the seal of a single file; a seal of several files replaces it."""
    return file.with_name(f"{file.name}.seal")


def seal(record: Path, files: Sequence[Path]) -> None:
    """Write a seal of files, and remove the write permission of others.

    Args:
        record: the path of the seal.
        files: files in the folder of the seal, or below it.
    """
    whole: Json = {}
    for file in files:
        # A large file with a valid seal of its own need not be read again.
        alone = own_seal(file)
        if alone != record and alone.exists() and not changed(alone):
            whole |= read_json(alone)
            continue
        with file.open("rb") as opened:
            # Otherwise a power failure could leave a seal without the contents of its file.
            os.fsync(opened.fileno())
        file.chmod(stat.S_IMODE(file.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
        whole[str(file.relative_to(record.parent))] = {"sha256": _sha256(file), **_stamp(file)}
    write_json(record, whole)
    record.chmod(stat.S_IMODE(record.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
    for alone in {*map(own_seal, files)} - {record}:
        alone.unlink(missing_ok=True)


def changed(record: Path) -> str:
    """Return why a seal or one of its files is invalid; "" if all are as they were sealed."""
    why = _wrong(record)
    if why:
        return f"{record}: {why}"
    try:
        whole = {record.parent / name: dict(was) for name, was in read_json(record).items()}
        reasons = ((file, _wrong(file) or _differs(file, was)) for file, was in whole.items())
        why = next((f"{file}: {reason}" for file, reason in reasons if reason), "")
        stale = not why and any(_stamp(file).items() - was.items() for file, was in whole.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{record}: is not a checksum file"
    # Same contents with other dates, such as of a copied cache: the next check will be fast again.
    if stale:
        # The user may have no permission to write to the cache.
        with contextlib.suppress(OSError):
            seal(record, [*whole])
    return why


def renew(record: Path, make: Callable[[], Sequence[Path]]) -> None:
    """Call `make` to write the files of a seal, unless they are valid; note a change of theirs."""
    if why := changed(record):
        if record.exists():
            _NOTES.append(f"{why}; rebuilt")
        record.unlink(missing_ok=True)
        try:
            seal(record, make())
        except OSError as error:
            # A write to a full disk fails without a file name.
            if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.filename = str(record)
            raise


def note(text: str) -> None:
    """Add a note that the run prints once, from whichever rank it comes."""
    _NOTES.append(text)


def take_notes() -> list[str]:
    """Return and clear the notes since the last call, such as changed files of the cache."""
    notes, _NOTES[:] = [*_NOTES], []
    return notes


def _wrong(path: Path) -> str:
    return foreign(path) if path.exists() else "is gone"


def _differs(file: Path, was: dict[str, object]) -> str:
    """Return how a file differs from its seal; "" if it does not."""
    # Its contents are read only if size, dates or inode differ.
    now = _stamp(file)
    if now["bytes"] != was["bytes"]:
        return f"has {now['bytes']} bytes, and had {was['bytes']}"
    same = all(was[name] == value for name, value in now.items()) or _sha256(file) == was["sha256"]
    return "" if same else "differs from the recorded checksum"


def _stamp(file: Path) -> dict[str, int]:
    """Return properties of a file that change with its contents."""
    # A program can set mtime, but only the kernel sets ctime.
    found = file.stat()
    return {
        "bytes": found.st_size,
        "mtime": found.st_mtime_ns,
        "ctime": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _sha256(file: Path) -> str:
    # Imported here, because every command imports this module.
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for piece in iter(lambda: opened.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()
