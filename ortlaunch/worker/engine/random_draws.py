"""Random numbers of a forward pass, recorded as tensors in one pass and used in every other one.

With them two engines that have their own generators compute the same function. This module must
not import onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from ortlaunch.worker.call_types import AnyFunction, Args, Kwargs

# Functions of torch that return random numbers, by name: a new one in torch must be added here.
_RANDOM_FUNCTIONS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
}
# Methods of a tensor that fill it with random numbers.
_IN_PLACE_METHODS = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "log_normal_",
    "cauchy_",
    "geometric_",
}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d"}


class RandomNumberRecorder(TorchFunctionMode):
    """A mode that records torch's random numbers, or replaces them by `given` in that order."""

    def __init__(self, replayed_draws: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.recorded: list[torch.Tensor] = []
        self._replayed_draws = None if replayed_draws is None else iter(replayed_draws)

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _DROPOUTS and kwargs.get("p", args[1] if len(args) > 1 else 0.5):
            # The record is the mask with its scale, not the result: other passes have another x.
            x = args[0]
            other_arguments = args[1:]
            return x * self._record_or_replay(
                lambda: func(torch.ones_like(x), *other_arguments, **{**kwargs, "inplace": False})
            )
        if name in _IN_PLACE_METHODS:
            drawn = self._record_or_replay(lambda: func(*args, **kwargs))
            return args[0] if self._replayed_draws is None else args[0].copy_(drawn)
        if name in _RANDOM_FUNCTIONS:
            return self._record_or_replay(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def _record_or_replay(self, draw_numbers: Any) -> Any:
        if self._replayed_draws is not None:
            return next(self._replayed_draws)
        drawn = draw_numbers()
        self.recorded.append(drawn.detach().clone())
        return drawn


class ReplayingModel(nn.Module):
    """A model whose forward pass receives its random numbers as the input `draws`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, draws: list[torch.Tensor], **batch: torch.Tensor) -> Any:
        with RandomNumberRecorder(draws):
            return self.model.forward(**batch)
