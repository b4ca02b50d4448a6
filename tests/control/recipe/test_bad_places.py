"""Tests of one-line errors about files, folders and streams that cannot be read or written."""

from __future__ import annotations

import errno
import os
import shlex
import site
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ortlaunch.base.errors import FileError
from ortlaunch.base.file_errors import (
    explain_errors_on_run_folder_or_cache_files,
    one_line_file_error_or_none,
)
from ortlaunch.run_folder.folder import write_text_atomically
from tests.makers import CUSTOM, OWN_MODULE

# This environment's command; PATH may have another one.
COMMAND = str(Path(sys.executable).with_name("ortlaunch"))
# The shell stays in a folder that no longer exists.
GONE = "mkdir gone; cd gone; rmdir ../gone; "
TRAIN = "ortlaunch train $HERE/good.yaml "
NOT_A_FOLDER = (
    "Not a directory; a part of it is a file, not a folder; --run-dir can name another folder"
)
# name: (command line of a shell in a folder with good.yaml, exit status, part of the one line on stderr).
CASES = {
    "run folder below a file": (TRAIN + "--run-dir $HERE/good.yaml/sub", 2, NOT_A_FOLDER),
    "run folder with a long name": (
        TRAIN + f"--run-dir {'x' * 5_000}",
        2,
        "File name too long; it is longer than",
    ),
    "run folder in /proc": (
        TRAIN + "--run-dir /proc/xyz",
        2,
        "ortlaunch: /proc/xyz: No such file or directory; --run",
    ),
    "an imported recipe below a file": (
        "echo '{\"bf16\": true}' > a.json; ortlaunch import a.json --from hf-trainer --base "
        "good.yaml --to good.yaml/x",
        2,
        "ortlaunch: good.yaml: File exists; it is a file where a folder should be; --to can "
        "name another folder",
    ),
    "a current folder that was deleted": (
        GONE + TRAIN,
        2,
        "the current folder no longer exists; cd to one that does",
    ),
    "a path that the locale cannot write": (
        # Python would switch such a locale to UTF-8 by itself.
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 " + TRAIN + "--run-dir ünï",
        2,
        "is not text in this shell's encoding (ascii); give it in UTF-8, with LC_ALL=C.UTF-8 or "
        "PYTHONUTF8=1",
    ),
    "a full disk for a plan": (
        "ortlaunch plan good.yaml > /dev/full",
        1,
        "standard output: No space left on device",
    ),
    "a full disk for help": (
        "ortlaunch --help > /dev/full",
        1,
        "standard output: No space left on device",
    ),
    # Closed or broken output streams must not change the exit status.
    "no output": ("ortlaunch plan good.yaml >&-", 0, ""),
    "a reader that leaves": ("ortlaunch schema | head -1 > /dev/null", 0, ""),
    "no place for errors": ("ortlaunch validate bad.yaml 2>&-", 2, ""),
    "a full disk for errors": ("ortlaunch validate bad.yaml 2> /dev/full", 2, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_place_is_one_line(case: str, tmp_path: Path) -> None:
    """A bad place gives the expected status and one line that names it, and no traceback."""
    typed, status, said = CASES[case]
    Path(tmp_path, "good.yaml").write_text(yaml.safe_dump(CUSTOM))
    Path(tmp_path, "mine.py").write_text(OWN_MODULE)
    env = {
        **os.environ,
        "HERE": str(tmp_path),
        "PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}",
    }
    ended = subprocess.run(
        ["bash", "-c", typed],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        # A hang must fail the test.
        timeout=60,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == (1 if said else 0)
    # The default run folder: nothing was started.
    assert not Path(tmp_path, "runs").exists()


@pytest.mark.parametrize(
    ("number", "path", "said", "status"),
    [
        (
            errno.EROFS,
            "runs/x",
            "runs/x: Read-only file system; --run-dir can name another folder",
            2,
        ),
        (
            errno.EACCES,
            "CACHE/tokens",
            "Permission denied; ORTLAUNCH_CACHE can name another folder",
            2,
        ),
        (errno.ENOSPC, "runs/x", "No space left on device; free some space", 1),
        # An error without a file: the arguments and variables of a new process are too long.
        (errno.E2BIG, None, "Argument list too long; the variables of launch.env", 2),
    ],
)
def test_what_is_said(
    number: int,
    path: str | None,
    said: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error names the place, the system's message, the cause and the remedy.

    The status is 1 where the machine is at fault, and 2 where the input is.
    """
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    found = one_line_file_error_or_none(
        OSError(number, os.strerror(number), path and path.replace("CACHE", str(tmp_path)))
    )
    assert found is not None
    assert said in str(found)
    assert found.exit_status == status


def test_a_packages_file_cannot_be_elsewhere() -> None:
    """No option is offered for the file of an installed package."""
    path = str(Path(site.getsitepackages()[0], "torch", "x.so"))
    found = one_line_file_error_or_none(OSError(errno.EIO, "Input/output error", path))
    assert str(found) == f"{path}: Input/output error; the disk or its server has a fault"


def test_a_failed_write_names_the_file_itself(tmp_path: Path) -> None:
    """A failed write names the target file, not the temporary file that is written first."""
    with pytest.raises(IsADirectoryError) as raised:
        write_text_atomically(tmp_path, "")
    assert raised.value.filename == str(tmp_path)


def test_an_error_that_is_not_understood_keeps_its_trace(tmp_path: Path) -> None:
    """An OSError with no known cause, or about a user's own file in a rank, keeps its traceback."""
    assert one_line_file_error_or_none(OSError("odd")) is None
    for path in (tmp_path / "theirs", None):
        with (
            pytest.raises(PermissionError),
            explain_errors_on_run_folder_or_cache_files(tmp_path / "run"),
        ):
            raise PermissionError(errno.EACCES, "Permission denied", path and str(path))


def test_a_rank_explains_errors_of_its_cache_and_run_folder(tmp_path: Path) -> None:
    """In a rank a cache below a file gives an error of one line, as in the command."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(FileError, match=r"file/x: Not a directory; a part of it is a file"),
        explain_errors_on_run_folder_or_cache_files(tmp_path),
    ):
        (tmp_path / "file" / "x").mkdir(parents=True)


def test_what_is_closed_is_open_for_what_is_started(tmp_path: Path) -> None:
    """Programs that are started with closed streams get the null device instead.

    Otherwise the next file that a rank opens would become its standard output.
    """
    # A child prints the targets of its standard input and output.
    look = (
        "import os, sys; print(*(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1)), "
        "file=sys.stderr)"
    )
    start = f"subprocess.run({[sys.executable, '-c', look]})"
    code = "import subprocess\nfrom ortlaunch.base.output import tolerate_lost_output_streams_within_block\n"
    code += f"with tolerate_lost_output_streams_within_block(): {start}"
    typed = f"{sys.executable} -c {shlex.quote(code)} <&- >&-"
    ended = subprocess.run(
        ["bash", "-c", typed], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr == "/dev/null /dev/null\n"


def test_a_disk_without_file_locks_is_named(tmp_path: Path) -> None:
    """A disk without file locks is named, although the error of the lock has no file name."""
    said = r"^No locks available; a disk has no file locks \(flock\), which run folder"
    with (
        pytest.raises(FileError, match=said),
        explain_errors_on_run_folder_or_cache_files(tmp_path),
    ):
        raise OSError(errno.ENOLCK, "No locks available")
