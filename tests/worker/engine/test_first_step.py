"""The first steps of low-precision and of offloaded training under DeepSpeed, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

pytest.importorskip("deepspeed")
from deepspeed.comm import comm
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import groups

from ortlaunch.planning.deepspeed_config import deepspeed_config_or_none
from ortlaunch.rank import Rank
from ortlaunch.worker.engine.lamb import Lamb
from ortlaunch.worker.engine.optimizer import build_optimizer
from ortlaunch.worker.engine.stepping import DeepSpeedStepper
from ortlaunch.worker.process_group.distributed import DistributedContext
from tests.makers import recipe
from tests.training import ZERO_3

CPU = torch.device("cpu")
GROUP = DistributedContext(Rank(0, 1, 0, 1), CPU)
# The rate of step 1 is that of a warm-up, a tenth of the peak.
RATE = 0.01
ADAM = {"learning_rate": 0.1, "weight_decay": 0.5, "no_decay": []}


class Mean(nn.Module):
    """One linear layer, with the mean of its squares as a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float().square().mean()


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, and a DeepSpeed that has no state of an earlier test."""
    monkeypatch.setattr(comm, "cdb", None)
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)
    # ZeRO 3 replaces it for the whole process: monkeypatch restores it after the test.
    monkeypatch.setattr(nn.functional, "linear", nn.functional.linear)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("stage", "name", "kind"),
    [(0, "adamw", AdamW), (1, "adamw", AdamW), (2, "adamw", AdamW), (0, "lamb", Lamb)],
)
def test_the_first_step_in_bf16_is_the_optimizers_first(stage: int, name: str, kind: Any) -> None:
    """Weights after step 1 are plain PyTorch's from the same gradients, as no step precedes it."""
    made = recipe(zero={"stage": stage}, precision="bf16", optimizer={"name": name, **ADAM})
    config: Any = deepspeed_config_or_none(made, 4, 1, 1)
    model = Mean()
    stepper = DeepSpeedStepper(
        model, build_optimizer(made.optimizer, model, "eager", CPU).optimizer, GROUP, config
    )
    plain = Mean().bfloat16()
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    plain(x).backward()
    # The reference: a step on float32 weights with the gradients of a bf16 pass.
    masters = [p.detach().float() for p in plain.parameters()]
    for master, parameter in zip(masters, plain.parameters()):
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
    kind(masters, lr=RATE, eps=made.optimizer.epsilon, weight_decay=0.5).step()
    stepper.run_micro_batch({"x": x}, is_last_of_step=True)
    stepper.clip_step_and_clear_gradients(RATE)
    for parameter, master in zip(model.parameters(), masters):
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(("stage", "parameters"), [(1, None), (2, None), (3, None), (3, "cpu")])
def test_an_offloaded_optimizer_trains_as_one_that_is_not(
    stage: int, parameters: str | None
) -> None:
    """Weights after three steps with `zero.offload` equal those without, up to float32 rounding."""

    def trained(offload: dict[str, Any] | None) -> list[torch.Tensor]:
        made = recipe(
            zero={**ZERO_3, "stage": stage, "offload": offload},
            optimizer={"name": "fused_adam", **ADAM},
        )
        model = Mean()
        generator = torch.Generator().manual_seed(1)
        config: Any = deepspeed_config_or_none(made, 4, 1, 1)
        chosen = build_optimizer(made.optimizer, model, "eager", CPU, config, 1)
        stepper = DeepSpeedStepper(model, chosen.optimizer, GROUP, config)
        for _ in range(3):
            stepper.run_micro_batch(
                {"x": torch.randn(4, 8, generator=generator)}, is_last_of_step=True
            )
            stepper.clip_step_and_clear_gradients(RATE)
        with GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return [parameter.detach().clone() for parameter in model.parameters()]

    for ours, plain in zip(trained({"optimizer": "cpu", "parameters": parameters}), trained(None)):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
