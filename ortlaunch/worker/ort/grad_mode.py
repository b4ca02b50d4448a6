"""Ends the gradient of an exported graph at what a model computes under `torch.no_grad()`.

ORT exports a model with gradients off, so what a forward pass says of them is not seen, and ORT's gradient goes through
everything. Here an export follows what the model says: a tensor computed with gradients off, out of something that is
trained, is detached where it is used with gradients on. Other tensors are left alone, such as the angles of a rotary
embedding, so that most models' graphs stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

Export = Callable[..., Any]


def following_grad_mode(export: Export) -> Export:
    """An export in which `no_grad`, `set_grad_enabled`, `enable_grad` and `inference_mode` mean what they say."""

    @functools.wraps(export)
    def export_with_grad_mode(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _GradMode(model) as mode, mode.told():
            return export(model, *args, **kwargs)

    return export_with_grad_mode


class _GradMode(TorchFunctionMode):
    """Follows every call of torch's functions: whether gradients are on, and which tensors have one.

    A tensor that no call here has made counts as trained: it is an input of the model's, or of a scripted function.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._enabled = True  # for the model; it is off for torch throughout an export
        self._untrained = WeakTensorKeyDictionary()
        self._stopped = WeakTensorKeyDictionary()  # made of trained ones with gradients off; each with its detached one
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.requires_grad:
                self._untrained[tensor] = True

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """While open, what no function mode sees is seen: whether gradients are on is asked, and custom functions."""
        apply = vars(torch.autograd.Function)["apply"]

        def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(apply.__get__(None, function), args, kwargs)

        def enter(inference: Any) -> None:
            inference.prev = self._enabled
            self._enabled = not inference.mode

        def leave(inference: Any, *raised: Any) -> None:
            self._enabled = inference.prev

        with contextlib.ExitStack() as patches:
            for owner, name, new in (
                (torch, "is_grad_enabled", lambda: self._enabled),
                (torch.autograd.Function, "apply", classmethod(applied)),
                (torch.inference_mode, "__enter__", enter),
                (torch.inference_mode, "__exit__", leave),
            ):
                patches.enter_context(mock.patch.object(owner, name, new))
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            self._enabled = args[0]
            return None
        return self._call(func, args, kwargs or {})

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = _differentiable((args, kwargs))
        versions = [tensor._version for tensor in given]
        trained = any(tensor not in self._untrained for tensor in given)
        if self._enabled:
            args, kwargs = tree_map_only(torch.Tensor, self._detached, (args, kwargs))
        result = func(*args, **kwargs)
        changed = [tensor for tensor, version in zip(given, versions) if tensor._version != version]
        for tensor in changed:
            if isinstance(tensor, torch.nn.Parameter):
                raise RuntimeError(
                    "a weight is changed in the forward pass, which ONNX Runtime's graph would leave out"
                )
            if tensor not in self._untrained and (tensor in self._stopped) == self._enabled:
                raise RuntimeError(_CHANGED)
        for tensor in (*changed, *_differentiable(result)):
            self._untrained.pop(tensor, None)
            self._stopped.pop(tensor, None)
            if not trained:
                self._untrained[tensor] = True
            elif not self._enabled:
                self._stopped[tensor] = None
        return result

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._stopped:
            return tensor
        if self._stopped[tensor] is None:
            self._stopped[tensor] = tensor.detach()
        return self._stopped[tensor]


def _differentiable(values: Any) -> list[torch.Tensor]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


_CHANGED = (
    "a tensor with a gradient is changed in place under torch.no_grad(), or one made there is changed outside: "
    "ONNX Runtime's gradient would be another than PyTorch's; write the change without a trailing underscore"
)
