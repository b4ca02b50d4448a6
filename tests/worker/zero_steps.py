"""One rank of two: a small training under DeepSpeed's own ZeRO 1/2 optimizer and under ours.

test_gradient_norm_ranks.py starts it by torchrun. Argument: the file to write.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed
from torch import nn

from ortmodule_tests.leaving import leave

STEPS = 6
BAD_STEP = 3
CASES: dict[str, dict[str, Any]] = {
    **{
        f"ZeRO {stage}, {precision}, {'clipped' if clip else 'not clipped'}": {
            "stage": stage, "precision": precision, "clip": clip
        }
        for stage in (1, 2) for precision in ("fp32", "bf16") for clip in (0.0, 0.3)
    },
    "fp32 sums of bf16 gradients": {"stage": 2, "precision": "bf16", "clip": 0.3, "sums": "fp32", "accumulation": 2},
    "accumulation": {"stage": 1, "precision": "bf16", "clip": 0.3, "accumulation": 2},
    "nan on rank 1, fp32": {"stage": 1, "precision": "fp32", "clip": 0.3, "bad": float("nan")},
    "nan on rank 1, bf16": {"stage": 2, "precision": "bf16", "clip": 0.3, "bad": float("nan")},
    "inf on rank 1, bf16": {"stage": 1, "precision": "bf16", "clip": 0.0, "bad": float("inf")},
    "nan on rank 1, bf16 unchecked": {
        "stage": 1, "precision": "bf16", "clip": 0.3, "bad": float("nan"), "bf16": {"check_grad_overflow": False}
    },
    "huge on rank 1, fp32": {"stage": 2, "precision": "fp32", "clip": 0.3, "bad": 1e30},
    "zero gradients": {"stage": 1, "precision": "bf16", "clip": 0.3, "bad": 0.0},
}  # fmt: skip


class Net(nn.Module):
    """A net with sizes that no number of ranks divides, an unused weight, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 301), nn.GELU(), nn.Linear(301, 33), nn.GELU(), nn.Linear(33, 1)
        )
        self.unused = nn.Linear(5, 3)
        # In a parameter group of its own, it leaves one rank's partition empty.
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def train(case: dict[str, Any], ours: bool) -> dict[str, Any]:
    """Return losses, norms, skipped steps, the number of measurements, and sums of the weights."""
    import deepspeed

    from ortmodule._internal.deepspeed import gradient_norm

    torch.manual_seed(0)
    net = Net()
    accumulation = case.get("accumulation", 1)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": case["clip"],
        "zero_optimization": {"stage": case["stage"], "reduce_bucket_size": 10_000},
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    if case["precision"] == "bf16":
        config["bf16"] = {"enabled": True, **case.get("bf16", {})}
    if "sums" in case:
        config["data_types"] = {"grad_accum_dtype": case["sums"]}
    scalar = [net.scale]
    rest = [p for p in net.parameters() if p is not net.scale]
    optimizer = torch.optim.AdamW(
        [{"params": rest}, {"params": scalar, "weight_decay": 0.0}], lr=1e-2
    )
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=config, dist_init_required=False
    )
    refusal_reason = (
        gradient_norm.fuse_gradient_norm_or_get_reason(engine.optimizer) if ours else None
    )
    measured = counted(gradient_norm)
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    torch.manual_seed(1 + torch.distributed.get_rank())
    losses = []
    norms = []
    skipped = []
    exact = []
    for step in range(STEPS):
        for i in range(accumulation):
            x = torch.randn(4, 7)
            loss = (engine(x.to(dtype)).float() - x.sum(1, keepdim=True)).square().mean()
            bad = case.get("bad", 1.0) if step == BAD_STEP and "bad" in case else 1.0
            # A factor of 0 applies to all ranks.
            on_this_rank = bad if torch.distributed.get_rank() == 1 or bad == 0 else 1.0
            engine.set_gradient_accumulation_boundary(i == accumulation - 1)
            engine.backward(loss * on_this_rank)
            losses.append(float(loss))
            if i == accumulation - 1:
                exact.append(norm_in_double(engine.optimizer))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        skipped.append(engine.skipped_steps)
    weights = [float(p.detach().double().abs().sum()) for p in net.parameters()]
    calls = measured["calls"]
    engine.destroy()
    return {
        "losses": losses, "norms": norms, "exact": exact, "skipped": skipped, "weights": weights, "calls": calls,
        "refusal_reason": refusal_reason,
    }  # fmt: skip


def norm_in_double(optimizer: Any) -> float:
    """Return the gradients' norm over all ranks in float64."""
    gradients = [g for group in optimizer.averaged_gradients.values() for g in group]
    total = torch.stack([g.double().square().sum() for g in gradients]).sum()
    torch.distributed.all_reduce(total)
    return float(total.sqrt())


def counted(gradient_norm: Any) -> dict[str, int]:
    """Count from here on how often gradients are measured."""
    measured = {"calls": 0}
    plain = getattr(
        gradient_norm.float64_sum_of_squares, "__wrapped__", gradient_norm.float64_sum_of_squares
    )

    def sum_of_squares(tensors: Any) -> torch.Tensor:
        measured["calls"] += 1
        total: torch.Tensor = plain(tensors)
        return total

    sum_of_squares.__wrapped__ = plain  # type: ignore[attr-defined]
    gradient_norm.float64_sum_of_squares = sum_of_squares
    return measured


def main() -> None:
    """Run every case both ways, and write the results on rank 0."""
    import deepspeed

    # Otherwise its compilation takes half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo")
    found = {
        name: {way: train(case, way == "ours") for way in ("stock", "ours")}
        for name, case in CASES.items()
    }
    if torch.distributed.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file)
    leave()


if __name__ == "__main__":
    main()
