"""`ortlaunch doctor --fabric`: ranks started as a training's are, which measure what they do."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ortlaunch.doctor import fabric
from ortlaunch.doctor.finding import Finding
from ortlaunch.errors import LaunchError, PlanError
from ortlaunch.launch import backend
from ortlaunch.launch.failure import explain_end
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import Recipe
from ortlaunch.resolve.prepare import write_run
from ortlaunch.resolve.resolve import resolve
from ortlaunch.run_folder.folder import RunDir, read_json

_MODULE = '''\
"""A model that nobody trains: ranks of `ortlaunch doctor --fabric` only measure."""
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.linear(x).mean()

def data():
    return [{"x": torch.ones(1)}] * 10000
'''
_RECIPE = """\
name: fabric
model: {task: custom, factory: "fabric_model:Model"}
data: {train: {format: custom, factory: "fabric_model:data"}}
batch: {micro_size: 1, accumulation_steps: 1}
optimizer: {name: sgd, learning_rate: 0.1}
engine: {name: eager}
train: {max_steps: 1}
"""
_OF_A_TRAINING = {"nodes", "max_restarts", "grace_seconds", "preflight"}


class Asked(NamedTuple):
    """Where ranks are to run: as of a recipe's section `launch`, with device and interface as typed."""

    recipe: Recipe | None
    overrides: tuple[str, ...]
    options: LaunchOptions


def measure(asked: Asked, folder: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Start the ranks and judge what they measure.

    Args:
        folder: that all hosts share; nothing stays in it.

    Raises:
        LaunchError: they failed; what they left behind stays.
    """
    with _work(folder) as work:
        launch = asked.recipe.launch.model_dump(mode="json", exclude_defaults=True) if asked.recipe else {}
        kept = {name: value for name, value in launch.items() if name not in _OF_A_TRAINING}
        (work / "fabric_model.py").write_text(_MODULE, encoding="utf-8")
        (work / "recipe.yaml").write_text(f"{_RECIPE}launch: {json.dumps(kept)}\n", encoding="utf-8")
        options = asked.options._replace(task="fabric", planned_only=False)
        resolved = resolve(work / "recipe.yaml", asked.overrides, options, environ)
        if resolved.world.inside is not None:
            raise PlanError("doctor --fabric starts its ranks itself, and this process is a rank of a launcher already")
        run, plan = RunDir(work / "run"), resolved.plan
        request = write_run(run, resolved.file.recipe, plan)
        launcher, log = backend(plan.launcher), run.path / "output.txt"
        job = launcher.submit(request._replace(notice_ends=True), log)
        end = explain_end(run, launcher.wait(job), job.signal, job.ended_by, job.oom_kills)
        if end.status or not run.fabric.exists():
            raise LaunchError(f"doctor --fabric: its ranks failed: {end.text}\nlog: {log}")
        return fabric.judge(read_json(run.fabric), plan.nodes)


@contextlib.contextmanager
def _work(folder: Path) -> Iterator[Path]:
    """A folder of its own, which stays where something failed."""
    work = Path(tempfile.mkdtemp(prefix="ortlaunch-fabric-", dir=folder))
    yield work
    shutil.rmtree(work, ignore_errors=True)
