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
# Types that contain no tensors; `tensors` skips them for speed.
_NO_TENSORS = {int, float, bool, str, type(None), slice, torch.Size, torch.dtype, torch.device}
Export = AnyFunction
# The grad mode at the start of the current export's forward pass; one entry for each open `begins`.
_begins: list[bool] = []
# One entry for each time that the model read the grad mode.
_reads: list[None] = []


@contextlib.contextmanager
def begins(gradients: bool) -> Iterator[None]:
    """Set the grad mode in which an export's forward pass begins."""
    _begins.append(gradients)
    try:
        yield
    finally:
        _begins.pop()


def at_start(default: bool) -> bool:
    """Return whether gradients are on at the start of this export's forward pass."""
    return _begins[-1] if _begins else default


@contextlib.contextmanager
def noted(export: ort_export.Export) -> Iterator[None]:
    """Record whether the model reads the grad mode; its graph is then valid for this mode only."""
    _reads.clear()
    yield
    export.facts["grad_mode"] = bool(_reads)


def following_grad_mode(export: Export) -> Export:
    """Wrap an export so that it follows the model's grad mode.

    The mode is set by `no_grad`, `set_grad_enabled`, `enable_grad` and `inference_mode`.
    """

    @functools.wraps(export)
    def export_with_grad_mode(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        with (
            _GradMode(model, kwargs["training"] != torch.onnx.TrainingMode.EVAL) as mode,
            mode.intercepted(),
        ):
            return export(model, *args, **kwargs)

    return export_with_grad_mode


_SCATTER = {torch.scatter, torch.Tensor.scatter, torch.Tensor.scatter_}


class _GradMode(TorchFunctionMode):
    """A function mode that tracks the model's grad mode, and which tensors have a gradient.

    A tensor that no tracked call has made counts as trained: it is an input of the model or of a
    scripted function.
    """

    def __init__(self, model: torch.nn.Module, training: bool) -> None:
        super().__init__()
        begin = at_start(training)
        self._training = training and begin
        # The mode that the model sees; for torch gradients are off throughout an export.
        self._enabled = begin
        # By tensor: whether it has a gradient with gradients on everywhere.
        self._trained = WeakTensorKeyDictionary()
        # Tensors computed from trained ones with gradients off, each with its detached copy.
        self._stopped = WeakTensorKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._trained[tensor] = tensor.requires_grad

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        """Intercept the calls that no function mode sees.

        These are reads of the grad mode, and custom functions.
        """
        plain = vars(torch.autograd.Function)["apply"]
        weights = set(map(id, self._trained.keys()))

        def applied(
            function: type[torch.autograd.Function], /, *args: object, **kwargs: object
        ) -> object:
            def apply(*args: object, **kwargs: object) -> object:
                if has_torch_function(given):
                    return handle_torch_function(apply, given, *args, **kwargs)
                return plain.__get__(None, function)(*args, **kwargs)

            given = tuple(tensors((args, kwargs)))
            # In a layer that runs as torch.
            if not torch.jit.is_tracing():
                return apply(*args, **kwargs)
            # A trace takes other arguments for constants; a weight's memory is that of each step.
            nested = tensors([value for value in args if not isinstance(value, _T)])
            if not {id(tensor) for tensor in nested} <= weights:
                raise RuntimeError(_NESTED.format(function.__name__))
            versions = versions_of(given)
            result = apply(*args, **kwargs)
            if changed_since(given, versions):
                raise RuntimeError(_DIRTY.format(function.__name__))
            return result

        def is_enabled() -> bool:
            # torch's own grad mode classes read the mode to restore it later; only reads by the
            # model count.
            if sys._getframe(1).f_code.co_filename != _GRAD_MODE:
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
                "the forward pass gives a tensor a hook, and ONNX Runtime's backward pass calls "
                "none"
            )
        if func == getter("data"):
            # A trace records .data as a constant.
            func = _T.detach
            args = args[:1]
        if any(isinstance(value, complex) for value in args) and (given := tensors(args)):
            # A trace refuses Python's complex numbers, as 1j * x has.
            args = tuple(
                _complex(value, given[0]) if isinstance(value, complex) else value for value in args
            )
        # torch's exporter has no form of a scatter of True or False.
        if func in _SCATTER:
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
            # The tensor was made in one mode and is changed in the other; detaching cannot express
            # that.
            if self._has_gradient(tensor) and (tensor in self._stopped) == self._enabled:
                raise RuntimeError(CHANGED)
        for tensor in (*changed, *filter(_differentiable, tensors(result))):
            self._trained[tensor] = trained
            self._stopped.pop(tensor, None)
            if trained and not self._enabled:
                self._stopped[tensor] = None
        return result

    def _has_gradient(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor would have a gradient if gradients were on everywhere."""
        return self._training and _differentiable(tensor) and self._trained.get(tensor, True)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._stopped:
            return tensor
        stopped: torch.Tensor | None = self._stopped[tensor]
        if stopped is None:
            stopped = self._stopped[tensor] = tensor.detach()
        return stopped


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results.

    The result is that of torch's tree_leaves, in a tenth of its time.
    """
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
    """Return how often each tensor was changed in place; hidden from function modes."""
    with torch._C.DisableTorchFunction():
        return [value._version for value in values]


def changed_since(values: Sequence[torch.Tensor], versions: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors that were changed in place since `versions_of` returned `versions`."""
    return [value for value, old, new in zip(values, versions, versions_of(values)) if old != new]


def _differentiable(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(tensor.is_floating_point() or tensor.is_complex())


def _complex(value: complex, like: torch.Tensor) -> torch.Tensor:
    """Compute a complex constant in the graph, because ONNX has none."""
    parts = [
        like.new_zeros((), dtype=torch.get_default_dtype()) + part
        for part in (value.real, value.imag)
    ]
    return torch.complex(parts[0], parts[1])


_AS_TORCH = "or let the layer run as torch (Settings.torch_modules=['PATH OF THE LAYER'])"
_NESTED = (
    "the custom function {} is given tensors in a list, a tuple or a dictionary, and ONNX Runtime's "
    f"graph would hold those of the first batch: pass each as an argument of its own, {_AS_TORCH}"
)
_DIRTY = (
    "the custom function {} changes an argument in place, and ONNX Runtime may read it elsewhere: "
    f"return a new tensor, without ctx.mark_dirty, {_AS_TORCH}"
)
CHANGED_WEIGHT = (
    "a weight is changed in the forward pass, which ONNX Runtime's graph would leave out"
)
CHANGED = (
    "a tensor with a gradient is changed in place under torch.no_grad(), or one made there is "
    "changed outside: ONNX Runtime's gradient would be another than PyTorch's; "
    "write the change without a trailing underscore"
)
