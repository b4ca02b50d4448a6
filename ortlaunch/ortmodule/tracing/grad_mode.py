"""Ends the gradient of an exported graph at what a model computes under `torch.no_grad()`.

ORT exports a model with gradients off, so what a forward pass says of them is not seen, and ORT's gradient goes through
everything. Here an export follows what the model says: a tensor computed with gradients off, out of something that is
trained, is detached where it is used with gradients on. Other tensors are left alone, such as the angles of a rotary
embedding, so that most models' graphs stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.ortmodule.base import export as ort_export
from ortlaunch.ortmodule.base.ort_types import AnyFunction
from ortlaunch.ortmodule.base.torch_calls import getter

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import Args, Kwargs

_T = torch.Tensor
_GRAD_MODE = torch.autograd.grad_mode.__file__
_NO_TENSORS = {int, float, bool, str, type(None), slice, torch.Size, torch.dtype, torch.device}
Export = AnyFunction
_begins: list[bool] = []
_reads: list[None] = []


@contextlib.contextmanager
def begins(gradients: bool) -> Iterator[None]:
    """While open, an export's forward pass begins with gradients on or off."""
    _begins.append(gradients)
    try:
        yield
    finally:
        _begins.pop()


def at_start(default: bool) -> bool:
    """Whether gradients are on where the forward pass of this export begins."""
    return _begins[-1] if _begins else default


@contextlib.contextmanager
def noted(export: ort_export.Export) -> Iterator[None]:
    """Note whether the model reads the grad mode: its graph is then one of this mode only."""
    _reads.clear()
    yield
    export.seen["grad_mode"] = bool(_reads)


def following_grad_mode(export: Export) -> Export:
    """An export in which `no_grad`, `set_grad_enabled`, `enable_grad` and `inference_mode` mean what they say."""

    @functools.wraps(export)
    def export_with_grad_mode(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        with (
            _GradMode(model, kwargs["training"] == torch.onnx.TrainingMode.TRAINING) as mode,
            mode.told(),
        ):
            return export(model, *args, **kwargs)

    return export_with_grad_mode


_SCATTER = {torch.scatter, torch.Tensor.scatter, torch.Tensor.scatter_}


class _GradMode(TorchFunctionMode):
    """Follows every call of torch's functions: whether gradients are on, and which tensors have one.

    A tensor that no call here has made counts as trained: it is an input of the model's, or of a scripted function.
    """

    def __init__(self, model: torch.nn.Module, training: bool) -> None:
        super().__init__()
        begin = at_start(training)
        self._training = training and begin
        self._enabled = begin  # for the model; gradients are off for torch throughout an export
        self._trained = WeakTensorKeyDictionary()
        self._stopped = (
            WeakTensorKeyDictionary()
        )  # made of trained ones with gradients off; each with its detached one
        for tensor in (*model.parameters(), *model.buffers()):
            self._trained[tensor] = tensor.requires_grad

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """While open, what no function mode sees is seen: whether gradients are on is asked, and custom functions."""
        plain = vars(torch.autograd.Function)["apply"]

        def applied(
            function: type[torch.autograd.Function], /, *args: object, **kwargs: object
        ) -> object:
            def apply(*args: object, **kwargs: object) -> object:
                if has_torch_function(given):
                    return handle_torch_function(apply, given, *args, **kwargs)
                return plain.__get__(None, function)(*args, **kwargs)

            given = tuple(tensors((args, kwargs)))
            return apply(*args, **kwargs)

        def is_enabled() -> bool:
            if sys._getframe(1).f_code.co_filename != _GRAD_MODE:  # no_grad reads it, to restore it
                _reads.append(None)
            return self._enabled

        def enter(inference: torch.inference_mode) -> None:
            vars(inference)["prev"] = self._enabled
            self._enabled = not inference.mode

        def leave(inference: torch.inference_mode, *raised: object) -> None:
            self._enabled = vars(inference)["prev"]

        with contextlib.ExitStack() as patches:
            for owner, name, new in (
                (torch, "is_grad_enabled", is_enabled),
                (torch.autograd.Function, "apply", classmethod(applied)),
                (torch.inference_mode, "__enter__", enter),
                (torch.inference_mode, "__exit__", leave),
            ):
                patches.enter_context(mock.patch.object(owner, name, new))
            yield

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is torch._C._set_grad_enabled:
            self._enabled = args[0]
            return None
        if func == getter("requires_grad") and args[0] in self._trained:
            return self._trained[args[0]] and args[0] not in self._stopped
        if func is _T.register_hook and self._has_gradient(args[0]):
            raise RuntimeError(
                "the forward pass gives a tensor a hook, and ONNX Runtime's backward pass calls none"
            )
        if func == getter("data"):
            # a trace has .data as a constant
            func = _T.detach
            args = args[:1]
        if any(isinstance(value, complex) for value in args) and (given := tensors(args)):
            # A trace refuses Python's complex numbers, as 1j * x has.
            args = tuple(
                _complex(value, given[0]) if isinstance(value, complex) else value for value in args
            )
        if func in _SCATTER:  # torch's exporter knows none of True and False
            args = tuple(int(value) if isinstance(value, bool) else value for value in args)
        return self._call(func, args, kwargs or {})

    def _call(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        given = [tensor for tensor in tensors((args, kwargs)) if _differentiable(tensor)]
        versions = versions_of(given)
        trained = func is not _T.detach and any(self._has_gradient(tensor) for tensor in given)
        if self._enabled and any(tensor in self._stopped for tensor in given):
            args, kwargs = tree_map_only(torch.Tensor, self._detached, (args, kwargs))
        result = func(*args, **kwargs)
        changed = changed_since(given, versions)
        for tensor in changed:
            if isinstance(tensor, torch.nn.Parameter):
                raise RuntimeError(CHANGED_WEIGHT)
            if self._has_gradient(tensor) and (tensor in self._stopped) == self._enabled:
                raise RuntimeError(CHANGED)
        for tensor in (*changed, *filter(_differentiable, tensors(result))):
            self._trained[tensor] = trained
            self._stopped.pop(tensor, None)
            if trained and not self._enabled:
                self._stopped[tensor] = None
        return result

    def _has_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether it would have one if gradients were on everywhere."""
        return self._training and _differentiable(tensor) and self._trained.get(tensor, True)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._stopped:
            return tensor
        stopped: torch.Tensor | None = self._stopped[tensor]
        if stopped is None:
            stopped = self._stopped[tensor] = tensor.detach()
        return stopped


def tensors(values: Any) -> list[torch.Tensor]:
    """Those among arguments or results; as torch's tree_leaves finds them, in a tenth of its time."""
    if isinstance(values, _T):
        return [values]
    if type(values) in (tuple, list):
        return [tensor for value in values for tensor in tensors(value)]
    if type(values) is dict:
        return [tensor for value in values.values() for tensor in tensors(value)]
    if type(values) in _NO_TENSORS:
        return []
    return [value for value in tree_leaves(values) if isinstance(value, _T)]


def versions_of(values: Sequence[torch.Tensor]) -> list[int]:
    """How often each was changed in place; unseen by function modes."""
    with torch._C.DisableTorchFunction():
        return [value._version for value in values]


def changed_since(values: Sequence[torch.Tensor], versions: Sequence[int]) -> list[torch.Tensor]:
    """Those that were changed in place since `versions_of` gave these."""
    return [value for value, old, new in zip(values, versions, versions_of(values)) if old != new]


def _differentiable(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(tensor.is_floating_point() or tensor.is_complex())


def _complex(value: complex, like: torch.Tensor) -> torch.Tensor:
    """Computed in the graph, for ONNX has no complex constants."""
    parts = [
        like.new_zeros((), dtype=torch.get_default_dtype()) + part
        for part in (value.real, value.imag)
    ]
    return torch.complex(parts[0], parts[1])


CHANGED_WEIGHT = (
    "a weight is changed in the forward pass, which ONNX Runtime's graph would leave out"
)
CHANGED = (
    "a tensor with a gradient is changed in place under torch.no_grad(), or one made there is changed outside: "
    "ONNX Runtime's gradient would be another than PyTorch's; write the change without a trailing underscore"
)
