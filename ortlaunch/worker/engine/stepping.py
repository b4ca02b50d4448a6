"""One optimizer step, with and without DeepSpeed, behind one small interface.

`micro_step` runs forward and backward of a micro batch, and `apply` changes the weights.
`named_state` gives access to the contents of a checkpoint, because only a stepper knows how they
are sharded.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.launch_plan import Mesh
from ortlaunch.tables.precisions import PRECISIONS
from ortlaunch.worker.engine.gradient_averaging import (
    GradientAveraging,
    UsedParameterComparison,
    UsedParameterRecorder,
    first_five_names_text,
)
from ortlaunch.worker.model.fsdp import (
    copy_values_from_rank_0,
    free_gathered_weights_if_sharded,
    parameters_without_dimension,
    part_of_this_rank,
    ranges_of_this_rank,
    replace_parts_by_whole_parameters,
)
from ortlaunch.worker.model.named_state import (
    NamedState,
    autotp_slices_or_none,
    persistent_buffers_by_name,
    scaler_loss_scale_or_none,
    trained_parameter_shapes,
    whole_parameter_ranges,
)
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.model.returned_values import ValueMeans
from ortlaunch.worker.model.tensor_parallel import sliced_dimension_or_none
from ortlaunch.worker.patching import (
    hide_package_unless_loaded,
    replace_attribute_temporarily,
)
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.process_group.tensor_groups import (
    explain_errors_of_sliced_layers,
    require_alike_in_tensor_groups,
    sum_of_gradient_squares_over_ranks,
    sum_of_squares,
)
from ortlaunch.worker.supervision.requests import RankRequests
from ortlaunch.worker.tensor_batch import TensorBatch
from ortlaunch.worker.weight_memory import WeightMemory
from ortmodule.loops import float64_sum_of_squares

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.tensor import DTensor

    from ortlaunch.worker.deepspeed.autotp import UnslicedLayer

# LoRA has gradients of zero in the first step.
_COMPARED_STEPS = 2


class StepOutcome(NamedTuple):
    """The result of one step, the same on every rank."""

    gradient_norm: float | None
    """Norm before clipping; None if it is not finite or DeepSpeed is set not to compute it."""
    skipped: bool
    """Whether the weights stay unchanged because a gradient was not finite.

    This is normal in fp16 until the loss scale fits.
    """
    failed: bool = False
    """Whether the weights stay unchanged because a gradient is not finite without loss scaling."""


class Stepper(Protocol):
    """The interface of an engine to the training loop."""

    module: nn.Module
    returned_values: ValueMeans
    """Values that the passes returned beside their losses."""

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Trained parameters that the loss leaves out on some rank, as far as that was checked."""

    def run_micro_batch(
        self, batch: TensorBatch, is_last_of_step: bool, loss_factor: float = 1.0
    ) -> torch.Tensor:
        """Run forward and backward of one micro batch.

        Args:
            batch: the arguments of the model's forward, by name.
            is_last_of_step: this is the last micro batch of a step.
            loss_factor: multiplies the loss before the backward pass.

        Returns:
            The loss times `loss_factor`, detached.
        """

    def clip_step_and_clear_gradients(self, *learning_rates: float) -> StepOutcome:
        """Clip gradients, step and clear gradients; do not step if a gradient is not finite.

        Args:
            learning_rates: the learning rate, or one for each parameter group.
        """

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield each parameter's name and this rank's part of its gradient.

        To be called after the passes of a step and before `apply`.
        """

    def drop_gradients(self) -> None:
        """Drop the gradients of a step's passes, before or after `apply`; change nothing else."""

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each trained parameter's name and this rank's part of it."""

    def named_state(self) -> NamedState:
        """Return the state that training changes, by parameter name.

        A checkpoint is written from this state and read into it.
        """

    def gather_whole_weights(
        self, weight_memory: WeightMemory
    ) -> contextlib.AbstractContextManager[object]:
        """Gather whole parameters on rank 0 while the context is open (collective).

        With `parallel` the model cannot be called afterwards, and `weight_memory` keeps them.
        """


class TorchStepper:
    """Steps in plain PyTorch: DistributedDataParallel, autocast and a gradient scaler."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: DistributedContext,
        precision: str,
        accumulation_steps: int,
        max_norm: float | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.accumulation = accumulation_steps
        self.max_norm = max_norm
        self.returned_values = ValueMeans()
        # FSDP2 averages gradients itself.
        is_averaged = group.size > 1 and not group.has_fsdp2
        self.averaging = GradientAveraging(model, group) if is_averaged else None
        self.used_parameters = (
            UsedParameterComparison(model, group) if group.size > 1 and group.has_fsdp2 else None
        )
        self.module: nn.Module = self.averaging.module if self.averaging else model
        self.dtype = narrow_dtype_or_none(precision)
        self.scaler = torch.amp.GradScaler(
            group.device.type, enabled=PRECISIONS[precision].scales_loss
        )
        self.casts: contextlib.ExitStack | None = None

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        return getattr(self.averaging or self.used_parameters, "unused_names", ())

    @contextlib.contextmanager
    def _autocast_and_average_around_pass(self, is_last_of_step: bool) -> Iterator[None]:
        """Open autocast around a pass; average gradients with the last micro batch."""
        averaging = (
            self.averaging.average_gradients_around_last_pass(is_last_of_step)
            if self.averaging
            else contextlib.nullcontext()
        )
        self._open_autocast_to_cache_weight_casts()
        with (
            averaging,
            torch.autocast(self.group.device.type, self.dtype, enabled=self.dtype is not None),
        ):
            yield
        if self.casts is not None and is_last_of_step:
            self.casts.close()
            self.casts = None

    def _open_autocast_to_cache_weight_casts(self) -> None:
        """Cast weights once a step instead of once a pass."""
        # Autocast drops its cached casts at the end of the outermost context, so keep one open.
        if self.casts is None and self.dtype is not None:
            self.casts = contextlib.ExitStack()
            self.casts.enter_context(torch.autocast(self.group.device.type, enabled=False))

    def run_micro_batch(
        self, batch: TensorBatch, is_last_of_step: bool, loss_factor: float = 1.0
    ) -> torch.Tensor:
        with self._autocast_and_average_around_pass(is_last_of_step):
            loss = _weighted_loss_or_exit_if_forked(
                self.returned_values.add_values_and_return_loss(self.module(**batch), loss_factor),
                loss_factor,
            )
            if self.used_parameters is not None:
                self.used_parameters.require_same_on_all_ranks(loss)
            # Inside the context: DistributedDataParallel decides in the backward pass whether to
            # average.
            self.scaler.scale(loss / self.accumulation).backward()
        return loss.detach()

    def clip_step_and_clear_gradients(self, *learning_rates: float) -> StepOutcome:
        _set_learning_rate_times_factor_of_each_group(self.optimizer, learning_rates)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip_and_return_unclipped_norm()
        # With a scaler an overflow is usual: the scaler skips the step and lowers its scale.
        has_failed = not (math.isfinite(norm) or self.scaler.is_enabled())
        scale_before = self.scaler.get_scale()
        if not has_failed:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        new_scale = self.scaler.get_scale()
        # At a scale of 1 or less, scaling cannot be the reason of an overflow.
        return StepOutcome(
            norm if math.isfinite(norm) else None,
            new_scale < scale_before,
            has_failed or new_scale < min(scale_before, 1.0),
        )

    def _clip_and_return_unclipped_norm(self) -> float:
        """Clip gradients; return their norm before clipping.

        The result is the same on every rank, because gradients are averaged.
        """
        if self.max_norm is None:
            return float64_gradient_norm(self.model)
        return float(
            nn.utils.clip_grad_norm_(
                [p for p in self.model.parameters() if p.requires_grad], self.max_norm
            )
        )

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, p.grad) for name, p in self.model.named_parameters())

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def named_state(self) -> NamedState:
        return NamedState(
            trained_parameter_shapes(self.model),
            whole_parameter_ranges(self.model.named_parameters(), self.optimizer),
            self.optimizer,
            persistent_buffers_by_name(self.model),
            loss_scale=scaler_loss_scale_or_none(self.scaler),
        )

    def gather_whole_weights(
        self, weight_memory: WeightMemory
    ) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class ShardedStepper(TorchStepper):
    """Steps of a model that FSDP2 has divided over the mesh of the group."""

    _compared_steps = 0

    @property
    def mesh(self) -> Mesh:
        """The axes of the ranks."""
        assert self.group.mesh is not None
        return self.group.mesh

    def run_micro_batch(
        self, batch: TensorBatch, is_last_of_step: bool, loss_factor: float = 1.0
    ) -> torch.Tensor:
        explains_slices = self.mesh.tensor > 1
        try:
            with explain_errors_of_sliced_layers() if explains_slices else contextlib.nullcontext():
                loss = super().run_micro_batch(batch, is_last_of_step, loss_factor)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise InputError(
                "parallel: the model uses weights of a layer that is not called, and FSDP2 gathers "
                "the weights of a layer when it is called; give in parallel.blocks the classes of "
                "layers that are called as a whole"
            ) from error
        if is_last_of_step:
            self._average_gradients_of_scalars()
        return loss

    def _average_gradients_of_scalars(self) -> None:
        """Average the gradients of parameters that FSDP2 leaves whole (collective)."""
        scalars = parameters_without_dimension(self.model).values()
        gradients = [p.grad for p in scalars if p.grad is not None]
        if gradients:
            numbers = [float(gradient) for gradient in gradients]
            numbers_by_rank = self.group.data_parallel.gather_numbers(numbers)
            for gradient, *rank_numbers in zip(gradients, *numbers_by_rank):
                gradient.fill_(sum(rank_numbers) / len(rank_numbers))

    def clip_step_and_clear_gradients(self, *learning_rates: float) -> StepOutcome:
        # Such as BatchNorm's statistics: evaluations have those that are saved and exported.
        copy_values_from_rank_0(self.model.buffers(), self.group.device)
        return super().clip_step_and_clear_gradients(*learning_rates)

    def _clip_and_return_unclipped_norm(self) -> float:
        gradients, whole_by_name = [], {}
        for name, gradient in super().named_gradients():
            if gradient is not None:
                gradients.append(part_of_this_rank(gradient))
                if sliced_dimension_or_none(cast("DTensor", gradient)) is None:
                    whole_by_name[name] = gradients[-1]
        if self.mesh.tensor > 1 and self._compared_steps < _COMPARED_STEPS:
            self._compared_steps += 1
            require_alike_in_tensor_groups(whole_by_name, self.group)
        divided = [gradient for gradient in gradients if gradient.dim()]
        squares = sum_of_gradient_squares_over_ranks(
            divided, [whole for whole in whole_by_name.values() if whole.dim()], self.group
        )
        scalars = [gradient for gradient in gradients if not gradient.dim()]
        # Each copy of the model has all gradients once, and each rank those of scalars.
        norm = math.sqrt(squares / self.mesh.replicate + sum_of_squares(scalars))
        # As torch's clip_grad_norm_.
        if self.max_norm is not None and norm > self.max_norm:
            torch._foreach_mul_(gradients, self.max_norm / (norm + 1e-6))
        return norm

    @property
    def gradient_factor(self) -> float:
        """The factor from a gradient of a single micro batch to that of its loss."""
        return self.accumulation / self.scaler.get_scale()

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield each trained parameter's name and whole gradient, one after another (collective)."""
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                gradient: Any = p.grad
                is_divided = hasattr(gradient, "full_tensor")
                yield name, gradient.full_tensor() if is_divided else gradient

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return (
            (name, None if gradient is None else part_of_this_rank(gradient))
            for name, gradient in super().named_gradients()
        )

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        free_gathered_weights_if_sharded(self.model)
        return ((name, part_of_this_rank(p.detach())) for name, p in super().trained_weights())

    def named_state(self) -> NamedState:
        free_gathered_weights_if_sharded(self.model)
        return NamedState(
            trained_parameter_shapes(self.model),
            ranges_of_this_rank(self.model, self.optimizer, self.group),
            self.optimizer,
            persistent_buffers_by_name(self.model),
            (self.group.rank // self.mesh.ranks_of_copy, self.mesh.replicate),
            loss_scale=scaler_loss_scale_or_none(self.scaler),
        )

    @contextlib.contextmanager
    def gather_whole_weights(self, weight_memory: WeightMemory) -> Iterator[None]:
        free_gathered_weights_if_sharded(self.model)
        replace_parts_by_whole_parameters(self.model, self.group.rank == 0, weight_memory)
        yield


@contextlib.contextmanager
def _allow_scalar_byte_views() -> Iterator[None]:
    """Let DeepSpeed view parameters without a dimension as bytes, which torch refuses."""
    original_view: Any = torch.Tensor.view

    def view_scalar_as_bytes(tensor: torch.Tensor, *view_arguments: Any) -> torch.Tensor:
        tensor_view: torch.Tensor = original_view(
            tensor if tensor.dim() or view_arguments != (torch.uint8,) else tensor[None],
            *view_arguments,
        )
        return tensor_view

    torch.Tensor.view = view_scalar_as_bytes  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.view


class DeepSpeedStepper:
    """Steps of DeepSpeed's engine, with ZeRO at the configured stage."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: DistributedContext,
        config: Json,
        tensor_plan: Mapping[str, str] | None = None,
    ) -> None:
        # Its autotuner would load MLflow for 1.7 s of a core.
        with hide_package_unless_loaded("mlflow"):
            import deepspeed

        _disable_deepspeed_shm_muon_compile_and_warnings(deepspeed)
        self.model = model
        self.group = group
        self.returned_values = ValueMeans()
        # DeepSpeed flattens parameters anyway, but first sends the bytes of each as it lies.
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        self._unsliced_layers: Sequence[UnslicedLayer] = ()
        self._comparisons_left = 0
        if self._tensor_rank_count > 1:
            from ortlaunch.worker.deepspeed.autotp import slice_layers_by_deepspeed_in_place

            self._comparisons_left = _COMPARED_STEPS
            # The initial values may depend on the rank.
            copy_values_from_rank_0([*model.parameters(), *model.buffers()], group.device)
            self._unsliced_layers = slice_layers_by_deepspeed_in_place(
                model, tensor_plan or {}, self._tensor_rank_count
            )
        # ZeRO 3: divide one tensor after another, so that no device ever holds all of them.
        if config["zero_optimization"]["stage"] == 3:
            deepspeed.init_distributed(dist_init_required=False)
            with _allow_scalar_byte_views():
                deepspeed.zero.Init(module=model, config_dict_or_path=config)
        with _disable_optimizer_steps(optimizer), _allow_scalar_byte_views():
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=config,
                dist_init_required=False,
                mpu=deepspeed.utils.groups if self._unsliced_layers else None,
            )
        if self._unsliced_layers:
            # It would send the batch of one rank to the others as a pickle; theirs is the same.
            self.engine.first_dataloader_check.remove()
        self.module: nn.Module = self.engine
        self.scales_loss = bool(config.get("fp16", {}).get("enabled"))
        self.unused_parameters: tuple[str, ...] = ()
        self._used_parameters: UsedParameterRecorder | None = UsedParameterRecorder(model, group)
        # Called for its checks: a run whose state cannot be saved must not start.
        self.named_state()

    def run_micro_batch(
        self, batch: TensorBatch, is_last_of_step: bool, loss_factor: float = 1.0
    ) -> torch.Tensor:
        self.engine.set_gradient_accumulation_boundary(is_last_of_step)
        is_sliced = self._tensor_rank_count > 1
        with explain_errors_of_sliced_layers() if is_sliced else contextlib.nullcontext():
            outputs = self.engine(**batch)
        loss = _weighted_loss_or_exit_if_forked(
            self.returned_values.add_values_and_return_loss(outputs, loss_factor), loss_factor
        )
        self.engine.backward(loss)
        if is_last_of_step and self._used_parameters is not None:
            self._record_and_print_unused_parameters(self._used_parameters)
        if not is_last_of_step:
            # Counts the micro step; the weights change at the boundary only.
            self.engine.step()
        return loss.detach()

    def clip_step_and_clear_gradients(self, *learning_rates: float) -> StepOutcome:
        _set_learning_rate_times_factor_of_each_group(self.engine.optimizer, learning_rates)
        if self._comparisons_left:
            self._comparisons_left -= 1
            require_alike_in_tensor_groups(
                dict(self._whole_gradients_in_tensor_group()), self.group
            )
        # Stage 0 in fp32: DeepSpeed does not compute a norm.
        if not hasattr(self.engine.optimizer, "_global_grad_norm"):
            return self._step_unless_norm_is_non_finite(self._float64_gradient_norm())
        skipped_before = self.engine.skipped_steps
        self.engine.step()
        reported_norm = self.engine.get_global_grad_norm()
        skipped = self.engine.skipped_steps > skipped_before
        norm = math.nan if reported_norm is None else float(reported_norm)
        # Some versions return -1 for nan.
        is_norm_bad = reported_norm is not None and not 0 <= norm < math.inf
        return StepOutcome(
            norm if 0 <= norm < math.inf else None,
            skipped,
            failed=(is_norm_bad or skipped) and not self.scales_loss,
        )

    @property
    def _tensor_rank_count(self) -> int:
        """Ranks that compute each layer together (AutoTP)."""
        return self.group.mesh.tensor if self.group.mesh else 1

    def _whole_gradients_in_tensor_group(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield this rank's part of each gradient that all ranks of its tensor group should have."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and autotp_slices_or_none(parameter) is None:
                yield name, _deepspeed_gradient_part_of_this_rank_or_none(parameter)

    def _float64_gradient_norm(self) -> float:
        if self._tensor_rank_count == 1:
            return float64_gradient_norm(self.model)
        gradients = [g for _, g in self.named_gradients() if g is not None]
        whole_gradients = [g for _, g in self._whole_gradients_in_tensor_group() if g is not None]
        squares = sum_of_gradient_squares_over_ranks(gradients, whole_gradients, self.group)
        # Each data-parallel rank has the averaged gradients.
        return math.sqrt(squares / self.group.data_parallel.size)

    def _record_and_print_unused_parameters(self, used_parameters: UsedParameterRecorder) -> None:
        self._used_parameters = None
        self.unused_parameters = used_parameters.remove_hooks_and_gather_unused_names()
        if self.unused_parameters:
            self.group.print_on_rank_0(
                f"the loss does not use {first_five_names_text(self.unused_parameters)}: "
                "DeepSpeed takes zeros for their "
                "gradients, and optimizer.weight_decay lowers them; freeze unused parameters "
                "(requires_grad_(False)) to keep them"
            )

    def _step_unless_norm_is_non_finite(self, unclipped_norm: float) -> StepOutcome:
        if not math.isfinite(unclipped_norm):
            self.engine.zero_grad()
            return StepOutcome(None, skipped=False, failed=True)
        self.engine.step()
        return StepOutcome(unclipped_norm, skipped=False)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return (
            (name, _deepspeed_gradient_part_of_this_rank_or_none(p) if p.requires_grad else None)
            for name, p in self.model.named_parameters()
        )

    @property
    def gradient_factor(self) -> float:
        """The factor from a gradient of a single micro batch to that of its loss."""
        scale = float(self.engine.optimizer.loss_scale) if self.scales_loss else 1.0
        return float(self.engine.gradient_accumulation_steps()) / scale

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield each trained parameter's name and, on rank 0, its whole gradient (collective)."""
        state = self.named_state()
        part_by_name = {part.name: part for part in state.parts}
        gradient_by_name = dict(self.named_gradients())
        for name, shape in state.shapes.items():
            part, gradient = part_by_name.get(name), gradient_by_name[name]
            arrays: dict[str, NDArray[Any]] = {}
            if part is not None and gradient is not None:
                # Numbers of the elements, as runs of a slice do not follow each other.
                numbers = torch.arange(math.prod(shape))
                if part.runs is not None:
                    numbers = part.runs.view_of(numbers).reshape(-1)
                arrays = {
                    "numbers": numbers[part.start :][: part.count].numpy(),
                    "values": gradient.detach().reshape(-1).float().cpu().numpy(),
                }
            whole_gradient = torch.zeros(shape)
            gathered = [a for a in self.group.gather_arrays_on_rank_0(arrays) if a]
            for rank_arrays in gathered:
                numbers, values = map(torch.from_numpy, rank_arrays.values())
                whole_gradient.view(-1)[numbers] = values
            yield name, whole_gradient if gathered else None

    def drop_gradients(self) -> None:
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        self.engine.zero_grad()
        if self.engine.zero_optimization_stage() in (1, 2) and hasattr(
            optimizer, "averaged_gradients"
        ):
            _drop_zero_averaged_gradients(optimizer)

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            (name, getattr(p, "ds_tensor", p))
            for name, p in self.model.named_parameters()
            if p.requires_grad
        )

    def named_state(self) -> NamedState:
        from ortlaunch.worker.deepspeed.named_state import named_state_of_deepspeed_engine

        return named_state_of_deepspeed_engine(self.engine, self.model, self.group)

    def gather_whole_weights(
        self, weight_memory: WeightMemory
    ) -> contextlib.AbstractContextManager[object]:
        import deepspeed

        if self._unsliced_layers:
            from ortlaunch.worker.deepspeed.autotp import make_parameters_whole

            make_parameters_whole(self.model, self.group.rank == 0, weight_memory)
            for unsliced_layer in self._unsliced_layers:
                unsliced_layer.put_back()
        sharded: contextlib.AbstractContextManager[object] = deepspeed.zero.GatheredParameters(
            list(self.model.parameters()), enabled=self.engine.zero_optimization_stage() == 3
        )
        return sharded


def _set_learning_rate_times_factor_of_each_group(
    optimizer: Any, learning_rates: Sequence[float]
) -> None:
    """Set the learning rate of each parameter group; a single rate is that of all.

    A group may have a factor of that rate (parameter_groups).
    """
    for group, rate in zip(optimizer.param_groups, [*learning_rates] * len(optimizer.param_groups)):
        group["lr"] = rate * group.get("rate_factor", 1.0)


def require_gradient(loss: torch.Tensor) -> None:
    """Check that a training loss has a gradient.

    Raises:
        InputError: it has none.
    """
    if not loss.requires_grad:
        raise InputError(
            "the loss that the model returns has no gradient: it is detached, whole numbers, "
            "computed under torch.no_grad, or of frozen parameters alone; return the loss as it was "
            "computed"
        )


def _weighted_loss_or_exit_if_forked(loss: torch.Tensor, loss_factor: float) -> torch.Tensor:
    """Return loss x factor in float32 or wider; return the loss itself if the factor is 1."""
    # A forked child that went on would write metrics and checkpoints and communicate with the other
    # ranks, beside its parent.
    if RankRequests.is_forked_child:
        message = "a process forked by the model or the data continued as this rank, and was ended"
        print(
            f"ortlaunch: {message} (process {os.getpid()}): a child process must end with os._exit",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    require_gradient(loss)
    return (
        loss
        if loss_factor == 1.0
        else loss.to(torch.promote_types(loss.dtype, torch.float32)) * loss_factor
    )


def float64_gradient_norm(model: nn.Module) -> float:
    """Return the norm of all gradients with double precision; inf or nan if an element is."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    return math.sqrt(float(float64_sum_of_squares(dense))) if dense else 0.0


def _deepspeed_gradient_part_of_this_rank_or_none(parameter: Any) -> torch.Tensor | None:
    """Return this rank's piece of a gradient under DeepSpeed, between backward pass and step."""
    # Only parameters of ZeRO 3 have this attribute.
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        local: torch.Tensor | None = safe_get_local_grad(parameter)
        return local
    # ZeRO 1 and 2 keep pieces of gradients behind this mapping.
    mapping = getattr(parameter, "_hp_mapping", None)
    gradient: torch.Tensor | None = parameter.grad
    if gradient is None and mapping is not None:
        gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return gradient


def _drop_zero_averaged_gradients(optimizer: Any) -> None:
    """Drop averaged gradients as DeepSpeed's ZeRO 1 and 2 do after an overflow."""
    # Otherwise later passes would add to these gradients.
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer._release_preflattened_grad_buffers()
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None


@contextlib.contextmanager
def _disable_optimizer_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disable the steps of this optimizer while the context is open."""
    # DeepSpeed 0.19.8 makes the state of stage 0 in bf16 and fp16 by a step with zero gradients.
    # Adam counts that step: its true first step would be 0.74 of the correct size, and the weights
    # would decay by the peak learning rate.
    vars(optimizer)["step"] = lambda *_, **__: None
    try:
        yield
    finally:
        del vars(optimizer)["step"]


def _disable_deepspeed_shm_muon_compile_and_warnings(deepspeed: Any) -> None:
    # On CPU DeepSpeed would compile, for half a minute, an all-reduce that only its inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # ZeRO imports Muon, which no recipe has. Muon's import compiles functions, for which torch would
    # load TorchInductor for 1.7 s of a core.
    uncompiled = replace_attribute_temporarily(
        deepspeed.runtime.compiler, "compile", lambda *_, **__: lambda function: function
    )
    # Older versions have no Muon.
    with uncompiled, contextlib.suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    warnings.filterwarnings(
        "ignore", message="`torch.distributed.* is deprecated", category=FutureWarning
    )
