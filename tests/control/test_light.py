"""The control side imports no heavy package, and its lowest modules not even pydantic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.makers import CUSTOM, OWN_MODULE

HEAVY = {
    "torch",
    "onnxruntime",
    "deepspeed",
    "transformers",
    "mpi4py",
    "numpy",
    "datasets",
    "tokenizers",
    "peft",
    "matplotlib",
}
# Reading hosts, ranks and run folders needs only the standard library.
LOWEST = (
    "ortlaunch.base.errors",
    "ortlaunch.rank",
    "ortlaunch.launch_plan",
    "ortlaunch.base.cache",
    "ortlaunch.base.module_start",
    "ortlaunch.run_folder.folder",
    "ortlaunch.run_folder.engine_report",
    "ortlaunch.planning.hosts",
    "ortlaunch.worker.supervision.rank_supervisor",
)
CONTROL_SIDE = (
    "ortlaunch.cli",
    "ortlaunch.run.control",
    "ortlaunch.launch_plan",
    "ortlaunch.launch.mpi",
    "ortlaunch.launch.local",
    "ortlaunch.launch.torchrun",
    "ortlaunch.launch.node",
    "ortlaunch.schedulers.slurm",
    "ortlaunch.schedulers.kubernetes",
    "ortlaunch.schedulers.azureml",
    "ortlaunch.bench.command",
    "ortlaunch.bench.auto",
)
ANSWERS = (
    "--help",
    "--version",
    "bench --help",
    "schema",
    "recipes list",
    "hostfile",
    "validate recipe.json",
    "plan recipe.json",
    "plan recipe.json --json",
    "train recipe.json --dry-run",
    "submit recipe.json --dry-run",
    "list",
    "plan recipe.json engine.name=auto",
    "parity recipe.json --dry-run engine.name=inductor",
    "train recipe.json --dry-run --nproc-per-node=2",
)
# All stages run in one fresh interpreter. Loaded modules can only grow, so the stages that may load
# least come first.
STAGES = (
    ("importing", LOWEST, {"pydantic", "yaml", "filelock", *HEAVY}),
    # `pip install --no-deps ortlaunch` and typer (which may import pydantic) are enough to print
    # the tested versions.
    ("typing", ("constraints",), {"yaml", "filelock", *HEAVY}),
    ("importing", CONTROL_SIDE, HEAVY),
    ("typing", ANSWERS, HEAVY),
)
# Runs the steps in order, and fails at the first step after which a package of `kept` is loaded.
ONE_BY_ONE = """
import importlib, sys

def typing(words):
    from ortlaunch.cli import main
    sys.argv = ["ortlaunch", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words

importing = importlib.import_module
for step, several, kept in {stages!r}:
    for each in several:
        globals()[step](each)
        found = kept & {{name.partition(".")[0] for name in sys.modules}}
        assert not found, f"{{step}} {{each}} brings {{found}}"
print("all is light")
"""


def brought(stages: Any, folder: Path) -> str:
    """Return the error of the first step that loads a forbidden package, or an empty text."""
    command = [sys.executable, "-c", ONE_BY_ONE.format(stages=stages)]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return "" if ended.stdout.endswith("all is light\n") else ended.stderr


def test_the_control_side_is_light(tmp_path: Path) -> None:
    """No control-side module and no command that only prints loads a heavy package."""
    (tmp_path / "recipe.json").write_text(json.dumps(CUSTOM))
    (tmp_path / "mine.py").write_text(OWN_MODULE)
    assert brought(STAGES, tmp_path) == ""


def test_what_brings_a_package_is_found(tmp_path: Path) -> None:
    """The failure names the step and the forbidden package."""
    stages = [("importing", ("json", "yaml"), {"yaml", "torch"})]
    assert "importing yaml brings {'yaml'}" in brought(stages, tmp_path)
