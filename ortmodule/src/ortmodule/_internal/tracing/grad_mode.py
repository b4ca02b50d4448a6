"""Stop the gradient of an exported graph at tensors that a model computes under `torch.no_grad()`.

ORT exports a model with gradients off. The grad mode that a forward pass sets is lost, and ORT's
gradient passes through everything. Here an export follows the model's grad mode: if a tensor is
computed with gradients off from a trained tensor, it is detached where it is used with gradients
on. Other tensors, such as the angles of a rotary embedding, are unchanged, so most models' graphs
stay the same.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ortmodule._internal.base.ort_types import AnyFunction
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import repair
from ortmodule._internal.base.torch_calls import tensor_property_getter
from ortmodule._internal.tracing.observer import (
    HandlerOrder,
    handle_calls_of_trace,
)
from ortmodule._internal.tracing.symbolics import ExportFunction

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import Args, Kwargs
    from ortmodule._internal.base.trace_facts import TraceFacts

_T = torch.Tensor
_GRAD_MODE = torch.autograd.grad_mode.__file__
# Types that contain no tensors; `tensors` skips them for speed.
_NO_TENSORS = {int, float, bool, str, type(None), slice, torch.Size, torch.dtype, torch.device}
# The grad mode at the start of the current export's forward pass; one entry for each open
# `set_starting_grad_mode_temporarily`.
_starting_modes: list[bool] = []


@contextlib.contextmanager
def set_starting_grad_mode_temporarily(gradients_are_enabled: bool) -> Iterator[None]:
    """Set the grad mode in which an export's forward pass begins."""
    _starting_modes.append(gradients_are_enabled)
    try:
        yield
    finally:
        _starting_modes.pop()


def starting_grad_mode_or_default(default_grad_mode: bool) -> bool:
    """Return whether gradients are on at the start of this export's forward pass."""
    return _starting_modes[-1] if _starting_modes else default_grad_mode


@repair(
    "stop_gradient_under_no_grad",
    "trace wrapper",
    70,
    fault="Gradients pass a value that is computed under `torch.no_grad()`, `weight.data` in a "
    "forward pass stays the weight of the export, and `if h.requires_grad:` never holds.",
    example="tracing/test_compat.py::test_each_check_passes[no_grad]",
)
def wrap_export_with_grad_mode_tracking(torch_export: ExportFunction) -> ExportFunction:
    """Wrap an export so that it follows the model's grad mode.

    The mode is set by `no_grad`, `set_grad_enabled`, `enable_grad` and `inference_mode`.
    """

    @functools.wraps(torch_export)
    def export_with_grad_mode(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        tracker = _GradModeTracker(model, kwargs["training"] != torch.onnx.TrainingMode.EVAL)
        with (
            handle_calls_of_trace(
                HandlerOrder.GRAD_MODE, tracker.call_in_grad_mode_of_model
            ) as facts,
            tracker.route_custom_functions_and_note_grad_mode_reads(facts),
        ):
            return torch_export(model, *args, **kwargs)

    return export_with_grad_mode


_SCATTER_FUNCTIONS = {torch.scatter, torch.Tensor.scatter, torch.Tensor.scatter_}


class _GradModeTracker:
    """A handler of calls that tracks the model's grad mode, and which tensors have a gradient.

    A tensor that no tracked call has made counts as trained: it is an input of the model or of a
    scripted function.
    """

    def __init__(self, traced_model: torch.nn.Module, is_training_export: bool) -> None:
        starting_mode = starting_grad_mode_or_default(is_training_export)
        self._training = is_training_export and starting_mode
        # The mode that the model sees; for torch gradients are off throughout an export.
        self._enabled = starting_mode
        # By tensor: whether it has a gradient with gradients on everywhere.
        self._trained = WeakTensorKeyDictionary()
        # Tensors computed from trained ones with gradients off, each with its detached copy.
        self._stopped = WeakTensorKeyDictionary()
        for tensor in (*traced_model.parameters(), *traced_model.buffers()):
            self._trained[tensor] = tensor.requires_grad

    @contextlib.contextmanager
    def route_custom_functions_and_note_grad_mode_reads(
        self, trace_facts: TraceFacts
    ) -> Iterator[None]:
        """Intercept the calls that no function mode sees.

        These are reads of the grad mode, and custom functions.
        """
        original_apply = vars(torch.autograd.Function)["apply"]
        weight_ids = set(map(id, self._trained.keys()))

        def apply_function(
            function: type[torch.autograd.Function], /, *args: object, **kwargs: object
        ) -> object:
            def call_apply(*args: object, **kwargs: object) -> object:
                if has_torch_function(input_tensors):
                    return handle_torch_function(call_apply, input_tensors, *args, **kwargs)
                return original_apply.__get__(None, function)(*args, **kwargs)

            input_tensors = tuple(tensors_inside_nested_values((args, kwargs)))
            # In a layer that runs as torch.
            if not torch.jit.is_tracing():
                return call_apply(*args, **kwargs)
            # A trace takes other arguments for constants; a weight's memory is that of each step.
            nested = tensors_inside_nested_values(
                [value for value in args if not isinstance(value, _T)]
            )
            if not {id(tensor) for tensor in nested} <= weight_ids:
                raise RuntimeError(_NESTED_MESSAGE.format(function.__name__))
            versions = inplace_change_counts(input_tensors)
            result = call_apply(*args, **kwargs)
            if tensors_changed_in_place_since(input_tensors, versions):
                raise RuntimeError(_DIRTY_MESSAGE.format(function.__name__))
            return result

        def read_grad_mode() -> bool:
            # torch's own grad mode classes read the mode to restore it later; only reads by the
            # model count.
            if sys._getframe(1).f_code.co_filename != _GRAD_MODE:
                trace_facts.reads_grad_mode = True
            return self._enabled

        def enter_inference_mode(inference: torch.inference_mode) -> None:
            vars(inference)["prev"] = self._enabled
            self._enabled = not inference.mode

        def leave_inference_mode(inference: torch.inference_mode, *raised: object) -> None:
            self._enabled = vars(inference)["prev"]

        with contextlib.ExitStack() as patches:
            for owner, name, new in (
                (torch, "is_grad_enabled", read_grad_mode),
                (torch.autograd.Function, "apply", classmethod(apply_function)),
                (torch.inference_mode, "__enter__", enter_inference_mode),
                (torch.inference_mode, "__exit__", leave_inference_mode),
            ):
                patches.enter_context(replace_attribute_temporarily(owner, name, new))
            yield

    def call_in_grad_mode_of_model(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        """Run a call with the detached copies of tensors that have no gradient in the model."""
        if func is torch._C._set_grad_enabled:
            self._enabled = args[0]
            return None
        if func == tensor_property_getter("requires_grad") and args[0] in self._trained:
            return self._trained[args[0]] and args[0] not in self._stopped
        if func is _T.register_hook and self._would_have_gradient_if_enabled_everywhere(args[0]):
            raise RuntimeError(
                "the forward pass gives a tensor a hook, and ONNX Runtime's backward pass calls "
                "none"
            )
        if func == tensor_property_getter("data"):
            # A trace records .data as a constant.
            func = _T.detach
            args = args[:1]
        if any(isinstance(value, complex) for value in args) and (
            input_tensors := tensors_inside_nested_values(args)
        ):
            # A trace refuses Python's complex numbers, as 1j * x has.
            args = tuple(
                _compute_complex_constant_in_graph(value, input_tensors[0])
                if isinstance(value, complex)
                else value
                for value in args
            )
        # torch's exporter has no form of a scatter of True or False.
        if func in _SCATTER_FUNCTIONS:
            args = tuple(int(value) if isinstance(value, bool) else value for value in args)
        return self._call_and_track_gradients_or_refuse_change(func, args, kwargs)

    def _call_and_track_gradients_or_refuse_change(
        self, called_function: AnyFunction, call_arguments: Args, call_keywords: Kwargs
    ) -> object:
        float_tensors = [
            tensor
            for tensor in tensors_inside_nested_values((call_arguments, call_keywords))
            if _is_float_or_complex(tensor)
        ]
        versions = inplace_change_counts(float_tensors)
        is_trained = called_function is not _T.detach and any(
            self._would_have_gradient_if_enabled_everywhere(tensor) for tensor in float_tensors
        )
        if self._enabled and any(tensor in self._stopped for tensor in float_tensors):
            call_arguments, call_keywords = tree_map_only(
                torch.Tensor, self._detached_copy_if_stopped, (call_arguments, call_keywords)
            )
        result = called_function(*call_arguments, **call_keywords)
        changed = tensors_changed_in_place_since(float_tensors, versions)
        for tensor in changed:
            if isinstance(tensor, torch.nn.Parameter):
                raise RuntimeError(CHANGED_WEIGHT_MESSAGE)
            # The tensor was made in one mode and is changed in the other; detaching cannot express
            # that.
            if (
                self._would_have_gradient_if_enabled_everywhere(tensor)
                and (tensor in self._stopped) == self._enabled
            ):
                raise RuntimeError(CHANGED_MESSAGE)
        for tensor in (
            *changed,
            *filter(_is_float_or_complex, tensors_inside_nested_values(result)),
        ):
            self._trained[tensor] = is_trained
            self._stopped.pop(tensor, None)
            if is_trained and not self._enabled:
                self._stopped[tensor] = None
        return result

    def _would_have_gradient_if_enabled_everywhere(self, traced_tensor: torch.Tensor) -> bool:
        return (
            self._training
            and _is_float_or_complex(traced_tensor)
            and self._trained.get(traced_tensor, True)
        )

    def _detached_copy_if_stopped(self, traced_tensor: torch.Tensor) -> torch.Tensor:
        if traced_tensor not in self._stopped:
            return traced_tensor
        stopped: torch.Tensor | None = self._stopped[traced_tensor]
        if stopped is None:
            stopped = self._stopped[traced_tensor] = traced_tensor.detach()
        return stopped


def tensors_inside_nested_values(nested_values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results.

    The result is that of torch's tree_leaves, in a tenth of its time.
    """
    if isinstance(nested_values, _T):
        return [nested_values]
    if type(nested_values) in (tuple, list):
        return [tensor for value in nested_values for tensor in tensors_inside_nested_values(value)]
    if type(nested_values) is dict:
        return [
            tensor
            for value in nested_values.values()
            for tensor in tensors_inside_nested_values(value)
        ]
    if type(nested_values) in _NO_TENSORS:
        return []
    return [value for value in tree_leaves(nested_values) if isinstance(value, _T)]


def inplace_change_counts(checked_tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; hidden from function modes."""
    with torch._C.DisableTorchFunction():
        return [value._version for value in checked_tensors]


def tensors_changed_in_place_since(
    checked_tensors: Sequence[torch.Tensor], earlier_change_counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return the tensors that were changed in place since `inplace_change_counts` returned `earlier_change_counts`."""
    return [
        value
        for value, old, new in zip(
            checked_tensors, earlier_change_counts, inplace_change_counts(checked_tensors)
        )
        if old != new
    ]


def _is_float_or_complex(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(tensor.is_floating_point() or tensor.is_complex())


def _compute_complex_constant_in_graph(
    complex_number: complex, like_tensor: torch.Tensor
) -> torch.Tensor:
    """Compute a complex constant in the graph, because ONNX has none."""
    parts = [
        like_tensor.new_zeros((), dtype=torch.get_default_dtype()) + part
        for part in (complex_number.real, complex_number.imag)
    ]
    return torch.complex(parts[0], parts[1])


_AS_TORCH = "or let the layer run as torch (torch_modules=['PATH OF THE LAYER'])"
_NESTED_MESSAGE = (
    "the custom function {} is given tensors in a list, a tuple or a dictionary, and ONNX Runtime's "
    f"graph would hold those of the first batch: pass each as an argument of its own, {_AS_TORCH}"
)
_DIRTY_MESSAGE = (
    "the custom function {} changes an argument in place, and ONNX Runtime may read it elsewhere: "
    f"return a new tensor, without ctx.mark_dirty, {_AS_TORCH}"
)
CHANGED_WEIGHT_MESSAGE = (
    "a weight is changed in the forward pass, which ONNX Runtime's graph would leave out"
)
CHANGED_MESSAGE = (
    "a tensor with a gradient is changed in place under torch.no_grad(), or one made there is "
    "changed outside: ONNX Runtime's gradient would be another than PyTorch's; "
    "write the change without a trailing underscore"
)
