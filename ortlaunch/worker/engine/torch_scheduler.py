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
        self._initial_state = optimizer, config
        self._initial_state = self._copy_initial_state()
        self._current_state = self._copy_initial_state()
        self._steps_done = 0

    def _copy_initial_state(self) -> tuple[torch.optim.Optimizer, Any]:
        # The parameters are not copied.
        shared = {
            id(parameter): parameter for group in self._groups for parameter in group["params"]
        }
        return copy.deepcopy(self._initial_state, shared)

    def advance_or_restart_and_read_learning_rates(
        self, step_index: int, completed_epochs: int
    ) -> list[float]:
        """Return the rate of each group at `step_index`, from 0, after so many whole epochs."""
        optimizer, config = self._current_state
        due_steps = (
            (step_index if config.interval == "step" else completed_epochs) // config.frequency
            if config
            else 0
        )
        if due_steps < self._steps_done:
            self._steps_done = 0
            self._current_state = optimizer, config = self._copy_initial_state()
        # torch expects an update before each step of a scheduler; the copy has none.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(self._steps_done, due_steps):
                config.scheduler.step()
        self._steps_done = due_steps
        for group, copied_group in zip(self._groups, optimizer.param_groups):
            group.update({name: value for name, value in copied_group.items() if name != "params"})
        return [group["lr"] for group in self._groups]
