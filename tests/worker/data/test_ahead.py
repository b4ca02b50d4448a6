"""Reading ahead gives the same micro batches in the same order, by a thread or by processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ortlaunch.base.errors import DataWorkerError, HookError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data import Batches, UserSamples
from ortlaunch.worker.data import read_ahead as ahead_module
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.read_ahead import ReadAheadSettings
from ortlaunch.worker.data.user_data import UserCollate
from tests import labs
from tests.makers import recipe
from tests.training import train_here
from tests.worker.tasks.test_train import ROWS, Line

# In the rank itself, by a thread, and by two processes.
READERS = [ReadAheadSettings(None), ReadAheadSettings(0), ReadAheadSettings(2)]


class Items:
    """Samples with the process that read them; one may raise an error."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise DataError(f"sample {index} is bad")
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"index": index, "process": os.getpid(), "drawn": torch.tensor(drawn)}


def batches_of(items: Any, accumulation: int = 2) -> Batches:
    return Batches(UserSamples(items), BatchPlan(2 * accumulation, 2, accumulation, 1, None), 7)


def taken(batches: Batches, keys: list[tuple[int, int]]) -> list[list[int]]:
    return [batches.read_micro_batch_and_count_tokens(*key, 0)["index"].tolist() for key in keys]


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_the_same_batches_as_without(reader: ReadAheadSettings) -> None:
    """Batches in order, repeated, after jumps and of another rank are the same as without."""
    batches = batches_of(Items())
    # (1, 0) is repeated; (7, 1) and (3, 0) are jumps, ahead and back.
    keys = [(0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (2, 0), (7, 1), (8, 0), (3, 0), (3, 1)]
    plain = taken(batches, keys)
    with batches.read_rank_batches_ahead(0, reader):
        assert taken(batches, keys) == plain
        # Rank 1 is not read ahead.
        assert (
            batches.read_micro_batch_and_count_tokens(0, 0, 1)["index"].tolist()
            == batches.read_micro_batch_and_count_tokens(0, 1, 0)["index"].tolist()
        )
    assert taken(batches, keys) == plain
    assert not multiprocessing.active_children()
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")
    ]


def test_processes_read_and_draw_alike() -> None:
    """Random values of a sample depend on seed, epoch and sample alone, not on the process.

    The training's own random numbers stay as they were.
    """
    states = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    drawn = {}
    readers = set()
    for workers, first in ((None, 3), (1, 0), (3, 0), (2, 5)):
        batches = batches_of(Items())
        with batches.read_rank_batches_ahead(0, ReadAheadSettings(workers)):
            # 20 steps of 4 samples are two epochs of 40.
            for step in range(first, 20):
                for number in (0, 1):
                    batch = batches.read_micro_batch_and_count_tokens(step, number, 0)
                    readers |= set(batch["process"].tolist())
                    for index, values in zip(batch["index"].tolist(), batch["drawn"].tolist()):
                        assert drawn.setdefault((step // 10, index), values) == values
    # Every sample of each epoch, each with values of its own.
    assert len(drawn) == 80
    assert len({tuple(values) for values in drawn.values()}) == 80
    after = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    assert after == states


@pytest.mark.parametrize("reader", READERS[1:], ids=str)
def test_what_is_wrong_with_a_sample_is_told(reader: ReadAheadSettings) -> None:
    """An error in a sample is raised unchanged when the training reaches that sample."""
    batches = batches_of(Items())
    # A sample of the fourth micro batch becomes bad.
    bad = batches.sample_indices_of_micro_batch(1, 1, 0)[0]
    batches.samples.items.bad = bad  # type: ignore[attr-defined]
    with batches.read_rank_batches_ahead(0, reader):
        taken(batches, [(0, 0), (0, 1), (1, 0)])
        with pytest.raises(DataError, match=f"^sample {bad} is bad$"):
            batches.read_micro_batch_and_count_tokens(1, 1, 0)


class Ending(Items):
    """Samples of which one ends its process, or cannot be handed over, as HOW names it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        how = os.environ["HOW"]
        if how.startswith("SIG") and index == 7:
            os.kill(os.getpid(), signal.Signals[how])
        if how == "exit" and index == 7:
            os._exit(3)
        # torch hands over no tensor of a graph.
        return {"x": torch.ones((), requires_grad=how == "graph") * index}


@pytest.mark.parametrize(
    ("how", "message", "status"),
    [
        ("SIGKILL", "a worker process was killed by SIGKILL; it was most likely out of memory: lower", 1),
        ("SIGBUS", "a worker process was killed by SIGBUS; batches are handed over in /dev/shm, which", 2),
        ("exit", "a worker process ended with exit status 3; try data.workers=0", 1),
        ("graph", "a worker process could not hand over a batch: RuntimeError: Cowardly refusing", 1),
        ("sockets", "could not hand over a batch: OSError: AF_UNIX path too long; set TMPDIR to a", 1),
    ],
)  # fmt: skip
def test_a_worker_that_fails_ends_the_reading(
    how: str, message: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ended, or cannot hand over its batch, is an error at once and by its name."""
    monkeypatch.setattr(ahead_module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setenv("HOW", how)
    if how == "sockets":
        # Of a long TMPDIR.
        folder = tmp_path / ("x" * 100)
        folder.mkdir()
        process: Any = multiprocessing.process.current_process()
        monkeypatch.setitem(process._config, "tempdir", str(folder))
    # Sample 7 is in some batch of the first epoch, whichever worker reads it.
    batches = batches_of(Ending())
    began = time.monotonic()

    def read_all() -> None:
        for step in range(10):
            for number in (0, 1):
                batches.read_micro_batch_and_count_tokens(step, number, 0)

    with (
        batches.read_rank_batches_ahead(0, ReadAheadSettings(2)),
        pytest.raises(DataWorkerError) as raised,
    ):
        read_all()
    assert message in str(raised.value)
    assert str(raised.value).startswith("data.workers: ")
    assert raised.value.exit_status == status
    # Seconds, and not train.stall_seconds; beside other tests a fork alone may take some.
    assert time.monotonic() - began < 20
    assert not multiprocessing.active_children()


# Batches of 16 MB.
LARGE = """
import torch
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data import Batches, UserSamples
from ortlaunch.worker.data.read_ahead import ReadAheadSettings
samples = UserSamples([{"x": torch.zeros(1_000_000)}] * 8)
batches = Batches(samples, BatchPlan(4, 4, 1, 1, None), 0)
with batches.read_rank_batches_ahead(0, ReadAheadSettings(2)):
    batches.read_micro_batch_and_count_tokens(0, 0, 0)
"""


@pytest.mark.lab
def test_a_full_dev_shm_ends_the_reading() -> None:
    """Batches that do not fit into /dev/shm are an error with the remedy, not a wait."""
    script = f'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "{sys.executable}" -c "$0"'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, LARGE],
                          capture_output=True, text=True, timeout=30, check=False)  # fmt: skip
    if "permitted" in done.stderr or "permission" in done.stderr:
        labs.skip(f"cannot mount a small /dev/shm: {done.stderr.strip()}")
    message = done.stderr.splitlines()[-1]
    assert (
        "DataWorkerError: data.workers: a worker process could not hand over a batch: " in message
    )
    assert "No space left on device" in message
    assert "docker run --shm-size=8g" in message


def test_signals_of_a_stop_leave_them_be() -> None:
    """Worker processes ignore stop signals, and end when the reading ends."""
    # A stop signal goes to all processes, but the rank may still need samples.
    batches = batches_of(Items())
    with batches.read_rank_batches_ahead(0, ReadAheadSettings(6)):
        plain = taken(batches, [(0, 0)])
        workers = multiprocessing.active_children()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            for worker in workers:
                os.kill(int(worker.pid or 0), number)
        assert len(taken(batches, [(0, 1), (1, 0), (1, 1)])) == 3
        assert all(worker.is_alive() for worker in workers)
        assert plain
    for worker in workers:
        worker.join(1)
        assert not worker.is_alive()


def test_a_training_with_processes(tmp_path: Path) -> None:
    """A training with worker processes has the same losses, and leaves no process behind."""
    sections = {
        "train": {"max_steps": 6},
        "log": {"every_steps": 1},
        "batch": {"micro_size": 2, "accumulation_steps": 2},
    }
    data = recipe().data.model_dump(exclude_defaults=True)
    plain, ahead = (
        train_here(
            tmp_path / str(workers), Line(), ROWS, data={**data, "workers": workers}, **sections
        )
        for workers in (None, 2)
    )
    assert ahead.values("loss") == plain.values("loss")
    assert not multiprocessing.active_children()


def padded(samples: list[tuple[list[int], int]]) -> dict[str, Any]:
    width = max(len(ids) for ids, _ in samples)
    return {
        "ids": [[*ids, *[0] * (width - len(ids))] for ids, _ in samples],
        "y": [label for _, label in samples],
    }


def nothing(samples: Any) -> Any:
    return None


def words(samples: Any) -> Any:
    return {"ids": ["a", "b"]}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    # The functions above, under a name that a recipe can give.
    monkeypatch.setitem(sys.modules, "collates_of_a_test", sys.modules[__name__])


def test_a_collate_of_the_users_own(own: None) -> None:
    """The user's own collate function accepts samples of any type and length."""
    items = UserSamples([([1] * (1 + n % 3), n) for n in range(9)], is_mapping=False)
    batches = Batches(
        items, BatchPlan(3, 3, 1, 1, None), 7, stack=UserCollate("collates_of_a_test:padded")
    )
    batch = batches.read_micro_batch_and_count_tokens(0, 0, 0)
    assert batch["y"].tolist() == batches.sample_indices_of_micro_batch(0, 0, 0)
    assert batch["ids"].shape == (3, max(1 + n % 3 for n in batch["y"].tolist()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "collates_of_a_test:nothing returned NoneType; it must be names to tensors"),
        ("words", "collates_of_a_test:words returned a value that cannot become a tensor"),
        ("gone", "data.collate: module 'collates_of_a_test' has no function 'gone'"),
    ],
)
def test_what_is_no_collate(name: str, message: str, own: None) -> None:
    """A collate function that is missing or returns no batch is refused by name."""
    with pytest.raises(DataError, match=message):
        UserCollate(f"collates_of_a_test:{name}")([{"x": 1}])


class Bad:
    """Samples of which the sixth raises an error."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 5:
            raise KeyError("no such picture")
        return {"x": torch.ones(1)}


def test_a_sample_that_raises_in_a_process() -> None:
    """An error in a worker process begins with the samples and the user's own message."""
    # DataLoader would put its own text first.
    batches = Batches(UserSamples(Bad()), BatchPlan(16, 16, 1, 1, None), 7)
    said = (
        r"^data.workers: reading samples .*\b5\b.* "
        r"of data.train raised KeyError: 'no such picture'\n"
    )
    with (
        batches.read_rank_batches_ahead(0, ReadAheadSettings(2)),
        pytest.raises(HookError, match=said),
    ):
        batches.read_micro_batch_and_count_tokens(0, 0, 0)
