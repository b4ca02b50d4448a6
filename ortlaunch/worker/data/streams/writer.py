"""Windows of a streamed corpus: files of tokens that a thread writes ahead of the training.

A window has so many samples (`stream.shuffle`), of consecutive documents of one file; the last one
of a file has fewer. Each window records where it begins and where the next one does, so that any of
them can be the first one of a resumed run. The windows are a function of the files and the seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ortlaunch.errors import DamagedFile, InputError
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.run_folder.file_sums import difference_from_record, flush_and_checksum_files
from ortlaunch.run_folder.folder import (
    is_temporary_file,
    read_own_json,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.worker.data.corpus import texts_of
from ortlaunch.worker.data.order import permutation
from ortlaunch.worker.data.reading import DataError, NoRows, Row, read_file
from ortlaunch.worker.data.token_cache import chunks, encoded

TOKENS = ".u32"
ENDS = ".ends"
FAILED = "failed"
# Bytes of a token.
_BYTES = 4
# Windows that the buffer has at least: one is read, one waits, one is written, one is deleted.
LEAST_WINDOWS = 4
_POLL_SECONDS = 0.05
# Errors of a record that somebody has changed.
_DAMAGED = (DamagedFile, TypeError, KeyError, AttributeError)


class Position(NamedTuple):
    """The begin of a window in the endless sequence of files, epoch after epoch."""

    number: int = 0
    """Windows before it."""
    first: int = 0
    """Samples before it."""
    turn: int = 0
    """Files before it."""
    document: int = 0
    """Documents of its file before it."""
    tokens: int = 0
    """Tokens of its first document that belong to earlier windows."""


class Window(NamedTuple):
    """The record of a window whose files are complete."""

    begin: Position
    after: Position
    """The begin of the next window."""


class Streamed(NamedTuple):
    """A streamed corpus, and how it is cut into windows."""

    corpus: Corpus
    files: Sequence[str]
    encode: Callable[[list[str]], Iterable[Sequence[int]]]
    """Texts -> the token ids of each document, with its marks."""
    length: int
    """Tokens of a sample."""
    shuffle: int
    """Samples of a window."""
    seed: int

    def file(self, turn: int) -> str:
        """Return the file of a turn; the files of each epoch have an order of their own."""
        epoch, place = divmod(turn, len(self.files))
        order = permutation(len(self.files), self.seed, epoch)
        return self.files[int(order(np.array([place]))[0])]


def path_of(folder: Path, number: int, ending: str = ".json") -> Path:
    """Return the path of a file of a window."""
    return folder / f"{number:09}{ending}"


def read_window(path: Path) -> Window | None:
    """Return the record of a window; None if it is absent."""
    try:
        found = read_own_json(path)
        return Window(Position(*found["begin"]), Position(*found["after"]))
    except (FileNotFoundError, *_DAMAGED):
        return None


def is_intact(path: Path) -> bool:
    """Return whether the files of a window are as its record has them, after a power failure."""
    try:
        files = read_own_json(path)["files"]
        return not any(
            difference_from_record(path.with_name(name), file) for name, file in files.items()
        )
    # Another process may just delete the window.
    except (FileNotFoundError, *_DAMAGED):
        return False


@dataclass
class Demand:
    """The samples that the training needs; it changes while the writer reads it."""

    present: int
    """The window whose samples are next."""
    required: int = 0
    """Samples before this one may be needed before the next step has ended."""
    wanted: int = -1
    """The last window that is waited for."""
    changed: threading.Event = field(default_factory=threading.Event)


class StreamWriter:
    """Writes the windows after a position, as far as the buffer has room, and deletes old ones."""

    def __init__(
        self, streamed: Streamed, folder: Path, buffer: int, begin: Position, demand: Demand
    ) -> None:
        """Start the thread.

        Args:
            streamed: the corpus.
            folder: the folder of the windows. One process writes there at a time.
            buffer: bytes of the windows from the present one on.
            begin: the first window.
            demand: what the training needs.
        """
        self.streamed = streamed
        self.folder = folder
        self.windows = max(LEAST_WINDOWS, buffer // (streamed.shuffle * streamed.length * _BYTES))
        self.begin = begin
        self.demand = demand
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenize ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. It may still wait for a server; nothing is written after that."""
        self._stopped.set()
        self.demand.changed.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        try:
            with (self.folder / "lock").open("w") as file:
                self._locked(file)
        # Whatever ends this thread must end the ranks that wait for it.
        except Exception as error:
            text = str(error) if isinstance(error, InputError) else repr(error)
            # At the end of a process the folder may be gone.
            with contextlib.suppress(OSError):
                write_text_atomically(
                    self.folder / FAILED, text
                ) if not self._stopped.is_set() else None

    def _locked(self, file: IO[str]) -> None:
        """Write while this process has the lock; a host that shares the folder writes for all."""
        while not self._stopped.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                self._stopped.wait(_POLL_SECONDS)
        # What a killed process left, and windows before the resumed one.
        for path in filter(is_temporary_file, self.folder.iterdir()):
            path.unlink(missing_ok=True)
        self._delete(self.begin.number)
        position = self.begin
        source: Iterator[Window] | None = None
        while not self._stopped.is_set():
            self.demand.changed.clear()
            # In this order: what is deleted for the later `present` makes room for `required`.
            required = self.demand.required
            present = self.demand.present
            self._delete(present - 1)
            path = path_of(self.folder, position.number)
            known = read_window(path)
            if known is not None and not is_intact(path):
                print(f"{path}: its tokens are not as they were written; written again", flush=True)
                path.unlink(missing_ok=True)
            elif known is not None:
                position = known.after
                source = None
            elif self._is_full(position, present, required):
                self.demand.changed.wait()
            else:
                source = source or self._written(position)
                position = next(source).after

    def _is_full(self, next_one: Position, present: int, required: int) -> bool:
        return (
            next_one.number - (present - 1) >= self.windows
            and next_one.number > self.demand.wanted
            and next_one.first >= required
        )

    def _delete(self, until: int) -> None:
        """Delete the windows before this one."""
        # The record first: a window with a record is complete.
        for ending in (".json", TOKENS, ENDS):
            for path in self.folder.glob(f"*{ending}"):
                if path.name < f"{until:09}":
                    path.unlink()

    def _written(self, begin: Position) -> Iterator[Window]:
        for window, tokens, ends in windows(self.streamed, begin):
            if self._stopped.is_set():
                return
            for ending, values in ((TOKENS, tokens), (ENDS, ends)):
                # Renamed when it is complete: another process may map an earlier one.
                partial = path_of(self.folder, window.begin.number, f"{ending}.partial")
                values.tofile(partial)
                partial.replace(path_of(self.folder, window.begin.number, ending))
            path = path_of(self.folder, window.begin.number)
            files = flush_and_checksum_files(
                self.folder, [path.with_suffix(end).name for end in (TOKENS, ENDS)]
            )
            write_json_atomically(path, {**window._asdict(), "files": files})
            yield window


def windows(
    streamed: Streamed, begin: Position
) -> Iterator[tuple[Window, NDArray[np.uint32], NDArray[np.int64]]]:
    """Yield the windows from a position on, each with its tokens and the ends of its documents.

    Raises:
        DataError: a file cannot be read, or no file of an epoch has a sample.
    """
    full = streamed.shuffle * streamed.length
    empty = 0
    while True:
        held = _Held(begin)
        for ids, sizes in _documents(streamed, begin):
            held.add(ids, sizes)
            while len(held.ids) >= full:
                yield held.window(streamed.shuffle, streamed.length)
        # The last tokens of a file, fewer than a sample, are left out.
        rest = len(held.ids) // streamed.length
        number, first, turn = held.at[:3]
        is_empty = not rest and (first, 0, 0) == (begin.first, *begin[3:])
        empty = empty + 1 if is_empty else 0
        begin = Position(number + bool(rest), first + rest, turn + 1)
        if empty == len(streamed.files):
            raise DataError(
                f"data.train: no file of {len(streamed.files):,} has the tokens of one sample "
                f"({streamed.length})"
            )
        if rest:
            window, tokens, ends = held.window(rest, streamed.length)
            yield window._replace(after=begin), tokens, ends


class _Held:
    """Tokens of one file that are in no window yet."""

    def __init__(self, begin: Position) -> None:
        self.at = begin
        self.ids: Any = np.empty(0, np.uint32)
        self.sizes: Any = np.empty(0, np.int64)
        # Tokens of the first document to drop.
        self.drop = begin.tokens

    def add(self, ids: NDArray[np.uint32], sizes: list[int]) -> None:
        self.ids = np.concatenate([self.ids, ids[self.drop :]])
        self.sizes = np.concatenate([self.sizes, np.array(sizes, np.int64)])
        self.sizes[0] -= self.drop
        self.drop = 0

    def window(self, samples: int, length: int) -> tuple[Window, Any, Any]:
        """Remove the tokens of a window, and return it."""
        count = samples * length
        ends = np.cumsum(self.sizes)
        whole = int(np.searchsorted(ends, count, side="right"))
        into = count - int(ends[whole - 1] if whole else 0)
        begin = self.at
        self.at = Position(
            begin.number + 1,
            begin.first + samples,
            begin.turn,
            begin.document + whole,
            into if whole else begin.tokens + into,
        )
        tokens, self.ids = self.ids[:count], self.ids[count:]
        self.sizes = self.sizes[whole:]
        if into:
            self.sizes[0] -= into
        return Window(begin, self.at), tokens, ends[:whole]


def _documents(
    streamed: Streamed, begin: Position
) -> Iterator[tuple[NDArray[np.uint32], list[int]]]:
    """Yield the tokens of the documents from a position on, and the number of each one's."""
    corpus = streamed.corpus
    rows = _rows(corpus, streamed.file(begin.turn))
    # Documents of earlier windows are read, and not tokenized again.
    texts = itertools.islice(texts_of(rows, corpus), begin.document, None)
    for found in encoded(chunks(texts), streamed.encode):
        yield found.tokens, found.sizes


def _rows(corpus: Corpus, file: str) -> Iterator[Row]:
    """Yield the rows of a file; report a file without rows.

    Its turn may come after days of training, which it must not end.
    """
    try:
        yield from read_file(file, corpus.format, corpus.document)
    except NoRows as error:
        print(f"{error}: the stream continues with the next file", flush=True)
