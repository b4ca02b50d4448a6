"""A user's folder on the lab's shared disk, with the recipe of a slow toy run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ortlaunch.run_folder.folder import RunDir
from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND, EAGER, SLOW, TOY, TOYS, environment, merged, reach

RECIPE = merged(
    TOY,
    {
        **EAGER,
        "model": {"factory": "slow_toys:net"},
        "batch": {"micro_size": 8},
        # Never reached: each test stops the run or sets a smaller number.
        "train": {"max_steps": 100_000},
    },
)


class Home:
    """A user's folder, with methods that run commands in it on the login node."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        # A space in the name, so that commands that do not quote it fail.
        self.run = folder / "my run"
        # The lab's PATH includes /usr/sbin; environment() would replace it.
        self.env = {**lab.environ, **environment(folder), "PATH": lab.environ["PATH"]}
        for name, text in (
            ("toys.py", TOYS),
            ("slow_toys.py", SLOW),
            ("recipe.yaml", yaml.safe_dump(RECIPE)),
        ):
            (folder / name).write_text(text)
        (folder / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
        (folder / "cache").mkdir()
        # While this file exists, each pass of the slow toy sleeps.
        (folder / "slow").touch()

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; for a repeated step, the last one."""
        records = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.well("status", self.run.name, "--json"))
        return found

    def well(self, *words: str, timeout: float = 60) -> str:
        ended = self.lab.run(
            LOGIN, str(COMMAND), *words, cwd=self.folder, env=self.env, timeout=timeout
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def reach(self, step: int) -> None:
        """Wait until the run has logged this step."""
        reach(RunDir(self.run), step)
