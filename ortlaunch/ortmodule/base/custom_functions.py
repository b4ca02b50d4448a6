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

from ortlaunch.ortmodule.base import torch_calls
from ortlaunch.ortmodule.build import extensions

if TYPE_CHECKING:
    import torch

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

_CALLS = "onnxruntime.training.ortmodule._custom_autograd_function"
_EXPORTER = "onnxruntime.training.ortmodule._custom_autograd_function_exporter"
# The autograd.Functions of each name, in the order of their first export.
_functions: dict[str, list[Any]] = {}
_COPIES = (
    "the custom function {} computes gradients of weights that it is given and that a layer has, and "
    "ONNX Runtime gives it other tensors: let the layer run as torch "
    "(Settings.torch_modules=['PATH OF THE LAYER'])"
)
# Methods by which a function describes itself to ORT's exporter.
_SCHEMA = ("infer_shape", "alias_input")


def keep_arguments() -> None:
    """Pass boolean tensors to custom functions as booleans, and copy the arguments that they save."""
    exporter: Any = importlib.import_module(_EXPORTER)
    exporter._default_export = _with_arguments(exporter._default_export)


def _with_arguments(default_export: AnyFunction) -> AnyFunction:
    @functools.wraps(default_export)
    def export(g: Any, /, *given: Any, **other: object) -> Any:
        name, function, cconv, size, kinds, ranks, *args = given
        takes = frozenset(
            i for i, arg in enumerate(args) if cconv[i] == "d" and arg.type().scalarType() == "Bool"
        )
        gives = frozenset(i for i, kind in enumerate(kinds) if kind == Kind.BOOL)
        # Functions of torch_calls already copy the tensors that they save.
        saves = function.__module__ != torch_calls.__name__
        if not (takes or gives or saves):
            return default_export(g, *given, **other)
        # ORT knows functions by name, and keeps the first one of a name.
        namesakes = _functions.setdefault(name, [])
        if function not in namesakes:
            namesakes.append(function)
        if number := namesakes.index(function):
            name = f"{name}[{number + 1}]"
        function = _called(function, takes, gives, saves)
        if takes or gives:
            # ORT caches functions by name, so a variant needs its own; ORT also decides by the name
            # which functions it recomputes.
            name = f"{name}[bool {sorted(takes)} {sorted(gives)}]"
        kinds = [Kind.UINT8 if kind == Kind.BOOL else kind for kind in kinds]
        outputs = default_export(g, name, function, cconv, size, kinds, ranks, *args, **other)
        if not gives:
            return outputs
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        values = [
            g.op("Cast", v, to_i=Kind.BOOL.value) if i in gives else v for i, v in enumerate(values)
        ]
        return tuple(values) if isinstance(outputs, (list, tuple)) else values[0]

    return export


def _called(
    function: Any,
    boolean_arguments: frozenset[int],
    boolean_results: frozenset[int],
    saves: bool,
) -> Any:
    """Return the class that ORT calls in place of an autograd.Function.

    boolean_arguments: positions of boolean arguments, which arrive as uint8.
    boolean_results: positions of boolean results.
    saves: whether the function may keep tensors of ORT for its backward pass.
    """

    import torch
    from torch.autograd.function import FunctionCtx
    from torch.utils._pytree import tree_leaves, tree_map_only

    # Filled in the first pass, if the function keeps a graph of its own; ORT copies the arguments of
    # that pass.
    keeps_graph: list[bool] = []
    # ORT's own functions tell it which outputs are their arguments.
    own = _given if hasattr(function, "alias_input") else _in_own_memory

    def entered(args: tuple[Any, ...]) -> list[Any]:
        """Return the arguments with the booleans restored."""
        return [arg.bool() if i in boolean_arguments else arg for i, arg in enumerate(args)]

    def as_uint8(outputs: Any) -> Any:
        """Return the outputs with booleans as uint8, the only form that ORT accepts."""
        if not isinstance(outputs, tuple):
            return outputs.byte() if boolean_results else outputs
        return tuple(
            output.byte() if i in boolean_results else output for i, output in enumerate(outputs)
        )

    def note_sizes(ctx: Any, outputs: Any) -> None:
        ctx._ortlaunch_outputs = [
            output.new_zeros(()).expand(output.shape) if isinstance(output, torch.Tensor) else None
            for output in (outputs if isinstance(outputs, tuple) else (outputs,))
        ]
        # ORT would fill with zeros of the first batch's sizes.
        FunctionCtx.set_materialize_grads(ctx, False)

    @torch_calls.noting_errors()
    def forward(ctx: Any, *args: Any) -> Any:
        given = tree_map_only(torch.Tensor, _copy, args) if keeps_graph else args
        made = function.forward(ctx, *entered(given))
        outputs = own(made, args)
        # Outputs are marked as the tensors that they are.
        marked = [id(tensor) for tensor in ctx.non_differentiable or ()]
        pairs = zip(tree_leaves(made), tree_leaves(outputs))
        ctx.mark_non_differentiable(*(new for old, new in pairs if id(old) in marked))
        note_sizes(ctx, outputs)
        if saves and _copy_saved(ctx, args):
            keeps_graph.append(True)
        return as_uint8(outputs)

    @torch_calls.noting_errors()
    def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function.setup_context(ctx, tuple(entered(inputs)), output)
        note_sizes(ctx, output)
        if saves:
            _copy_saved(ctx, inputs)

    @torch_calls.noting_errors()
    def backward(ctx: Any, *gradients: Any) -> Any:
        if getattr(ctx, "_ortlaunch_fills", True):
            gradients = tuple(
                like.new_zeros(like.shape) if gradient is None and like is not None else gradient
                for gradient, like in zip(gradients, ctx._ortlaunch_outputs)
            )
        try:
            found = own(function.backward(ctx, *gradients), gradients)
        except RuntimeError as error:
            if "appears to not have been used in the graph" not in str(error):
                raise
            raise RuntimeError(_COPIES.format(function.__name__)) from error
        if not saves:
            return found
        found = found if isinstance(found, tuple) else (found,)
        # ORT's graph has a gradient of each input that needs one, and ends where it gets None.
        return tuple(
            like.new_zeros(like.shape) if gradient is None and like is not None else gradient
            for gradient, like in zip(found, ctx._ortlaunch_inputs)
        )

    # torch has two styles of autograd.Function: forward with a ctx, or forward without one and a
    # separate setup_context.
    if function.setup_context is torch.autograd.Function.setup_context:
        steps: dict[str, AnyFunction] = {"forward": forward}
    else:
        steps = {
            "forward": lambda *args: as_uint8(own(function.forward(*entered(args)), args)),
            "setup_context": set_up,
        }
    members = {
        **{name: staticmethod(step) for name, step in steps.items()},
        "backward": staticmethod(backward),
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
    }
    schema = {
        name: staticmethod(getattr(function, name)) for name in _SCHEMA if hasattr(function, name)
    }
    # ORT registers only classes whose metaclass is that of torch.autograd.Function.
    made: Any = types.new_class(
        function.__name__,
        (torch.autograd.Function,),
        {},
        lambda body: body.update(members, **schema),
    )
    made._backward_cls.set_materialize_grads = _note_fills
    return made


def _note_fills(ctx: Any, value: bool) -> None:
    """Note whether a function wants zeros in place of None; a replacement of its ctx's method."""
    ctx._ortlaunch_fills = value


def _copy_saved(ctx: Any, args: tuple[Any, ...]) -> bool:
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

    places = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    leaves: list[torch.Tensor] = []

    def own(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().data_ptr() not in places:
            return value
        # Such as `x.detach().requires_grad_()`.
        own_leaf = value.requires_grad and not value._is_view()
        if own_leaf and not any(value is arg for arg in args):
            leaves.append(value)
            return value
        return _copy(value)

    if ctx.to_save:
        ctx.save_for_backward(*tree_map_only(torch.Tensor, own, ctx.to_save))
    # Functions may also save a tensor as a plain attribute of ctx, or in a list.
    for name, value in vars(ctx).items():
        setattr(ctx, name, tree_map_only(torch.Tensor, own, value))
    ctx._ortlaunch_inputs = [
        arg.new_zeros(()).expand(arg.shape)
        if isinstance(arg, torch.Tensor) and arg.requires_grad
        else None
        for arg in args
    ]
    return bool(leaves)


def _in_own_memory(results: Any, given: tuple[Any, ...]) -> Any:
    """Return contiguous results that share no memory with what was given, as ORT takes them."""
    import torch
    from torch.utils._pytree import tree_map_only

    places = {
        value.untyped_storage().data_ptr() for value in given if isinstance(value, torch.Tensor)
    }
    return tree_map_only(
        torch.Tensor,
        lambda result: (
            result.clone(memory_format=torch.contiguous_format)
            if result.untyped_storage().data_ptr() in places
            else result.contiguous()
        ),
        results,
    )


def _given(results: Any, given: tuple[Any, ...]) -> Any:
    return results


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A backward pass may ask a saved tensor whether it needs a gradient; grad mode is off here.
    return tensor.clone().requires_grad_(tensor.requires_grad)


# ---------------------------------------------------------------------------------------- inlined or refused


_inline: contextvars.ContextVar[bool] = contextvars.ContextVar("inline", default=False)


@contextlib.contextmanager
def inlining(wanted: bool) -> Iterator[None]:
    """Set how exports in this with-block treat custom autograd functions.

    Args:
        wanted: True: ORT derives their forward pass; False: ORT's graph calls them.
    """
    calls = importlib.import_module(_CALLS)
    called = calls.custom_autograd_function_enabler.state
    token = _inline.set(wanted)
    if wanted:
        # The exporter inlines no function that ORT exports as a call.
        calls.enable_custom_autograd_support(False)
    try:
        yield
    finally:
        _inline.reset(token)
        calls.enable_custom_autograd_support(called)


def without_inlining(export: AnyFunction) -> AnyFunction:
    """Return an export that inlines only inside of `inlining(True)`.

    Where it cannot export a call, it raises the reason.
    """

    @functools.wraps(export)
    def export_without_inlining(*args: object, **kwargs: object) -> object:
        try:
            return export(*args, **{**kwargs, "autograd_inlining": _inline.get()})
        except RuntimeError as error:
            # The text with which torch's exporter refuses an autograd function that nothing
            # handles.
            if "Couldn't export Python operator" in str(error):
                refuse(error)
            raise

    return export_without_inlining


def refuse(cause: Exception | None = None) -> None:
    """Raise RuntimeError with the reason why custom autograd functions cannot be in the graph here."""
    raise RuntimeError(
        f"{f'{cause}: ' if cause else ''}custom autograd functions inside ORT's graph need "
        f"{extensions.INTEROP}, which `ortlaunch setup` could not build here: "
        f"{extensions.interop_refusal()}"
    ) from cause
