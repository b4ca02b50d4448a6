"""A streamed corpus as samples: training begins before all of it is fetched and tokenized.

The samples count endlessly, epoch after epoch: a sample's index is its place in the sequence of
files. The files of an epoch have an order by the seed, and so have the samples of a window. Where a
window begins is recorded in checkpoints, so that a resume in any world opens that window alone.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortlaunch.worker.data.corpus import column_and_changed_settings_text, corpus_name_for_errors
from ortlaunch.worker.data.file_rows import (
    DataError,
    hash_of_size_and_first_middle_last_blocks,
    local_or_remote_file_bytes,
)
from ortlaunch.worker.data.order import Permutation, SampleEpoch, epoch_permutation
from ortlaunch.worker.data.samples import Sample, Samples
from ortlaunch.worker.data.shards import map_file_as_array
from ortlaunch.worker.data.streams.writer import (
    ENDS,
    FAILED,
    TOKENS,
    Position,
    SampleDemand,
    StreamedCorpus,
    StreamWriter,
    Window,
    are_window_files_intact,
    read_window_record_or_none_if_damaged,
    window_path,
)
from ortlaunch.worker.data.token_cache import Documents, ShowProgress, ignore_progress

# The number of samples of an endless source, in mixtures, where indices of sources must differ.
ENDLESS = 1 << 39
_POLL_SECONDS = 0.02
# Windows whose tokens are mapped, and whose order is held, at once.
_OPEN_WINDOWS = 4
# Sets the order of a window's samples apart from that of files.
_WINDOW_SEED_OFFSET = 1 << 31
MakeSamples = Callable[[Documents, int], Samples]


class StreamedSamples:
    """The samples of a streamed corpus, and their order."""

    def __init__(
        self,
        streamed: StreamedCorpus,
        make_samples: MakeSamples,
        tokenizer: str,
        folder: Path,
        buffer_bytes: int,
        show_progress: ShowProgress = ignore_progress,
    ) -> None:
        """Prepare the stream; the first request for a sample starts the tokenizing.

        Args:
            streamed: the corpus, and how it is cut into windows.
            make_samples: makes the samples of a window; the seed of their random values is the second
                argument.
            tokenizer: all that tokens depend on beside the corpus.
            folder: the folder of the windows, shared by all ranks.
            buffer_bytes: bytes of windows on the disk.
            show_progress: called with progress messages.
        """
        self.streamed = streamed
        self._make = make_samples
        empty = make_samples(Documents(np.empty(0, np.uint32), np.empty(0, np.int64)), 0)
        self.varies = getattr(empty, "varies", False)
        self._buffer = buffer_bytes
        self._show_progress = show_progress
        self._process = os.getpid()
        corpus = streamed.corpus
        # A bucket's file counts by its size: to read from it takes a request.
        sizes = [
            f"{path} "
            f"{local_or_remote_file_bytes(path) if '://' in path else hash_of_size_and_first_middle_last_blocks(path)}"
            for path in streamed.files
        ]
        settings = f"{corpus.format} {corpus.document} {column_and_changed_settings_text(corpus)} {streamed[3:6]}"
        if streamed.chats and streamed.chats.held_out:
            settings += f" {streamed.chats.held_out} held out"
        key = "\n".join([settings, tokenizer, *sizes])
        self.fingerprint = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._folder = folder / self.fingerprint
        self._folder.mkdir(parents=True, exist_ok=True)
        # Of an earlier start.
        (self._folder / FAILED).unlink(missing_ok=True)
        self._writer: StreamWriter | None = None
        self._reach = 0
        self._cached_window = functools.lru_cache(_OPEN_WINDOWS)(self._samples_of_window)
        self._cached_permutation = functools.lru_cache(_OPEN_WINDOWS)(self._window_permutation)
        self._begin_at(Position())

    def _begin_at(self, position: Position) -> None:
        self._begin = position
        self._windows: list[Window] = []
        # The last two places up to which samples were released.
        self._released = (position.first_sample, position.first_sample)
        self._demand = SampleDemand(position.window_number, position.first_sample + self._reach)

    def __len__(self) -> int:
        return ENDLESS

    @property
    def files(self) -> int:
        """The number of files of an epoch."""
        return len(self.streamed.files)

    def order(self, seed: int) -> StreamedSamples:
        """Return the order of the samples, which depends on the seed of the stream."""
        return self

    @property
    def epoch(self) -> float:
        """The files begun so far, in passes over all files."""
        return round(self.window_position_at_sample(self._released[1]).turn / self.files, 4)

    def restart_at_recorded_position_unless_there(self, recorded_position: Sequence[int]) -> None:
        """Begin at the recorded position of a window; earlier samples cannot be requested."""
        position = Position(*recorded_position)
        if (position, self._released[1]) == (self._begin, position.first_sample):
            return
        self.close()
        self._begin_at(position)

    def window_position_at_sample(self, sample_place: int) -> Position:
        """Return the position of the window that has this place, as far as windows are known."""
        window_index = self._last_window_index_at_or_before_or_minus_1(sample_place)
        if window_index < 0:
            return self._begin
        window = self._windows[window_index]
        return window.begin if sample_place < window.after.first_sample else window.after

    def passed(self, sample_place: int, samples_ahead: int) -> list[Position]:
        """Release the samples before a place, and return its window's position in a list.

        Args:
            sample_place: the samples before it have been trained on.
            samples_ahead: samples after it that may be needed before the next call.
        """
        # Another rank may be a step behind.
        self._released = (self._released[1], sample_place)
        self._reach = samples_ahead
        self._demand.present = self.window_position_at_sample(self._released[0]).window_number
        self._demand.required = sample_place + samples_ahead
        self._demand.changed.set()
        return [self.window_position_at_sample(sample_place)]

    def sample_epochs_at(self, sample_places: Sequence[int]) -> list[SampleEpoch]:
        """Return the sample at each of these places; wait for their windows.

        A place before the first window, whose sample is unknown, has index -1.
        """
        sample_epochs = []
        for sample_place in sample_places:
            if sample_place < self._begin.first_sample:
                sample_epochs.append(SampleEpoch(-1, 0))
                continue
            window = self._start_writer_and_wait_for_window_of_sample(sample_place)
            order = self._cached_permutation(window)
            window_sample = int(order(np.array([sample_place - window.begin.first_sample]))[0])
            sample_epochs.append(
                SampleEpoch(
                    window.begin.first_sample + window_sample, window.begin.turn // self.files
                )
            )
        return sample_epochs

    def wait_and_list_indices_read_first(self, max_samples: int) -> list[int]:
        """Return the indices of up to `max_samples` samples that are read first from here on."""
        window = self._start_writer_and_wait_for_window_of_sample(self._released[1])
        return [
            *range(
                window.begin.first_sample,
                min(window.after.first_sample, window.begin.first_sample + max_samples),
            )
        ]

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample of a window that is not deleted yet."""
        window = self._start_writer_and_wait_for_window_of_sample(index)
        return self._cached_window(window).sample(index - window.begin.first_sample, epoch)

    def size(self, index: int) -> int:
        """Return the number of tokens of a chat before padding."""
        window = self._start_writer_and_wait_for_window_of_sample(index)
        chats: Any = self._cached_window(window)
        return int(chats.size(index - window.begin.first_sample))

    def close(self) -> None:
        """End the tokenizing."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._cached_window.cache_clear()

    def _last_window_index_at_or_before_or_minus_1(self, sample_place: int) -> int:
        """Return the index of the last known window that begins at or before a place, or -1."""
        return (
            bisect.bisect_right(
                self._windows, sample_place, key=lambda window: window.begin.first_sample
            )
            - 1
        )

    def _start_writer_and_wait_for_window_of_sample(self, sample_place: int) -> Window:
        """Return the window of a place; wait until it is written.

        Raises:
            DataError: the corpus cannot be read.
        """
        # One process a host writes, also if it finds its own samples written: another rank may wait.
        # A process that only reads batches for a rank never writes.
        if self._process == os.getpid() and os.environ.get("LOCAL_RANK", "0") == "0":
            self._writer = self._writer or StreamWriter(
                self.streamed, self._folder, self._buffer, self._begin, self._demand
            )
        began = time.monotonic()
        shown_seconds = 0
        while True:
            window_index = self._last_window_index_at_or_before_or_minus_1(sample_place)
            if window_index >= 0 and sample_place < self._windows[window_index].after.first_sample:
                return self._windows[window_index]
            window_number = (
                self._windows[window_index].begin.window_number + 1
                if window_index >= 0
                else self._begin.window_number
            )
            if self._register_window_of_sample_if_written(window_number, sample_place):
                continue
            # Written although the buffer is full, as the training waits for it.
            self._demand.awaited_window = window_number
            self._demand.changed.set()
            if (self._folder / FAILED).exists():
                raise DataError((self._folder / FAILED).read_text(encoding="utf-8"))
            if time.monotonic() - began > shown_seconds + 1:
                shown_seconds += 1
                name = corpus_name_for_errors(self.streamed.corpus)
                self._show_progress(f"waiting for the next samples of {name}, {shown_seconds} s")
            time.sleep(_POLL_SECONDS)

    def _register_window_of_sample_if_written(self, window_number: int, sample_place: int) -> bool:
        # Usually the next one. This rank may have needed no sample of several windows.
        paths = itertools.chain(
            [window_path(self._folder, window_number)], self._folder.glob("*.json")
        )
        for path in paths:
            window = read_window_record_or_none_if_damaged(path)
            if (
                window is None
                or not window.begin.first_sample <= sample_place < window.after.first_sample
            ):
                continue
            # One that is not intact is written again.
            if are_window_files_intact(path):
                bisect.insort(
                    self._windows, window, key=lambda known_window: known_window.begin.first_sample
                )
                return True
        return False

    def _window_permutation(self, window: Window) -> Permutation:
        seed = self.streamed.seed + _WINDOW_SEED_OFFSET
        return epoch_permutation(
            window.after.first_sample - window.begin.first_sample, seed, window.begin.window_number
        )

    def _samples_of_window(self, window: Window) -> Samples:
        window_number = window.begin.window_number
        tokens = map_file_as_array(window_path(self._folder, window_number, TOKENS), np.uint32)
        ends = map_file_as_array(window_path(self._folder, window_number, ENDS), np.int64)
        # A seed of its own, as all windows count their samples from 0.
        return self._make(Documents(tokens, ends), self.streamed.seed + ((window_number + 1) << 32))
