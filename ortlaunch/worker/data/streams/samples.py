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

import numpy as np

from ortlaunch.worker.data.corpus import columns, corpus_name
from ortlaunch.worker.data.order import Permutation, permutation
from ortlaunch.worker.data.reading import DataError, blocks_hash, size_of
from ortlaunch.worker.data.samples import Sample, Samples
from ortlaunch.worker.data.shards import mapped
from ortlaunch.worker.data.streams.writer import (
    ENDS,
    FAILED,
    TOKENS,
    Demand,
    Position,
    Streamed,
    StreamWriter,
    Window,
    is_intact,
    path_of,
    read_window,
)
from ortlaunch.worker.data.token_cache import Documents, ShowProgress, silent

# The number of samples of an endless source, in mixtures, where indices of sources must differ.
ENDLESS = 1 << 39
_POLL_SECONDS = 0.02
# Windows whose tokens are mapped, and whose order is held, at once.
_OPEN = 4
# Sets the order of a window's samples apart from that of files.
_OF_WINDOWS = 1 << 31
MakeSamples = Callable[[Documents, int], Samples]


class StreamedSamples:
    """The samples of a streamed corpus, and their order."""

    def __init__(
        self,
        streamed: Streamed,
        make: MakeSamples,
        tokenizer: str,
        folder: Path,
        buffer: int,
        show_progress: ShowProgress = silent,
    ) -> None:
        """Prepare the stream; the first request for a sample starts the tokenizing.

        Args:
            streamed: the corpus, and how it is cut into windows.
            make: makes the samples of a window; the seed of their random values is the second
                argument.
            tokenizer: all that tokens depend on beside the corpus.
            folder: the folder of the windows, shared by all ranks.
            buffer: bytes of windows on the disk.
            show_progress: called with progress messages.
        """
        self.streamed = streamed
        self._make = make
        empty = make(Documents(np.empty(0, np.uint32), np.empty(0, np.int64)), 0)
        self.varies = getattr(empty, "varies", False)
        self._buffer = buffer
        self._show_progress = show_progress
        self._process = os.getpid()
        corpus = streamed.corpus
        # A bucket's file counts by its size: to read from it takes a request.
        sizes = [
            f"{path} {size_of(path) if '://' in path else blocks_hash(path)}"
            for path in streamed.files
        ]
        settings = f"{corpus.format} {corpus.document} {columns(corpus)} {streamed[3:]}"
        key = "\n".join([settings, tokenizer, *sizes])
        self.fingerprint = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._folder = folder / self.fingerprint
        self._folder.mkdir(parents=True, exist_ok=True)
        # Of an earlier start.
        (self._folder / FAILED).unlink(missing_ok=True)
        self._writer: StreamWriter | None = None
        self._reach = 0
        self._opened = functools.lru_cache(_OPEN)(self._open)
        self._order_of = functools.lru_cache(_OPEN)(self._permutation)
        self._begin_at(Position())

    def _begin_at(self, position: Position) -> None:
        self._begin = position
        self._windows: list[Window] = []
        # The last two places up to which samples were released.
        self._passed = (position.first, position.first)
        self._demand = Demand(position.number, position.first + self._reach)

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
        return round(self.position(self._passed[1]).turn / self.files, 4)

    def seek(self, begin: Sequence[int]) -> None:
        """Begin at the recorded position of a window; earlier samples cannot be requested."""
        position = Position(*begin)
        if (position, self._passed[1]) == (self._begin, position.first):
            return
        self.close()
        self._begin_at(position)

    def position(self, place: int) -> Position:
        """Return the position of the window that has this place, as far as windows are known."""
        at = self._number_of(place)
        if at < 0:
            return self._begin
        window = self._windows[at]
        return window.begin if place < window.after.first else window.after

    def passed(self, place: int, reach: int) -> list[Position]:
        """Release the samples before a place, and return its window's position in a list.

        Args:
            place: the samples before it have been trained on.
            reach: samples after it that may be needed before the next call.
        """
        # Another rank may be a step behind.
        self._passed = (self._passed[1], place)
        self._reach = reach
        self._demand.present = self.position(self._passed[0]).number
        self._demand.required = place + reach
        self._demand.changed.set()
        return [self.position(place)]

    def at(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return (sample, epoch) at each of these places; wait for their windows.

        A place before the first window, whose sample is unknown, has sample -1.
        """
        found = []
        for place in places:
            if place < self._begin.first:
                found.append((-1, 0))
                continue
            window = self._window(place)
            order = self._order_of(window)
            within = int(order(np.array([place - window.begin.first]))[0])
            found.append((window.begin.first + within, window.begin.turn // self.files))
        return found

    def first(self, count: int) -> list[int]:
        """Return the indices of up to `count` samples that are read first from here on."""
        window = self._window(self._passed[1])
        return [*range(window.begin.first, min(window.after.first, window.begin.first + count))]

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample of a window that is not deleted yet."""
        window = self._window(index)
        return self._opened(window).sample(index - window.begin.first, epoch)

    def close(self) -> None:
        """End the tokenizing."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._opened.cache_clear()

    def _number_of(self, place: int) -> int:
        """Return the index of the last known window that begins at or before a place, or -1."""
        return bisect.bisect_right(self._windows, place, key=lambda each: each.begin.first) - 1

    def _window(self, place: int) -> Window:
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
        shown = 0
        while True:
            at = self._number_of(place)
            if at >= 0 and place < self._windows[at].after.first:
                return self._windows[at]
            number = self._windows[at].begin.number + 1 if at >= 0 else self._begin.number
            if self._add(number, place):
                continue
            # Written although the buffer is full, as the training waits for it.
            self._demand.wanted = number
            self._demand.changed.set()
            if (self._folder / FAILED).exists():
                raise DataError((self._folder / FAILED).read_text(encoding="utf-8"))
            if time.monotonic() - began > shown + 1:
                shown += 1
                name = corpus_name(self.streamed.corpus)
                self._show_progress(f"waiting for the next samples of {name}, {shown} s")
            time.sleep(_POLL_SECONDS)

    def _add(self, number: int, place: int) -> bool:
        """Add the written window of a place to those known; return whether there is one."""
        # Usually the next one. This rank may have needed no sample of several windows.
        paths = itertools.chain([path_of(self._folder, number)], self._folder.glob("*.json"))
        for path in paths:
            found = read_window(path)
            if found is None or not found.begin.first <= place < found.after.first:
                continue
            # One that is not intact is written again.
            if is_intact(path):
                bisect.insort(self._windows, found, key=lambda each: each.begin.first)
                return True
        return False

    def _permutation(self, window: Window) -> Permutation:
        seed = self.streamed.seed + _OF_WINDOWS
        return permutation(window.after.first - window.begin.first, seed, window.begin.number)

    def _open(self, window: Window) -> Samples:
        number = window.begin.number
        tokens = mapped(path_of(self._folder, number, TOKENS), np.uint32)
        ends = mapped(path_of(self._folder, number, ENDS), np.int64)
        # A seed of its own, as all windows count their samples from 0.
        return self._make(Documents(tokens, ends), self.streamed.seed + ((number + 1) << 32))
