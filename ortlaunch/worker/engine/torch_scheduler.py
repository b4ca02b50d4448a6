"""A learning-rate scheduler of torch as a function of steps and epochs: a resume needs no state."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch


class TorchScheduler:
    """The rates of an optimizer's parameter groups, which torch's scheduler computes."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Any) -> None:
        """Keep a copy of the scheduler, with parameter groups of its own.

        Args:
            optimizer: its parameter groups have the rates.
            config: Lightning's LRSchedulerConfig; None: the rates never change.
        """
        self._groups = optimizer.param_groups
        # A rollback goes back to an earlier step: it begins with a new copy.
        self._first = optimizer, config
        self._first = self._copied()
        self._now = self._copied()
        self._done = 0

    def _copied(self) -> tuple[torch.optim.Optimizer, Any]:
        # The parameters are not copied.
        shared = {id(each): each for group in self._groups for each in group["params"]}
        return copy.deepcopy(self._first, shared)

    def rates(self, step: int, epochs: int) -> list[float]:
        """Return the rate of each group at `step`, from 0, after so many whole epochs."""
        optimizer, config = self._now
        due = (step if config.interval == "step" else epochs) // config.frequency if config else 0
        if due < self._done:
            self._done = 0
            self._now = optimizer, config = self._copied()
        # torch expects an update before each step of a scheduler; the copy has none.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(self._done, due):
                config.scheduler.step()
        self._done = due
        for group, own in zip(self._groups, optimizer.param_groups):
            group.update({name: value for name, value in own.items() if name != "params"})
        return [group["lr"] for group in self._groups]
