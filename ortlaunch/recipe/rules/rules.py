"""Rules across fields of a recipe: (paths involved, message) for each broken rule. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ortlaunch.optimizers import OPTIMIZERS
from ortlaunch.recipe.fields.deepspeed_keys import deepspeed_rules
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import DOES_NOTHING, chosen
from ortlaunch.recipe.rules.bad_step_rules import bad_step_rules
from ortlaunch.recipe.rules.best_rules import best_rules
from ortlaunch.recipe.rules.checkpoint_rules import checkpoint_rules
from ortlaunch.recipe.rules.data_rules import data_rules
from ortlaunch.recipe.rules.engine_rules import engine_device_rules, engine_rules
from ortlaunch.recipe.rules.launch_rules import launch_rules
from ortlaunch.recipe.rules.model_rules import function, model_rules
from ortlaunch.recipe.rules.schedule_rules import schedule_rules
from ortlaunch.recipe.rules.submit_rules import submit_rules
from ortlaunch.recipe.text.place import Problem
from ortlaunch.tasks import TASKS
from ortlaunch.units import count_with_noun


def broken(recipe: Recipe) -> Iterator[Problem]:
    """Yield every rule that the recipe breaks."""
    # The order of the report where two problems have the same place.
    rules = (
        model_rules,
        data_rules,
        _batch,
        _optimizer,
        schedule_rules,
        engine_rules,
        deepspeed_rules,
        _train,
        checkpoint_rules,
        best_rules,
        bad_step_rules,
        launch_rules,
        submit_rules,
    )
    for rule in rules:
        yield from rule(recipe)
    if recipe.launch.device != "auto":
        yield from device_rules(recipe, recipe.launch.device)


def device_rules(recipe: Recipe, device: str, hosts: str = "the run's hosts") -> Iterator[Problem]:
    """Yield the problems of precision and engine settings on a known device.

    Args: recipe: the run's. device: `cpu` or `cuda`. hosts: the hosts with this device, as the
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
    found = recipe.launch.device == "auto"
    cpu = "CPU (launch.device is auto, and this host has no visible GPU)" if found else "CPU"
    use = f"use launch.device=cuda if {hosts} have GPUs, else" if found else "use"
    if recipe.engine.name == "ort" and recipe.format.is_narrow:
        yield (
            ("precision", "engine.name", "launch.device"),
            f"got {recipe.precision} with engine ort on {cpu}, where ONNX Runtime trains in fp32 "
            f"only; {use} "
            "precision: fp32, or engine.name: eager",
        )
    elif recipe.format.scales_loss and recipe.zero:
        yield (
            ("precision", "zero", "launch.device"),
            f"got fp16 with DeepSpeed on {cpu}, which DeepSpeed refuses; {use} bf16 or fp32, or "
            "zero: null",
        )


def task_rules(recipe: Recipe, task: str) -> Iterator[Problem]:
    """Yield the problems of a recipe for the task that the command gives the ranks."""
    if TASKS[task].compares and recipe.engine.name == "auto":
        yield (
            ("engine.name",),
            (
                "got auto, but the comparison with plain PyTorch needs a fixed engine; use ort or "
                "inductor"
            ),
        )


def _batch(recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.batch
    launch = recipe.launch
    total = batch.global_size
    micro = batch.micro_size
    steps = batch.accumulation_steps
    if total is None and (micro is None or steps is None) and micro != "auto":
        yield (
            ("batch", "batch.global_size", "batch.micro_size", "batch.accumulation_steps"),
            "give global_size, or both micro_size and accumulation_steps (global_size = "
            "micro_size x accumulation_steps x ranks)",
        )
        return
    if micro == "auto":
        yield from _auto(recipe)
        # The smallest size that will be tried.
        micro = 1
        steps = None
    per_rank = (micro or 1) * (steps or 1)
    if total is None:
        return
    shown = " x ".join(
        f"{name} ({value})"
        for name, value in (("micro_size", micro), ("accumulation_steps", steps))
        if value
    )
    if total % per_rank:
        yield (
            ("batch.global_size", "batch.micro_size", "batch.accumulation_steps"),
            f"got {total}, which is not a multiple of {shown}; {_near_multiples(total, per_rank)}",
        )
    elif launch.processes_per_node:
        ranks = (nodes * launch.processes_per_node for nodes in launch.node_counts)
        broken = (
            _batch_on(total, per_rank, shown, each, exact=bool(micro and steps)) for each in ranks
        )
        # One number of hosts is enough as an example.
        yield from itertools.islice(itertools.chain.from_iterable(broken), 1)


def _auto(recipe: Recipe) -> Iterator[Problem]:
    steps = recipe.batch.accumulation_steps
    if recipe.batch.global_size is None:
        yield (
            ("batch.micro_size", "batch.global_size"),
            "got auto, which keeps a global batch by accumulation; give batch.global_size",
        )
    if steps is not None:
        yield (
            ("batch.accumulation_steps", "batch.micro_size"),
            f"got {steps} beside micro_size: auto, which determines accumulation; leave it out, "
            "or write null",
        )


def _batch_on(total: int, per_rank: int, shown: str, ranks: int, exact: bool) -> Iterator[Problem]:
    """Yield the problems of the batch equation where the recipe itself sets the number of ranks."""
    paths = (
        "batch.global_size",
        "batch.micro_size",
        "batch.accumulation_steps",
        "launch.nodes",
        "launch.processes_per_node",
    )
    of_ranks = count_with_noun(ranks, "rank")
    if exact and total != per_rank * ranks:
        yield (
            paths,
            f"got {total}, but {shown} x {of_ranks} = {per_rank * ranks}; leave one of the three "
            "out",
        )
    elif total % (per_rank * ranks):
        near = _near_multiples(total, per_rank * ranks)
        unit = f"{shown} x {of_ranks} = {per_rank * ranks}"
        yield (
            paths,
            f"got {total}, which is not a multiple of {unit if shown else of_ranks}; {near}",
        )


def _near_multiples(total: int, unit: int) -> str:
    below = total // unit * unit
    above = (total // unit + 1) * unit
    return f"{below} or {above} would be valid" if below else f"{above} would be valid"


# What configure_optimizers of a LightningModule decides.
_GROUPED = {"weight_decay", "no_decay", "groups", "layer_decay", "attributes"}


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    zero = recipe.zero
    takes = tuple(dict.fromkeys(f for name in optimizer.names for f in OPTIMIZERS[name].fields))
    # Fields of no optimizer in particular, as learning_rate, are not among them.
    of_some = {field for traits in OPTIMIZERS.values() for field in traits.fields} | (
        _GROUPED if optimizer.name == "configured" else set()
    )
    if optimizer.name == "configured" and not recipe.model.traits.wrapper:
        yield (
            ("optimizer.name", "model.task"),
            f"got configured, which is for task lightning, and task is {recipe.model.task}",
        )
    if optimizer.name == "configured" and chosen(recipe.schedule):
        yield (
            ("schedule", "optimizer.name"),
            "has no effect with optimizer configured: configure_optimizers has the scheduler",
        )
    for key in sorted(of_some & chosen(optimizer) - set(takes)):
        yield (
            (f"optimizer.{key}", "optimizer.name"),
            DOES_NOTHING.format(optimizer.name, " and ".join(takes) or "learning_rate alone"),
        )
    yield from _combined(optimizer)
    whole = [name for name in optimizer.names if OPTIMIZERS[name].needs_whole_tensors]
    if whole and zero is not None and zero.stage > 0:
        yield (
            ("optimizer.name", "zero.stage"),
            f"got {whole[0]} with ZeRO {zero.stage}: {whole[0].upper()} computes an update from a "
            "whole tensor, and ZeRO splits tensors into flat pieces, so every update would be "
            "wrong; use fused_adam, or zero.stage: 0",
        )


def _combined(optimizer: Optimizer) -> Iterator[Problem]:
    """Yield the groups whose optimizer cannot run beside the others."""
    able = [name for name, traits in OPTIMIZERS.items() if traits.combines]
    others = {name for name in optimizer.names if name != optimizer.name}
    for at, group in enumerate(optimizer.groups):
        if group.name and group.name != optimizer.name and group.name not in able:
            yield (
                (f"optimizer.groups[{at}].name",),
                f"got {group.name}; beside another optimizer there can be {', '.join(able)}",
            )
    if others and not optimizer.traits.combines:
        yield (
            ("optimizer.name", "optimizer.groups"),
            f"got {optimizer.name} with groups of {', '.join(sorted(others))}; beside another "
            f"optimizer there can be {', '.join(able)}",
        )


def _train(recipe: Recipe) -> Iterator[Problem]:
    steps = recipe.train.max_steps
    epochs = recipe.train.epochs
    if steps is None and epochs is None:
        yield (
            ("train.max_steps", "train.epochs"),
            "is missing: set max_steps or epochs",
        )
    if steps is not None and epochs is not None:
        yield (
            ("train.epochs", "train.max_steps"),
            f"got {epochs:g} beside max_steps: {steps}; keep one, and write null in place of the "
            "other",
        )
    first, last = recipe.log.profile_steps or (1, 1)
    if first > min(last, steps or last):
        yield (
            ("log.profile_steps", "train.max_steps"),
            f"got {first}:{last}; the first step is at most the last, and at most train.max_steps: "
            "as 4:9",
        )
    yield from function("train.hook", recipe.train.hook)
    yield from function("train.metric", recipe.train.metric)
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
    for by_epochs, by_steps, section in (
        ("train.evaluate_every_epochs", "train.evaluate_every_steps", recipe.train),
        ("checkpoint.every_epochs", "checkpoint.every_steps", recipe.checkpoint),
    ):
        given = [getattr(section, path.partition(".")[2]) for path in (by_epochs, by_steps)]
        if None not in given:
            yield (
                (by_epochs, by_steps),
                f"got {given[0]:g} beside {by_steps}: {given[1]}; keep one, and write null in "
                "place of the other",
            )
        if recipe.data.evaluation is None and section is recipe.train and any(given):
            yield (
                (by_steps if given[1] else by_epochs, "data.evaluation"),
                "has no effect without data.evaluation; set that corpus, or a share of data.train",
            )
