"""The passes of a step on one rank: casts of weights in bf16, and forked children."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.worker.engine.gradient_averaging import UsedParameterRecorder
from ortlaunch.worker.engine.stepping import TorchStepper

PASSES = 3
RATE = 0.5


class Squared(nn.Module):
    """One linear layer, with the mean of its squares as a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float().square().mean()


class Casts(TorchDispatchMode):
    """A mode that counts the casts of a weight to bfloat16."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.weight
        return func(*args, **(kwargs or {}))


def test_weights_are_cast_once_a_step() -> None:
    """Weights are cast once a step, with the same results, bit for bit, as casts in each pass."""
    model = Squared()
    plain = Squared()
    optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in (model, plain)]
    group: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    stepper = TorchStepper(model, optimizers[0], group, "bf16", PASSES, None)
    for step in range(2):
        inputs = torch.randn(PASSES, 4, 8)
        with Casts(model.linear.weight) as casts:
            ours = [
                stepper.run_micro_batch({"x": x}, is_last_of_step=i == PASSES - 1)
                for i, x in enumerate(inputs)
            ]
        assert casts.count == 1, step
        for x, loss in zip(inputs, ours):
            # A context for each pass, so that each casts the weight.
            with torch.autocast("cpu", torch.bfloat16):
                expected = plain(x)
                (expected / PASSES).backward()
            assert torch.equal(loss, expected.detach())
        assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)  # type: ignore[arg-type]
        stepper.clip_step_and_clear_gradients(RATE)
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(model.linear.weight, plain.linear.weight)


def test_parameters_that_no_rank_uses_are_found() -> None:
    """Of DeepSpeed's engine, too: a parameter that another rank's loss uses is used."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].bias.requires_grad_(False)
    group: Any = SimpleNamespace(gather=lambda names: [names, ["b.weight"]])
    used = UsedParameterRecorder(model, group)
    for _ in range(2):
        model["a"](torch.ones(1, 2)).sum().backward()
    assert used.remove_hooks_and_gather_unused_names() == ("b.bias", "c.weight")


FORKS = """
import os, torch
from ortlaunch.worker.supervision.requests import RankRequests
from ortlaunch.worker.engine.stepping import _weighted_loss_or_exit_if_forked
RankRequests().handle_signals_as_requests_and_tell_supervisor()
child = os.fork()
_weighted_loss_or_exit_if_forked(torch.ones((), requires_grad=True), 1.0)
os._exit(0 if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 10)
"""


def test_a_forked_child_does_not_go_on_as_the_rank() -> None:
    """A forked child that continues as the rank is ended with an error."""
    # It would write files and communicate with the other ranks, beside its parent.
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False
    )
    # The child ends with status 1, to which its parent adds 10.
    assert ended.returncode == 11
    assert "forked by the model or the data continued as this rank, and was ended" in ended.stderr
