"""Which runs this user has started, wherever their folders lie: a small file for each in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path

from ortlaunch.cache import cache_folder
from ortlaunch.errors import FileError
from ortlaunch.run_folder.folder import RunDir, write_text


def add(run: RunDir) -> None:
    """Remember a run; where that cannot be written, the run goes on all the same, and it is said."""
    path = os.path.abspath(run.path)
    try:
        write_text(cache_folder("runs") / hashlib.sha256(os.fsencode(path)).hexdigest()[:16], path)
    except (OSError, FileError) as error:
        print(f"`ortlaunch list` will not know of {run}: {error}", file=sys.stderr, flush=True)


def named(given: Path) -> Path:
    """The newest run of this user for `latest`, or of a run's name or folder name; anything else stays a path."""
    if given.exists() or str(given) != given.name:
        return given
    pattern = re.compile(
        "" if str(given) == "latest" else rf"{re.escape(str(given))}(-\d{{8}}-\d{{6}}(-\d+)?)?$"
    )
    found = next((run.path for run in runs() if pattern.match(run.path.name)), None)
    if found is None:
        return given
    print(f"run: {found}", file=sys.stderr, flush=True)
    return found


def runs() -> list[RunDir]:
    """Those whose folders are still there, the newest start first; the others are forgotten."""
    found = []
    for file in cache_folder("runs").iterdir():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            run = RunDir(file.read_text(encoding="utf-8"))
            if run.job.exists():
                found.append((run.job.stat().st_mtime, run))
            elif not Path(run.path).exists():
                file.unlink()
    return [run for _, run in sorted(found, key=lambda pair: -pair[0])]
