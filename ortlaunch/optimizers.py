"""The table of optimizers: the values of the recipe's `optimizer.name`, and what differs between them.

Standard library only, for every side; `recipe.optimizer.traits` is the row.
"""

from __future__ import annotations

from typing import NamedTuple

_WORKER = "ortlaunch.worker.engine.optimizer"


class OptimizerTraits(NamedTuple):
    """One row."""

    builder: str
    """`module:function` of the worker that makes it."""
    fields: tuple[str, ...]
    """Settings of the recipe that it has, beside those of all."""
    moments: int
    """Float32 values of state for each trained parameter; 0: with `momentum` one."""
    adapts: bool = True
    """Whether a step has about the size of the learning rate, whatever the gradient's."""
    state: str = ""
    """Optimizers with the same name here go on from each other's state."""
    needs_whole_tensors: bool = False
    """Whether it scales each tensor by its own norm, which ZeRO's flat pieces have not."""
    on_device: str = "AdamW"
    """ONNX Runtime's class for devices."""
    on_device_note: str = ""
    """What to say where that is another one."""


_ADAM = ("betas", "epsilon")
OPTIMIZERS = {
    "fused_adam": OptimizerTraits(f"{_WORKER}:fused_adam_or_torch", _ADAM, 2, state="adam"),
    "adamw": OptimizerTraits(f"{_WORKER}:adamw", _ADAM, 2, state="adam"),
    "lamb": OptimizerTraits(
        f"{_WORKER}:lamb",
        (*_ADAM, "always_adapt"),
        2,
        state="lamb",
        needs_whole_tensors=True,
        on_device_note="optimizer: lamb was asked; ONNX Runtime's AdamW runs on devices",
    ),
    "sgd": OptimizerTraits(
        f"{_WORKER}:sgd", ("momentum",), 0, adapts=False, state="sgd", on_device="SGD"
    ),
}
