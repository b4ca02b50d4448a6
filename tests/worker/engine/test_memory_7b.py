"""The plan of Llama-2-7b for 8 GPUs, compared with the bytes that DeepSpeed allocates for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.planning.memory import estimate_rank_memory_or_none
from tests.makers import bert
from tests.worker.engine.test_memory import LLAMA_7B

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
RANKS = 8
PARAMETERS = 6_738_415_616
# Adam's moments on a rank, which exist only from the first step on.
STATE = 8 * PARAMETERS // RANKS
# ZeRO 3 keeps no gathered parameters, so that none are counted.
NO_GATHER = {"zero_optimization": {"stage3_max_live_parameters": 0}}


def case(stage: int, precision: str, **offload: str) -> dict[str, Any]:
    """Return the sections of a recipe."""
    zero = {"stage": stage, "deepspeed": NO_GATHER, "offload": offload or None}
    return {
        "precision": precision,
        "zero": zero,
        "batch": {"micro_size": 1, "accumulation_steps": 1},
    }


CASES = {
    "ZeRO 0 bf16": case(0, "bf16"),
    "ZeRO 1 bf16": case(1, "bf16"),
    "ZeRO 2 fp32": case(2, "fp32"),
    "ZeRO 3 bf16": case(3, "bf16"),
    "ZeRO 2 fp16, optimizer offloaded": case(2, "fp16", optimizer="cpu"),
    "ZeRO 3 bf16, all offloaded": case(3, "bf16", optimizer="cpu", parameters="cpu"),
}


def planned(sections: dict[str, Any]) -> dict[str, int]:
    """Return the planned bytes of all that `memory_7b` counts.

    GPU and host memory are added, because `memory_7b` has one memory for both.
    """
    data = {"train": "python-docs", "tokenizer": "here", "sequence_length": 8}
    adam = {"name": "adamw", "learning_rate": 1.0}
    memory = estimate_rank_memory_or_none(
        bert(
            model={"task": "causal-lm", "config": LLAMA_7B}, data=data, optimizer=adam, **sections
        ),
        1,
        RANKS,
        "cuda",
    )
    assert memory is not None
    parts = dict(memory.by_stage)[memory.chosen]
    stage = sections["zero"]["stage"]
    # Other stages allocate gradients in the first backward pass.
    early = parts.gradients + parts.buckets if stage == 3 else 0
    left = (
        parts.weights
        + parts.optimizer
        + early
        + memory.host.offloaded
        - (STATE if stage else 8 * PARAMETERS)
    )
    offloads = memory.host.offloaded > 0
    return {"built": memory.host.built, "left": left} | (
        {} if offloads else {"start": max(memory.start, left)}
    )


@pytest.mark.timeout(300)
def test_the_plan_of_7b_is_what_deepspeed_takes() -> None:
    """The planned bytes of the state and the start's peak are within 3 % of the counted ones."""
    command = [sys.executable, "-m", "tests.worker.memory_7b", json.dumps(CASES)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counted = json.loads(done.stdout.splitlines()[-1])
    for name, sections in CASES.items():
        for kind, size in planned(sections).items():
            assert size == pytest.approx(counted[name][kind], rel=0.03), (
                name,
                kind,
                size / PARAMETERS,
            )
