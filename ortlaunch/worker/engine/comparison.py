"""Comparison of plain PyTorch with an engine's module, for one micro batch and the same weights.

This module also switches dropout off during the comparison. The comparison has no side effects: it
writes no `.grad`, and it restores weights, buffers and random states. The module is independent of
the engines and must not import onnxruntime or deepspeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from ortlaunch.base.errors import EngineError
from ortlaunch.tables.precisions import PRECISIONS
from ortlaunch.worker.allocator import trim_heap
from ortlaunch.worker.engine.differences import (
    Comparison,
    EvaluationLosses,
    NamedTensors,
    PassResult,
    loss_gradient_and_state_differences,
    mark_differences_that_are_rounding,
    to_double_precision,
)
from ortlaunch.worker.engine.float64 import compute_in_float64
from ortlaunch.worker.engine.random_draws import RandomNumberRecorder, ReplayingModel
from ortlaunch.worker.model.matmul_precision import use_matmul_precision
from ortlaunch.worker.model.model import LossModule, disable_chunked_head
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.model.returned_values import loss_of_engine_output
from ortlaunch.worker.patching import replace_attribute_temporarily


def run_and_compare_passes(
    reference_model: nn.Module,
    engine_module: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    *,
    precision: str = "fp32",
    uses_autocast: bool = False,
    tolerance: float | None = None,
) -> Comparison:
    """Compare forward and backward of `batch` through `reference_model` and through `engine_module`.

    Both passes run without dropout and with exact matmuls. If they differ by more than the
    tolerance in fp32, the reference also runs in float64. A difference from PyTorch that is as
    large as PyTorch's own difference from float64 is rounding.

    Args:
        reference_model: returns the loss of `batch`. Its forward is called directly, without
            torch.compile and without the module's hooks.
        engine_module: the same model on an engine, with the same parameter objects. If the model has
            dropout, it must be exported with dropout off (see `dropouts`), because an ONNX graph
            keeps the ratio of its export.
        batch: one micro batch, as arguments by name.
        precision: fp32, fp16 or bf16: the precision of the passes. It sets the limits of rounding
            (`PRECISIONS`).
        uses_autocast: run both passes under autocast to `precision`. If false, weights and batch are
            already in that precision.
        tolerance: replaces the precision's own tolerance.

    Raises:
        DrawsNumbers: the model draws random numbers beside dropout, and not the same in both passes.
    """
    model = (
        reference_model.model if isinstance(reference_model, ReplayingModel) else reference_model
    )
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    precision_limits = PRECISIONS[precision]
    device = next(iter(trained.values())).device
    tolerance = tolerance or precision_limits.tolerance
    dtype = narrow_dtype_or_none(precision) if uses_autocast else None

    def run_pass(
        forward: Callable[..., torch.Tensor],
        parameters: Mapping[str, nn.Parameter],
        is_in_float64: bool = False,
    ) -> PassResult:
        lowered = torch.autocast(device.type, dtype, enabled=dtype is not None)
        # The state is saved first, outside the casts, so that it is saved in its own precision.
        with (
            _restore_weights_and_yield_changes(model) as changed_state,
            lowered,
            compute_in_float64(batch, is_in_float64) as pass_batch,
        ):
            loss, gradients = loss_and_scaled_gradients(
                forward, pass_batch, parameters, precision_limits.scale
            )
        return PassResult(loss, gradients, changed_state)

    devices = [device] if device.type == "cuda" else []
    # At the highest precision, to compare the engines and not TF32 or oneDNN's bfloat16.
    with (
        torch.random.fork_rng(devices),
        disable_dropout(reference_model),
        use_matmul_precision("highest"),
        _compute_loss_of_own_rank(model),
    ):
        state_before = _cpu_and_device_random_state(device)
        with use_whole_logits_without_reentrancy(model):
            reference_pass = run_pass(reference_model.forward, trained)
        state_after = _cpu_and_device_random_state(device)
        _set_cpu_and_device_random_state(device, state_before)
        # Otherwise the memory that PyTorch's pass has freed would stay beside the module's.
        trim_heap()
        engine_pass = run_pass(engine_module, trained)
        # Torch draws inside ONNX Runtime's graph, too; only the same numbers can be compared.
        has_draws = not torch.equal(state_before, state_after)
        if has_draws and not torch.equal(_cpu_and_device_random_state(device), state_after):
            raise UnrepeatableRandomNumbersError
        comparison = loss_gradient_and_state_differences(
            engine_pass, reference_pass, precision_limits
        )._replace(draws=int(has_draws))
        if precision_limits.is_narrow or comparison.largest_difference <= tolerance:
            return comparison
        # Float64 takes twice the memory: only the gradients in question are kept and computed.
        names_in_question = {item.name for item in comparison.gradients if item.value > tolerance}
        engine_pass = engine_pass.select_gradients(names_in_question)
        reference_pass = reference_pass.select_gradients(names_in_question)
        try:
            with use_whole_logits_without_reentrancy(model):
                parameters_in_question = {name: trained[name] for name in names_in_question}
                float64_pass = run_pass(
                    reference_model.forward, parameters_in_question, is_in_float64=True
                )
        # A model may fail in float64 for any reason; the comparison is then without this judgement.
        except Exception as error:
            return comparison._replace(not_judged=str(error) or type(error).__name__)
        norm = comparison.reference_norm
        engine_to_float64, reference_to_float64 = (
            loss_gradient_and_state_differences(item, float64_pass, precision_limits, norm)
            for item in (engine_pass, reference_pass)
        )
        return mark_differences_that_are_rounding(
            comparison, engine_to_float64, reference_to_float64, tolerance
        )


def compare_passes_replaying_random_numbers_if_drawn(
    reference_model: nn.Module,
    engine_module: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    wrap_replaying_model: Callable[[ReplayingModel], Callable[..., torch.Tensor]] | None,
    **compare_options: Any,
) -> Comparison:
    """Run `compare`; if the model draws random numbers, record them and pass them to both passes.

    Args:
        reference_model: see `compare`.
        engine_module: see `compare`.
        batch: see `compare`.
        wrap_replaying_model: makes the engine's module of a model that receives its random numbers as inputs.
            None: such models are not compared.
        compare_options: further arguments of `compare`.

    Raises:
        DrawsNumbers: the model draws random numbers that cannot be passed to both.
    """
    plain_comparison: Comparison | None = None
    try:
        plain_comparison = run_and_compare_passes(
            reference_model, engine_module, batch, **compare_options
        )
        limit = (
            compare_options.get("tolerance")
            or PRECISIONS[compare_options.get("precision", "fp32")].tolerance
        )
        # A difference may be one of the numbers' order.
        if (
            not plain_comparison.draws
            or wrap_replaying_model is None
            or plain_comparison.largest_difference <= limit
        ):
            return plain_comparison._replace(draws=0)
    except UnrepeatableRandomNumbersError:
        if wrap_replaying_model is None:
            raise
    parameter = next(reference_model.parameters())
    with (
        torch.random.fork_rng([parameter.device] if parameter.is_cuda else []),
        disable_dropout(reference_model),
        disable_chunked_head(reference_model),
        _compute_loss_of_own_rank(reference_model),
        _restore_weights_and_yield_changes(reference_model),
        torch.no_grad(),
        RandomNumberRecorder() as draws,
    ):
        reference_model.forward(**batch)
    replaying_model = ReplayingModel(reference_model)
    try:
        comparison = run_and_compare_passes(
            replaying_model,
            wrap_replaying_model(replaying_model),
            {**batch, "draws": draws.recorded},
            **compare_options,
        )
    except UnrepeatableRandomNumbersError:
        if plain_comparison is None:
            raise
        return plain_comparison._replace(draws=0)
    return comparison._replace(draws=len(draws.recorded))


def evaluation_losses_or_none(
    reference_model: nn.Module,
    engine_module: nn.Module,
    batch: dict[str, torch.Tensor],
    autocast_dtype: torch.dtype | None,
) -> EvaluationLosses | None:
    """Return the losses of an evaluation pass through `engine_module` and `reference_model`.

    Layers such as nn.TransformerEncoder compute otherwise in evaluation.

    Args:
        reference_model: see `compare`.
        engine_module: the engine's module, with the same parameter objects.
        batch: see `compare`.
        autocast_dtype: of autocast; None without it.

    Returns:
        None if the model draws random numbers in evaluation, too.
    """
    device = next(reference_model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    modes = [
        (layer, layer.training)
        for compared_module in (reference_model, engine_module)
        for layer in compared_module.modules()
    ]
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        _compute_loss_of_own_rank(reference_model),
        _restore_weights_and_yield_changes(reference_model),
        use_matmul_precision("highest"),
        torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None),
    ):
        state_before = _cpu_and_device_random_state(device)
        try:
            for compared_module in (reference_model, engine_module):
                compared_module.eval()
            with use_whole_logits_without_reentrancy(reference_model):
                reference_loss = float(loss_of_engine_output(reference_model.forward(**batch)))
            if not torch.equal(_cpu_and_device_random_state(device), state_before):
                return None
            engine_loss = float(loss_of_engine_output(engine_module(**batch)))
            return EvaluationLosses(engine_loss, reference_loss)
        finally:
            for layer, mode in modes:
                layer.training = mode


class UnrepeatableRandomNumbersError(EngineError):
    """A model draws random numbers that differ between two passes."""

    def __init__(self) -> None:
        super().__init__(
            "the model draws random numbers in forward that cannot be given to both, so that its "
            "passes cannot be compared"
        )


def _compute_loss_of_own_rank(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Compare one rank's samples alone: another rank may need no further pass, and not take part."""
    return (
        model.compute_loss_of_own_rank()
        if isinstance(model, LossModule)
        else contextlib.nullcontext()
    )


@contextlib.contextmanager
def use_whole_logits_without_reentrancy(model: nn.Module) -> Iterator[None]:
    """Compute whole logits, without reentrant checkpoints, while the context is open."""
    # autograd.grad does not reach weights inside a reentrant checkpoint.
    function = torch.utils.checkpoint.CheckpointFunction
    with (
        disable_chunked_head(model),
        replace_attribute_temporarily(function, "apply", lambda run, _, *inputs: run(*inputs)),
    ):
        yield


def loss_and_scaled_gradients(
    forward: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    loss_scale: float,
) -> tuple[float, NamedTensors]:
    """Return the loss of a batch, and the gradients of the loss times `loss_scale` by name."""
    loss = loss_of_engine_output(forward(**batch))
    if not parameters:
        return float(loss.detach()), {}
    # backward() would run the hooks by which DistributedDataParallel and DeepSpeed get gradients.
    gradients = torch.autograd.grad(
        loss.float() * loss_scale, tuple(parameters.values()), allow_unused=True
    )
    return float(loss.detach()), dict(zip(parameters, gradients))


def owner_name_and_ratio_of_active_dropouts(model: nn.Module) -> list[tuple[object, str, float]]:
    """Return (owner, attribute, value) of every dropout above 0.

    Owners are modules and the configs of modules.
    """
    owners = {
        id(owner): owner for m in model.modules() for owner in (m, getattr(m, "config", None))
    }
    return [
        (owner, name, value)
        for owner in owners.values()
        for name, value in getattr(owner, "__dict__", {}).items()
        if _is_dropout_ratio(owner, name) and type(value) in (int, float) and value > 0
    ]


def _is_dropout_ratio(owner: object, attribute_name: str) -> bool:
    """Return whether an attribute is a dropout ratio.

    It is `p` of nn.Dropout and similar classes, and attention_dropout, resid_pdrop, drop_prob,
    layerdrop and similar names of any owner.
    """
    return "drop" in attribute_name.lower() or (
        attribute_name == "p" and "drop" in type(owner).__name__.lower()
    )


@contextlib.contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout of the model to 0 while the context is open; training mode stays on."""
    active_ratios = owner_name_and_ratio_of_active_dropouts(model)
    try:
        for owner, name, _ in active_ratios:
            setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, value in active_ratios:
            setattr(owner, name, value)


@contextlib.contextmanager
def _restore_weights_and_yield_changes(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Restore weights and buffers at the end; yield a dictionary of the changes of the pass.

    The dictionary is filled at the end, with the difference of each tensor that changed, by name.
    """
    state_before = {
        name: (tensor, tensor.data, tensor.detach().clone())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    changed_state: dict[str, torch.Tensor] = {}
    try:
        yield changed_state
    finally:
        with torch.no_grad():
            for name, (tensor, data, value) in state_before.items():
                # A tensor of another shape is a table that grew: it has no difference to report.
                if tensor.shape == value.shape and not _are_all_values_equal(tensor, value):
                    changed_state[name] = to_double_precision(
                        tensor.detach()
                    ) - to_double_precision(value)
                # The pass may have replaced `.data` or written into it: undo both.
                tensor.data = data
                if not _are_all_values_equal(data, value):
                    data.copy_(value)


def _are_all_values_equal(tensor: torch.Tensor, other_tensor: torch.Tensor) -> bool:
    """Return whether all values are the same; nan equals nan."""
    return torch.equal(tensor, other_tensor) or bool(
        ((tensor == other_tensor) | (tensor.isnan() & other_tensor.isnan())).all()
    )


def _cpu_and_device_random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
    return torch.get_rng_state()


def _set_cpu_and_device_random_state(device: torch.device, random_state: torch.Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(random_state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random_state[size:], device)
