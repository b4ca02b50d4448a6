"""The table of optimizers: the values of the recipe's `optimizer.name`, and their properties.

Standard library only, for every side; `recipe.optimizer.traits` is the row.
"""

from __future__ import annotations

from typing import NamedTuple

_WORKER = "ortlaunch.worker.engine.optimizer"


class OptimizerTraits(NamedTuple):
    """One row of the table."""

    builder: str
    """`module:function` of the worker that creates the optimizer."""
    fields: tuple[str, ...]
    """Settings of the recipe that only some optimizers have, and this one does."""
    moments: float
    """State for each trained parameter, in float32 values; 0: one if `momentum` is set."""
    adapts: bool = True
    """Whether a step's size is about the learning rate, independent of the gradient's size."""
    # A checkpoint of one can be resumed with the other.
    state: str = ""
    """Name of the state's layout; optimizers with the same one can load each other's state."""
    tensors: tuple[str, ...] = ()
    """State tensors of a parameter that can have another shape or type than it; () if none can."""
    # ZeRO shards flat buffers, where a rank may have only a part of a tensor.
    needs_whole_tensors: bool = False
    """Whether the update of a value depends on the whole tensor."""
    # The others count their steps by parameter group.
    combines: bool = False
    """Whether it can optimize some parameters beside another optimizer."""
    on_device: str = "AdamW"
    """ONNX Runtime's optimizer class for on-device training."""
    on_device_note: str = ""
    """A note for the user if that is another optimizer."""


_ADAM = ("betas", "epsilon")
MUON_MOMENTUM = 0.95
"""Muon's momentum where the recipe gives none: the default of torch and of Muon's author."""
OPTIMIZERS = {
    "fused_adam": OptimizerTraits(f"{_WORKER}:fused_adam_or_torch", _ADAM, 2, state="adam"),
    "adamw": OptimizerTraits(f"{_WORKER}:adamw", _ADAM, 2, state="adam", combines=True),
    "lamb": OptimizerTraits(
        f"{_WORKER}:lamb",
        (*_ADAM, "always_adapt"),
        2,
        state="lamb",
        needs_whole_tensors=True,
        on_device_note="optimizer: lamb is not available on devices; ONNX Runtime's AdamW replaces it",
    ),
    "sgd": OptimizerTraits(
        f"{_WORKER}:sgd",
        ("momentum",),
        0,
        adapts=False,
        state="sgd",
        combines=True,
        on_device="SGD",
    ),
    "muon": OptimizerTraits(
        f"{_WORKER}:muon",
        (*_ADAM, "momentum"),
        2,  # AdamW's. Matrices of layers have one.
        state="muon",
        needs_whole_tensors=True,
        combines=True,
        on_device_note="optimizer: muon is not available on devices; ONNX Runtime's AdamW replaces it",
    ),
    "adafactor": OptimizerTraits(
        f"{_WORKER}:adafactor",
        (),
        0,  # One value for each row and each column.
        state="adafactor",
        tensors=("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"),
        needs_whole_tensors=True,
        combines=True,
        on_device_note="optimizer: adafactor is not available on devices; ONNX Runtime's AdamW "
        "replaces it",
    ),
    "adamw_8bit": OptimizerTraits(
        f"{_WORKER}:adamw_8bit",
        _ADAM,
        2 / 4,  # Two bytes. The scales, two float32 values for each 256, are not counted.
        state="adamw_8bit",
        tensors=("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"),
        needs_whole_tensors=True,
        combines=True,
    ),
    # The LightningModule's own.
    "configured": OptimizerTraits(
        "ortlaunch.worker.engine.lightning_optimizer:configured",
        (),
        2,
        adapts=False,
        state="configured",
    ),
}
