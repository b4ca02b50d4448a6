"""ORT's ORTModule with what loops of other people read of a model: class, `load_state_dict`, `named_parameters`.

Hugging Face's Trainer looks for labels in the arguments of a model's class, and saves the config of its own classes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from typing import Any

from ortlaunch.ortmodule.base.source_guard import PACKAGE

_SAVING = ("save_pretrained", "push_to_hub")  # which write the names of classes into config.json
_COMPLETE = "_ortlaunch_complete"


@functools.cache
def wrapper_class() -> Any:
    """A subclass of ORT's ORTModule, once a process."""
    base: Any = importlib.import_module(PACKAGE).ORTModule
    eval_frame: Any = importlib.import_module("torch._C._dynamo").eval_frame

    class ORTModule(base):
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            """For isinstance, beside type(): the class of a model that saves itself, as transformers' and peft's."""
            own = vars(self)
            kind = type(own["_torch_module"].module) if own.get(_COMPLETE) else None
            return kind if kind is not None and hasattr(kind, "save_pretrained") else type(self)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            _complete(self)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Unseen by torch.compile(wrapped), which would trace ORT's Python code."""
            compiling = eval_frame.set_eval_frame(None)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                eval_frame.set_eval_frame(compiling)

        vars(__call__)["_torchdynamo_disable"] = True

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _new, (), self.__getstate__()

        def __getstate__(self) -> dict[str, Any]:
            bound = types.MethodType
            return {name: value for name, value in vars(self).items() if name == "forward" or type(value) is not bound}

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__({name: value for name, value in state.items() if name != _COMPLETE})
            _complete(self)

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.named_parameters(*args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.named_buffers(*args, **kwargs)

    ORTModule.__qualname__ = "ORTModule"
    return ORTModule


def _complete(wrapped: Any) -> None:
    """ORT binds copies of the model's methods to it; those of a class and those that save are to stay the model's."""
    kind = type(wrapped.module)
    for name in list(vars(wrapped)):
        if name in _SAVING or isinstance(inspect.getattr_static(kind, name, None), classmethod):
            del vars(wrapped)[name]
    vars(wrapped)[_COMPLETE] = True


def _new() -> Any:
    kind = wrapper_class()
    return kind.__new__(kind)
