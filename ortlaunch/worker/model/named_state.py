"""The state that training changes, by parameter name, independent of the engine's storage.

An engine stores parameters whole or as ranges of one flat tensor; its stepper knows the ranges. A
checkpoint is written from this state and read into it (worker/checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.worker.model.parameter_groups import CombinedOptimizer
from ortlaunch.worker.model.quantized_weights import quantized_layers

NamedNumbers = dict[str, float]
STATE_TENSORS = "state_tensors"
"""Key of a parameter group with the names of state tensors that have shapes and types of their own.

Such an optimizer updates whole parameters and counts the steps of each as an int.
"""


class Runs(NamedTuple):
    """A slice of a tensor along any dimension: runs of equal length of the flattened tensor."""

    first: int
    """The first element."""
    length: int
    """Elements of a run."""
    stride: int
    """Elements from the begin of a run to the begin of the next one."""

    def view_of(self, flat_tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a whole flattened tensor; a row is a run."""
        return flat_tensor.as_strided(
            (flat_tensor.numel() // self.stride, self.length), (self.stride, 1), self.first
        )


@dataclass(frozen=True)
class ParameterRange:
    """A range of a flattened parameter, and the location of its master weights on this rank."""

    name: str
    start: int
    count: int
    master: torch.Tensor
    """The tensor that the optimizer updates; it is the key of the optimizer's state."""
    offset: int
    """The start of the range in the flattened master tensor."""
    group: Json
    """The optimizer's parameter group of this tensor."""
    runs: Runs | None = None
    """The slice of the parameter that `start` and `count` are in; None: the whole parameter."""
    is_saved: bool = True
    """Whether a checkpoint has this range from this rank, and not from another that has it, too."""


@dataclass(frozen=True)
class LossScale:
    """Access to the loss scale of fp16 and its counters, as numbers by name.

    All implementations have the name `scale`; other names differ.
    """

    read: Callable[[], NamedNumbers]
    write: Callable[[NamedNumbers], None]


@dataclass(frozen=True)
class NamedState:
    """One rank's part of the state that training changes."""

    shapes: dict[str, tuple[int, ...]]
    """The whole shape of every trained parameter, by name."""
    parts: list[ParameterRange]
    optimizer: torch.optim.Optimizer
    buffers: dict[str, torch.Tensor]
    copy_and_count: tuple[int, int] | None = None
    """Of ranks that hold the same parts: the number of this one, and their count; None: all ranks."""
    loss_scale: LossScale | None = None
    refresh: Callable[[], None] = field(default=lambda: None)
    """Copies the master weights into the model's weights (collective)."""


class ParameterSlices(NamedTuple):
    """The slices of a parameter that ranks of a tensor group have."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    dimension: int
    """The dimension that is sliced."""
    sizes: tuple[int, ...]
    """The size of each rank's slice along it."""


def autotp_slices_or_none(parameter: torch.Tensor) -> ParameterSlices | None:
    """Return the slices that DeepSpeed's AutoTP made of a parameter; None: it is whole."""
    # What DeepSpeed's universal checkpoints know of it.
    slices = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
    if slices is None or slices["partition_dim"] is None:
        return None
    return ParameterSlices(
        slices["logical_shape"], slices["partition_dim"], slices["partition_sizes"]
    )


def trained_parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and whole shapes of the trained parameters."""
    return {name: _whole_shape(p) for name, p in model.named_parameters() if p.requires_grad}


def _whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if (slices := autotp_slices_or_none(parameter)) is not None:
        return slices.shape
    # ZeRO 3 leaves only pieces in the model, and the whole shape in `ds_shape`.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def require_same_trained_parameters(
    model: nn.Module, optimizer_parameters: Mapping[str, nn.Parameter]
) -> None:
    """Refuse a model whose trained parameters are no longer those of the optimizer.

    Args:
        model: the model.
        optimizer_parameters: the parameters that were trained at the start, by name.

    Raises:
        InputError: a parameter was frozen, unfrozen or replaced since then.
    """
    current_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in {**optimizer_parameters, **current_parameters}:
        if current_parameters.get(name) is not optimizer_parameters.get(name):
            change_text = (
                "frozen"
                if name not in current_parameters
                else "replaced"
                if name in optimizer_parameters
                else "unfrozen"
            )
            raise InputError(
                f"model: {name} was {change_text} while training, and the optimizer has the parameters of "
                "the start, so that no checkpoint can hold both; set requires_grad before, and let "
                "a parameter rest by its gradient (None) or by optimizer.groups"
            )


def persistent_buffers_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a model saves besides its parameters."""
    model_state = model.state_dict(keep_vars=True)
    # Their scales are as frozen as their weights.
    quantized = tuple(f"{name}." for name, _ in quantized_layers(model))
    return {
        name: value
        for name, value in model_state.items()
        if not isinstance(value, nn.Parameter) and not name.startswith(quantized)
    }


def whole_parameter_ranges(
    named_weights: Iterable[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> list[ParameterRange]:
    """Return one range for each whole parameter.

    Args:
        named_weights: the model's parameters with their names.
        optimizer: it updates the parameters, or a master copy of each.
        masters: the master copies, by parameter; None if there are none.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    named_masters = (
        (name, (masters or {}).get(p, p)) for name, p in named_weights if p.requires_grad
    )
    return [
        ParameterRange(name, 0, master.numel(), master, 0, groups[id(master)])
        for name, master in named_masters
    ]


def scaler_loss_scale_or_none(scaler: torch.amp.GradScaler) -> LossScale | None:
    """Return the loss scale of torch's scaler; None if the scaler is disabled."""
    return LossScale(scaler.state_dict, scaler.load_state_dict) if scaler.is_enabled() else None


def optimizer_state_tensor_names(parameter_group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the optimizer's state tensors for each weight of this group."""
    if STATE_TENSORS in parameter_group:
        return tuple(parameter_group[STATE_TENSORS])
    if "betas" in parameter_group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if parameter_group.get("momentum") else ()


def counts_steps_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer keeps one `step` per parameter group, not per parameter."""
    # LAMB and ONNX Runtime's FusedAdam do.
    return not isinstance(
        optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, CombinedOptimizer)
    )
