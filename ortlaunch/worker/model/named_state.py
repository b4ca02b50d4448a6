"""What training changes, by parameter name, however an engine keeps it: whole, or in pieces of one flat tensor.

A checkpoint is written from it and read into it (worker/checkpoint); steppers know where their parts lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ortlaunch.json_types import Json

Numbers = dict[str, float]


@dataclass(frozen=True)
class ParameterRange:
    """A range of a flattened parameter, and where this rank keeps its master weights."""

    name: str
    start: int
    count: int
    master: torch.Tensor
    """The tensor that the optimizer steps; its state is kept under this tensor."""
    offset: int
    """Where the range begins in the flattened master tensor."""
    group: Json
    """The optimizer's parameter group of this tensor."""


@dataclass(frozen=True)
class LossScale:
    """The loss scale of fp16 with its counters, as numbers; `scale` is what all kinds have."""

    read: Callable[[], Numbers]
    write: Callable[[Numbers], None]


def _nothing() -> None:
    """Nothing to do."""


@dataclass(frozen=True)
class NamedState:
    """Everything that a rank holds of what training changes."""

    shapes: dict[str, tuple[int, ...]]
    """Of every trained parameter, whole."""
    parts: list[ParameterRange]
    optimizer: torch.optim.Optimizer
    buffers: dict[str, torch.Tensor]
    replicated: bool = True
    """Every rank holds all of it; else each holds its own parts."""
    loss_scale: LossScale | None = None
    refresh: Callable[[], None] = field(default=_nothing)
    """Makes the model's weights what the master weights are (collective)."""


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the parameters that training changes; ZeRO 3 leaves pieces in the model."""
    return {
        name: tuple(getattr(p, "ds_shape", p.shape))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model saves besides its parameters."""
    kept = model.state_dict(keep_vars=True)
    return {name: value for name, value in kept.items() if not isinstance(value, nn.Parameter)}


def whole_parts(
    names: Iterable[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> list[ParameterRange]:
    """Parts of parameters that the optimizer steps as they are, or by a master copy of each."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = ((name, (masters or {}).get(p, p)) for name, p in names if p.requires_grad)
    return [
        ParameterRange(name, 0, master.numel(), master, 0, groups[id(master)])
        for name, master in found
    ]


def grad_scaler(scaler: torch.amp.GradScaler) -> LossScale | None:
    """torch's loss scale; None where it is off."""
    return LossScale(scaler.state_dict, scaler.load_state_dict) if scaler.is_enabled() else None


def tensor_kinds(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Tensors that the optimizer of this parameter group keeps for each weight."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group.get("momentum") else ()


def counts_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps one `step` for a parameter group, as LAMB and ONNX Runtime's FusedAdam do."""
    return not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))
