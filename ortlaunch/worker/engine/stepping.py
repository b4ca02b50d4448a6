"""One optimizer step, with and without DeepSpeed, behind one small interface.

`backward` takes a micro batch's loss, `apply` changes the weights; `named_state` says where it keeps what a checkpoint
holds, because only a stepper knows what it shards.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ortlaunch.json_types import Json
from ortlaunch.precisions import PRECISIONS
from ortlaunch.worker.deepspeed.sum_of_squares import sum_of_squares
from ortlaunch.worker.engine.averaging import Averaging
from ortlaunch.worker.model.named_state import (
    NamedState,
    buffers_of,
    grad_scaler,
    trained_shapes,
    whole_parts,
)
from ortlaunch.worker.model.own_numbers import Numbers
from ortlaunch.worker.model.precision import narrow_dtype_of
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import Requests

Batch = dict[str, torch.Tensor]


class Stepped(NamedTuple):
    """What a step did, the same on every rank."""

    gradient_norm: float | None
    """Before clipping; None: not finite, or DeepSpeed was told not to compute it."""
    skipped: bool
    """Weights stay: a gradient was not finite, as fp16's loss scale brings about until it fits."""
    failed: bool = False
    """Weights stay, and no loss scale is the reason: a gradient is not finite."""


class Stepper(Protocol):
    """What the loop needs of an engine."""

    module: nn.Module
    numbers: Numbers
    """What the passes returned beside their losses."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Trained parameters that the loss leaves out on some rank, as far as anybody looked."""

    def micro_step(self, batch: Batch, last: bool, factor: float = 1.0) -> torch.Tensor:
        """Forward and backward of one micro batch; returns its loss times `factor`, detached. `last` of a step."""

    def apply(self, learning_rate: float) -> Stepped:
        """Clip, step, clear gradients; no step where a gradient is not finite."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each parameter's name and what this rank has of its gradient, after the passes of a step."""

    def drop_gradients(self) -> None:
        """Forget the gradients of a step's passes, whether or not `apply` has seen them; nothing else changes."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each trained parameter's name and what this rank holds of it."""

    def named_state(self) -> NamedState:
        """What training changes, by parameter name: a checkpoint is written from it and read into it."""

    def whole_weights(self) -> contextlib.AbstractContextManager[object]:
        """While open, the model's parameters are whole on rank 0 (collective)."""


class TorchStepper:
    """Plain PyTorch: gradients averaged by DistributedDataParallel, precision by autocast and a gradient scaler."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: DistributedContext,
        precision: str,
        accumulation: int,
        max_norm: float | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.accumulation = accumulation
        self.max_norm = max_norm
        self.numbers = Numbers()
        self.averaging = Averaging(model, group) if group.size > 1 else None
        self.module: nn.Module = self.averaging.module if self.averaging else model
        self.dtype = narrow_dtype_of(precision)
        self.scaler = torch.amp.GradScaler(
            group.device.type, enabled=PRECISIONS[precision].scales_loss
        )
        self.casts: contextlib.ExitStack | None = None

    @property
    def unused(self) -> tuple[str, ...]:
        return self.averaging.unused if self.averaging else ()

    @contextlib.contextmanager
    def _pass(self, last: bool) -> Iterator[None]:
        """Autocast, and gradients averaged with the last micro batch."""
        averaging = self.averaging.of(last) if self.averaging else contextlib.nullcontext()
        self._keep_casts()
        with (
            averaging,
            torch.autocast(self.group.device.type, self.dtype, enabled=self.dtype is not None),
        ):
            yield
        if self.casts is not None and last:
            self.casts.close()
            self.casts = None

    def _keep_casts(self) -> None:
        """Cast weights once a step: autocast drops what it has cast where the outermost context ends, so open one."""
        if self.casts is None and self.dtype is not None:
            self.casts = contextlib.ExitStack()
            self.casts.enter_context(torch.autocast(self.group.device.type, enabled=False))

    def micro_step(self, batch: Batch, last: bool, factor: float = 1.0) -> torch.Tensor:
        with self._pass(last):
            loss = _weighted(self.numbers.take(self.module(**batch), factor), factor)
            # Inside, because DistributedDataParallel decides in the backward pass whether to average.
            self.scaler.scale(loss / self.accumulation).backward()
        return loss.detach()

    def apply(self, learning_rate: float) -> Stepped:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(self.optimizer)
        norm = self._norm()
        failed = not (math.isfinite(norm) or self.scaler.is_enabled())
        before = self.scaler.get_scale()
        if not failed:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.scaler.get_scale()
        # Gradients that overflow without being scaled up do so by themselves.
        return Stepped(
            norm if math.isfinite(norm) else None,
            scale < before,
            failed or scale < min(before, 1.0),
        )

    def _norm(self) -> float:
        """The gradient norm before clipping, and clips; averaged gradients give every rank the same."""
        if self.max_norm is None:
            return gradient_norm(self.model)
        return float(
            nn.utils.clip_grad_norm_(
                [p for p in self.model.parameters() if p.requires_grad], self.max_norm
            )
        )

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, p.grad) for name, p in self.model.named_parameters())

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def named_state(self) -> NamedState:
        return NamedState(
            trained_shapes(self.model),
            whole_parts(self.model.named_parameters(), self.optimizer),
            self.optimizer,
            buffers_of(self.model),
            loss_scale=grad_scaler(self.scaler),
        )

    def whole_weights(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class DeepSpeedStepper:
    """DeepSpeed's engine around the model; ZeRO shards what the stage says."""

    unused = ()  # DeepSpeed takes a gradient that does not come for zeros

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: DistributedContext,
        config: Json,
    ) -> None:
        import deepspeed

        _only_what_training_needs(deepspeed)
        self.model = model
        self.group = group
        self.numbers = Numbers()
        if (
            config["zero_optimization"]["stage"] == 3
        ):  # one tensor after another, so that no device holds all of them
            deepspeed.init_distributed(dist_init_required=False)
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        with _no_step(optimizer):
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        self.module: nn.Module = self.engine
        self.scales = bool(config.get("fp16", {}).get("enabled"))
        self.named_state()  # now, that a run whose state cannot be saved does not begin

    def micro_step(self, batch: Batch, last: bool, factor: float = 1.0) -> torch.Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        loss = _weighted(self.numbers.take(self.engine(**batch), factor), factor)
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro step; weights change at the boundary
        return loss.detach()

    def apply(self, learning_rate: float) -> Stepped:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if not hasattr(
            self.engine.optimizer, "_global_grad_norm"
        ):  # stage 0 in fp32: DeepSpeed measures nothing
            return self._apply_plain(gradient_norm(self.model))
        before = self.engine.skipped_steps
        self.engine.step()
        told = self.engine.get_global_grad_norm()
        skipped = self.engine.skipped_steps > before
        norm = math.nan if told is None else float(told)
        bad = told is not None and not 0 <= norm < math.inf  # -1 is what some versions say of nan
        return Stepped(
            norm if 0 <= norm < math.inf else None,
            skipped,
            failed=(bad or skipped) and not self.scales,
        )

    def _apply_plain(self, norm: float) -> Stepped:
        if not math.isfinite(norm):
            self.engine.zero_grad()
            return Stepped(None, skipped=False, failed=True)
        self.engine.step()
        return Stepped(norm, skipped=False)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return (
            (name, _piece(p) if p.requires_grad else None)
            for name, p in self.model.named_parameters()
        )

    def drop_gradients(self) -> None:
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        self.engine.zero_grad()
        if self.engine.zero_optimization_stage() in (1, 2) and hasattr(
            optimizer, "averaged_gradients"
        ):
            _forget_averaged(optimizer)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            (name, getattr(p, "ds_tensor", p))
            for name, p in self.model.named_parameters()
            if p.requires_grad
        )

    def named_state(self) -> NamedState:
        from ortlaunch.worker.deepspeed.named_state import named_state

        return named_state(self.engine, self.model, self.group.rank)

    def whole_weights(self) -> contextlib.AbstractContextManager[object]:
        import deepspeed

        sharded: contextlib.AbstractContextManager[object] = deepspeed.zero.GatheredParameters(
            list(self.model.parameters()), enabled=self.engine.zero_optimization_stage() == 3
        )
        return sharded


def _weighted(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Loss x factor, in float32 at least; the loss itself where that is 1, so that no bit changes."""
    if (
        Requests.is_forked_child
    ):  # it would write metrics and checkpoints, and speak to the other ranks, beside its parent
        told = "a process that the model or the data forked goes on as this rank, and is ended"
        print(
            f"ortlaunch: {told} (process {os.getpid()}): a child must leave by os._exit",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    return (
        loss if factor == 1.0 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor
    )


def gradient_norm(model: nn.Module) -> float:
    """The norm of all gradients, as exact as in double precision; inf or nan where one of their numbers is."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    return math.sqrt(float(sum_of_squares(dense))) if dense else 0.0


def _piece(parameter: Any) -> torch.Tensor | None:
    """This rank's piece of a gradient under DeepSpeed, between backward pass and step."""
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        from deepspeed.utils import safe_get_local_grad

        local: torch.Tensor | None = safe_get_local_grad(parameter)
        return local
    mapping = getattr(parameter, "_hp_mapping", None)
    gradient: torch.Tensor | None = parameter.grad
    if gradient is None and mapping is not None:
        gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return gradient


def _forget_averaged(optimizer: Any) -> None:
    """What DeepSpeed's ZeRO 1 and 2 do after an overflow: later passes would else add to these gradients."""
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer._release_preflattened_grad_buffers()
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None


@contextlib.contextmanager
def _no_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, steps of this optimizer do nothing.

    DeepSpeed 0.19.8 makes the state of stage 0 in bf16 and fp16 by a step with gradients of zero. Adam counts it, so
    that its true first step is 0.74 of what it should be, and weights decay by the peak learning rate.
    """
    vars(optimizer)["step"] = lambda *_, **__: None
    try:
        yield
    finally:
        del vars(optimizer)["step"]


def _only_what_training_needs(deepspeed: Any) -> None:
    # On CPU DeepSpeed would compile, for half a minute, an all-reduce that only its inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings(
        "ignore", message="`torch.distributed.* is deprecated", category=FutureWarning
    )
