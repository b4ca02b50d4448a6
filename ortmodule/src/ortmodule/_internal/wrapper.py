"""ORT's ORTModule with the attributes of a model that third-party training loops read.

These are the class, `load_state_dict` and `named_parameters`. Hugging Face's Trainer finds the
label arguments by a model's class, and saves the config only of its own classes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from ortmodule._internal.base.source_guard import PACKAGE

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import OrtModule, TorchModule

# These methods write the names of classes into config.json.
_SAVING_METHODS = ("save_pretrained", "push_to_hub")
# Set at the end of the construction; before it, `__class__` is the wrapper's own.
_COMPLETE_ATTRIBUTE = "_ortmodule_complete"


class TransparentOrtWrapper(nn.Module):
    """The part of an ORTModule that this package adds; `create_class_with_ort_base` adds ORT's class as a base."""

    _ortmodule_kind: ClassVar[type[TransparentOrtWrapper]]
    # Attributes of ORT's class.
    module: nn.Module
    _torch_module: TorchModule
    _logger: logging.Logger

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the model's class if it can save itself, else type(self); isinstance uses it.

        Models of transformers and peft can save themselves.
        """
        attributes = vars(self)
        model_class = (
            type(attributes["_torch_module"].module)
            if attributes.get(_COMPLETE_ATTRIBUTE)
            else None
        )
        return (
            model_class
            if model_class is not None and hasattr(model_class, "save_pretrained")
            else type(self)
        )

    def __init__(self, *args: object) -> None:
        # ORT's class becomes a base here and not in the class statement, because ORT must be
        # imported after the settings that it reads at import are set. The slot of `object` is used,
        # because `__class__` is a property of this class.
        vars(object)["__class__"].__set__(self, create_class_with_ort_base(type(self)))  # type: ignore[arg-type]  # hashable
        super().__init__(*args)
        _restore_model_methods_and_mark_complete(self)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the module, hidden from torch.compile(wrapped).

        torch.compile would trace ORT's Python code.
        """
        eval_callback = eval_frame.set_eval_frame(None)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(eval_callback)

    vars(__call__)["_torchdynamo_disable"] = True

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in vars(self).items()
            if key == "forward" or type(value) is not MethodType
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(
            {name: value for name, value in state.items() if name != _COMPLETE_ATTRIBUTE}
        )
        _restore_model_methods_and_mark_complete(self)

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> object:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


@functools.cache
def create_class_with_ort_base(wrapper_class: type[Any]) -> Any:
    """Return `wrapper_class`, a subclass of Wrapper, with ORT's ORTModule as its last base.

    The first call imports ORT.
    """
    ort_class: Any = importlib.import_module(PACKAGE).ORTModule
    # Pickles name `_ortmodule_kind`, because the class made here is not an attribute of a module.
    class_members = {
        "__module__": wrapper_class.__module__,
        "__qualname__": wrapper_class.__qualname__,
        "__doc__": wrapper_class.__doc__,
        "_ortmodule_kind": wrapper_class,
    }
    return (
        wrapper_class
        if issubclass(wrapper_class, ort_class)
        else type(wrapper_class.__name__, (wrapper_class, ort_class), class_members)
    )


def _restore_model_methods_and_mark_complete(ort_module: OrtModule) -> None:
    """Restore class methods and saving methods to the model's own.

    ORT binds copies of the model's methods to the wrapper.
    """
    model_class = type(ort_module.module)
    for name in list(vars(ort_module)):
        if name in _SAVING_METHODS or isinstance(
            inspect.getattr_static(model_class, name, None), classmethod
        ):
            del vars(ort_module)[name]
    vars(ort_module)[_COMPLETE_ATTRIBUTE] = True
