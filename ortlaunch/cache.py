"""Where ortlaunch keeps what is made once: built extensions, trained tokenizers, tokenized corpora, measured engines.

`$ORTLAUNCH_CACHE`, else `$XDG_CACHE_HOME/ortlaunch`, else `~/.cache/ortlaunch`. What lies there is run and trained on,
so that it must be this user's or root's, writable by nobody else, and what was written: every file has a seal beside it
with its size and SHA-256. A group may write that is the user's alone, by its name (as umask 002 takes it).
Standard library, errors and run.folder only.
"""

from __future__ import annotations

import contextlib
import errno
import grp
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
    """The cache folder; not created here.

    Raises:
        FileError: this user has no home folder that it could be in.
    """
    own = os.environ.get("ORTLAUNCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(own).expanduser() if own else Path(base).expanduser() / "ortlaunch"
    except RuntimeError:  # as in a container whose user has no entry in /etc/passwd
        why = f"HOME is not set, and user {os.geteuid()} has no home folder"
        raise FileError(
            f"no folder for the cache: {why}; set ORTLAUNCH_CACHE to a folder of your own", 2
        ) from None


def cache_folder(*names: str) -> Path:
    """A folder of the cache, made where it is absent.

    Raises:
        FileError: somebody else could put something into it, or what it should lie in cannot be made.
    """
    try:
        cache_root().parent.mkdir(parents=True, exist_ok=True)
        for folder in _down_to(names):
            folder.mkdir(mode=0o755, exist_ok=True)
            require_own(folder)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}; ORTLAUNCH_CACHE names another place"
        raise FileError(f"{cache_root()}: cannot be made: {why}", 2) from error
    return cache_root().joinpath(*names)


def _down_to(names: Sequence[str]) -> Iterator[Path]:
    """The cache folder, and each of the folders below."""
    for count in range(len(names) + 1):
        yield cache_root().joinpath(*names[:count])


def require_own(path: Path) -> None:
    """Refuse what somebody else could have written.

    Raises:
        FileError: it belongs to another user, or others may write to it.
    """
    why = foreign(path)
    if why:
        mend = f"type: rm -r {shlex.quote(str(path))} (what it holds is made again)"
        if why.startswith("belongs"):
            mend = "set ORTLAUNCH_CACHE to a folder of your own"
        whom = f"who could put programs there that this user ({os.geteuid()}) runs"
        raise FileError(f"{path}: {why}, {whom}; {mend}", 2)


def foreign(path: Path) -> str:
    """Who else can write there, or nothing."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    others = stat.S_IWOTH if _private(found.st_gid) else _WRITABLE_BY_OTHERS
    return "is writable by others" if found.st_mode & others else ""


def _private(group: int) -> bool:
    """Whether a group is this user alone: the user's first, and of the user's name."""
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid())
        return user.pw_gid == group and grp.getgrgid(group).gr_name == user.pw_name
    return False


def own_seal(file: Path) -> Path:
    """The seal of a file alone, which one of several files takes over."""
    return file.with_name(f"{file.name}.seal")


def seal(record: Path, files: Sequence[Path]) -> None:
    """Record what the files are, which lie in the record's folder or below; nobody else may write to them any more.

    One that lies in it and has a seal of its own is not read again.
    """
    whole: Json = {}
    for file in files:
        alone = own_seal(file)
        if alone != record and alone.exists() and not changed(alone):
            whole |= read_json(alone)
            continue
        with file.open("rb") as opened:
            os.fsync(
                opened.fileno()
            )  # else a power cut could leave what was sealed without its content
        file.chmod(stat.S_IMODE(file.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
        whole[str(file.relative_to(record.parent))] = {"sha256": _sha256(file), **_stamp(file)}
    write_json(record, whole)
    record.chmod(stat.S_IMODE(record.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
    for alone in {*map(own_seal, files)} - {record}:
        alone.unlink(missing_ok=True)


def changed(record: Path) -> str:
    """What is wrong with the record or a file of it; nothing where all are as they were sealed."""
    why = _wrong(record)
    if why:
        return f"{record}: {why}"
    try:
        whole = {record.parent / name: dict(was) for name, was in read_json(record).items()}
        reasons = ((file, _wrong(file) or _differs(file, was)) for file, was in whole.items())
        why = next((f"{file}: {reason}" for file, reason in reasons if reason), "")
        stale = not why and any(_stamp(file).items() - was.items() for file, was in whole.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{record}: is no seal"
    if stale:
        with contextlib.suppress(OSError):  # a cache that this user may only read
            seal(record, [*whole])
    return why


def renew(record: Path, make: Callable[[], Sequence[Path]]) -> None:
    """Let `make` write the record's files, unless they are what they were; that they were changed is noted."""
    why = changed(record)
    if why:
        if record.exists():
            _NOTES.append(f"{why}; made anew")
        record.unlink(missing_ok=True)
        try:
            seal(record, make())
        except OSError as error:
            if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.filename = str(record)  # a full disk is met in a write, which has no name
            raise


def note(text: str) -> None:
    """Let the run say this once, whichever rank found it."""
    _NOTES.append(text)


def take_notes() -> list[str]:
    """What was found since the last call: files of the cache that were changed, and what else was noted."""
    notes, _NOTES[:] = [*_NOTES], []
    return notes


def _wrong(path: Path) -> str:
    return foreign(path) if path.exists() else "is gone"


def _differs(file: Path, was: dict[str, object]) -> str:
    """How a file is another than it was; it is read only where its size, dates or place on the disk differ."""
    now = _stamp(file)
    if now["bytes"] != was["bytes"]:
        return f"has {now['bytes']} bytes, and had {was['bytes']}"
    same = all(was[name] == value for name, value in now.items()) or _sha256(file) == was["sha256"]
    return "" if same else "is not what was written"


def _stamp(file: Path) -> dict[str, int]:
    """What differs after every change of a file; the change time is the kernel's own."""
    found = file.stat()
    return {
        "bytes": found.st_size,
        "mtime": found.st_mtime_ns,
        "ctime": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _sha256(file: Path) -> str:
    import hashlib  # here: every command imports this module

    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for piece in iter(lambda: opened.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()
