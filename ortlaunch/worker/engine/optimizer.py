"""The optimizer of a run, and its replacement where the requested one is not available."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.run_folder.engine_report import OptimizerGroup
from ortlaunch.tables.optimizers import MUON_MOMENTUM, OPTIMIZERS
from ortlaunch.worker.engine.torch_scheduler import TorchScheduler
from ortlaunch.worker.model.named_state import STATE_TENSORS
from ortlaunch.worker.model.parameter_groups import (
    CombinedOptimizer,
    build_parameter_groups_and_notes,
    named_parameters_without_prefix,
    parameter_group_records,
)
from ortlaunch.worker.model.quantized_weights import import_bitsandbytes_or_refuse
from ortmodule import FusedAdam
from ortmodule.loops import build_torch_adamw, reason_tensor_is_too_large_or_empty


class OptimizerInputs(NamedTuple):
    """The inputs from which an optimizer is built."""

    settings: Optimizer
    groups: list[Json]
    """Parameter groups with their weight decay."""
    engine_name: str
    """The engine that runs the model."""
    device: torch.device
    """The device of the model."""
    deepspeed_config: Mapping[str, Any] | None = None
    """DeepSpeed's config, which divides and moves parameters; None without DeepSpeed."""
    rank_count: int = 1
    """The number of ranks over which DeepSpeed divides parameters."""
    model: nn.Module = nn.Identity()
    """The model, with the engine around it."""

    @property
    def adam_settings(self) -> Json:
        """The settings that all Adam-like optimizers share."""
        return {
            "lr": self.settings.learning_rate,
            "betas": self.settings.betas,
            "eps": self.settings.epsilon,
        }


class BuiltOptimizer(NamedTuple):
    """An optimizer and its record."""

    optimizer: torch.optim.Optimizer
    used: str
    """The name of its class, with the arguments that matter."""
    replacement_reason: str = ""
    """Why it is not the requested one; empty if it is."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    scheduler: TorchScheduler | None = None
    """The learning rates that a LightningModule configured; None: the recipe's schedule."""
    groups: tuple[OptimizerGroup, ...] = ()
    """The record of its parameter groups."""


def require_trained_parameters(model: nn.Module, freeze_patterns: Sequence[str] = ()) -> None:
    """Check that there is something to train.

    Args:
        model: the model.
        freeze_patterns: the patterns of model.freeze.

    Raises:
        InputError: the model has no trained parameter.
    """
    if not any(p.requires_grad for p in model.parameters()):
        count = len([*model.parameters()])
        why = (
            f"none of its {count} parameters has requires_grad" if count else "it has no parameters"
        )
        if count and freeze_patterns:
            why += f" under model.freeze={[*freeze_patterns]}: leave out a pattern, or except some with !"
        raise InputError(f"model: there is nothing to train: {why}")


def build_optimizer(
    settings: Optimizer,
    model: nn.Module,
    engine_name: str,
    device: torch.device,
    deepspeed_config: Mapping[str, Any] | None = None,
    rank_count: int = 1,
) -> BuiltOptimizer:
    """Build the recipe's optimizer over the trained parameters.

    Args:
        settings: the recipe's `optimizer`.
        model: its trained parameters are optimized.
        engine_name: the engine that runs the model.
        device: the device of the model.
        deepspeed_config: DeepSpeed's config, which divides and moves parameters; None without DeepSpeed.
        rank_count: the number of ranks over which DeepSpeed divides them.

    Raises:
        InputError: the model has no trained parameter, or the recipe's groups do not fit it.
    """
    require_trained_parameters(model)
    groups, notes = build_parameter_groups_and_notes(settings, model)
    records = parameter_group_records(groups, model, settings.learning_rate)
    by_name: dict[str, list[Json]] = {}
    for group in _groups_of_divided_or_whole_parameters(groups):
        by_name.setdefault(group.pop("optimizer"), []).append(group)
    built = []
    for name, optimizer_groups in by_name.items():
        module, _, function = OPTIMIZERS[name].builder.partition(":")
        build: Callable[[OptimizerInputs], BuiltOptimizer] = getattr(
            import_module(module), function
        )
        if OPTIMIZERS[name].tensors:
            for group in optimizer_groups:
                group[STATE_TENSORS] = OPTIMIZERS[name].tensors
        built.append(
            build(
                OptimizerInputs(
                    settings,
                    optimizer_groups,
                    engine_name,
                    device,
                    deepspeed_config,
                    rank_count,
                    model,
                )
            )
        )
    built_optimizer = built[0]
    if len(built) > 1:
        built_optimizer = BuiltOptimizer(
            CombinedOptimizer([part.optimizer for part in built]),
            " and ".join(part.used for part in built),
        )
    return built_optimizer._replace(notes=(*notes, *built_optimizer.notes), groups=tuple(records))


def _groups_of_divided_or_whole_parameters(groups: Sequence[Json]) -> Iterator[Json]:
    """Yield each group, as two where FSDP2 divides a part of its parameters."""
    for group in groups:
        # torch's operators on lists of tensors take either.
        parameters_by_kind: dict[bool, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            is_divided = hasattr(parameter, "full_tensor")
            parameters_by_kind.setdefault(is_divided, []).append(parameter)
        for parameters in parameters_by_kind.values():
            yield {**group, "params": parameters}


def lamb(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build our own LAMB."""
    from ortlaunch.worker.engine.lamb import Lamb

    built = Lamb(inputs.groups, **inputs.adam_settings, always_adapt=inputs.settings.always_adapt)
    return BuiltOptimizer(built, "ortlaunch.worker.engine.lamb.Lamb")


def sgd(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build torch's SGD."""
    built = torch.optim.SGD(
        inputs.groups, lr=inputs.settings.learning_rate, momentum=inputs.settings.momentum
    )
    return BuiltOptimizer(built, "torch.optim.SGD")


def muon(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build torch's Muon, with the scale that makes AdamW's rates and decays fit it.

    Raises:
        InputError: torch has no Muon, or a parameter is not a matrix.
    """
    if not hasattr(torch.optim, "Muon"):
        raise InputError(f"optimizer: muon needs torch 2.9 or newer; this is {torch.__version__}")
    names = {id(p): name for name, p in named_parameters_without_prefix(inputs.model)}
    others = [names[id(p)] for group in inputs.groups for p in group["params"] if p.ndim != 2]
    if others:
        raise InputError(
            f"optimizer.groups: muon is for matrices only, and not for {', '.join(others)}"
        )
    built = torch.optim.Muon(
        inputs.groups,
        lr=inputs.settings.learning_rate,
        momentum=inputs.settings.momentum or MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return BuiltOptimizer(built, "torch.optim.Muon")


def adafactor(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build transformers' Adafactor, at the recipe's learning rate."""
    from transformers.optimization import Adafactor

    built = Adafactor(
        inputs.groups,
        lr=inputs.settings.learning_rate,
        # Its own rates, from the step and from each tensor's size, would replace the schedule.
        relative_step=False,
        scale_parameter=False,
    )
    return BuiltOptimizer(built, "transformers.Adafactor")


def adamw_8bit(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build bitsandbytes' AdamW, whose moments have 8 bits a value.

    Raises:
        MissingDependency: bitsandbytes is not installed.
        InputError: it has no kernels for the device.
    """
    bitsandbytes = import_bitsandbytes_or_refuse("optimizer.name: adamw_8bit", "bitsandbytes")
    if inputs.device.type not in bitsandbytes.supported_torch_devices:
        raise InputError(
            f"optimizer.name: adamw_8bit: bitsandbytes {bitsandbytes.__version__} has no kernels "
            f"for {inputs.device.type}"
        )
    built = bitsandbytes.optim.AdamW8bit(inputs.groups, **inputs.adam_settings)
    return BuiltOptimizer(built, "bitsandbytes.optim.AdamW8bit")


def adamw(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build torch's AdamW: its fused kernel where it has one, and else that of lists."""
    built, used, reason = build_torch_adamw(inputs.groups, **inputs.adam_settings)
    return BuiltOptimizer(built, used, notes=(f"AdamW is not fused: {reason}",) if reason else ())


def fused_adam_or_torch(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build ONNX Runtime's FusedAdam, or torch's fused AdamW with the reason."""
    zero = (inputs.deepspeed_config or {}).get("zero_optimization")
    reason = _reason_ort_is_unavailable_or_empty(
        inputs.engine_name, inputs.device
    ) or _reason_fused_adam_is_refused_or_empty(inputs.groups, zero, inputs.rank_count)
    if reason:
        return adamw(inputs)._replace(replacement_reason=reason)
    return BuiltOptimizer(
        FusedAdam(inputs.groups, **inputs.adam_settings), "onnxruntime.training.optim.FusedAdam"
    )


def _reason_ort_is_unavailable_or_empty(engine_name: str, device: torch.device) -> str:
    if device.type != "cuda":
        return "ONNX Runtime's is for CUDA only"
    return "" if engine_name == "ort" else f"ONNX Runtime is not loaded with engine {engine_name}"


def _reason_fused_adam_is_refused_or_empty(
    parameter_groups: Sequence[Mapping[str, Any]],
    zero_config: Mapping[str, Any] | None,
    rank_count: int,
) -> str:
    """Return why ONNX Runtime's FusedAdam cannot update these parameters; empty if it can.

    The answer depends on the form in which DeepSpeed's ZeRO holds the parameters.
    """
    if zero_config and (zero_config.get("offload_optimizer") or {}).get("device", "none") != "none":
        return "ONNX Runtime's is for CUDA only, and zero.offload keeps the optimizer off the GPU"
    sizes = [[parameter.numel() for parameter in group["params"]] for group in parameter_groups]
    # ZeRO flattens each group and gives each rank a part of it (stage 0: all of it).
    if zero_config:
        sizes = [
            [-(-sum(group) // (rank_count if zero_config.get("stage") else 1))] for group in sizes
        ]
    return reason_tensor_is_too_large_or_empty(size for group in sizes for size in group)
