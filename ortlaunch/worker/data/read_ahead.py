"""Micro batches that are read ahead while earlier ones train: by a thread, or by worker processes.

The order of samples is known in advance. A request for another micro batch than the next one
restarts the reading there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import multiprocessing.queues
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from ortlaunch.base.die_with_parent import request_signal_at_parent_end_or_exit_if_ended
from ortlaunch.base.errors import (
    DataWorkerError,
    HookError,
    InputError,
    OrtlaunchError,
    first_message_line,
)
from ortlaunch.base.process import wait_until_true_or_timeout
from ortlaunch.recipe.fields.data import BATCHES_EACH_WORKER
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.supervision.rank_process import PASSED_ON
from ortlaunch.worker.tensor_batch import TensorBatch

ReadMicroBatch = Callable[[list[SampleEpoch]], TensorBatch]
# Micro batches that the thread reads ahead.
_THREAD_BATCHES = 2
# Seconds between looks for an ended worker process while no batch comes; seconds in which its end
# is seen after an error; bytes of its own error.
_LOOK_SECONDS = 1.0
_END_SECONDS = 2.0
_ERROR_BYTES = 4000
_MEMORY = "it was most likely out of memory: lower data.workers or batch.micro_size"
_SHARED = (
    "batches are handed over in /dev/shm, which is full: make it larger (docker run --shm-size=8g), "
    "or lower data.workers; data.workers=0 needs none"
)
# What the end of a worker or its error contains -> the remedy.
_REMEDIES = {
    "SIGKILL": _MEMORY,
    "MemoryError": _MEMORY,
    "Cannot allocate memory": _MEMORY,
    "SIGBUS": _SHARED,
    "(shm)": _SHARED,
    "No space left": _SHARED,
    "AF_UNIX path": "set TMPDIR to a shorter path",
    "Too many open files": "raise the limit of open files: ulimit -n 65536",
}


class MicroBatchIndex(NamedTuple):
    """Which micro batch of a rank, in the order of training."""

    step_index: int
    """From 0."""
    pass_index: int
    """The pass of gradient accumulation within the step, from 0."""


class ReadAheadSettings(NamedTuple):
    """How micro batches are read ahead, and into which memory."""

    workers: int | None
    """Number of worker processes; 0: one thread, None: nothing is read ahead."""
    pinned: bool = False
    """Whether batches are put into pinned memory, from which a GPU copies by itself."""


class BatchReadAhead:
    """The micro batches of one rank, in order, read ahead."""

    def __init__(
        self,
        read: ReadMicroBatch,
        sample_epochs_of_micro_batch: Callable[[MicroBatchIndex], list[SampleEpoch]],
        passes_per_step: int,
        reader: ReadAheadSettings,
    ) -> None:
        """Prepare the reading; it starts at the first `batch`.

        Args:
            read: makes a batch of samples.
            sample_epochs_of_micro_batch: the samples of a micro batch.
            passes_per_step: micro batches of a step.
            reader: how to read ahead.
        """
        self._read = read
        self._sample_epochs_of_micro_batch = sample_epochs_of_micro_batch
        self._passes = passes_per_step
        self._reader = reader
        self._source: Iterator[Any] | None = None
        self._next_index = MicroBatchIndex(-1, -1)
        self._last_batch = (MicroBatchIndex(-1, -1), TensorBatch())

    def take_next_batch_or_repeat_last(self, micro_batch_index: MicroBatchIndex) -> TensorBatch:
        """Return a micro batch; the last one may be requested again."""
        if micro_batch_index == self._last_batch[0]:
            return self._last_batch[1]
        if self._source is None or micro_batch_index != self._next_index:
            self.close()
            self._source = self._start_reading(micro_batch_index)
        batch_or_error = next(self._source)
        # A worker process returns its error in place of the batch; see `_Reads`.
        if isinstance(batch_or_error, OrtlaunchError):
            # Else another request for this batch would return the next one.
            self.close()
            raise batch_or_error
        self._next_index = self._next_pass(micro_batch_index)
        self._last_batch = micro_batch_index, batch_or_error
        return self._last_batch[1]

    def close(self) -> None:
        """End the thread or the worker processes."""
        if self._source is not None:
            self._source.close()  # type: ignore[attr-defined]
        self._source = None

    def _start_reading(self, first_index: MicroBatchIndex) -> Iterator[Any]:
        sample_epoch_lists = self._sample_epochs_from(first_index)
        if self._reader.workers:
            return _read_batches_by_worker_processes(self._read, sample_epoch_lists, self._reader)
        return _read_batches_by_thread(self._read, sample_epoch_lists, self._reader)

    def _sample_epochs_from(
        self, micro_batch_index: MicroBatchIndex
    ) -> Iterator[list[SampleEpoch]]:
        """Yield the samples of each micro batch from there on."""
        # Only the rank's main thread advances this iterator, so that it needs no lock.
        while True:
            yield self._sample_epochs_of_micro_batch(micro_batch_index)
            micro_batch_index = self._next_pass(micro_batch_index)

    def _next_pass(self, micro_batch_index: MicroBatchIndex) -> MicroBatchIndex:
        step_index, pass_index = micro_batch_index
        return (
            MicroBatchIndex(step_index, pass_index + 1)
            if pass_index + 1 < self._passes
            else MicroBatchIndex(step_index + 1, 0)
        )


def _read_batches_by_thread(
    read: ReadMicroBatch,
    sample_epoch_lists: Iterator[list[SampleEpoch]],
    read_ahead_settings: ReadAheadSettings,
) -> Iterator[TensorBatch]:
    def read_batch(sample_epochs: list[SampleEpoch]) -> TensorBatch:
        batch = read(sample_epochs)
        return (
            {name: value.pin_memory() for name, value in batch.items()}
            if read_ahead_settings.pinned
            else batch
        )

    thread = ThreadPoolExecutor(1)
    try:
        pending_batches = collections.deque(
            thread.submit(read_batch, sample_epochs)
            for sample_epochs in itertools.islice(sample_epoch_lists, _THREAD_BATCHES)
        )
        while True:
            ready_batch = pending_batches.popleft().result()
            # The next one is submitted before the yield, so that it is read during the training.
            pending_batches.append(thread.submit(read_batch, next(sample_epoch_lists)))
            yield ready_batch
    finally:
        thread.shutdown(cancel_futures=True)


def _read_batches_by_worker_processes(
    read: ReadMicroBatch,
    sample_epoch_lists: Iterator[list[SampleEpoch]],
    read_ahead_settings: ReadAheadSettings,
) -> Iterator[Any]:
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import signal_handling

    receiver, sender = os.pipe()
    os.set_blocking(receiver, False)
    # Forked processes share the memory of the samples. They end with the rank; stop signals, which
    # also reach them, are ignored there. The generator of its own keeps DataLoader from drawing
    # its base seed from the training's random numbers.
    loader: Any = DataLoader(
        _BatchDataset(read), batch_size=None, sampler=sample_epoch_lists,
        num_workers=int(read_ahead_settings.workers or 0),
        prefetch_factor=BATCHES_EACH_WORKER, pin_memory=read_ahead_settings.pinned,
        worker_init_fn=_start_function_that_ties_worker_to_rank(os.getpid(), sender),
        generator=torch.Generator(), multiprocessing_context="fork",
    )  # fmt: skip
    # A stop signal waits until the new process ignores it; else it would end the process.
    other_processes = multiprocessing.active_children()
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        loader_iterator = iter(loader)
    except OSError as error:
        # They ignore the signal that would end them with the rank.
        for worker in {*multiprocessing.active_children()} - {*other_processes}:
            worker.kill()
        raise _worker_error_with_remedy(
            f"no process could be started: {first_message_line(error)}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        os.close(sender)
    workers = loader_iterator._workers
    # Else torch's handler of SIGCHLD would raise anywhere in the training.
    signal_handling._remove_worker_pids(id(loader_iterator))
    loader_iterator._worker_pids_set = False
    # torch's own are five seconds.
    loader_iterator._try_get_data = functools.partial(loader_iterator._try_get_data, _LOOK_SECONDS)
    try:
        while True:
            try:
                batch = next(loader_iterator)
            # ConnectionError among them, where a worker ended while its batch was taken.
            except (OSError, EOFError, RuntimeError) as error:
                raise _worker_error_with_remedy(
                    _wait_for_worker_failure_text_or_empty(workers, receiver)
                    or first_message_line(error)
                ) from error
            yield batch
    finally:
        os.close(receiver)
        loader_iterator._shutdown_workers()
        # A worker that hangs in a sample outlives the shutdown; a closed one raises ValueError.
        for worker in workers:
            with contextlib.suppress(ValueError):
                worker.kill()


def _wait_for_worker_failure_text_or_empty(workers: Sequence[BaseProcess], error_pipe: int) -> str:
    """Return how a worker process ended, or failed to hand over a batch; "" if none did."""
    # Its connection may be closed before it has ended.
    wait_until_true_or_timeout(lambda: any(worker.exitcode for worker in workers), _END_SECONDS)
    # A worker writes its error before it ends.
    with contextlib.suppress(BlockingIOError):
        if text := os.read(error_pipe, _ERROR_BYTES):
            line = text.decode(errors="replace").splitlines()[0]
            return f"a worker process could not hand over a batch: {line}"
    for worker in workers:
        if status := worker.exitcode:
            end_text = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with exit status {status}"
            )
            return f"a worker process {end_text}"
    return ""


def _worker_error_with_remedy(reason: str) -> DataWorkerError:
    remedy = next(
        (remedy for part, remedy in _REMEDIES.items() if part in reason), "try data.workers=0"
    )
    # Another start on this host would fail again, unless memory was short by chance.
    return DataWorkerError(f"data.workers: {reason}; {remedy}", 2 if remedy is _SHARED else 1)


class _BatchDataset(Dataset[TensorBatch | OrtlaunchError]):
    """The data set that a worker process of DataLoader reads from."""

    def __init__(self, read: ReadMicroBatch) -> None:
        self.read = read

    def __getitem__(self, sample_epochs: list[SampleEpoch]) -> TensorBatch | OrtlaunchError:
        """Return a batch, or an error in its place."""
        # A raised error would get DataLoader's own text in front.
        try:
            return self.read(sample_epochs)
        except InputError as error:
            return error
        # The user's own code may raise anything.
        except Exception as error:
            samples = ", ".join(str(sample_epoch.sample_index) for sample_epoch in sample_epochs)
            stack_text = "".join(
                traceback.format_exception(type(error), error, error.__traceback__)
            )
            error_text = f"{type(error).__name__}: {error}"
            return HookError(
                f"data.workers: reading samples {samples} of data.train raised {error_text}\n{stack_text}"
            )


def _start_function_that_ties_worker_to_rank(
    rank_pid: int, error_pipe: int
) -> Callable[[int], None]:
    """Return the start function of a worker process, which ties the process to its rank.

    Args:
        rank_pid: the rank's process id.
        error_pipe: the descriptor to which an error is written.
    """

    def end_worker(error: Exception, item: object) -> None:
        """End the process with the error of the thread that hands over its batches."""
        # Otherwise the thread would print the error, and the rank would wait for the batch for ever.
        traceback.print_exception(error)
        os.write(
            error_pipe,
            f"{type(error).__name__}: {first_message_line(error)}\n".encode()[:_ERROR_BYTES],
        )
        os._exit(1)

    def start_worker(worker_id: int) -> None:
        # The rank alone handles stop signals; the workers end when the rank has ended.
        for signal_number in PASSED_ON:
            signal.signal(signal_number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end_worker)  # type: ignore[attr-defined]
        request_signal_at_parent_end_or_exit_if_ended(signal.SIGKILL, rank_pid)

    return start_worker
