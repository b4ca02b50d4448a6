"""The cache folder: which owners are accepted, and how changed files are found."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from ortlaunch.base.cache import (
    cache_root_without_creating,
    create_private_cache_folder_or_refuse,
    merge_into_checksum_record_and_protect_files,
    reason_checksums_differ_refreshing_times_if_same,
)
from ortlaunch.base.errors import FileError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a cache folder for this test alone; it does not exist yet."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a file belong to another user than the current one, and return that user's id."""
    # Only root can change an owner; for other users the test changes the current user instead.
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    return path.stat().st_uid


def test_folders_of_the_cache_are_the_users_alone(cache: Path) -> None:
    """Folders of the cache are writable by their owner only, for any umask.

    Compiled extensions are loaded from there.
    """
    before = os.umask(0)
    try:
        folder = create_private_cache_folder_or_refuse("a", "b")
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
    """Every folder from the cache folder down is checked, and the message gives the remedy."""
    create_private_cache_folder_or_refuse("a", "b")
    wrong = cache.joinpath(*names)
    other = give_away(wrong, monkeypatch)
    with pytest.raises(FileError) as caught:
        create_private_cache_folder_or_refuse("a", "b")
    # Without root every folder seems to belong to another user, so the topmost one is reported.
    first = wrong if os.getuid() == 0 else cache
    assert str(caught.value) == (
        f"{first}: belongs to user {other}, who could place programs there that this user "
        f"({os.geteuid()}) runs; set ORTLAUNCH_CACHE to a folder of your own"
    )
    assert caught.value.exit_status == 2


def test_a_folder_that_others_write_to_is_refused(cache: Path) -> None:
    """A folder that all users may write to is refused, with the command that removes it."""
    create_private_cache_folder_or_refuse("a").chmod(0o757)
    with pytest.raises(FileError) as caught:
        create_private_cache_folder_or_refuse("a")
    assert str(caught.value) == (
        f"{cache / 'a'}: is writable by others, who could place programs there that this user "
        f"({os.geteuid()}) runs; type: rm -r {cache / 'a'} (its contents are rebuilt)"
    )


def test_a_private_group_may_write(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the user's primary group, if it has the user's name, may write to the folder.

    Systems with umask 002 give each user such a private group.
    """
    user = pwd.getpwuid(os.geteuid())
    folder = create_private_cache_folder_or_refuse("a")
    os.chown(folder, -1, user.pw_gid)
    folder.chmod(0o775)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((user.pw_name, "x", gid, [])))
    assert create_private_cache_folder_or_refuse("a") == folder
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("staff", "x", gid, [])))
    with pytest.raises(FileError, match="is writable by others"):
        create_private_cache_folder_or_refuse("a")


def sealed(cache: Path, text: str = "content") -> tuple[Path, Path]:
    """Write a file and its seal in the cache, and return both paths."""
    folder = create_private_cache_folder_or_refuse("files")
    file = folder / "x.bin"
    record = folder / "x.seal"
    file.write_text(text)
    merge_into_checksum_record_and_protect_files(record, [file])
    return file, record


def test_what_was_sealed_is_unchanged(cache: Path) -> None:
    """A file with its original content is accepted, also with another modification time."""
    file, record = sealed(cache)
    assert reason_checksums_differ_refreshing_times_if_same(record) == ""
    os.utime(file, (1, 1))
    # The first call writes the seal anew with the new time, and the second one reads that seal.
    assert [
        reason_checksums_differ_refreshing_times_if_same(record),
        reason_checksums_differ_refreshing_times_if_same(record),
    ] == ["", ""]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cont", "has 4 bytes, and had 7"),
        ("contenT", "differs from the recorded checksum"),
        (None, "is gone"),
    ],
)
def test_another_content_is_seen(text: str | None, reason: str, cache: Path) -> None:
    """A file that was cut, changed or removed is reported with the difference."""
    file, record = sealed(cache)
    file.write_text(text) if text is not None else file.unlink()
    assert reason_checksums_differ_refreshing_times_if_same(record) == f"{file}: {reason}"


def test_a_file_of_another_user_is_seen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealed file is refused if another user owns it, since that user can change it any time."""
    file, record = sealed(cache)
    other = give_away(file, monkeypatch)
    assert reason_checksums_differ_refreshing_times_if_same(record) in (
        f"{file}: belongs to user {other}",
        f"{record}: belongs to user {other}",
    )


@pytest.mark.parametrize("text", [None, "", "[]", '{"x.bin": 1}', '{"x.bin": {}}'])
def test_without_a_seal_nothing_is_taken(text: str | None, cache: Path) -> None:
    """Files without a readable seal are refused."""
    _, record = sealed(cache)
    record.write_text(text) if text is not None else record.unlink()
    assert (
        reason_checksums_differ_refreshing_times_if_same(record)
        == f"{record}: {'is gone' if text is None else 'is not a checksum file'}"
    )


def test_sealed_files_are_the_users_alone(cache: Path) -> None:
    """Sealing makes a file writable by its owner only, also under umask 000."""
    before = os.umask(0)
    try:
        file, record = sealed(cache)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, record)] == [0o644] * 2


def test_a_folder_that_cannot_be_made_where_its_parent_is_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is reported if the file system allows no new folder, as /proc does."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", "/proc/nocache")
    with pytest.raises(
        FileError,
        match=r"^/proc/nocache: cannot be made: .*; set ORTLAUNCH_CACHE to another folder$",
    ):
        create_private_cache_folder_or_refuse("tokens")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder gets an error that names ORTLAUNCH_CACHE.

    An example is a container whose user has no entry in /etc/passwd.
    """
    for name in ("HOME", "XDG_CACHE_HOME", "ORTLAUNCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home"))
    )
    with pytest.raises(
        FileError,
        match=r"^no folder for the cache: HOME is not set, and user .* set ORTLAUNCH_CACHE",
    ):
        cache_root_without_creating()


def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported for a home folder that is no folder, such as /dev/null."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", "/dev/null/home/cache")
    mend = (
        "/dev/null/home/cache: cannot be made: Not a directory: /dev/null/home; set "
        "ORTLAUNCH_CACHE to another folder"
    )
    with pytest.raises(FileError, match=f"^{mend}$"):
        create_private_cache_folder_or_refuse("tokens")
