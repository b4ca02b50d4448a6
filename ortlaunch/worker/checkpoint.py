"""Checkpoints: written whole, marked COMPLETE last, found newest first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ortlaunch.plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir, read_json, write_json, write_text
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.stepping import Stepper


def save(
    run: RunDir, recipe: Recipe, group: DistributedContext, stepper: Stepper, step: int, state: dict[str, Any]
) -> Path:
    """Write the checkpoint after `step` steps (collective); older ones beyond `checkpoint.keep` go."""
    folder = run.checkpoint(step)
    if group.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # one that was left half written
        folder.mkdir(parents=True)
    group.barrier()
    stepper.save(folder, dict(state))
    group.barrier()
    if group.rank == 0:
        _complete(folder, step, group, state["samples"])
        _prune(run, recipe.checkpoint.keep)
    return folder


def _complete(folder: Path, step: int, group: DistributedContext, samples: int) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / "manifest.json", {"step": step, "samples": samples, "ranks": group.size, "files": files})
    write_text(folder / "COMPLETE", "")


def _prune(run: RunDir, keep: int | None) -> None:
    if keep is not None:
        for _, folder in run.complete_checkpoints()[:-keep]:
            (folder / "COMPLETE").unlink()  # first, so that nobody takes it while it goes
            shutil.rmtree(folder)


def newest(run: RunDir) -> tuple[int, Path] | None:
    """(step, folder) of the newest checkpoint that was written to its end."""
    found = run.complete_checkpoints()
    return found[-1] if found else None


def samples_seen(folder: Path, step: int, batch: BatchPlan) -> int:
    """How many samples the steps up to this checkpoint took, in whatever batches; old ones tell only their steps."""
    seen: int = read_json(folder / "manifest.json").get("samples", step * batch.global_samples)
    return seen
