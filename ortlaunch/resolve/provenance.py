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

from ortlaunch.base import machine
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.version import __version__

# Git may need longer for the state of a very large repository on a slow disk: it is then unknown.
_GIT_SECONDS = 5
_METADATA_FIELD = re.compile(r"^(Name|Version): *(\S+)", re.MULTILINE)


def append_start_to_command_log(
    run: RunDir, recipe_path: Path, typed_arguments: Sequence[str]
) -> None:
    """Append a line for this start to commands.jsonl; the environment is not written.

    Args:
        typed_arguments: the command line, the program first.
    """
    start_record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": list(typed_arguments),
        "cwd": os.getcwd(),
        "recipe": os.path.abspath(recipe_path),
        "git": git_commit_and_dirty_or_none(recipe_path.parent),
    }
    append_json_line(run.commands, start_record)


def git_commit_and_dirty_or_none(work_folder: Path) -> dict[str, object] | None:
    """Return `commit`, and whether the work tree is `dirty` (None: unknown); None outside git."""
    head = _git_output_or_none(work_folder, "rev-parse", "HEAD")
    if not head:
        return None
    changed_files = _git_output_or_none(work_folder, "status", "--porcelain")
    return {"commit": head.strip(), "dirty": None if changed_files is None else bool(changed_files)}


def package_and_machine_versions_record() -> dict[str, object]:
    """Return the versions of ortlaunch, Python and every package, with facts about the machine."""
    return {
        "ortlaunch": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": machine.usable_core_count(),
        "packages": _version_by_installed_package(),
    }


def _version_by_installed_package() -> dict[str, str]:
    """Return the version of each installed package by name, without those of damaged metadata."""
    # Imported on use: it takes time, and only a start needs it.
    from importlib import metadata

    versions = {}
    for package in metadata.distributions():
        text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
        # `package.metadata` would parse the description as well, in ten times the time.
        fields = dict(_METADATA_FIELD.findall(text)[:2])
        if len(fields) == len(("Name", "Version")):
            versions[fields["Name"]] = fields["Version"]
    return dict(sorted(versions.items()))


def _git_output_or_none(work_folder: Path, *git_arguments: str) -> str | None:
    """Return git's output; None without git or a work tree of this user's, or after a timeout."""
    # Reading only: no lock on the index, and no program that the repository's configuration names.
    git_command = ["git", "-c", "core.fsmonitor=false", "-C", str(work_folder), *git_arguments]
    git_environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        completed = subprocess.run(
            git_command,
            env=git_environment,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
        return completed.stdout if completed.returncode == 0 else None
    return None
