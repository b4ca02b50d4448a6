"""A complete training of one rank in this process, on a test's own model and samples."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe, dump_recipe_yaml
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker import __main__ as worker
from ortlaunch.worker.checkpoint import set_aside_damaged_and_choose_own_or_source_checkpoint
from ortlaunch.worker.data import Batches, UserSamples
from ortlaunch.worker.engine.engine import build_engine
from ortlaunch.worker.model.identity import data_and_frozen_weights_identity
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.agreement import accept_save_and_stop_requests
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.watchdog import Watchdog
from ortlaunch.worker.tasks.train import TrainState, train_until_end_or_agreed_stop
from ortlaunch.worker.training.checkpoint_exports import CheckpointExports
from tests.makers import plan, recipe

# Stage 3 allocates a buffer of its bucket's size at once, 2 GB by default, and the engine may live
# until the test process ends. The kernel refuses to fork a process with more memory in one piece
# than the machine has.
ZERO_3 = {"stage": 3, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 10_000}}}
SHARDINGS = [None, *({"stage": stage} for stage in range(3)), ZERO_3]


class Trained(NamedTuple):
    """The result of a training: run folder, model and final state."""

    run: RunDir
    model: nn.Module
    state: TrainState

    def values(self, name: str) -> list[tuple[int, Any]]:
        """Return (step, value) of every record that has the field `name`."""
        return [(record["step"], record[name]) for record in records(self.run) if name in record]


def records(run: RunDir) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl."""
    # Python's parser also accepts NaN and Infinity, which are not JSON.
    return [
        json.loads(line, parse_constant=_refuse) for line in run.metrics.read_text().splitlines()
    ]


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def train_here(
    folder: Path, model: nn.Module, samples: Sequence[Mapping[str, Any]], *,
    evaluation: Sequence[Mapping[str, Any]] | None = None, **sections: Any,
) -> Trained:  # fmt: skip
    """Train `model` on `samples` on the eager engine and the CPU; `sections` are the recipe's."""
    return train_session_here(
        session_here(folder, model, samples, evaluation=evaluation, **sections)
    )


def train_session_here(session: Session) -> Trained:
    """Train in a session of `session_here`."""
    with accept_save_and_stop_requests(session.group) as agreed:
        return Trained(
            session.run,
            session.model.model,
            train_until_end_or_agreed_stop(session, agreed, CheckpointExports(session)),
        )


class _Data(SimpleNamespace):
    # As LoadedData, a key of the cache of audits.
    __hash__ = object.__hash__


def session_here(
    folder: Path, model: nn.Module, samples: Sequence[Mapping[str, Any]], *,
    evaluation: Sequence[Mapping[str, Any]] | None = None, **sections: Any,
) -> Session:  # fmt: skip
    """Return the session of the only rank of such a training."""
    made = recipe(**sections)
    run = RunDir(folder)
    folder.mkdir(parents=True, exist_ok=True)
    planned = plan(made)
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    batches = Batches(UserSamples(samples), planned.batch, made.seed)
    wrapped = LossModule(model.train())
    wrapped.has_numbers = made.model.task == "custom"
    engine = build_engine(
        made, planned, wrapped, group, batches.read_micro_batch_and_count_tokens(0, 0, 0)
    )
    held_out = None if evaluation is None else UserSamples(evaluation)
    data: Any = _Data(
        train=batches.samples,
        evaluation=held_out,
        parts={},
        tokenizer=None,
        class_lines=list,
        recipe=made,
    )
    found = set_aside_damaged_and_choose_own_or_source_checkpoint(run, group)
    known = data_and_frozen_weights_identity(batches.samples, model)
    return Session(made, planned, run, group, data, batches, wrapped, engine, found, identity=known)


def run_here(folder: Path, recipe: Recipe, task: str = "train") -> RunDir:
    """Run a recipe's only rank in this process, and return its run folder."""
    run = RunDir(folder)
    run.path.mkdir(exist_ok=True)
    run.recipe.write_text(dump_recipe_yaml(recipe))
    run.plan.write_text(replace(plan(recipe), task=task).to_json())
    rank = Rank(0, 1, 0, 1)
    had_group = torch.distributed.is_initialized()
    # A rank sets RANK and others, which would make later tests of this process ranks of a launcher.
    try:
        with mock.patch.dict(os.environ):
            assert worker.join_ranks_and_run_task(run, rank, Watchdog(rank, run)) == 0
    finally:
        # A process that fails ends with its process group; this one goes on.
        if torch.distributed.is_initialized() and not had_group:
            torch.distributed.destroy_process_group()
    return run
