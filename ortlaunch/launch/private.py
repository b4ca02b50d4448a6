"""A folder for one run on this host that only its user can write to, for the launcher's own files.

torchrun unpickles the contents of its rendezvous, and Open MPI does not start beside files of a
killed mpirun. The run folder is as open as the umask, and a group that may write there could
replace files in it. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from ortlaunch.base.errors import LaunchError
from ortlaunch.run_folder.folder import RunDir


def private_folder_path_in_tmp(run_dir: RunDir) -> Path:
    """Return the path of the private folder.

    It is the same for each start of a run on this host, so that it can be printed before the start.
    """
    # The host's name is part of it: several hosts may share the temporary folder.
    name = hashlib.sha256(
        os.fsencode(f"{socket.gethostname()} {os.path.abspath(run_dir.path)}")
    ).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ortlaunch-{os.geteuid()}" / name


def recreate_empty_private_folder_or_refuse_unsafe(private_folder: Path) -> None:
    """Create the private folder, empty.

    Raises:
        LaunchError: another user owns the folder above it, or others can write there.
    """
    parent_folder = private_folder.parent
    user = os.geteuid()
    parent_folder.mkdir(mode=0o700, exist_ok=True)
    # Every user can create files in the temporary folder: a link must not be followed.
    parent_status = parent_folder.lstat()
    if (
        not stat.S_ISDIR(parent_status.st_mode)
        or parent_status.st_uid != user
        or parent_status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise LaunchError(
            f"{parent_folder}: must be a folder of user {user} in which nobody else can write, "
            "for launchers trust "
            f"the files in it; got {stat.filemode(parent_status.st_mode)} of user {parent_status.st_uid}: "
            "remove it, or set TMPDIR"
        )
    # A command that was killed leaves its folder.
    shutil.rmtree(private_folder, ignore_errors=True)
    private_folder.mkdir()
    # A mode given to mkdir would be reduced by the umask.
    private_folder.chmod(stat.S_IRWXU)
