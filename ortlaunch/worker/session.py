"""The session of one rank: recipe, plan, world, data, model and engine, built in this order.

A Session is the only argument of a task. This module is independent of tasks and launchers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ortlaunch.errors import InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.process_memory import record_process_memory
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.run_folder.origin import may_be_same_data
from ortlaunch.worker.checkpoint import CompleteCheckpoint, choose, explain
from ortlaunch.worker.data import Batches, LoadedData, load_data, reader, stack_of
from ortlaunch.worker.data.identity import identity as of_data
from ortlaunch.worker.data.vocabulary import goes_on_with, keep
from ortlaunch.worker.engine.allocator import give_back_freed_memory
from ortlaunch.worker.engine.engine import TrainingEngine, build_engine
from ortlaunch.worker.engine.memory_use import MemoryUse
from ortlaunch.worker.length import with_steps
from ortlaunch.worker.model.identity import identity
from ortlaunch.worker.model.model import LossModule, build_model
from ortlaunch.worker.model.pretrained import loading_notes
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.gpus import exporting
from ortlaunch.worker.supervision.progress import Progress


@dataclass(frozen=True)
class Session:
    """All objects of one rank for one task."""

    recipe: Recipe
    """The recipe with `train.max_steps`, also if the length was set in epochs."""
    plan: Plan
    run: RunDir
    group: DistributedContext
    data: LoadedData
    batches: Batches
    """Batches of the training data; for `evaluate`, of the evaluation data."""
    model: LossModule
    """The model with the weights that the engine trains."""
    engine: TrainingEngine
    checkpoint: CompleteCheckpoint | None = None
    """The checkpoint to resume from, or None."""
    model_built_at: float = 0.0
    """The time when the model was built, by time.perf_counter(); the engine was built later."""
    progress: Progress = field(default_factory=lambda: Progress(rank=1))
    """The current activity and its start; the default shows nothing."""
    identity: Mapping[str, object] = field(default_factory=dict)
    """The identity of samples and frozen weights, which checkpoints record."""

    def reading_ahead(self) -> contextlib.AbstractContextManager[None]:
        """Read batches in advance while the context is open, as configured in the recipe."""
        # Batches are read in their usual order: the caller must use them in this order.
        return self.batches.read_ahead(self.group.rank, reader(self.recipe, self.group.device.type))


def require_same_data(
    key: str, found: Mapping[str, object] | None, recipe: Recipe, group: DistributedContext
) -> None:
    """Check that all ranks have the same samples (collective).

    Args:
        key: the recipe's field of the data, for the error.
        found: the identity of this rank's samples; None: it reads none.
        recipe: the recipe of the run.
        group: all ranks.

    Raises:
        InputError: another rank has other samples; the same on all ranks.
    """
    of_ranks: list[Any] = group.gather(found)
    first = of_ranks[0]
    for rank, each in enumerate(of_ranks):
        if each == first or (
            {**each, "fingerprint": None} == {**first, "fingerprint": None}
            and may_be_same_data(each["fingerprint"], first["fingerprint"])
        ):
            continue
        if not recipe.data.is_custom:
            raise InputError(
                f"{key}: the ranks have listed different files; give a list that stays"
            )
        raise InputError(
            f"{key}: its factory returns other samples on rank {rank} ({each['samples']:,}) than on "
            f"rank 0 ({first['samples']:,}). It must return all samples, in one order, on each rank: "
            "ortlaunch shares them out. "
            "Python's, NumPy's and torch's generators are seeded alike; sort sets and lists of "
            "files, and seed generators of your own"
        )


def build_session(
    recipe: Recipe,
    plan: Plan,
    run: RunDir,
    group: DistributedContext,
    progress: Progress,
    data: LoadedData | None = None,
) -> Session:
    """Read the data, build the model and put it on its engine (collective).

    Args:
        recipe: the run's recipe.
        plan: the run's plan.
        run: the run folder.
        group: the ranks of the run.
        progress: shows the current activity.
        data: the data if they are already read. Custom data are not.
    """
    progress.doing("reading checkpoints")
    found = choose(run, group)
    progress.doing("reading data")
    data = load_data(recipe, group, data, goes_on_with(run, recipe))
    data.read_for(plan.traits)
    progress.doing("building the model")
    model = build_model(recipe, data)
    # An evaluation needs no training data.
    measures = plan.traits.evaluates
    samples = data.evaluation if measures else data.train
    assert samples is not None, "the control side has looked for data.evaluation"
    trained_on = identity(None if measures else samples, model)
    require_same_data("data.train", trained_on.get("data"), recipe, group)
    if recipe.data.is_custom and data.evaluation is not None:
        require_same_data("data.evaluation", of_data(data.evaluation), recipe, group)
    if found is not None:
        explain(run, recipe, found, trained_on, group)
    if group.rank == 0 and plan.traits.saves:
        keep(run, recipe, data.tokenizer, data.class_names, data.classes)
    # Before the engine is built, whose memory counts.
    memory = MemoryUse(group.device, model)
    # Now, because this run may be one that runs out of memory.
    if group.rank == 0 and group.device.type == "cpu":
        record_process_memory(recipe, memory.process)
    built = time.perf_counter()
    batches = Batches(samples, plan.batch, recipe.seed, recipe.data.lengths, stack_of(recipe))
    first = 0
    if found is not None and batches.streams:
        # Streamed samples before the checkpoint's are not kept.
        first = found.step
        batches.go_on(first, found.samples)
        batches.seek(found.streams)
    if not measures:
        recipe = with_steps(recipe, plan.batch, run, group, len(samples), found)
    model.attach(recipe, plan, run, group, len(samples), found.step if found else 0)
    progress.doing(
        exporting(group.device) if recipe.engine.name == "ort" else "building the engine"
    )
    engine = build_engine(recipe, plan, model, group, batches.micro_batch(first, 0, group.rank))
    engine.memory = memory
    if found is not None:
        # The checkpoint has the weights that the pretrained model lacks.
        notes = loading_notes(model.loaded)
        engine.notes = tuple(note for note in engine.notes if note not in notes)
    if run.choice.exists():
        engine.record.engine = replace(engine.record.engine, **read_own_json(run.choice))
    # An export has freed its copies of the model.
    give_back_freed_memory()
    return Session(
        recipe, plan, run, group, data, batches, model, engine, found, built, progress, trained_on
    )
