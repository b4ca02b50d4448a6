"""The origin of a run: typed command, recipe's commit, machine. Standard library only."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ortlaunch import machine
from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.version import __version__

# Git may need longer for the state of a very large repository on a slow disk: it is then unknown.
_GIT_SECONDS = 5
_FIELD = re.compile(r"^(Name|Version): *(\S+)", re.MULTILINE)


def record(run: RunDir, recipe: Path, typed: Sequence[str]) -> None:
    """Append a line for this start to commands.jsonl; the environment is not written.

    Args:
        typed: the command line, the program first.
    """
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": list(typed),
        "cwd": os.getcwd(),
        "recipe": os.path.abspath(recipe),
        "git": commit(recipe.parent),
    }
    append_json_line(run.commands, line)


def commit(folder: Path) -> dict[str, object] | None:
    """Return `commit`, and whether the work tree is `dirty` (None: unknown); None outside git."""
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return None
    changes = _git(folder, "status", "--porcelain")
    return {"commit": head.strip(), "dirty": None if changes is None else bool(changes)}


def environment() -> Json:
    """Return the versions of ortlaunch, Python and every package, with facts about the machine."""
    return {
        "ortlaunch": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": machine.usable_core_count(),
        "packages": _packages(),
    }


def _packages() -> dict[str, str]:
    """Return the version of each installed package by name, without those of damaged metadata."""
    # Imported on use: it takes time, and only a start needs it.
    from importlib import metadata

    found = {}
    for package in metadata.distributions():
        text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
        # `package.metadata` would parse the description as well, in ten times the time.
        fields = dict(_FIELD.findall(text)[:2])
        if len(fields) == len(("Name", "Version")):
            found[fields["Name"]] = fields["Version"]
    return dict(sorted(found.items()))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None without git or a work tree of this user's, or after a timeout."""
    # Reading only: no lock on the index, and no program that the repository's configuration names.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
        return ended.stdout if ended.returncode == 0 else None
    return None
