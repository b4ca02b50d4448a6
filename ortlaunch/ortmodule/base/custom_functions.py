"""What custom autograd functions inside ORT's graph (its PythonOp) need to be right, inlined or refused.

ORT hands a function its tensors by DLPack, in which a boolean tensor is one of uint8: `~mask` then flips bits, and a
boolean output ends the step. Here each function gets, and may return, the booleans that eager gives it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ortlaunch.ortmodule.base import torch_calls
from ortlaunch.ortmodule.build import extensions

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction

_CALLS = "onnxruntime.training.ortmodule._custom_autograd_function"
_EXPORTER = "onnxruntime.training.ortmodule._custom_autograd_function_exporter"
_SCHEMA = ("infer_shape", "alias_input")  # what a function may tell ORT's exporter about itself


def keep_arguments() -> None:
    """Give custom functions boolean tensors as booleans, and copy the arguments that they save."""
    exporter: Any = importlib.import_module(_EXPORTER)
    exporter._default_export = _with_arguments(exporter._default_export)


def _with_arguments(default_export: AnyFunction) -> AnyFunction:
    from torch.onnx import TensorProtoDataType as Kind

    @functools.wraps(default_export)
    def export(g: Any, /, *given: Any, **other: object) -> Any:
        name, function, cconv, size, kinds, ranks, *args = given
        takes = frozenset(
            i for i, arg in enumerate(args) if cconv[i] == "d" and arg.type().scalarType() == "Bool"
        )
        gives = frozenset(i for i, kind in enumerate(kinds) if kind == Kind.BOOL)
        if (
            not takes and not gives and function.__module__ == torch_calls.__name__
        ):  # it copies what it saves
            return default_export(g, *given, **other)
        function = _called(function, takes, gives)
        if (
            takes or gives
        ):  # ORT keeps functions by name; it recomputes those that it knows by theirs
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


def _called(function: Any, takes: frozenset[int], gives: frozenset[int]) -> Any:
    """Return the class that ORT calls in place of an autograd.Function.

    takes: places of boolean arguments, which come as uint8.
    gives: places of boolean results.
    """

    import torch

    def entered(args: tuple[Any, ...]) -> list[Any]:
        return [arg.bool() if i in takes else arg for i, arg in enumerate(args)]

    def left(outputs: Any) -> Any:
        if not isinstance(outputs, tuple):
            return outputs.byte() if gives else outputs
        return tuple(output.byte() if i in gives else output for i, output in enumerate(outputs))

    def forward(ctx: Any, *args: Any) -> Any:
        outputs = function.forward(ctx, *entered(args))
        _copy_saved(ctx, args)
        return left(outputs)

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function.setup_context(ctx, tuple(entered(inputs)), output)
        _copy_saved(ctx, inputs)

    if function.setup_context is torch.autograd.Function.setup_context:
        steps: dict[str, AnyFunction] = {"forward": forward}
    else:
        steps = {
            "forward": lambda *args: left(function.forward(*entered(args))),
            "setup_context": set_up,
        }
    members = {
        **{name: staticmethod(step) for name, step in steps.items()},
        "backward": staticmethod(function.backward),
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
    }
    schema = {
        name: staticmethod(getattr(function, name)) for name in _SCHEMA if hasattr(function, name)
    }
    # ORT registers nothing but classes of torch.autograd.Function's own kind.
    return types.new_class(
        function.__name__,
        (torch.autograd.Function,),
        {},
        lambda body: body.update(members, **schema),
    )


def _copy_saved(ctx: Any, args: tuple[Any, ...]) -> None:
    """Copy the tensors that a forward pass saved and that share the memory of its arguments.

    ORT gives that memory to other nodes before the backward pass. ORT's own copies are missing from
    the second pass on: it copies only the arguments that it recognized as saved in the first one.
    """
    import torch

    places = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}

    def own(value: Any) -> Any:
        taken = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in places
        return value.clone() if taken else value

    if ctx.to_save:
        ctx.save_for_backward(*map(own, ctx.to_save))
    for name, value in vars(ctx).items():
        setattr(ctx, name, own(value))


# ---------------------------------------------------------------------------------------- inlined or refused


_inline: contextvars.ContextVar[bool] = contextvars.ContextVar("inline", default=False)


@contextlib.contextmanager
def inlining(wanted: bool) -> Iterator[None]:
    """Let ORT derive the forward of custom autograd functions in exports of this with-block; False: call them."""
    calls = importlib.import_module(_CALLS)
    called = calls.custom_autograd_function_enabler.state
    token = _inline.set(wanted)
    if wanted:  # the exporter inlines no function that ORT exports as a call
        calls.enable_custom_autograd_support(False)
    try:
        yield
    finally:
        _inline.reset(token)
        calls.enable_custom_autograd_support(called)


def without_inlining(export: AnyFunction) -> AnyFunction:
    """An export that inlines only inside of `inlining(True)`, and ends with the reason where it cannot call."""

    @functools.wraps(export)
    def export_without_inlining(*args: object, **kwargs: object) -> object:
        try:
            return export(*args, **{**kwargs, "autograd_inlining": _inline.get()})
        except RuntimeError as error:
            if "Couldn't export Python operator" in str(error):
                refuse(error)
            raise

    return export_without_inlining


def refuse(cause: Exception | None = None) -> None:
    """Raise RuntimeError, saying what keeps custom autograd functions out of the graph here."""
    raise RuntimeError(
        f"{f'{cause}: ' if cause else ''}custom autograd functions inside ORT's graph need {extensions.INTEROP}, which "
        f"`ortlaunch setup` could not build here: {extensions.interop_refusal()}"
    ) from cause
