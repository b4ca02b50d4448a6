"""The optimizer and the scheduler that a LightningModule configures.

Only this module uses Lightning, whose own functions read the forms of the result.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ortlaunch.base.errors import InputError
from ortlaunch.worker.engine.optimizer import BuiltOptimizer, OptimizerInputs
from ortlaunch.worker.engine.torch_scheduler import TorchScheduler


def configured(inputs: OptimizerInputs) -> BuiltOptimizer:
    """Build the optimizer that the LightningModule's configure_optimizers returns.

    Raises:
        InputError: it is none or several, has a state that a checkpoint cannot hold, or its
            scheduler does not depend on steps and epochs alone.
    """
    module: Any = next(
        item for item in inputs.model.modules() if hasattr(item, "configure_optimizers")
    )
    lightning_class = next(
        item for item in type(module).__mro__ if item.__name__ == "LightningModule"
    )
    name = f"{type(module).__name__}.configure_optimizers"
    # Of `lightning` or `pytorch_lightning`, whichever the user's module imports.
    lightning_optimizer: Any = import_module(
        f"{lightning_class.__module__.rpartition('.')[0]}.optimizer"
    )
    optimizers, schedulers, monitor = lightning_optimizer._configure_optimizers(
        module.configure_optimizers()
    )
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise InputError(
            f"{name} returned {len(optimizers)} optimizers and {len(schedulers)} schedulers; a run "
            "has one optimizer and at most one scheduler (ChainedScheduler joins several): return "
            "them, or give the recipe's optimizer"
        )
    (optimizer,) = optimizers
    optimizer_class = type(optimizer)
    if optimizer_class not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) or any(
        group.get("amsgrad") for group in optimizer.param_groups
    ):
        raise InputError(
            f"{name} returned {optimizer_class.__name__}; checkpoints hold the state of torch's Adam and "
            "AdamW, without amsgrad, and SGD: return one of them, or give the recipe's optimizer"
        )
    optimized_parameters = {
        parameter for group in optimizer.param_groups for parameter in group["params"]
    }
    left_out = [
        key
        for key, value in module.named_parameters()
        if value.requires_grad and value not in optimized_parameters
    ]
    if left_out:
        raise InputError(
            f"{name} leaves out {', '.join(left_out[:5])}: set requires_grad=False for parameters "
            "that are not trained"
        )
    config = next(
        iter(lightning_optimizer._configure_schedulers_automatic_opt(schedulers, monitor)), None
    )
    if config is not None and config.reduce_on_plateau:
        raise InputError(
            f"{name} returned a ReduceLROnPlateau, which follows a metric; here a learning rate "
            "is a function of the step, so that a resumed run repeats it: return another scheduler"
        )
    return BuiltOptimizer(
        optimizer,
        f"torch.optim.{optimizer_class.__name__} of {name}",
        scheduler=TorchScheduler(optimizer, config),
    )
