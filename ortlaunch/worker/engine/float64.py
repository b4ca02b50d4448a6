"""One pass of a float32 model in float64, to find which float32 result is nearer to the exact one.

The model does not change: every call of a torch function gets its float32 tensors as float64, and
values that the call writes into a weight or buffer are copied back into it. This module must not
import onnxruntime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.worker.patching import replace_attribute_temporarily

if TYPE_CHECKING:
    from ortlaunch.worker.call_types import AnyFunction, Args, Kwargs

_T = torch.Tensor


def _tensor_property_getter(property_name: str) -> AnyFunction:
    """Return the function that reads a property of tensors, as `__torch_function__` receives it."""
    getter: AnyFunction = getattr(_T, property_name).__get__
    return getter


_NARROW = {torch.float32, torch.float16, torch.bfloat16}
# Casts by these methods become casts to float64.
_CASTS = {_T.float, _T.half, _T.bfloat16}
# Calls that compute nothing and must see the tensor itself, not its float64 form.
_NOT_WIDENED = {
    _tensor_property_getter("requires_grad"),
    _tensor_property_getter("is_leaf"),
    _tensor_property_getter("shape"),
    _tensor_property_getter("device"),
    _T.size,
    _T.dim,
}


@contextlib.contextmanager
def compute_in_float64(
    batch: dict[str, torch.Tensor], is_enabled: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """Compute in float64 while the context is open; yield the batch in float64.

    Without `is_enabled` nothing changes.
    """
    if not is_enabled:
        yield batch
        return
    wide_batch = tree_map(lambda value: value.double() if _is_narrow(value) else value, batch)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            _Float64Mode() as mode,
            replace_attribute_temporarily(
                torch.autograd.Function, "apply", mode.autograd_function_apply_in_float64()
            ),
        ):
            yield wide_batch
    finally:
        torch.set_default_dtype(default_dtype)


class _Float64Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        # Each tensor with its float64 form, and the tensor's version when that was made.
        self._wide_by_tensor = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _NOT_WIDENED:
            return func(*args, **kwargs)
        if func == vars(torch._C.TensorBase)["data"].__set__:
            self._wide_by_tensor.pop(args[0], None)
            return func(args[0], args[1].to(args[0].dtype))
        return self._call_in_float64_and_copy_back(
            _T.double if func in _CASTS else func, args, kwargs
        )

    def autograd_function_apply_in_float64(self) -> object:
        """Return a method for `torch.autograd.Function.apply`, which is no torch function."""
        apply = vars(torch.autograd.Function)["apply"].__func__
        return classmethod(
            lambda cls, *args, **kwargs: self._call_in_float64_and_copy_back(
                partial(apply, cls), args, kwargs
            )
        )

    def _call_in_float64_and_copy_back(
        self, function: AnyFunction, args: Args, kwargs: Kwargs
    ) -> object:
        """Call the function in float64, and copy what it writes into its arguments back."""
        # The calls here must not come back by way of `__torch_function__`.
        with torch._C.DisableTorchFunction():
            narrow = [value for value in tree_leaves((args, kwargs)) if _is_narrow(value)]
            args, kwargs = tree_map(self._cached_float64_tensor_or_dtype, (args, kwargs))
            versions = [self._wide_by_tensor[tensor][0]._version for tensor in narrow]
        result = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            for tensor, version in zip(narrow, versions):
                wide = self._wide_by_tensor[tensor][0]
                # BatchNorm's kernel does not count versions of its statistics: compare those by
                # value.
                if wide._version != version or not (
                    tensor.requires_grad or torch.equal(tensor.double(), wide)
                ):
                    with torch.no_grad():
                        tensor.data.copy_(wide)
                    self._wide_by_tensor[tensor] = wide, tensor._version
        return result

    def _cached_float64_tensor_or_dtype(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _NARROW else value
        if not _is_narrow(value):
            return value
        wide, version = self._wide_by_tensor.get(value, (None, None))
        # A form that was made without gradients cannot be used where gradients are needed.
        needs_gradient = value.requires_grad and torch.is_grad_enabled()
        if wide is None or version != value._version or (needs_gradient and not wide.requires_grad):
            wide = value.double()
            self._wide_by_tensor[value] = wide, value._version
        return wide


def _is_narrow(value: Any) -> bool:
    return isinstance(value, _T) and value.dtype in _NARROW
