"""A LightningModule as the model of a run: its steps, its hooks, and its `self.trainer`.

The whole `training_step` is the forward pass that an engine runs, so that on engine ort it is one
graph, whose outputs are the loss and the logged values. Must not import Lightning: the user's
module does, by either of its names, `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ortlaunch.base.errors import EngineError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data.user_data import batch_in_original_form
from ortlaunch.worker.model.model import LossModule, require_scalar_loss
from ortlaunch.worker.model.returned_values import LOSS, ValueMeans, output_values_by_name_or_empty
from ortlaunch.worker.process_group.distributed import DistributedContext

_HOOKS = {
    "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end",
    "on_validation_epoch_start", "on_validation_epoch_end",
}  # fmt: skip
# The parts of Lightning that a run calls, or that need no call.
_KNOWN_PARTS = _HOOKS | {
    "setup", "configure_model", "configure_optimizers", "training_step", "validation_step",
    "forward", "prepare_data", "train_dataloader", "val_dataloader",
}  # fmt: skip


class RunTrainer:
    """The `self.trainer` of a LightningModule: sizes and position of the run, logged values."""

    # ORTModule compares the attributes of an object with a __dict__ before each pass.
    __slots__ = ("logged", "values")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"global_step": 0, "current_epoch": 0}
        self.logged: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("global_step", "current_epoch") and torch.jit.is_tracing():
            raise _graph_would_fix_value_error(f"self.{name}")
        if name.startswith("__") or name not in self.values:
            raise AttributeError(
                f"self.trainer.{name} is not available in a run of ortlaunch; available are "
                f"{', '.join(sorted(self.values))}"
            )
        return self.values[name]

    def __deepcopy__(self, memo: object) -> RunTrainer:
        return self

    def log(self, name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
        """Record a value for metrics.jsonl, which has the mean over passes and ranks.

        Raises:
            EngineError: a graph would keep the value of its first pass.
            InputError: the value is not one number, or is to be reduced in another way.
        """
        if torch.jit.is_tracing() and isinstance(value, (int, float)):
            raise _graph_would_fix_value_error(
                f"the Python number {value!r} that it logs as {name!r}"
            )
        logged_value = (
            torch.empty(0) if hasattr(value, "compute") else torch.as_tensor(value).detach()
        )
        if logged_value.numel() != 1 or reduce_fx not in ("mean", torch.mean):
            raise InputError(
                f"self.log({name!r}): got {type(value).__name__} with reduce_fx {reduce_fx!r}; "
                "log one number, of which metrics.jsonl has the mean; of a metric object its value"
            )
        self.logged[name] = logged_value.reshape(())

    def log_dict(self, dictionary: Mapping[str, Any], *_: Any, **options: Any) -> None:
        """Record several values."""
        for name, value in dictionary.items():
            self.log(name, value, **options)


class _RefusedBatchIndex:
    """The `batch_idx` of a traced pass: a graph cannot have it, so that any use is refused."""

    def _refuse(self, *_: object) -> Any:
        raise _graph_would_fix_value_error("batch_idx")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __hash__ = __add__ = __radd__ = \
        __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = __int__ = \
        __index__ = __float__ = __str__ = __format__ = _refuse  # fmt: skip


def _graph_would_fix_value_error(value_name: str) -> EngineError:
    return EngineError(
        f"training_step reads {value_name}, which changes between passes, and a graph keeps its first "
        "value; read it in a hook, or train with engine.name=eager"
    )


class LightningLoss(LossModule):
    """A LightningModule whose forward pass is its `training_step`, or its `validation_step`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.trainer = RunTrainer()
        self.parameters_of = {
            name: len(inspect.signature(getattr(model, name)).parameters)
            for name in ("training_step", "validation_step")
        }
        self._set_trainer_on_lightning_modules()
        model.setup("fit")
        model.configure_model()

    def _set_trainer_on_lightning_modules(self) -> None:
        """Give the module, and the LightningModules inside it, this trainer."""
        for module in self.model.modules():
            if hasattr(module, "_trainer"):
                vars(module).update(
                    _trainer=self.trainer, log=self.trainer.log, log_dict=self.trainer.log_dict
                )

    def set_trainer_values_and_device(
        self, recipe: Recipe, plan: Plan, run: RunDir, group: DistributedContext, sample_count: int,
        first_step: int,
    ) -> None:  # fmt: skip
        # The text of a bound method has the name of the class that defines it.
        if recipe.data.evaluation and "method LightningModule." in str(
            getattr(self.model, "validation_step", "")
        ):
            raise InputError(
                f"data.evaluation: {type(self.model).__name__} has no validation_step to run on it"
            )
        self.trainer.values.update(
            max_steps=recipe.train.max_steps, samples=sample_count,
            estimated_stepping_batches=recipe.train.max_steps,
            global_samples=plan.batch.global_samples, global_step=first_step,
            max_epochs=math.ceil((recipe.train.max_steps or 0) * plan.batch.global_samples / sample_count),
            num_training_batches=math.ceil(sample_count / (plan.batch.micro_samples * plan.batch.data_parallel_ranks)),
            accumulate_grad_batches=plan.batch.accumulation_steps, world_size=group.size,
            global_rank=group.rank, local_rank=group.local.local_rank,
            is_global_zero=group.rank == 0, default_root_dir=str(run), log_dir=str(run),
            logger=None, loggers=[], sanity_checking=False, indices=itertools.count(),
        )  # fmt: skip
        for module in self.model.modules():
            vars(module).update({"_device": group.device} if hasattr(module, "_device") else {})

    def _output_with_loss(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # A copy that an exporter makes has lost its trainer.
        if vars(self.model)["_trainer"] is None:
            self._set_trainer_on_lightning_modules()
        self.trainer.logged = {}
        # torch.compile would compile again for each index; a module that reads it runs in eager.
        traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
        index = _RefusedBatchIndex() if traced else next(self.trainer.values["indices"])
        name = "training_step" if self.training else "validation_step"
        # Lightning, too, leaves out the index of a step that has no parameter for it.
        output = getattr(self.model, name)(
            *(batch_in_original_form(batch), index)[: self.parameters_of[name]]
        )
        validates = not self.training and not isinstance(output, torch.Tensor)
        loss = self._require_validation_loss(output) if validates else require_scalar_loss(output)
        return {**self.trainer.logged, LOSS: loss}

    def _require_validation_loss(self, output: Any) -> torch.Tensor:
        """Return the `loss` of what validation_step returned or logged, or its only loss.

        Raises:
            InputError: there is no such value, or there are several.
        """
        values = {**self.trainer.logged, **output_values_by_name_or_empty(output)}
        named = [name for name in values if LOSS in name.lower()] or [*values]
        if LOSS not in values and len(named) != 1:
            raise InputError(
                f"{type(self.model).__name__}.validation_step returns no loss, and logs "
                f"{' and '.join(named) or 'none'}: return the loss, or log it as 'val_loss'"
            )
        return require_scalar_loss(values.get(LOSS, values[named[0]]))

    def call_lightning_hook(self, name: str, value_means: ValueMeans) -> None:
        self.trainer.values["indices"] = itertools.count()
        self.trainer.logged = {}
        getattr(self.model, name)()
        value_means.add_values_and_return_loss({LOSS: torch.zeros(()), **self.trainer.logged}, 1.0)
        value_means.keep_step()

    def begin_lightning_step(
        self, step_index: int, samples_before_step: int, value_means: ValueMeans
    ) -> None:
        values = self.trainer.values
        epoch, samples_of_epoch = divmod(samples_before_step, values["samples"])
        values.update(
            global_step=step_index,
            current_epoch=epoch,
            indices=itertools.count(
                samples_of_epoch * values["accumulate_grad_batches"] // values["global_samples"]
            ),
        )
        if samples_of_epoch < values["global_samples"]:
            self.call_lightning_hook("on_train_epoch_start", value_means)

    def end_lightning_step(
        self, completed_steps: int, samples_seen: int, value_means: ValueMeans
    ) -> None:
        self.trainer.values["global_step"] = completed_steps
        if samples_seen // self.trainer.values["samples"] > self.trainer.values["current_epoch"]:
            self.call_lightning_hook("on_train_epoch_end", value_means)


def wrap_lightning(model: nn.Module) -> LightningLoss:
    """Check the LightningModule that the factory returned, and wrap it.

    Raises:
        InputError: it is none, or overrides a part of Lightning that a run never calls.
    """
    module_class = type(model)
    base = next((item for item in module_class.__mro__ if item.__name__ == "LightningModule"), None)
    if base is None:
        raise InputError(
            f"model.factory returned {module_class.__name__}; task lightning takes a LightningModule"
        )
    parts = {
        name: value
        for owner in base.__mro__
        if "lightning" in owner.__module__
        for name, value in vars(owner).items()
        if callable(value) and not name.startswith("_")
    }
    overridden_parts = {
        name for name in parts if getattr(module_class, name) is not getattr(base, name)
    } | (set() if model.automatic_optimization else {"automatic_optimization"})
    # Those of Lightning's other loops are no part of its `fit` either.
    uncalled_parts = sorted(
        item
        for item in overridden_parts - _KNOWN_PARTS
        if "test" not in item and "predict" not in item
    )
    if uncalled_parts or "training_step" not in overridden_parts:
        raise InputError(
            f"{module_class.__name__} has no training_step, or has {', '.join(uncalled_parts) or 'no other part'}, "
            f"which a run of ortlaunch never calls; it calls {', '.join(sorted(_HOOKS))}; "
            "Lightning's own Trainer runs an ORTModule, too (`ortlaunch docs lightning`)"
        )
    return LightningLoss(model)
