"""The optimizer LAMB, as NVIDIA's FusedLAMB trains BERT.

The paper is You et al., "Large Batch Optimization for Deep Learning", 2020.
It is AdamW's update, scaled for each tensor by |weights| / |update|. The training loop clips
gradients, not this optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ortlaunch.base.json_types import Json

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

# Elements that are updated at once: a step needs about three copies of them for a short time.
_PORTION = 1 << 25


class Moments(NamedTuple):
    """The moments of gradients, one tensor for each parameter."""

    means: list[torch.Tensor]
    squares: list[torch.Tensor]


class Lamb(torch.optim.Optimizer):
    """LAMB with bias correction and decoupled weight decay.

    Tensors without weight decay keep a trust ratio of 1, as in FusedLAMB (use_nvlamb=False). With
    `always_adapt` they have a ratio of their own, as in the paper's algorithm. LAMB must get whole
    tensors: on flattened partitions every ratio is wrong.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        always_adapt: bool = False,
    ) -> None:
        self.always_adapt = always_adapt
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # no overloads
        """Update every parameter that has a gradient, once."""
        loss = closure() if closure else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameters in _parameter_lists_of_limited_size(
                [p for p in group["params"] if p.grad is not None]
            ):
                self._update_parameters(group, parameters)
        return loss

    def _update_parameters(self, parameter_group: Json, parameters: list[torch.Tensor]) -> None:
        first_beta, second_beta = parameter_group["betas"]
        means, squares = self._get_or_create_moments(parameters)
        gradients = [
            p.grad.to(mean.dtype) for p, mean in zip(parameters, means) if p.grad is not None
        ]
        torch._foreach_lerp_(means, gradients, 1 - first_beta)
        torch._foreach_mul_(squares, second_beta)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second_beta)
        denominators = torch._foreach_sqrt(
            torch._foreach_div(squares, 1 - second_beta ** parameter_group["step"])
        )
        torch._foreach_add_(denominators, parameter_group["eps"])
        # Both moments start at 0: the divisions by 1 - beta ** step correct that bias.
        updates = torch._foreach_div(
            torch._foreach_div(means, 1 - first_beta ** parameter_group["step"]), denominators
        )
        if parameter_group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=parameter_group["weight_decay"])
        if parameter_group["weight_decay"] or self.always_adapt:
            torch._foreach_mul_(updates, self._trust_ratios(parameters, updates))
        torch._foreach_add_(parameters, updates, alpha=-parameter_group["lr"])

    def _get_or_create_moments(self, parameters: list[torch.Tensor]) -> Moments:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return Moments(
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
        )

    @staticmethod
    def _trust_ratios(
        parameters: list[torch.Tensor], updates: tuple[torch.Tensor, ...] | list[torch.Tensor]
    ) -> list[torch.Tensor]:
        # A ratio is 1 where a norm is 0: weights that start at 0 could otherwise never change.
        weights = torch._foreach_norm(parameters)
        steps = torch._foreach_norm(updates)
        return [
            torch.where((w > 0) & (s > 0), w / s, torch.ones_like(w))
            for w, s in zip(weights, steps)
        ]


def _parameter_lists_of_limited_size(
    parameters: list[torch.Tensor],
) -> Iterator[list[torch.Tensor]]:
    """Yield lists of parameters of about `_PORTION` elements each."""
    portion: list[torch.Tensor] = []
    for parameter in parameters:
        portion.append(parameter)
        if sum(p.numel() for p in portion) >= _PORTION:
            yield portion
            portion = []
    if portion:
        yield portion
