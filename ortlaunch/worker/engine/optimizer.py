"""The optimizer of a run, and its replacement where the requested one is not available."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.errors import InputError, MissingDependency
from ortlaunch.json_types import Json
from ortlaunch.optimizers import MUON_MOMENTUM, OPTIMIZERS
from ortlaunch.ortmodule.fused_adam import ONNXRUNTIME, TORCH, fused_adam, why_too_large
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.run_folder.engine_report import OptimizerGroup
from ortlaunch.worker.engine.torch_scheduler import TorchScheduler
from ortlaunch.worker.model.named_state import STATE_TENSORS
from ortlaunch.worker.model.parameter_groups import (
    CombinedOptimizer,
    describe_groups,
    named_parameters,
    parameter_groups,
)


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
    scheduler: TorchScheduler | None = None
    """The learning rates that a LightningModule configured; None: the recipe's schedule."""
    groups: tuple[OptimizerGroup, ...] = ()
    """The record of its parameter groups."""


def build_optimizer(
    recipe: Optimizer,
    model: nn.Module,
    engine: str,
    device: torch.device,
    deepspeed: Mapping[str, Any] | None = None,
    ranks: int = 1,
) -> BuiltOptimizer:
    """Build the recipe's optimizer over the trained parameters.

    Args:
        recipe: the recipe's `optimizer`.
        model: its trained parameters are optimized.
        engine: the engine that runs the model.
        device: the device of the model.
        deepspeed: DeepSpeed's config, which divides and moves parameters; None without DeepSpeed.
        ranks: the number of ranks over which DeepSpeed divides them.

    Raises:
        InputError: the model has no trained parameter, or the recipe's groups do not fit it.
    """
    if not any(p.requires_grad for p in model.parameters()):
        count = len([*model.parameters()])
        why = (
            f"none of its {count} parameters has requires_grad" if count else "it has no parameters"
        )
        raise InputError(f"model: there is nothing to train: {why}")
    groups, notes = parameter_groups(recipe, model)
    records = describe_groups(groups, model, recipe.learning_rate)
    by_name: dict[str, list[Json]] = {}
    for group in groups:
        by_name.setdefault(group.pop("optimizer"), []).append(group)
    built = []
    for name, own in by_name.items():
        module, _, function = OPTIMIZERS[name].builder.partition(":")
        build: Callable[[Building], BuiltOptimizer] = getattr(import_module(module), function)
        for group in own if OPTIMIZERS[name].tensors else ():
            group[STATE_TENSORS] = OPTIMIZERS[name].tensors
        built.append(build(Building(recipe, own, engine, device, deepspeed, ranks, model)))
    one = built[0]
    if len(built) > 1:
        one = BuiltOptimizer(
            CombinedOptimizer([each.optimizer for each in built]),
            " and ".join(each.used for each in built),
        )
    return one._replace(notes=(*notes, *one.notes), groups=tuple(records))


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


def muon(parts: Building) -> BuiltOptimizer:
    """Build torch's Muon, with the scale that makes AdamW's rates and decays fit it.

    Raises:
        InputError: torch has no Muon, or a parameter is not a matrix.
    """
    if not hasattr(torch.optim, "Muon"):
        raise InputError(f"optimizer: muon needs torch 2.9 or newer; this is {torch.__version__}")
    names = {id(p): name for name, p in named_parameters(parts.model)}
    others = [names[id(p)] for group in parts.groups for p in group["params"] if p.ndim != 2]
    if others:
        raise InputError(
            f"optimizer.groups: muon is for matrices only, and not for {', '.join(others)}"
        )
    made = torch.optim.Muon(
        parts.groups,
        lr=parts.recipe.learning_rate,
        momentum=parts.recipe.momentum or MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return BuiltOptimizer(made, "torch.optim.Muon")


def adafactor(parts: Building) -> BuiltOptimizer:
    """Build transformers' Adafactor, at the recipe's learning rate."""
    from transformers.optimization import Adafactor

    made = Adafactor(
        parts.groups,
        lr=parts.recipe.learning_rate,
        # Its own rates, from the step and from each tensor's size, would replace the schedule.
        relative_step=False,
        scale_parameter=False,
    )
    return BuiltOptimizer(made, "transformers.Adafactor")


def adamw_8bit(parts: Building) -> BuiltOptimizer:
    """Build bitsandbytes' AdamW, whose moments have 8 bits a value.

    Raises:
        MissingDependency: bitsandbytes is not installed.
        InputError: it has no kernels for the device.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingDependency(
            f"optimizer.name: adamw_8bit needs bitsandbytes: {error}; "
            'type: pip install "ortlaunch[bitsandbytes]"'
        ) from None
    if parts.device.type not in bitsandbytes.supported_torch_devices:
        raise InputError(
            f"optimizer.name: adamw_8bit: bitsandbytes {bitsandbytes.__version__} has no kernels "
            f"for {parts.device.type}"
        )
    made = bitsandbytes.optim.AdamW8bit(parts.groups, **parts.adam)
    return BuiltOptimizer(made, "bitsandbytes.optim.AdamW8bit")


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
    return "" if engine == "ort" else f"ONNX Runtime is not loaded with engine {engine}"


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
