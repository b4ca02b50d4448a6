"""What a run leaves after its last step: export/, memory.json, and the lines that say how it went."""

from __future__ import annotations

from typing import Any

from ortlaunch.plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.rundir import RunDir, write_json
from ortlaunch.worker.distributed import Group
from ortlaunch.worker.engine import Engine
from ortlaunch.worker.export import export
from ortlaunch.worker.memory_use import memory_line
from ortlaunch.worker.model import LossModule
from ortlaunch.worker.progress import Progress
from ortlaunch.worker.tell import late_notes, outcome_lines


def finish(
    recipe: Recipe, plan: Plan, run: RunDir, group: Group, engine: Engine, model: LossModule, tokenizer: Any
) -> None:
    """Write the trained model and what it took (collective); rank 0 says so."""
    lines = [*late_notes(engine.truth(), engine.notes), *outcome_lines(engine.truth())]
    if not recipe.engine.parity_only and engine.memory is not None:
        used = engine.memory.record(plan, group)
        Progress(group.rank).doing("writing the export")
        export(recipe, run, group, engine.stepper, model, tokenizer)
        write_json(run.memory, used) if group.rank == 0 else None
        lines.append(memory_line(used))
    if group.rank == 0:
        print(*lines, sep="\n", flush=True)
