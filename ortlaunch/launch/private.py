"""A folder of one run on this host, in which its user alone can write, for the launcher's own files.

torchrun unpickles what its rendezvous holds, and Open MPI does not start beside files of a killed mpirun.
The run folder is as open as the umask, and a group that may write there could replace files in it. Standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from ortlaunch.errors import LaunchError
from ortlaunch.run_folder.folder import RunDir


def private_folder(run_dir: RunDir) -> Path:
    """Its path, the same for each start of a run on this host, so that it can be printed before anything is started."""
    name = hashlib.sha256(
        os.fsencode(f"{socket.gethostname()} {os.path.abspath(run_dir.path)}")
    ).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ortlaunch-{os.geteuid()}" / name


def make_private(folder: Path) -> None:
    """Create it, empty.

    Raises:
        LaunchError: somebody else owns the folder above, which lies in a folder that all users share.
    """
    above = folder.parent
    user = os.geteuid()
    above.mkdir(mode=0o700, exist_ok=True)
    found = above.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != user
        or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise LaunchError(
            f"{above}: must be a folder of user {user} in which nobody else can write, for launchers trust "
            f"the files in it; got {stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, or set TMPDIR"
        )
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    folder.mkdir()
    folder.chmod(stat.S_IRWXU)  # whatever the umask
