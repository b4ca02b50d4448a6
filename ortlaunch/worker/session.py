"""The session of one rank: recipe, plan, world, data, model and engine, built in this order.

A Session is the only argument of a task. This module is independent of tasks and launchers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.parity import is_divided_model_compared, parity_step_count_and_reason
from ortlaunch.run_folder.cached_process_memory import cache_process_memory_if_writable
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.origin import may_fingerprints_be_of_same_data
from ortlaunch.worker.allocator import trim_heap
from ortlaunch.worker.checkpoint import (
    CompleteCheckpoint,
    print_training_changes_and_refuse_unallowed,
    set_aside_damaged_and_choose_own_or_source_checkpoint,
)
from ortlaunch.worker.data import (
    Batches,
    LoadedData,
    collate_function_of_recipe,
    load_data_and_print_notes,
    read_ahead_settings_of_recipe,
)
from ortlaunch.worker.data.identity import data_identity_record as of_data
from ortlaunch.worker.data.vocabulary import (
    vocabulary_of_start_checkpoint_or_none,
    write_vocabulary_and_tokenizer_if_changed,
)
from ortlaunch.worker.engine.engine import TrainingEngine, build_engine
from ortlaunch.worker.engine.memory_use import RankMemoryMeter
from ortlaunch.worker.model.adapters import set_adapters_from_layer_inputs
from ortlaunch.worker.model.identity import data_and_frozen_weights_identity
from ortlaunch.worker.model.model import (
    LossModule,
    is_on_meta_device,
    seed_and_build_loss_module_on_cpu,
)
from ortlaunch.worker.model.packing import set_document_attention
from ortlaunch.worker.model.pretrained import notes_on_weights_not_loaded
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.run_length import resolve_max_steps_and_write_length
from ortlaunch.worker.supervision.gpus import onnxruntime_export_phase_text
from ortlaunch.worker.supervision.progress import Progress
from ortlaunch.worker.weight_memory import WeightMemory


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

    def read_batches_ahead(self) -> contextlib.AbstractContextManager[None]:
        """Read batches in advance while the context is open, as configured in the recipe."""
        # Batches are read in their usual order: the caller must use them in this order.
        return self.batches.read_rank_batches_ahead(
            self.group.data_parallel.rank,
            read_ahead_settings_of_recipe(self.recipe, self.group.device.type),
        )


def require_same_samples_on_all_ranks(
    data_field: str,
    own_identity: Mapping[str, object] | None,
    recipe: Recipe,
    group: DistributedContext,
) -> None:
    """Check that all ranks have the same samples (collective).

    Args:
        data_field: the recipe's field of the data, for the error.
        own_identity: the identity of this rank's samples; None: it reads none.
        recipe: the recipe of the run.
        group: all ranks.

    Raises:
        InputError: another rank has other samples; the same on all ranks.
    """
    identity_by_rank: list[Any] = group.gather(own_identity)
    first_identity = identity_by_rank[0]
    for rank, rank_identity in enumerate(identity_by_rank):
        if rank_identity == first_identity or (
            {**rank_identity, "fingerprint": None} == {**first_identity, "fingerprint": None}
            and may_fingerprints_be_of_same_data(
                rank_identity["fingerprint"], first_identity["fingerprint"]
            )
        ):
            continue
        if not recipe.data.is_custom:
            raise InputError(
                f"{data_field}: the ranks have listed different files; give a list that stays"
            )
        raise InputError(
            f"{data_field}: its factory returns other samples on rank {rank} ({rank_identity['samples']:,}) than on "
            f"rank 0 ({first_identity['samples']:,}). It must return all samples, in one order, on each rank: "
            "ortlaunch shares them out. "
            "Python's, NumPy's and torch's generators are seeded alike; sort sets and lists of "
            "files, and seed generators of your own"
        )


def load_data_and_build_session(
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
    progress.begin_and_show_activity("reading checkpoints")
    start_checkpoint = set_aside_damaged_and_choose_own_or_source_checkpoint(run, group)
    progress.begin_and_show_activity("reading data")
    data = load_data_and_print_notes(
        recipe, group, data, vocabulary_of_start_checkpoint_or_none(run, recipe)
    )
    data.read_samples_needed_by(plan.traits)
    progress.begin_and_show_activity("building the model")
    # Where the model is divided, one rank has the memory for all of it, and sends the parts.
    keeps_whole = group.has_fsdp2 and group.rank == 0
    with (
        WeightMemory(run.path).keep_registered_parameters()
        if keeps_whole
        else contextlib.nullcontext()
    ):
        model = seed_and_build_loss_module_on_cpu(
            recipe,
            data,
            has_weights=not group.has_fsdp2 or keeps_whole,
            # A comparison needs the whole model before.
            is_divided_later=group.has_fsdp2 and not parity_step_count_and_reason(recipe).steps,
        )
    # An evaluation needs no training data.
    is_evaluation = plan.traits.evaluates
    samples = data.evaluation if is_evaluation else data.train
    assert samples is not None, "the control side has looked for data.evaluation"
    has_first_values = start_checkpoint is not None or is_evaluation or is_on_meta_device(model)
    lora = recipe.model.lora
    if lora is not None and lora.init == "eva" and not has_first_values:
        set_adapters_from_layer_inputs(model.model, samples, lora.r)
    trained_identity = data_and_frozen_weights_identity(None if is_evaluation else samples, model)
    if group.has_fsdp2:
        model.loaded, trained_identity["weights"], model.document_mask_reason = group.gather(
            [model.loaded, trained_identity["weights"], model.document_mask_reason]
        )[0]
        if model.document_mask_reason == "":
            set_document_attention(model.model)
    require_same_samples_on_all_ranks("data.train", trained_identity.get("data"), recipe, group)
    if recipe.data.is_custom and data.evaluation is not None:
        require_same_samples_on_all_ranks(
            "data.evaluation", of_data(data.evaluation), recipe, group
        )
    if start_checkpoint is not None:
        print_training_changes_and_refuse_unallowed(
            run, recipe, start_checkpoint, trained_identity, group
        )
    if group.rank == 0 and plan.traits.saves:
        write_vocabulary_and_tokenizer_if_changed(
            run, recipe, data.tokenizer, data.class_names, data.classes
        )
    # Before the engine is built, whose memory counts.
    memory = RankMemoryMeter(group.device, model)
    # Now, because this run may be one that runs out of memory.
    if group.rank == 0 and group.device.type == "cpu":
        cache_process_memory_if_writable(recipe, memory.process)
    built_at = time.perf_counter()
    batches = Batches(
        samples,
        plan.batch,
        recipe.seed,
        recipe.data.padding_bucket_or_multiple_of_8_lengths,
        collate_function_of_recipe(recipe),
    )
    first_step = 0
    if start_checkpoint is not None and batches.streams:
        # Streamed samples before the checkpoint's are not kept.
        first_step = start_checkpoint.step
        batches.begin_step_after_positions(first_step, start_checkpoint.samples)
        batches.seek_streams(start_checkpoint.streams)
    if not is_evaluation:
        recipe = resolve_max_steps_and_write_length(
            recipe, plan.batch, run, group, len(samples), start_checkpoint
        )
    model.set_trainer_values_and_device(
        recipe, plan, run, group, len(samples), start_checkpoint.step if start_checkpoint else 0
    )
    progress.begin_and_show_activity(
        onnxruntime_export_phase_text(group.device)
        if recipe.engine.name == "ort"
        else "building the engine"
    )
    engine = build_engine(
        recipe,
        plan,
        model,
        group,
        batches.read_micro_batch_and_count_tokens(first_step, 0, group.data_parallel.rank),
        compares_divided_model=group.mesh is not None
        and start_checkpoint is None
        and plan.task in ("train", "parity")
        and is_divided_model_compared(recipe, sum(p.numel() for p in model.parameters())),
    )
    # The checkpoint has the weights that the pretrained model lacks.
    dropped_notes = notes_on_weights_not_loaded(model.loaded) if start_checkpoint else ()
    engine = replace(
        engine,
        memory_use=memory,
        notes=tuple(note for note in engine.notes if note not in dropped_notes),
    )
    if run.choice.exists():
        engine.record.engine = replace(
            engine.record.engine, **read_json_or_raise_damaged(run.choice)
        )
    # An export has freed its copies of the model.
    trim_heap()
    return Session(
        recipe=recipe,
        plan=plan,
        run=run,
        group=group,
        data=data,
        batches=batches,
        model=model,
        engine=engine,
        checkpoint=start_checkpoint,
        model_built_at=built_at,
        progress=progress,
        identity=trained_identity,
    )
