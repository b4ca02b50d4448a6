"""Two gloo ranks a case train a BERT of 5 million parameters: planned and measured bytes.

Each case has two processes of its own, forked when everything heavy is imported, so that no case
includes another's memory. The result is JSON. `python -m tests.worker.memory_ranks FOLDER '{"name":
{recipe's sections}}'`
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from ortlaunch.planning.hosts import Host
from ortlaunch.rank import Rank
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.worker.checkpoint.snapshot import BUFFER, snapshot_of_this_rank
from ortlaunch.worker.data import Batches, samples_of_source_for_task  # noqa: F401  (imported before the fork)
from ortlaunch.worker.engine.engine import build_engine
from ortlaunch.worker.engine.memory_use import RankMemoryMeter
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.process_group.distributed import (
    DistributedContext,
    _make_data_parallel_group,
)
from tests.makers import bert, plan

RANKS = 2
ACCUMULATION = 2
MODEL = {"model_type": "bert", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 1024, "vocab_size": 8000}  # fmt: skip


class NoData:
    """Data without content: words and labels have no effect on memory here."""

    tokenizer = train = evaluation = label_names = class_names = None
    classes = 0
    read = ()


def measure(rank: int, folder: Path, sections: dict[str, Any]) -> NoReturn:
    """Run one rank of a case, and write its memory record."""
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank)
    )
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    kind = {"task": "masked-lm", "config": MODEL, **sections.pop("model", {})}
    batch = {"micro_size": 2, "accumulation_steps": ACCUMULATION}
    recipe = bert(model=kind, **{"batch": batch, **sections})
    settled = plan(recipe, [Host("localhost", RANKS, tuple(range(RANKS)))], "torchrun")
    group = DistributedContext(
        Rank(rank, RANKS, rank, RANKS),
        torch.device("cpu"),
        mesh=settled.mesh,
        has_fsdp2=settled.has_fsdp2,
    )
    group.data_parallel = _make_data_parallel_group(group)
    words = torch.arange(64).reshape(2, 32)
    sample = {"input_ids": words, "labels": words}
    model = seed_and_build_loss_module_on_cpu(recipe, NoData())  # type: ignore[arg-type]
    memory = RankMemoryMeter(group.device, model)
    engine = build_engine(recipe, settled, model, group, sample)
    for _ in range(2):
        for accumulation in range(ACCUMULATION):
            engine.stepper.run_micro_batch(
                engine.to_device(sample), is_last_of_step=accumulation == ACCUMULATION - 1
            )
        memory.count_live_tensors_in_first_two_steps(engine.stepper)
        engine.stepper.clip_step_and_clear_gradients(1e-4)
        memory.count_live_tensors_in_first_two_steps(engine.stepper)
    record = memory.gather_memory_report(settled, group)
    assert settled.memory is not None
    entries = snapshot_of_this_rank(engine.stepper.named_state(), {}, group).tensors
    saved = sum(flat.nbytes for key, _, flat in entries if not key.startswith(BUFFER))
    store.add("done", 1)
    # The first to exit would break the other's last message.
    while store.add("done", 0) < RANKS:
        time.sleep(0.01)
    (folder / f"{rank}.json").write_text(
        json.dumps(
            {
                **json_values_of_record(record),
                "saved": saved,
                "share": settled.memory.checkpoint // RANKS,
            }
        )
    )
    # Freeing a DistributedDataParallel now can block for ever: see
    # worker/process_group/distributed.py.
    os._exit(0)


def fork(rank: int, folder: Path, sections: dict[str, Any]) -> int:
    """Start one rank; it exits with status 0 once its record is written."""
    child = os.fork()
    if child:
        return child
    try:
        measure(rank, folder, sections)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main(folder: Path, cases: dict[str, Any]) -> None:
    """Run the cases one after another."""
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    from transformers import BertForMaskedLM  # noqa: F401

    found = {}
    for number, (name, sections) in enumerate(cases.items()):
        own = folder / str(number)
        own.mkdir()
        children = [fork(rank, own, dict(sections)) for rank in range(RANKS)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(f"{name} failed")
        found[name] = json.loads((own / "0.json").read_text())
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
