"""Rules across fields of a recipe: (paths involved, message) for each broken rule. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ortlaunch.base.units import count_with_noun
from ortlaunch.recipe.fields.deepspeed_keys import deepspeed_rules
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import NO_EFFECT_MESSAGE, names_of_non_default_fields
from ortlaunch.recipe.fields.zero import Zero
from ortlaunch.recipe.rules.bad_step_rules import bad_step_limit_rules
from ortlaunch.recipe.rules.best_rules import metric_and_evaluation_need_rules
from ortlaunch.recipe.rules.checkpoint_rules import checkpoint_retention_rules
from ortlaunch.recipe.rules.data_rules import all_data_section_rules
from ortlaunch.recipe.rules.engine_rules import all_engine_section_rules, engine_device_rules
from ortlaunch.recipe.rules.launch_rules import launch_rules
from ortlaunch.recipe.rules.model_rules import all_model_section_rules, function_name_rules
from ortlaunch.recipe.rules.schedule_rules import warmup_and_decay_rules
from ortlaunch.recipe.rules.submit_rules import submit_text_and_option_rules
from ortlaunch.recipe.text.source_location import Problem
from ortlaunch.tables.optimizers import OPTIMIZERS
from ortlaunch.tables.tasks import TASKS

# Their updates go element by element. On engines that FSDP2 has, fused_adam is torch's AdamW.
_SHARDED_OPTIMIZERS = ("adamw", "fused_adam", "sgd")
_FIELDS_OF_FSDP2 = {"shard", "replicate", "blocks", "offload"}


def broken_rule_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield every rule that the recipe breaks."""
    # The order of the report where two problems have the same place.
    rules = (
        all_model_section_rules,
        all_data_section_rules,
        _batch_equation_rules,
        _optimizer_field_and_zero_rules,
        warmup_and_decay_rules,
        all_engine_section_rules,
        deepspeed_rules,
        _length_profile_hook_and_interval_rules,
        checkpoint_retention_rules,
        metric_and_evaluation_need_rules,
        bad_step_limit_rules,
        launch_rules,
        submit_text_and_option_rules,
    )
    for rule in rules:
        yield from rule(recipe)
    if recipe.launch.device != "auto":
        yield from precision_and_engine_device_rules(recipe, recipe.launch.device)


def precision_and_engine_device_rules(
    recipe: Recipe, device: str, hosts_text: str = "the run's hosts"
) -> Iterator[Problem]:
    """Yield the problems of precision and engine settings on a known device.

    Args: recipe: the run's. device: `cpu_text` or `cuda`. hosts: the hosts with this device, as the
    message names them.
    """
    yield from engine_device_rules(recipe, device)
    if device != "cpu":
        return
    if recipe.model.offload_activations:
        yield (
            ("model.offload_activations", "launch.device"),
            "has no effect on a CPU, whose activations are in host memory; leave it out",
        )
    # Often this is a login node, and the hosts of the run have GPUs: the message suggests both remedies.
    is_automatic = recipe.launch.device == "auto"
    cpu_text = (
        "CPU (launch.device is auto, and this host has no visible GPU)" if is_automatic else "CPU"
    )
    remedy_text = (
        f"use launch.device=cuda if {hosts_text} have GPUs, else" if is_automatic else "use"
    )
    if recipe.engine.name == "ort" and recipe.format.is_narrow:
        yield (
            ("precision", "engine.name", "launch.device"),
            f"got {recipe.precision} with engine ort on {cpu_text}, where ONNX Runtime trains in fp32 "
            f"only; {remedy_text} "
            "precision: fp32, or engine.name: eager",
        )
    elif recipe.format.scales_loss and recipe.zero:
        yield (
            ("precision", "zero", "launch.device"),
            f"got fp16 with DeepSpeed on {cpu_text}, which DeepSpeed refuses; {remedy_text} bf16 or fp32, or "
            "zero: null",
        )


def engine_auto_rules_of_comparing_task(recipe: Recipe, task_name: str) -> Iterator[Problem]:
    """Yield the problems of a recipe for the task that the command gives the ranks."""
    if TASKS[task_name].compares and recipe.engine.name == "auto":
        yield (
            ("engine.name",),
            (
                "got auto, but the comparison with plain PyTorch needs a fixed engine; use ort or "
                "inductor"
            ),
        )


def _batch_equation_rules(recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.batch
    launch = recipe.launch
    global_size = batch.global_size
    micro_size = batch.micro_size
    accumulation_steps = batch.accumulation_steps
    if (
        global_size is None
        and (micro_size is None or accumulation_steps is None)
        and micro_size != "auto"
    ):
        yield (
            ("batch", "batch.global_size", "batch.micro_size", "batch.accumulation_steps"),
            "give global_size, or both micro_size and accumulation_steps (global_size = "
            "micro_size x accumulation_steps x ranks)",
        )
        return
    if micro_size == "auto":
        yield from _automatic_micro_size_rules(recipe)
        # The smallest size that will be tried.
        micro_size = 1
        accumulation_steps = None
    samples_per_rank = (micro_size or 1) * (accumulation_steps or 1)
    if global_size is None:
        return
    product_text = " x ".join(
        f"{name} ({value})"
        for name, value in (("micro_size", micro_size), ("accumulation_steps", accumulation_steps))
        if value
    )
    if global_size % samples_per_rank:
        yield (
            ("batch.global_size", "batch.micro_size", "batch.accumulation_steps"),
            f"got {global_size}, which is not a multiple of {product_text}; "
            f"{_nearest_multiples_text(global_size, samples_per_rank)}",
        )
    elif launch.processes_per_node:
        rank_counts = (nodes * launch.processes_per_node for nodes in launch.node_counts)
        problems_by_rank_count = (
            _batch_divides_among_ranks_rules(
                global_size,
                samples_per_rank,
                product_text,
                rank_count,
                is_exact=bool(micro_size and accumulation_steps),
            )
            for rank_count in rank_counts
        )
        # One number of hosts is enough as an example.
        yield from itertools.islice(itertools.chain.from_iterable(problems_by_rank_count), 1)


def _automatic_micro_size_rules(recipe: Recipe) -> Iterator[Problem]:
    accumulation_steps = recipe.batch.accumulation_steps
    if recipe.batch.global_size is None:
        yield (
            ("batch.micro_size", "batch.global_size"),
            "got auto, which keeps a global batch by accumulation; give batch.global_size",
        )
    if accumulation_steps is not None:
        yield (
            ("batch.accumulation_steps", "batch.micro_size"),
            f"got {accumulation_steps} beside micro_size: auto, which determines accumulation; leave it out, "
            "or write null",
        )


def _batch_divides_among_ranks_rules(
    global_size: int, samples_per_rank: int, product_text: str, rank_count: int, is_exact: bool
) -> Iterator[Problem]:
    """Yield the problems of the batch equation where the recipe itself sets the number of ranks."""
    key_names = (
        "batch.global_size",
        "batch.micro_size",
        "batch.accumulation_steps",
        "launch.nodes",
        "launch.processes_per_node",
    )
    ranks_text = count_with_noun(rank_count, "rank")
    if is_exact and global_size != samples_per_rank * rank_count:
        yield (
            key_names,
            f"got {global_size}, but {product_text} x {ranks_text} = "
            f"{samples_per_rank * rank_count}; leave one of the three "
            "out",
        )
    elif global_size % (samples_per_rank * rank_count):
        nearest_text = _nearest_multiples_text(global_size, samples_per_rank * rank_count)
        unit_text = f"{product_text} x {ranks_text} = {samples_per_rank * rank_count}"
        yield (
            key_names,
            f"got {global_size}, which is not a multiple of "
            f"{unit_text if product_text else ranks_text}; {nearest_text}",
        )


def _nearest_multiples_text(global_size: int, divisor: int) -> str:
    lower_multiple = global_size // divisor * divisor
    upper_multiple = (global_size // divisor + 1) * divisor
    return (
        f"{lower_multiple} or {upper_multiple} would be valid"
        if lower_multiple
        else f"{upper_multiple} would be valid"
    )


# What configure_optimizers of a LightningModule decides.
_GROUP_FIELDS = {"weight_decay", "no_decay", "groups", "layer_decay", "attributes"}


def _optimizer_field_and_zero_rules(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    zero = recipe.zero
    used_fields = tuple(
        dict.fromkeys(f for name in optimizer.names for f in OPTIMIZERS[name].fields)
    )
    # Fields of no optimizer in particular, as learning_rate, are not among them.
    fields_of_some_optimizer = {
        field for traits in OPTIMIZERS.values() for field in traits.fields
    } | (_GROUP_FIELDS if optimizer.name == "configured" else set())
    if optimizer.name == "configured" and not recipe.model.traits.wrapper:
        yield (
            ("optimizer.name", "model.task"),
            f"got configured, which is for task lightning, and task is {recipe.model.task}",
        )
    if optimizer.name == "configured" and names_of_non_default_fields(recipe.schedule):
        yield (
            ("schedule", "optimizer.name"),
            "has no effect with optimizer configured: configure_optimizers has the scheduler",
        )
    for key in sorted(
        fields_of_some_optimizer & names_of_non_default_fields(optimizer) - set(used_fields)
    ):
        yield (
            (f"optimizer.{key}", "optimizer.name"),
            NO_EFFECT_MESSAGE.format(
                optimizer.name, " and ".join(used_fields) or "learning_rate alone"
            ),
        )
    yield from _combined_optimizer_rules(optimizer)
    yield from _parallel_rules(recipe)
    whole_tensor_optimizers = [
        name for name in optimizer.names if OPTIMIZERS[name].needs_whole_tensors
    ]
    if whole_tensor_optimizers and zero is not None and zero.stage > 0:
        yield (
            ("optimizer.name", "zero.stage"),
            f"got {whole_tensor_optimizers[0]} with ZeRO {zero.stage}: "
            f"{whole_tensor_optimizers[0].upper()} computes an update from a "
            "whole tensor, and ZeRO splits tensors into flat pieces, so every update would be "
            "wrong; use fused_adam, or zero.stage: 0",
        )


def _parallel_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of FSDP2 beside other sections."""
    if recipe.parallel is None:
        return
    if recipe.zero:
        yield from _autotp_rules(recipe, recipe.parallel, recipe.zero)
    if recipe.model.traits.wrapper:
        yield (
            ("parallel", "model.task"),
            f"was not tried with task {recipe.model.task}; leave it out, or use zero",
        )
    if recipe.parallel.tensor == 1:
        for field_name in ("tensor_plan", "across_hosts"):
            if getattr(recipe.parallel, field_name):
                yield (
                    (f"parallel.{field_name}", "parallel.tensor"),
                    "has no effect without parallel.tensor; set it as well, or leave this out",
                )
    others = [name for name in recipe.optimizer.names if name not in _SHARDED_OPTIMIZERS]
    if others:
        yield (
            ("parallel", "optimizer.name"),
            f"got optimizer {others[0]}, whose update needs whole tensors or plain ones; with parallel "
            f"there can be {', '.join(_SHARDED_OPTIMIZERS)}",
        )


def _autotp_rules(recipe: Recipe, parallel: Parallel, zero: Zero) -> Iterator[Problem]:
    """Yield the problems of `parallel` beside `zero`: DeepSpeed's tensor parallelism."""
    if parallel.tensor == 1:
        yield (
            ("parallel", "zero"),
            "FSDP2 and DeepSpeed's ZeRO both divide the model over the ranks; leave out one of them, "
            "or give parallel.tensor alone, which zero.stage 0 to 2 can have beside it",
        )
        return
    for field_name in sorted(names_of_non_default_fields(parallel) & _FIELDS_OF_FSDP2):
        yield (
            (f"parallel.{field_name}", "zero"),
            "is for FSDP2: with zero there are as many copies as parallel.tensor leaves ranks for; leave "
            "this out, or zero",
        )
    if zero.stage == 3:
        yield (
            ("zero.stage", "parallel.tensor"),
            "got 3 with parallel.tensor, whose slices ZeRO 3 would divide again; use zero.stage 0, 1 or 2, "
            "or leave out zero: FSDP2 divides weights, too",
        )
    if zero.stage == 0 and recipe.format.is_narrow:
        yield (
            ("zero.stage", "parallel.tensor"),
            f"got 0 with parallel.tensor in {recipe.precision}, where DeepSpeed 0.19.8 clips by the norm of the "
            "first rank's slices alone; use zero.stage 1 or 2",
        )
    if zero.offload:
        yield (
            ("zero.offload", "parallel.tensor"),
            "was not tried with slices of layers; leave out one of them, or use parallel.offload without zero",
        )


def _combined_optimizer_rules(optimizer: Optimizer) -> Iterator[Problem]:
    """Yield the groups whose optimizer cannot run beside the others."""
    combinable_names = [name for name, traits in OPTIMIZERS.items() if traits.combines]
    other_names = {name for name in optimizer.names if name != optimizer.name}
    for group_index, group in enumerate(optimizer.groups):
        if group.name and group.name != optimizer.name and group.name not in combinable_names:
            yield (
                (f"optimizer.groups[{group_index}].name",),
                f"got {group.name}; beside another optimizer there can be {', '.join(combinable_names)}",
            )
    if other_names and not optimizer.traits.combines:
        yield (
            ("optimizer.name", "optimizer.groups"),
            f"got {optimizer.name} with groups of {', '.join(sorted(other_names))}; beside another "
            f"optimizer there can be {', '.join(combinable_names)}",
        )


def _length_profile_hook_and_interval_rules(recipe: Recipe) -> Iterator[Problem]:
    max_steps = recipe.train.max_steps
    epochs = recipe.train.epochs
    if max_steps is None and epochs is None:
        yield (
            ("train.max_steps", "train.epochs"),
            "is missing: set max_steps or epochs",
        )
    if max_steps is not None and epochs is not None:
        yield (
            ("train.epochs", "train.max_steps"),
            f"got {epochs:g} beside max_steps: {max_steps}; keep one, and write null in place of the "
            "other",
        )
    first_step, last_step = recipe.log.profile_steps or (1, 1)
    if first_step > min(last_step, max_steps or last_step):
        yield (
            ("log.profile_steps", "train.max_steps"),
            f"got {first_step}:{last_step}; the first step is at most the last, and at most train.max_steps: "
            "as 4:9",
        )
    yield from function_name_rules("train.hook", recipe.train.hook)
    yield from function_name_rules("train.metric", recipe.train.metric)
    if recipe.train.loss_weight is not None and not recipe.data.is_custom:
        yield (
            ("train.loss_weight", "data.train", "data.train.format"),
            "is for custom data (format: custom); all samples of this data count equally; "
            "leave it out",
        )
    if recipe.model.traits.wrapper and recipe.train.metric is not None:
        yield (
            ("train.metric", "model.task"),
            "has no effect with task lightning: log the metric in validation_step",
        )
    for epochs_key, steps_key, section in (
        ("train.evaluate_every_epochs", "train.evaluate_every_steps", recipe.train),
        ("checkpoint.every_epochs", "checkpoint.every_steps", recipe.checkpoint),
    ):
        intervals = [getattr(section, path.partition(".")[2]) for path in (epochs_key, steps_key)]
        if None not in intervals:
            yield (
                (epochs_key, steps_key),
                f"got {intervals[0]:g} beside {steps_key}: {intervals[1]}; keep one, and write null in "
                "place of the other",
            )
        if recipe.data.evaluation is None and section is recipe.train and any(intervals):
            yield (
                (steps_key if intervals[1] else epochs_key, "data.evaluation"),
                "has no effect without data.evaluation; set that corpus, or a share of data.train",
            )
