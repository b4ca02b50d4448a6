"""One rank of a training without a model on a streamed corpus; test_stream_kills.py kills it."""

from __future__ import annotations

import itertools
import json
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.run_folder.folder import read_json_or_raise_damaged, write_json_atomically
from tests.worker.data import test_stream


class Training(NamedTuple):
    """Values that the ranks of all starts share."""

    paths: list[str]
    folder: Path
    form: str
    environ: dict[str, str]


def run(rank: int, world: int, meet: Barrier, training: Training) -> None:
    """Take the batches of a rank from the newest checkpoint on; one checkpoint every third step."""
    os.environ.update(training.environ, LOCAL_RANK=str(rank))
    folder = training.folder
    of = test_stream.batches(
        test_stream.STREAMS[training.form](training.paths, folder / "stream"), world
    )
    checkpoint = folder / "checkpoint.json"
    begin: Any = {"step": 0, "positions": []}
    if checkpoint.exists():
        begin = read_json_or_raise_damaged(checkpoint)
    of.begin_step_after_positions(begin["step"], begin["step"] * test_stream.GLOBAL)
    of.seek_streams(begin["positions"])
    meet.wait()
    with (folder / f"rank{rank}.jsonl").open("a") as taken:
        for step in itertools.count(begin["step"]):
            ids = of.read_micro_batch_and_count_tokens(step, 0, rank)["input_ids"].tolist()
            found = [*zip(of.sample_indices_of_micro_batch(step, 0, rank), ids)]
            # As the sum of the gradients.
            meet.wait()
            positions = of.release_streamed_samples_and_return_positions(
                of.positions_before_step(step + 1)
            )
            taken.write(json.dumps({"step": step, "world": world, "taken": found}) + "\n")
            taken.flush()
            if rank == 0 and step % 3 == 2:
                write_json_atomically(checkpoint, {"step": step + 1, "positions": positions})
            time.sleep(0.005)
