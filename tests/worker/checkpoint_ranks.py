"""Ranks that save a small training in the middle and resume it, in every way of keeping its state.

test_checkpoint_ranks.py starts them by torchrun. Arguments: the folder of all checkpoints, and the
file to write. Two ranks come first and save; other numbers of ranks resume from these checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.checkpoint.background import BackgroundTask
from ortlaunch.worker.checkpoint.restore import load_checkpoint_print_notes_and_return_loop_state
from ortlaunch.worker.checkpoint.snapshot import snapshot_of_this_rank
from ortlaunch.worker.checkpoint.transaction import (
    take_snapshot_on_all_ranks,
    write_snapshot_as_checkpoint,
)
from ortlaunch.worker.engine.lamb import Lamb
from ortlaunch.worker.engine.stepping import DeepSpeedStepper, Stepper, TorchStepper
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortmodule_tests.leaving import leave

STEPS = 6
SAVED = 3
# Samples a step: 1, 2 and 3 ranks have equal shares.
SAMPLES = 12
RATE = 1e-2
# Stage (None: without DeepSpeed), optimizer, precision.
WAYS: dict[str, tuple[int | None, str, str]] = {
    "none": (None, "adamw", "fp32"),
    "zero 0": (0, "adamw", "fp32"),
    "zero 1": (1, "adamw", "fp32"),
    "zero 2": (2, "adamw", "fp32"),
    "zero 3": (3, "adamw", "fp32"),
}
ALONE: dict[str, tuple[int | None, str, str]] = {
    "sgd": (None, "sgd", "fp32"),
    "sgd, zero 1": (1, "sgd", "fp32"),
    "sgd, zero 3": (3, "sgd", "fp32"),
    "fused, zero 2": (2, "fused", "fp32"),
    "lamb": (None, "lamb", "fp32"),
    "bf16": (None, "adamw", "bf16"),
    "bf16, zero 0": (0, "adamw", "bf16"),
    "bf16, zero 1": (1, "adamw", "bf16"),
    "bf16, zero 2": (2, "adamw", "bf16"),
    "bf16, zero 3": (3, "adamw", "bf16"),
}


class Net(nn.Module):
    """A net with sizes that no number of ranks divides.

    It also has a frozen layer, a buffer and a scalar.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.layers = nn.Sequential(
            nn.Linear(7, 301), nn.GELU(), nn.Linear(301, 33), nn.GELU(), nn.Linear(33, 1)
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        here = x.to(self.scale.dtype) if not torch.is_autocast_enabled("cpu") else x
        wanted = x.float().sum(1, keepdim=True)
        return (self.layers(here + self.frozen(here)) * self.scale - wanted).float().square().mean()


def build(way: tuple[int | None, str, str], group: DistributedContext) -> Stepper:
    """Return a stepper on a net that begins alike on every rank."""
    stage, name, precision = way
    torch.manual_seed(0)
    net = Net()
    groups: Any = [
        {"params": list(net.layers.parameters()), "weight_decay": 0.1},
        {"params": [net.scale], "weight_decay": 0.0},
    ]
    optimizers: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=RATE),
        "fused": lambda: torch.optim.AdamW(groups, lr=RATE, fused=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=RATE, momentum=0.9),
        "lamb": lambda: Lamb(groups, lr=RATE),
    }
    if stage is None:
        return TorchStepper(net, optimizers[name](), group, precision, 1, 1.0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // group.size, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "stage3_param_persistence_threshold": 400},
        "zero_allow_untested_optimizer": True, **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }  # fmt: skip
    return DeepSpeedStepper(net, optimizers[name](), group, config)


def steps(stepper: Stepper, group: DistributedContext, which: range) -> list[float]:
    """Take some steps, and return their losses, averaged over all ranks."""
    losses = []
    share = SAMPLES // group.size
    for step in which:
        # The data depend on the step alone, so a resumed training gets the same.
        x = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(step))
        mine = x[group.rank * share : (group.rank + 1) * share]
        losses.append(
            group.mean_over_ranks(float(stepper.run_micro_batch({"x": mine}, is_last_of_step=True)))
        )
        stepper.clip_step_and_clear_gradients(RATE / (step + 1))
    return losses


def weights(stepper: Stepper) -> list[float]:
    """Return values that depend on every bit of this rank's master weights and optimizer state."""
    named = stepper.named_state()
    found = []
    for part in named.parts:
        kept = [value for _, value in sorted(named.optimizer.state[part.master].items())]
        for value in (part.master, *(value for value in kept if isinstance(value, torch.Tensor))):
            mine = (
                value.detach().reshape(-1)[part.offset : part.offset + part.count]
                if value.dim()
                else value
            )
            # Weighted by position, so that exchanged elements show.
            found.append(float(mine.double().mul(torch.arange(1, mine.numel() + 1)).sum()))
    return found


def close(stepper: Stepper) -> None:
    if isinstance(stepper, DeepSpeedStepper):
        stepper.engine.destroy()


def interrupted(
    way: tuple[int | None, str, str], folder: Path, group: DistributedContext
) -> dict[str, Any]:
    """Train without interruption, and again with a resume from a checkpoint in this folder."""
    found: dict[str, Any] = {}
    straight = build(way, group)
    losses = steps(straight, group, range(STEPS))
    found["straight"] = losses, weights(straight)
    close(straight)
    first = build(way, group)
    steps(first, group, range(SAVED))
    folder.mkdir(parents=True, exist_ok=True)
    snapshot_of_this_rank(first.named_state(), {"step": SAVED}, group).write_rank_file_and_index(
        folder
    )
    close(first)
    group.barrier()
    found["resumed"] = resumed(way, folder, group, losses[:SAVED])
    return found


def beside(
    way: tuple[int | None, str, str], folder: Path, group: DistributedContext
) -> dict[str, Any]:
    """As `interrupted`, but training continues while the checkpoint is written.

    Both all-reduce at the same time; the write has a channel of its own.
    """
    run = RunDir(folder)
    # A second group of the same ranks.
    apart = group.duplicate_on_new_cpu_group()
    straight = build(way, group)
    losses = steps(straight, group, range(SAVED))
    taken = take_snapshot_on_all_ranks(
        run, group, straight, SAVED, {"step": SAVED}, copies_to_host=True
    )
    written = BackgroundTask(
        lambda: write_snapshot_as_checkpoint(run, {}, apart, taken, SAVED, SAVED * SAMPLES)
    )
    losses += steps(straight, group, range(SAVED, STEPS))
    found = {"straight": (losses, weights(straight))}
    close(straight)
    written.wait_and_raise_its_error()
    return {**found, "resumed": resumed(way, run.checkpoint_folder(SAVED), group, losses[:SAVED])}


def resumed(
    way: tuple[int | None, str, str], folder: Path, group: DistributedContext, before: list[float]
) -> tuple[list[float], list[float]]:
    """Resume a training, and return its losses and weights."""
    second = build(way, group)
    state = load_checkpoint_print_notes_and_return_loop_state(folder, second.named_state(), group)
    after = steps(second, group, range(state["step"], STEPS))
    now = weights(second)
    close(second)
    return [*before, *after], now


def main() -> None:
    """Save and resume in each way; other world sizes resume in each way from every checkpoint."""
    import deepspeed

    # Otherwise its compilation takes half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    size = torch.distributed.get_world_size()
    group = DistributedContext(Rank(rank, size, rank, size), torch.device("cpu"))
    folder = Path(sys.argv[1])
    file = Path(sys.argv[2])
    if size == 2:
        found = {
            name: interrupted(way, folder / name, group) for name, way in {**WAYS, **ALONE}.items()
        }
        found["async"] = beside(WAYS["zero 1"], folder / "async", group)
    else:
        found = {f"{saved} -> {name}": resumed(way, folder / saved, group, []) for saved in WAYS
                 for name, way in WAYS.items()}  # fmt: skip
    # ZeRO's import of Muon would load it.
    assert "torch._inductor.compile_fx" not in sys.modules
    every = group.gather(found)
    if rank == 0:
        file.write_text(json.dumps(every))
    leave()


if __name__ == "__main__":
    main()
