"""Fixtures for tests of whole runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.runs import COMMAND, TOYS, Run, Train, environment
from tests.ort import INSTALLED, build


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toys, texts and a private cache that shares the built extensions."""
    home = tmp_path_factory.mktemp("home")
    (home / "toys.py").write_text(TOYS)
    (home / "cache").mkdir()
    # The build is slow, so that all modules of tests share it.
    if INSTALLED:
        build()
    for name, lines in (("train", 400), ("held-out", 24)):
        text = [
            f"the {i % 7} cats saw {i % 5} dogs near the {i % 3} old houses" for i in range(lines)
        ]
        (home / f"{name}.txt").write_text("\n\n".join(text))
    words = [("good fine nice", 0), ("bad poor sad", 1), ("odd queer weird", 2)]
    rows = [
        {"text": " ".join([kind.split()[i % 3]] * (1 + i % 4)), "label": c}
        for i in range(60)
        for kind, c in words
    ]
    (home / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


@pytest.fixture(scope="module")
def train(home: Path) -> Train:
    """A function that runs `ortlaunch train` on a recipe, given as a mapping, to its end."""

    def start(folder: str, recipe: dict[str, Any], *arguments: str, timeout: float = 120) -> Run:
        path = home / f"{folder}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        command = [str(COMMAND), "train", path.name, *arguments, f"--run-dir={folder}"]
        ended = subprocess.run(
            command,
            cwd=home,
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Run(home / folder, ended.returncode, ended.stdout, ended.stderr)

    return start
