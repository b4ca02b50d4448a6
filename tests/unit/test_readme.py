"""Every `ortlaunch` command in README.md is run as it stands there; training only as a dry run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
# Half a minute and more; distributed/test_extensions.py and launch/test_bench.py run them for real.
NOT_RUN = ("setup", "bench")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _commands() -> list[list[str]]:
    lines = [line for block in _blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("ortlaunch ")]


def test_the_commands_of_the_readme_work(tmp_path):
    """From copying a recipe to training one's own model, nothing in README is out of date."""
    (tmp_path / "my_model.py").write_text(_blocks("python")[0])
    (tmp_path / "my_recipe.yaml").write_text(_blocks("yaml")[0])
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    commands = _commands()
    assert len(commands) >= 7
    for words in commands:
        if words[0] not in NOT_RUN:
            _run([*words, "--dry-run"] if words[0] in ("train", "parity") else words, tmp_path)


def _run(words: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "ortlaunch.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"ortlaunch {shlex.join(words)}: {done.stderr}"


def test_the_tree_of_the_readme_exists():
    """Files that README's tree names are there."""
    tree = README.partition("## The tree")[2].partition("MIT licence")[0]
    named = set(re.findall(r"(?<=\s)[\w/]+\.py|(?<=\s)[a-z]+/", tree)) - {"ortlaunch/", "ortlaunch/cli.py"}
    source = Path(__file__).parents[2] / "ortlaunch"
    missing = [name for name in named if not (source / name).exists() and not (source / "worker" / name).exists()]
    assert named
    assert not missing
