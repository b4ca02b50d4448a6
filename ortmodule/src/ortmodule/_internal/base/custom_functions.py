"""Corrections for custom autograd functions inside ORT's graph (its PythonOp), inlined or refused.

ORT passes tensors to a function by DLPack, in which a boolean tensor is one of uint8: `~mask` then
flips bits, and a boolean output ends the step. Here each function receives booleans as in eager
mode, and may return booleans.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.onnx import TensorProtoDataType as Kind

from ortmodule._internal.base import torch_calls
from ortmodule._internal.base.repair_registry import repair
from ortmodule._internal.native import extensions

if TYPE_CHECKING:
    import torch

    from ortmodule._internal.base.ort_types import AnyFunction

_CALLS_MODULE = "onnxruntime.training.ortmodule._custom_autograd_function"
_EXPORTER_MODULE = "onnxruntime.training.ortmodule._custom_autograd_function_exporter"
# The autograd.Functions of each name, in the order of their first export.
_functions_by_name: dict[str, list[Any]] = {}
_COPIED_WEIGHTS_MESSAGE = (
    "the custom function {} computes gradients of weights that it is given and that a layer has, and "
    "ONNX Runtime gives it other tensors: let the layer run as torch "
    "(torch_modules=['PATH OF THE LAYER'])"
)
# Methods by which a function describes itself to ORT's exporter.
_SCHEMA_METHODS = ("infer_shape", "alias_input")


@repair(
    "keep_booleans_of_autograd_functions",
    "after import",
    60,
    fault="A custom autograd function gets booleans as uint8 and cannot return any; gradients "
    "behind one that saves its argument are up to 15 times as large; a second class of one "
    "name, a result that is a view and a `backward` that returns None for a weight run another "
    "function or end the pass.",
    example="tracing/test_compat.py::test_each_check_passes[mask]",
    sources={
        "_custom_autograd_function_exporter:_default_export": "aa1d3d1bf6199e03",
    },
)
def keep_booleans_of_autograd_functions() -> bool:
    """Pass boolean tensors to custom functions as booleans, and copy the arguments that they save."""
    if extensions.reason_interop_is_unbuildable_or_empty():
        return False
    exporter: Any = importlib.import_module(_EXPORTER_MODULE)
    exporter._default_export = _wrap_ort_export_for_booleans_and_saved_tensors(
        exporter._default_export
    )
    return True


def _wrap_ort_export_for_booleans_and_saved_tensors(ort_default_export: AnyFunction) -> AnyFunction:
    @functools.wraps(ort_default_export)
    def export_boolean_and_copying_variant(g: Any, /, *arguments: Any, **keywords: object) -> Any:
        name, function_class, convention, result_count, result_types, ranks, *inputs = arguments
        boolean_arguments = frozenset(
            i
            for i, input_value in enumerate(inputs)
            if convention[i] == "d" and input_value.type().scalarType() == "Bool"
        )
        boolean_results = frozenset(
            i for i, result_type in enumerate(result_types) if result_type == Kind.BOOL
        )
        # Functions of torch_calls already copy the tensors that they save.
        saves_ort_tensors = function_class.__module__ != torch_calls.__name__
        if not (boolean_arguments or boolean_results or saves_ort_tensors):
            return ort_default_export(g, *arguments, **keywords)
        # ORT knows functions by name, and keeps the first one of a name.
        namesakes = _functions_by_name.setdefault(name, [])
        if function_class not in namesakes:
            namesakes.append(function_class)
        if namesake_index := namesakes.index(function_class):
            name = f"{name}[{namesake_index + 1}]"
        function_class = _create_ort_function_class_with_uint8_booleans(
            function_class, boolean_arguments, boolean_results, saves_ort_tensors
        )
        if boolean_arguments or boolean_results:
            # ORT caches functions by name, so a variant needs its own; ORT also decides by the name
            # which functions it recomputes.
            name = f"{name}[bool {sorted(boolean_arguments)} {sorted(boolean_results)}]"
        result_types = [
            Kind.UINT8 if result_type == Kind.BOOL else result_type for result_type in result_types
        ]
        outputs = ort_default_export(
            g,
            name,
            function_class,
            convention,
            result_count,
            result_types,
            ranks,
            *inputs,
            **keywords,
        )
        if not boolean_results:
            return outputs
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        values = [
            g.op("Cast", v, to_i=Kind.BOOL.value) if i in boolean_results else v
            for i, v in enumerate(values)
        ]
        return tuple(values) if isinstance(outputs, (list, tuple)) else values[0]

    return export_boolean_and_copying_variant


def _create_ort_function_class_with_uint8_booleans(
    autograd_function_class: Any,
    boolean_argument_positions: frozenset[int],
    boolean_result_positions: frozenset[int],
    may_save_ort_tensors: bool,
) -> Any:
    """Return the class that ORT calls in place of an autograd.Function.

    boolean_argument_positions: positions of boolean arguments, which arrive as uint8.
    boolean_result_positions: positions of boolean results.
    may_save_ort_tensors: whether the function may keep tensors of ORT for its backward pass.
    """

    import torch
    from torch.autograd.function import FunctionCtx
    from torch.utils._pytree import tree_leaves, tree_map_only

    # Filled in the first pass, if the function keeps a graph of its own; ORT copies the arguments of
    # that pass.
    keeps_graph: list[bool] = []
    # ORT's own functions tell it which outputs are their arguments.
    separate_results = (
        _unchanged_results
        if hasattr(autograd_function_class, "alias_input")
        else _contiguous_results_in_own_memory
    )

    def uint8_arguments_to_booleans(function_arguments: tuple[Any, ...]) -> list[Any]:
        """Return the arguments with the booleans restored."""
        return [
            arg.bool() if i in boolean_argument_positions else arg
            for i, arg in enumerate(function_arguments)
        ]

    def boolean_results_to_uint8(function_results: Any) -> Any:
        """Return the outputs with booleans as uint8, the only form that ORT accepts."""
        if not isinstance(function_results, tuple):
            return function_results.byte() if boolean_result_positions else function_results
        return tuple(
            output.byte() if i in boolean_result_positions else output
            for i, output in enumerate(function_results)
        )

    def record_output_sizes_for_zero_filling(ctx: Any, function_results: Any) -> None:
        ctx._ortmodule_outputs = [
            output.new_zeros(()).expand(output.shape) if isinstance(output, torch.Tensor) else None
            for output in (
                function_results if isinstance(function_results, tuple) else (function_results,)
            )
        ]
        # ORT would fill with zeros of the first batch's sizes.
        FunctionCtx.set_materialize_grads(ctx, False)

    @torch_calls.record_and_reraise_errors()
    def forward(ctx: Any, *args: Any) -> Any:
        forward_arguments = (
            tree_map_only(torch.Tensor, _clone_tensor, args) if keeps_graph else args
        )
        results = autograd_function_class.forward(
            ctx, *uint8_arguments_to_booleans(forward_arguments)
        )
        outputs = separate_results(results, args)
        # Outputs are marked as the tensors that they are.
        marked_ids = [id(tensor) for tensor in ctx.non_differentiable or ()]
        pairs = zip(tree_leaves(results), tree_leaves(outputs))
        ctx.mark_non_differentiable(
            *(output for result, output in pairs if id(result) in marked_ids)
        )
        record_output_sizes_for_zero_filling(ctx, outputs)
        if may_save_ort_tensors and _copy_shared_saved_tensors_and_detect_own_graph(ctx, args):
            keeps_graph.append(True)
        return boolean_results_to_uint8(outputs)

    @torch_calls.record_and_reraise_errors()
    def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        autograd_function_class.setup_context(
            ctx, tuple(uint8_arguments_to_booleans(inputs)), output
        )
        record_output_sizes_for_zero_filling(ctx, output)
        if may_save_ort_tensors:
            _copy_shared_saved_tensors_and_detect_own_graph(ctx, inputs)

    @torch_calls.record_and_reraise_errors()
    def backward(ctx: Any, *gradients: Any) -> Any:
        if getattr(ctx, "_ortmodule_fills", True):
            gradients = tuple(
                sample.new_zeros(sample.shape)
                if gradient is None and sample is not None
                else gradient
                for gradient, sample in zip(gradients, ctx._ortmodule_outputs)
            )
        try:
            input_gradients = separate_results(
                autograd_function_class.backward(ctx, *gradients), gradients
            )
        except RuntimeError as error:
            if "appears to not have been used in the graph" not in str(error):
                raise
            raise RuntimeError(
                _COPIED_WEIGHTS_MESSAGE.format(autograd_function_class.__name__)
            ) from error
        if not may_save_ort_tensors:
            return input_gradients
        input_gradients = (
            input_gradients if isinstance(input_gradients, tuple) else (input_gradients,)
        )
        # ORT's graph has a gradient of each input that needs one, and ends where it gets None.
        return tuple(
            sample.new_zeros(sample.shape) if gradient is None and sample is not None else gradient
            for gradient, sample in zip(input_gradients, ctx._ortmodule_inputs)
        )

    # torch has two styles of autograd.Function: forward with a ctx, or forward without one and a
    # separate setup_context.
    if autograd_function_class.setup_context is torch.autograd.Function.setup_context:
        forward_methods: dict[str, AnyFunction] = {"forward": forward}
    else:
        forward_methods = {
            "forward": lambda *args: boolean_results_to_uint8(
                separate_results(
                    autograd_function_class.forward(*uint8_arguments_to_booleans(args)), args
                )
            ),
            "setup_context": set_up,
        }
    members = {
        **{name: staticmethod(method) for name, method in forward_methods.items()},
        "backward": staticmethod(backward),
        "__module__": autograd_function_class.__module__,
        "__qualname__": autograd_function_class.__qualname__,
    }
    schema_methods = {
        name: staticmethod(getattr(autograd_function_class, name))
        for name in _SCHEMA_METHODS
        if hasattr(autograd_function_class, name)
    }
    # ORT registers only classes whose metaclass is that of torch.autograd.Function.
    ort_function_class: Any = types.new_class(
        autograd_function_class.__name__,
        (torch.autograd.Function,),
        {},
        lambda body: body.update(members, **schema_methods),
    )
    ort_function_class._backward_cls.set_materialize_grads = _record_zero_filling
    return ort_function_class


def _record_zero_filling(ctx: Any, value: bool) -> None:
    """Note whether a function wants zeros in place of None; a replacement of its ctx's method."""
    ctx._ortmodule_fills = value


def _copy_shared_saved_tensors_and_detect_own_graph(
    ctx: Any, forward_arguments: tuple[Any, ...]
) -> bool:
    """Copy the tensors that a forward pass saved and that share the memory of its arguments.

    ORT gives that memory to other nodes before the backward pass. From the second pass on, ORT's
    own copies are missing: it copies only the arguments that it recognized as saved in the first
    pass.

    Returns:
        Whether the function keeps a graph of its own that begins at such a tensor. A copy would be
        no part of that graph, so that the function needs copies of its arguments.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    argument_addresses = {
        arg.untyped_storage().data_ptr()
        for arg in forward_arguments
        if isinstance(arg, torch.Tensor)
    }
    graph_leaves: list[torch.Tensor] = []

    def copy_if_shared(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in argument_addresses:
            return value
        # Such as `x.detach().requires_grad_()`.
        is_own_leaf = value.requires_grad and not value._is_view()
        if is_own_leaf and not any(value is arg for arg in forward_arguments):
            graph_leaves.append(value)
            return value
        return _clone_tensor(value)

    if ctx.to_save:
        ctx.save_for_backward(*tree_map_only(torch.Tensor, copy_if_shared, ctx.to_save))
    # Functions may also save a tensor as a plain attribute of ctx, or in a list.
    for name, value in vars(ctx).items():
        setattr(ctx, name, tree_map_only(torch.Tensor, copy_if_shared, value))
    ctx._ortmodule_inputs = [
        arg.new_zeros(()).expand(arg.shape)
        if isinstance(arg, torch.Tensor) and arg.requires_grad
        else None
        for arg in forward_arguments
    ]
    return bool(graph_leaves)


def _contiguous_results_in_own_memory(results: Any, function_arguments: tuple[Any, ...]) -> Any:
    """Return contiguous results that share no memory with what was given, as ORT takes them."""
    import torch
    from torch.utils._pytree import tree_map_only

    argument_addresses = {
        value.untyped_storage().data_ptr()
        for value in function_arguments
        if isinstance(value, torch.Tensor)
    }
    return tree_map_only(
        torch.Tensor,
        lambda result: (
            result.clone(memory_format=torch.contiguous_format)
            if result.untyped_storage().data_ptr() in argument_addresses
            else result.contiguous()
        ),
        results,
    )


def _unchanged_results(results: Any, arguments: tuple[Any, ...]) -> Any:
    return results


def _clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    # A backward pass may ask a saved tensor whether it needs a gradient; grad mode is off here.
    return tensor.clone().requires_grad_(tensor.requires_grad)


# ---------------------------------------------------------------------------------------- inlined or refused


_inline: contextvars.ContextVar[bool] = contextvars.ContextVar("inline", default=False)


@contextlib.contextmanager
def set_custom_function_inlining_temporarily(are_inlined: bool) -> Iterator[None]:
    """Set how exports in this with-block treat custom autograd functions.

    Args:
        are_inlined: True: ORT derives their forward pass; False: ORT's graph calls them.
    """
    support_module = importlib.import_module(_CALLS_MODULE)
    were_called = support_module.custom_autograd_function_enabler.state
    token = _inline.set(are_inlined)
    if are_inlined:
        # The exporter inlines no function that ORT exports as a call.
        support_module.enable_custom_autograd_support(False)
    try:
        yield
    finally:
        _inline.reset(token)
        support_module.enable_custom_autograd_support(were_called)


@repair(
    "refuse_custom_backward",
    "trace wrapper",
    20,
    fault="Where ORT's extension torch_interop_utils cannot be built, the `backward` of a custom "
    "autograd function is ignored: a reversed gradient is +2 instead of -2.",
    example="tracing/test_compat.py::test_each_check_passes[backward]",
)
def wrap_export_with_current_inlining_flag(torch_export: AnyFunction) -> AnyFunction:
    """Return an export that inlines only inside of `set_custom_function_inlining_temporarily(True)`.

    Where it cannot export a call, it raises the reason.
    """

    @functools.wraps(torch_export)
    def export_without_inlining(*args: object, **kwargs: object) -> object:
        try:
            return torch_export(*args, **{**kwargs, "autograd_inlining": _inline.get()})
        except RuntimeError as error:
            # The text with which torch's exporter refuses an autograd function that nothing
            # handles.
            if "Couldn't export Python operator" in str(error):
                raise_interop_extension_missing(error)
            raise

    return export_without_inlining


@repair("refuse_custom_backward", "after import", 40)
def _interop_is_refused() -> bool:
    return bool(extensions.reason_interop_is_unbuildable_or_empty())


def raise_interop_extension_missing(causing_error: Exception | None = None) -> None:
    """Raise RuntimeError with the reason why custom autograd functions cannot be in the graph here."""
    raise RuntimeError(
        f"{f'{causing_error}: ' if causing_error else ''}custom autograd functions inside ORT's graph need "
        f"{extensions.INTEROP}, which {extensions.SETUP_COMMAND} could not build here: "
        f"{extensions.reason_interop_is_unbuildable_or_empty()}"
    ) from causing_error
