"""The optimizer of a run, and its replacement where the requested one is not available."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.ortmodule.fused_adam import ONNXRUNTIME, TORCH, fused_adam, why_too_large
from ortlaunch.recipe.fields.models import Optimizer
from ortlaunch.worker.engine.scheduler import Scheduler


class Building(NamedTuple):
    """The inputs from which an optimizer is built."""

    recipe: Optimizer
    groups: list[Json]
    """Parameter groups with their weight decay."""
    engine: str
    """The engine that runs the model."""
    device: torch.device
    """The device of the model."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's config, which divides and moves parameters; None without DeepSpeed."""
    ranks: int = 1
    """The number of ranks over which DeepSpeed divides parameters."""
    model: nn.Module = nn.Identity()
    """The model, with the engine around it."""

    @property
    def adam(self) -> Json:
        """The settings that all Adam-like optimizers share."""
        return {
            "lr": self.recipe.learning_rate,
            "betas": self.recipe.betas,
            "eps": self.recipe.epsilon,
        }


class BuiltOptimizer(NamedTuple):
    """An optimizer and its record."""

    optimizer: torch.optim.Optimizer
    used: str
    """The name of its class, with the arguments that matter."""
    why: str = ""
    """Why it is not the requested one; empty if it is."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    scheduler: Scheduler | None = None
    """The learning rates that a LightningModule configured; None: the recipe's schedule."""


def build_optimizer(
    recipe: Optimizer,
    model: nn.Module,
    engine: str,
    device: torch.device,
    deepspeed: Mapping[str, Any] | None = None,
    ranks: int = 1,
) -> BuiltOptimizer:
    """Build the recipe's optimizer over the trained parameters, in decay and no-decay groups.

    Args:
        recipe: the recipe's `optimizer`.
        model: its trained parameters are optimized.
        engine: the engine that runs the model.
        device: the device of the model.
        deepspeed: DeepSpeed's config, which divides and moves parameters; None without DeepSpeed.
        ranks: the number of ranks over which DeepSpeed divides them.

    Raises:
        InputError: the model has no trained parameter.
    """
    groups, notes = parameter_groups(recipe, model.named_parameters())
    if not groups:
        count = len([*model.parameters()])
        why = (
            f"none of its {count} parameters has requires_grad" if count else "it has no parameters"
        )
        raise InputError(f"model: there is nothing to train: {why}")
    module, _, name = recipe.traits.builder.partition(":")
    build: Callable[[Building], BuiltOptimizer] = getattr(import_module(module), name)
    return build(Building(recipe, groups, engine, device, deepspeed, ranks, model))._replace(
        notes=notes
    )


def lamb(parts: Building) -> BuiltOptimizer:
    """Build our own LAMB."""
    from ortlaunch.worker.engine.lamb import Lamb

    made = Lamb(parts.groups, **parts.adam, always_adapt=parts.recipe.always_adapt)
    return BuiltOptimizer(made, "ortlaunch.worker.engine.lamb.Lamb")


def sgd(parts: Building) -> BuiltOptimizer:
    """Build torch's SGD."""
    made = torch.optim.SGD(
        parts.groups, lr=parts.recipe.learning_rate, momentum=parts.recipe.momentum
    )
    return BuiltOptimizer(made, "torch.optim.SGD")


def adamw(parts: Building) -> BuiltOptimizer:
    """Build torch's AdamW."""
    return BuiltOptimizer(torch.optim.AdamW(parts.groups, **parts.adam), "torch.optim.AdamW")


def fused_adam_or_torch(parts: Building) -> BuiltOptimizer:
    """Build ONNX Runtime's FusedAdam, or torch's fused AdamW with the reason."""
    zero = (parts.deepspeed or {}).get("zero_optimization")
    why = _why_not_ort(parts.engine, parts.device) or _why_not_these(
        parts.groups, zero, parts.ranks
    )
    if why:
        made = torch.optim.AdamW(parts.groups, fused=True, **parts.adam)
        return BuiltOptimizer(made, TORCH, why)
    return BuiltOptimizer(fused_adam(parts.groups, **parts.adam), ONNXRUNTIME)


def _why_not_ort(engine: str, device: torch.device) -> str:
    if device.type != "cuda":
        return "ONNX Runtime's is for CUDA only"
    if engine != "ort":
        return f"ONNX Runtime is not loaded with engine {engine}"
    return ""


def _why_not_these(
    groups: Sequence[Mapping[str, Any]], zero: Mapping[str, Any] | None, ranks: int
) -> str:
    """Return why ONNX Runtime's FusedAdam cannot update these parameters; empty if it can.

    The answer depends on the form in which DeepSpeed's ZeRO holds the parameters.
    """
    if zero and (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        return "ONNX Runtime's is for CUDA only, and zero.offload keeps the optimizer off the GPU"
    sizes = [[parameter.numel() for parameter in group["params"]] for group in groups]
    # ZeRO flattens each group and gives each rank a part of it (stage 0: all of it).
    if zero:
        sizes = [[-(-sum(group) // (ranks if zero.get("stage") else 1))] for group in sizes]
    return why_too_large(size for group in sizes for size in group)


def parameter_groups(
    recipe: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]
) -> tuple[list[dict[str, object]], tuple[str, ...]]:
    """Return the groups of trained parameters with and without weight decay, and notes.

    A name of `no_decay` that matches no parameter makes a note.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    spared = {name for name, _ in trained for word in recipe.no_decay if word in name}
    groups = [
        {
            "params": [p for name, p in trained if name not in spared],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [p for name, p in trained if name in spared], "weight_decay": 0.0},
    ]
    idle = [word for word in recipe.no_decay if not any(word in name for name, _ in trained)]
    # The default lists the norms of several model families, of which each model has only some:
    # only the user's own names make a note.
    own = recipe.no_decay != Optimizer.model_fields["no_decay"].default and recipe.weight_decay > 0
    notes = (
        (f"optimizer.no_decay: no parameter's name contains {', '.join(idle)}",)
        if idle and own
        else ()
    )
    return [group for group in groups if group["params"]], notes
