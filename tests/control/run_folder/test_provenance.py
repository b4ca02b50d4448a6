"""Test commands.jsonl: the typed command and the recipe's commit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ortlaunch.resolve import provenance
from ortlaunch.run_folder.folder import RunDir


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, with an author set, and return its output."""
    # The machine may have no git configuration, and the user's own must not change the test.
    who = {
        f"GIT_{role}_{what}": "a@b"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_every_start_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start in the folder appends a line with its command; earlier lines stay."""
    run = RunDir(tmp_path)
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        typed = ("ortlaunch", "train", "a.yaml", f"train.max_steps={step}")
        provenance.append_start_to_command_log(run, Path("a.yaml"), typed)
    lines = [json.loads(line) for line in run.commands.read_text().splitlines()]
    assert [line["argv"][-1] for line in lines] == ["train.max_steps=1", "train.max_steps=2"]
    assert {(line["cwd"], line["recipe"], line["git"]) for line in lines} == {
        (str(tmp_path), f"{tmp_path}/a.yaml", None)
    }


def test_the_commit_of_the_recipes_folder(tmp_path: Path) -> None:
    """The commit is recorded; changed or untracked files make it dirty."""
    assert provenance.git_commit_and_dirty_or_none(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert provenance.git_commit_and_dirty_or_none(tmp_path) is None  # nothing was committed yet
    (tmp_path / "a.yaml").write_text("name: a\n")
    git(tmp_path, "add", "a.yaml")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert provenance.git_commit_and_dirty_or_none(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "new.py").write_text("")
    assert provenance.git_commit_and_dirty_or_none(tmp_path) == {"commit": head, "dirty": True}


def test_a_repository_starts_no_program_of_its_own(tmp_path: Path) -> None:
    """Reading the commit of a repository runs no program named in the repository's configuration."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a.yaml").write_text("name: a\n")
    git(tmp_path, "add", "a.yaml")
    git(tmp_path, "commit", "-qm", "first")
    # `git status` runs the program in core.fsmonitor, so a foreign repository could run anything.
    git(tmp_path, "config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    assert provenance.git_commit_and_dirty_or_none(tmp_path) is not None
    assert not (tmp_path / "ran").exists()


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git the commit is None."""
    # PATH has only an empty folder. This file's own folder may be in a repository.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_commit_and_dirty_or_none(Path(__file__).parent) is None
