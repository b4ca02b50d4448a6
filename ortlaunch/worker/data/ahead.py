"""Micro batches that are read while those before them train: by a thread, or by processes of the rank's own.

Which samples come next is known; who asks for others than the next ones begins anew there.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ortlaunch.die_with_parent import die_with_parent
from ortlaunch.errors import HookError, InputError, OrtlaunchError
from ortlaunch.worker.supervision.child import PASSED_ON

Batch = dict[str, torch.Tensor]
Places = list[tuple[int, int]]  # (sample, epoch)
Read = Callable[[Places], Batch]
# micro batches that wait
_THREADS_OWN = 2
_EACH_WORKERS = 2


class Reader(NamedTuple):
    """Who reads, and where to."""

    workers: int | None
    """Processes; 0: a thread, None: nobody reads ahead."""
    pinned: bool = False
    """Into memory that a GPU copies from by itself."""


class Ahead:
    """One rank's micro batches, in order."""

    def __init__(
        self, read: Read, places: Callable[[int, int], Places], passes: int, reader: Reader
    ) -> None:
        """places: of a step (from 0) and pass."""
        self._read = read
        self._places = places
        self._passes = passes
        self._reader = reader
        self._source: Iterator[Any] | None = None
        self._next = (-1, -1)
        self._last = ((-1, -1), Batch())

    def take(self, step: int, number: int) -> Batch:
        """Micro batch `number` of a step; the one that was taken last may be taken again."""
        if (step, number) == self._last[0]:
            return self._last[1]
        if self._source is None or (step, number) != self._next:
            self.close()
            self._source = self._begin(step, number)
        found = next(self._source)
        if isinstance(found, OrtlaunchError):
            raise found
        self._next = self._after(step, number)
        self._last = (step, number), found
        return self._last[1]

    def close(self) -> None:
        """End thread and processes."""
        if self._source is not None:
            self._source.close()  # type: ignore[attr-defined]
        self._source = None

    def _begin(self, step: int, number: int) -> Iterator[Any]:
        ahead = self._counted(step, number)
        if self._reader.workers:
            return _by_processes(self._read, ahead, self._reader)
        return _by_thread(self._read, ahead, self._reader)

    def _counted(self, step: int, number: int) -> Iterator[Places]:
        """Which samples come from there on; asked for by the rank's own thread alone."""
        while True:
            yield self._places(step, number)
            step, number = self._after(step, number)

    def _after(self, step: int, number: int) -> tuple[int, int]:
        return (step, number + 1) if number + 1 < self._passes else (step + 1, 0)


def _by_thread(read: Read, ahead: Iterator[Places], reader: Reader) -> Iterator[Batch]:
    def one(places: Places) -> Batch:
        batch = read(places)
        return (
            {name: value.pin_memory() for name, value in batch.items()} if reader.pinned else batch
        )

    thread = ThreadPoolExecutor(1)
    try:
        waiting = collections.deque(
            thread.submit(one, each) for each in itertools.islice(ahead, _THREADS_OWN)
        )
        while True:
            found = waiting.popleft().result()
            waiting.append(thread.submit(one, next(ahead)))
            yield found
    finally:
        thread.shutdown(cancel_futures=True)


def _by_processes(read: Read, ahead: Iterator[Places], reader: Reader) -> Iterator[Any]:
    """Forked, so that they share what the samples hold; they go with the rank, not by a signal that asks for a stop."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        _Reads(read), batch_size=None, sampler=ahead, num_workers=int(reader.workers or 0),
        prefetch_factor=_EACH_WORKERS, pin_memory=reader.pinned, worker_init_fn=_be_left_alone(os.getpid()),
        generator=torch.Generator(), multiprocessing_context="fork",
    )  # fmt: skip
    found = iter(loader)
    try:
        yield from found
    finally:
        workers = found._workers
        found._shutdown_workers()
        for worker in workers:  # one that did not come back from a sample
            with contextlib.suppress(ValueError):
                worker.kill()


class _Reads(Dataset[Batch | OrtlaunchError]):
    """What a process of DataLoader's does."""

    def __init__(self, read: Read) -> None:
        self.read = read

    def __getitem__(self, places: Places) -> Batch | OrtlaunchError:
        """An error in place of a batch, for DataLoader would put words of its own before it."""
        try:
            return self.read(places)
        except InputError as error:
            return error
        except Exception as error:  # of the user's own code
            samples = ", ".join(str(index) for index, _ in places)
            where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            what = f"{type(error).__name__}: {error}"
            return HookError(
                f"data.workers: reading samples {samples} of data.train raised {what}\n{where}"
            )


def _be_left_alone(rank: int) -> Callable[[int], None]:
    """What a process begins with: a stop is the rank's own to answer, and a rank that is gone needs nobody."""

    def begin(number: int) -> None:
        for each in PASSED_ON:
            signal.signal(each, signal.SIG_IGN)
        die_with_parent(signal.SIGKILL, rank)

    return begin


def seed_sample(seed: int, index: int, epoch: int) -> None:
    """What a sample draws at random is a function of these, whichever process reads it."""
    drawn = int.from_bytes(
        hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=7).digest(), "big"
    )
    torch.manual_seed(drawn)
    random.seed(drawn)
    np.random.seed(drawn % (1 << 32))
