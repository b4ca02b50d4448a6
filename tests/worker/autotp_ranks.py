"""Ranks of one world train a small Qwen three steps, or resume it, and save; two more steps follow.

test_autotp_checkpoint.py starts them by torchrun. Arguments: the sections of the recipe, the
checkpoint to read ("" for none), the one to write, and the file for the losses of the steps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed

from ortlaunch.planning.hosts import Host
from ortlaunch.rank import Rank
from ortlaunch.worker.checkpoint.restore import load_checkpoint_print_notes_and_return_loop_state
from ortlaunch.worker.checkpoint.snapshot import snapshot_of_this_rank
from ortlaunch.worker.engine.engine import build_engine
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.process_group.distributed import (
    DistributedContext,
    _make_data_parallel_group,
)
from ortmodule_tests.leaving import leave
from tests.makers import bert, plan
from tests.worker.memory_ranks import NoData

# The inner width is odd: its slices differ in size.
MODEL = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "intermediate_size": 65, "vocab_size": 99, "tie_word_embeddings": True}  # fmt: skip


def main() -> None:
    """Train or resume, save, and go on."""
    sections, source, target, file = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    recipe = bert(
        model={"task": "causal-lm", "config": MODEL},
        **{"zero": None, "engine": {"name": "eager"}, "batch": {"micro_size": 2}}
        | {"optimizer": {"name": "adamw", "learning_rate": 1e-2}}
        | json.loads(sections),
    )
    settled = plan(recipe, [Host("localhost", size, tuple(range(size)))], "torchrun")
    group = DistributedContext(
        Rank(rank, size, rank, size),
        torch.device("cpu"),
        mesh=settled.mesh if size > 1 else None,
        has_fsdp2=settled.has_fsdp2 and size > 1,
    )
    group.data_parallel = _make_data_parallel_group(group)
    model = seed_and_build_loss_module_on_cpu(recipe, NoData())  # type: ignore[arg-type]
    words = torch.arange(64).reshape(4, 16)
    # Every world has the same mean of gradients: each rank has all samples.
    sample = {"input_ids": words, "labels": words}
    engine = build_engine(recipe, settled, model, group, sample)

    def take_steps(count: int) -> list[float]:
        losses = []
        for _ in range(count):
            batch = engine.to_device(sample)
            losses.append(float(engine.stepper.run_micro_batch(batch, is_last_of_step=True)))
            engine.stepper.clip_step_and_clear_gradients(1e-2)
        return losses

    if source:
        load_checkpoint_print_notes_and_return_loop_state(
            Path(source), engine.stepper.named_state(), group
        )
    else:
        take_steps(3)
    Path(target).mkdir(exist_ok=True)
    snapshot_of_this_rank(engine.stepper.named_state(), {}, group).write_rank_file_and_index(
        Path(target)
    )
    losses = take_steps(2)
    if rank == 0:
        Path(file).write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    main()
