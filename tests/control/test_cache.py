"""The cache folder: whom it is taken from, and whether what lies in it is what was written."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from ortlaunch.cache import cache_folder, cache_root, changed, seal
from ortlaunch.errors import FileError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, not yet there."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the file another user's than the one who runs; the other's number."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    return path.stat().st_uid


def test_folders_of_the_cache_are_the_users_alone(cache: Path) -> None:
    """Whatever the umask says, nobody else may write where programs are loaded from."""
    before = os.umask(0)
    try:
        folder = cache_folder("a", "b")
    finally:
        os.umask(before)
    assert folder == cache / "a" / "b"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "a", folder)] == [
        0o755
    ] * 3


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b")])
def test_a_folder_of_another_user_is_refused(
    names: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every folder from the cache folder down is looked at; the message says what would be right."""
    cache_folder("a", "b")
    wrong = cache.joinpath(*names)
    other = give_away(wrong, monkeypatch)
    with pytest.raises(FileError) as caught:
        cache_folder("a", "b")
    first = wrong if os.getuid() == 0 else cache
    assert str(caught.value) == (
        f"{first}: belongs to user {other}, who could put programs there that this user ({os.geteuid()}) runs; "
        "set ORTLAUNCH_CACHE to a folder of your own"
    )
    assert caught.value.exit_status == 2


def test_a_folder_that_others_write_to_is_refused(cache: Path) -> None:
    """A folder that anybody may write to holds anybody's files."""
    cache_folder("a").chmod(0o757)
    with pytest.raises(FileError) as caught:
        cache_folder("a")
    assert str(caught.value) == (
        f"{cache / 'a'}: is writable by others, who could put programs there that this user ({os.geteuid()}) runs; "
        f"type: rm -r {cache / 'a'} (what it holds is made again)"
    )


def test_a_private_group_may_write(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that bears the user's name and is the user's first is the user alone, as umask 002 takes it; no other."""
    user = pwd.getpwuid(os.geteuid())
    folder = cache_folder("a")
    os.chown(folder, -1, user.pw_gid)
    folder.chmod(0o775)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((user.pw_name, "x", gid, [])))
    assert cache_folder("a") == folder
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("staff", "x", gid, [])))
    with pytest.raises(FileError, match="is writable by others"):
        cache_folder("a")


def sealed(cache: Path, text: str = "content") -> tuple[Path, Path]:
    """A file in the cache and its seal."""
    folder = cache_folder("files")
    file = folder / "x.bin"
    record = folder / "x.seal"
    file.write_text(text)
    seal(record, [file])
    return file, record


def test_what_was_sealed_is_unchanged(cache: Path) -> None:
    """A file is taken as long as it is what was written, also with another date."""
    file, record = sealed(cache)
    assert changed(record) == ""
    os.utime(file, (1, 1))
    assert [changed(record), changed(record)] == ["", ""]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("cont", "has 4 bytes, and had 7"), ("contenT", "is not what was written"), (None, "is gone")],
)
def test_another_content_is_seen(text: str | None, reason: str, cache: Path) -> None:
    """A file that was cut, changed or removed is named with what is wrong."""
    file, record = sealed(cache)
    file.write_text(text) if text is not None else file.unlink()
    assert changed(record) == f"{file}: {reason}"


def test_a_file_of_another_user_is_seen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another user owns can change at any time."""
    file, record = sealed(cache)
    other = give_away(file, monkeypatch)
    assert changed(record) in (
        f"{file}: belongs to user {other}",
        f"{record}: belongs to user {other}",
    )


@pytest.mark.parametrize("text", [None, "", "[]", '{"x.bin": 1}', '{"x.bin": {}}'])
def test_without_a_seal_nothing_is_taken(text: str | None, cache: Path) -> None:
    """A record that is absent or unreadable says nothing of its files."""
    _, record = sealed(cache)
    record.write_text(text) if text is not None else record.unlink()
    assert changed(record) == f"{record}: {'is gone' if text is None else 'is no seal'}"


def test_sealed_files_are_the_users_alone(cache: Path) -> None:
    """A file that was written under umask 000 is not left writable by all."""
    before = os.umask(0)
    try:
        file, record = sealed(cache)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, record)] == [0o644] * 2


def test_a_folder_that_cannot_be_made_where_its_parent_is_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a file system that takes none."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", "/proc/nocache")
    with pytest.raises(
        FileError, match=r"^/proc/nocache: cannot be made: .*; ORTLAUNCH_CACHE names another place$"
    ):
        cache_folder("tokens")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in /etc/passwd: the cache needs a place, and the error says which."""
    for name in ("HOME", "XDG_CACHE_HOME", "ORTLAUNCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home"))
    )
    with pytest.raises(
        FileError,
        match=r"^no folder for the cache: HOME is not set, and user .* set ORTLAUNCH_CACHE",
    ):
        cache_root()


def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user whose HOME is none."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", "/dev/null/home/cache")
    mend = "/dev/null/home/cache: cannot be made: Not a directory: /dev/null/home; ORTLAUNCH_CACHE names another place"
    with pytest.raises(FileError, match=f"^{mend}$"):
        cache_folder("tokens")
