"""Tests that a command reads each file once and makes later decisions from that content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ortlaunch.base.errors import RecipeError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from tests.makers import CUSTOM

pytestmark = pytest.mark.usefixtures("workbench")
COMMANDS = (
    ["validate", "top.yaml"],
    ["plan", "top.yaml"],
    ["plan", "top.yaml", "engine.name=auto"],
    ["train", "top.yaml", "--dry-run", "--nproc-per-node=2"],
    ["plan", "top.yaml", "--hostfile", "hosts"],
)
# Runs the commands in one process; Python's audit hook reports every opened file.
OPENED = """
import json, os, sys
opened, commands = [], json.loads(sys.argv[1])
def note(event, given):
    if event == "open" and os.path.basename(str(given[0])) in ("top.yaml", "middle.yaml", "base.yaml", "hosts"):
        opened.append(os.path.basename(given[0]))
sys.addaudithook(note)
from ortlaunch.cli import main
for words in commands:
    sys.argv = ["ortlaunch", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
    opened.append("")
with open("opened.json", "w") as file:
    json.dump(opened, file)
"""


@pytest.fixture(autouse=True)
def recipes(workbench: None) -> None:
    """Write a recipe that extends a second one, which extends a third, and a host file."""
    Path("base.yaml").write_text(yaml.safe_dump(CUSTOM))
    Path("middle.yaml").write_text("extends: base.yaml\nseed: 3\n")
    Path("top.yaml").write_text("extends: middle.yaml\nname: top\n")
    Path("hosts").write_text("localhost slots=1\n")


def test_each_file_is_opened_once() -> None:
    """Each verb opens a recipe, the recipes that it extends and the host file once each."""
    command = [sys.executable, "-c", OPENED, json.dumps(COMMANDS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    # The empty names between commands become double blanks.
    seen = " ".join(json.loads(Path("opened.json").read_text())).split("  ")
    assert [sorted(each.split()) for each in seen] == [
        sorted(["base.yaml", "middle.yaml", "top.yaml", *(["hosts"] if "hosts" in words else [])])
        for words in COMMANDS
    ]


def test_a_further_override_reads_nothing() -> None:
    """A further override needs no file, and is checked by the rules.

    The host file may be a pipe, which cannot be read twice.
    """
    base = load_and_resolve_recipe(
        Path("top.yaml"), ["train.max_steps=7"], LaunchOptions(hostfile="hosts"), {}
    )
    for name in ("base.yaml", "middle.yaml", "top.yaml", "hosts"):
        # A second read would fail now.
        os.unlink(name)
    for made in (base.apply_overrides("seed=9"), base.apply_auto_results("seed=9")):
        assert made.recipe_file.overrides == ("train.max_steps=7", "seed=9")
        assert (
            made.recipe_file.recipe.name,
            made.recipe_file.recipe.seed,
            made.recipe_file.recipe.train.max_steps,
        ) == (
            "top",
            9,
            7,
        )
        assert (made.world, made.plan) == (base.world, base.plan)
    with pytest.raises(
        RecipeError, match=r"override 'sed=9': sed: unknown key; did you mean seed\?"
    ):
        base.apply_overrides("sed=9")
