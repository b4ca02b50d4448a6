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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ortlaunch.base.errors import DamagedFile, InputError
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.run_folder.file_sums import file_difference_text_or_empty, flush_and_checksum_files
from ortlaunch.run_folder.folder import (
    is_temporary_file,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.worker.data.chats.rows import chats_of_rows_with_fraction_of_corpus_read
from ortlaunch.worker.data.corpus import non_empty_texts_of_rows_with_fraction_of_corpus_read
from ortlaunch.worker.data.file_rows import DataError, NoRows, Row, read_file_rows
from ortlaunch.worker.data.order import epoch_permutation
from ortlaunch.worker.data.token_cache import (
    Documents,
    chunks_of_limited_size,
    encode_chunks_reading_ahead,
)

TOKENS = ".u32"
ENDS = ".ends"
FAILED = "failed"
# Bytes of a token.
_BYTES = 4
# Windows that the buffer has at least: one is read, one waits, one is written, one is deleted.
LEAST_WINDOWS = 4
_POLL_SECONDS = 0.05
# Errors of a record that somebody has changed.
_DAMAGE_ERRORS = (DamagedFile, TypeError, KeyError, AttributeError)


class Position(NamedTuple):
    """The begin of a window in the endless sequence of files, epoch after epoch."""

    window_number: int = 0
    """Windows before it."""
    first_sample: int = 0
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


class ChatCounts(NamedTuple):
    """How whole chats become samples."""

    kept_indices: Callable[[Documents], Sequence[int]]
    """Chats -> those that have something to learn."""
    sample_count: Callable[[Documents], int]
    """Such chats -> the number of their samples, which several may share."""
    held_out: int = 0
    """The first chats of the first file, which are not trained on."""
    row_findings: Callable[[], Mapping[str, str]] = dict
    """Returns findings of the first chats for the audit, by name."""


class StreamedCorpus(NamedTuple):
    """A streamed corpus, and how it is cut into windows."""

    corpus: Corpus
    files: Sequence[str]
    encode: Callable[[list[Any]], Iterable[Sequence[int]]]
    """Texts or chats -> the token ids of each, with its marks."""
    length: int
    """Tokens of a sample."""
    shuffle: int
    """Samples of a window; of chats that are packed, the chats."""
    seed: int
    chats: ChatCounts | None = None
    """None: documents of text, which samples cut anywhere."""

    def file_of_turn(self, turn: int) -> str:
        """Return the file of a turn; the files of each epoch have an order of their own."""
        epoch, file_index = divmod(turn, len(self.files))
        order = epoch_permutation(len(self.files), self.seed, epoch)
        return self.files[int(order(np.array([file_index]))[0])]

    def first_document_at(self, position: Position) -> int:
        """Return the documents of a position's file before it, with those that are held out."""
        held_out = self.chats.held_out if self.chats else 0
        is_first_file = self.file_of_turn(position.turn) == self.files[0]
        return max(position.document, held_out if is_first_file else 0)


def window_path(folder: Path, window_number: int, ending: str = ".json") -> Path:
    """Return the path of a file of a window."""
    return folder / f"{window_number:09}{ending}"


def read_window_record_or_none_if_damaged(record_path: Path) -> Window | None:
    """Return the record of a window; None if it is absent."""
    try:
        record = read_json_or_raise_damaged(record_path)
        return Window(Position(*record["begin"]), Position(*record["after"]))
    except (FileNotFoundError, *_DAMAGE_ERRORS):
        return None


def are_window_files_intact(record_path: Path) -> bool:
    """Return whether the files of a window are as its record has them, after a power failure."""
    try:
        files = read_json_or_raise_damaged(record_path)["files"]
        return not any(
            file_difference_text_or_empty(record_path.with_name(name), file)
            for name, file in files.items()
        )
    # Another process may just delete the window.
    except (FileNotFoundError, *_DAMAGE_ERRORS):
        return False


@dataclass
class SampleDemand:
    """The samples that the training needs; it changes while the writer reads it."""

    present: int
    """The window whose samples are next."""
    required: int = 0
    """Samples before this one may be needed before the next step has ended."""
    awaited_window: int = -1
    """The last window that is waited for."""
    changed: threading.Event = field(default_factory=threading.Event)


class StreamWriter:
    """Writes the windows after a position, as far as the buffer has room, and deletes old ones."""

    def __init__(
        self,
        streamed: StreamedCorpus,
        folder: Path,
        buffer_bytes: int,
        begin: Position,
        demand: SampleDemand,
    ) -> None:
        """Start the thread.

        Args:
            streamed: the corpus.
            folder: the folder of the windows. One process writes there at a time.
            buffer_bytes: bytes of the windows from the present one on.
            begin: the first window.
            demand: what the training needs.
        """
        self.streamed = streamed
        self.folder = folder
        self.window_capacity = max(
            LEAST_WINDOWS, buffer_bytes // (streamed.shuffle * streamed.length * _BYTES)
        )
        self.begin = begin
        self.demand = demand
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._write_windows_or_failure_file_until_stopped,
            name="tokenize ahead",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. It may still wait for a server; nothing is written after that."""
        self._stopped.set()
        self.demand.changed.set()
        self._thread.join(timeout=2)

    def _write_windows_or_failure_file_until_stopped(self) -> None:
        try:
            with (self.folder / "lock").open("w") as file:
                self._await_lock_then_write_and_delete_windows(file)
        # Whatever ends this thread must end the ranks that wait for it.
        except Exception as error:
            text = str(error) if isinstance(error, InputError) else repr(error)
            # At the end of a process the folder may be gone.
            with contextlib.suppress(OSError):
                if not self._stopped.is_set():
                    write_text_atomically(self.folder / FAILED, text)

    def _await_lock_then_write_and_delete_windows(self, lock_file: IO[str]) -> None:
        """Write while this process has the lock; a host that shares the folder writes for all."""
        while not self._stopped.is_set():
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                self._stopped.wait(_POLL_SECONDS)
        # What a killed process left, and windows before the resumed one.
        for path in filter(is_temporary_file, self.folder.iterdir()):
            path.unlink(missing_ok=True)
        self._delete_windows_before(self.begin.window_number)
        position = self.begin
        source: Iterator[Window] | None = None
        while not self._stopped.is_set():
            self.demand.changed.clear()
            # In this order: what is deleted for the later `present` makes room for `required`.
            required = self.demand.required
            present = self.demand.present
            self._delete_windows_before(present - 1)
            path = window_path(self.folder, position.window_number)
            written_window = read_window_record_or_none_if_damaged(path)
            if written_window is not None and not are_window_files_intact(path):
                print(f"{path}: its tokens are not as they were written; written again", flush=True)
                path.unlink(missing_ok=True)
            elif written_window is not None:
                position = written_window.after
                source = None
            elif (
                position.window_number - (present - 1) >= self.window_capacity
                and position.window_number > self.demand.awaited_window
                and position.first_sample >= required
            ):
                # No room for the next window.
                self.demand.changed.wait()
            else:
                source = source or self._write_and_yield_windows(position)
                position = next(source).after

    def _delete_windows_before(self, window_number: int) -> None:
        # The record first: a window with a record is complete.
        for ending in (".json", TOKENS, ENDS):
            for path in self.folder.glob(f"*{ending}"):
                if path.name < f"{window_number:09}":
                    path.unlink()

    def _write_and_yield_windows(self, first_position: Position) -> Iterator[Window]:
        for window, documents in windows_and_documents_from(self.streamed, first_position):
            if self._stopped.is_set():
                return
            for ending, values in ((TOKENS, documents.tokens), (ENDS, documents.ends)):
                # Renamed when it is complete: another process may map an earlier one.
                partial = window_path(self.folder, window.begin.window_number, f"{ending}.partial")
                np.asarray(values).tofile(partial)
                partial.replace(window_path(self.folder, window.begin.window_number, ending))
            path = window_path(self.folder, window.begin.window_number)
            files = flush_and_checksum_files(
                self.folder, [path.with_suffix(end).name for end in (TOKENS, ENDS)]
            )
            write_json_atomically(path, {**window._asdict(), "files": files})
            yield window


def windows_and_documents_from(
    streamed: StreamedCorpus, first_position: Position
) -> Iterator[tuple[Window, Documents]]:
    """Yield the windows from a position on, each with its documents.

    Raises:
        DataError: a file cannot be read, or no file of an epoch has a sample.
    """
    empty_files = 0
    while True:
        pending = (
            _PendingChats(streamed, streamed.chats, first_position)
            if streamed.chats
            else _PendingTokens(streamed, first_position)
        )
        for ids, sizes in _token_ids_and_document_sizes_from(streamed, first_position):
            pending.append_documents(ids, sizes)
            yield from pending.take_windows(is_end_of_file=False)
        # The last window of a file has fewer samples.
        last_windows = [*pending.take_windows(is_end_of_file=True)]
        window_number, first_sample, turn = pending.position[:3]
        is_empty = not last_windows and (first_sample, 0, 0) == (
            first_position.first_sample,
            *first_position[3:],
        )
        empty_files = empty_files + 1 if is_empty else 0
        first_position = Position(window_number, first_sample, turn + 1)
        if empty_files == len(streamed.files):
            raise DataError(
                f"data.train: no file of {len(streamed.files):,} has the tokens of one sample "
                f"({streamed.length})"
            )
        for window, documents in last_windows:
            yield window._replace(after=first_position), documents


class _PendingTokens:
    """Tokens of one file that are in no window yet."""

    def __init__(self, streamed: StreamedCorpus, begin: Position) -> None:
        self.streamed = streamed
        self.position = begin
        self.ids: Any = np.empty(0, np.uint32)
        self.sizes: Any = np.empty(0, np.int64)
        # Tokens of the first document to drop.
        self.tokens_to_drop = begin.tokens

    def append_documents(self, token_ids: NDArray[np.uint32], sizes: list[int]) -> None:
        self.ids = np.concatenate([self.ids, token_ids[self.tokens_to_drop :]])
        self.sizes = np.concatenate([self.sizes, np.array(sizes, np.int64)])
        self.sizes[0] -= self.tokens_to_drop
        self.tokens_to_drop = 0

    def take_windows(self, is_end_of_file: bool) -> Iterator[tuple[Window, Documents]]:
        """Remove and yield the windows that are full; at the end of a file, its last samples, too.

        The last tokens of a file, fewer than a sample, are left out.
        """
        length = self.streamed.length
        while len(self.ids) >= self.streamed.shuffle * length:
            yield self._take_window(self.streamed.shuffle, length)
        if is_end_of_file and len(self.ids) >= length:
            yield self._take_window(len(self.ids) // length, length)

    def _take_window(self, sample_count: int, sample_length: int) -> tuple[Window, Documents]:
        token_count = sample_count * sample_length
        ends = np.cumsum(self.sizes)
        whole_documents = int(np.searchsorted(ends, token_count, side="right"))
        tokens_into_next = token_count - int(ends[whole_documents - 1] if whole_documents else 0)
        begin = self.position
        self.position = Position(
            begin.window_number + 1,
            begin.first_sample + sample_count,
            begin.turn,
            begin.document + whole_documents,
            tokens_into_next if whole_documents else begin.tokens + tokens_into_next,
        )
        tokens, self.ids = self.ids[:token_count], self.ids[token_count:]
        self.sizes = self.sizes[whole_documents:]
        if tokens_into_next:
            self.sizes[0] -= tokens_into_next
        return Window(begin, self.position), Documents(tokens, ends[:whole_documents])


class _PendingChats:
    """Chats of one file that are in no window yet; those without an answer are left out."""

    def __init__(self, streamed: StreamedCorpus, counts: ChatCounts, begin: Position) -> None:
        self.streamed = streamed
        self.count_functions = counts
        self.position = begin
        self.chats = list[NDArray[np.uint32]]()
        # The number of chats of the file up to each of these, with those that are left out.
        self.read_counts = list[int]()
        self.read_count = streamed.first_document_at(begin)
        self.left_out_count = 0

    def append_documents(self, token_ids: NDArray[np.uint32], sizes: list[int]) -> None:
        ends = np.cumsum(sizes)
        kept_indices = self.count_functions.kept_indices(Documents(token_ids, ends))
        for index in kept_indices:
            chat = token_ids[ends[index] - sizes[index] : ends[index]]
            self.chats.append(chat[: self.streamed.length])
            self.read_counts.append(self.read_count + index + 1)
        self.read_count += len(sizes)
        self.left_out_count += len(sizes) - len(kept_indices)

    def take_windows(self, is_end_of_file: bool) -> Iterator[tuple[Window, Documents]]:
        """Remove and yield the windows that are full; at the end of a file, its last chats, too."""
        if is_end_of_file and self.left_out_count:
            print(
                f"{self.streamed.file_of_turn(self.position.turn)}: {self.left_out_count:,} of "
                f"{self.read_count:,} chats have no answer within data.sequence_length "
                f"({self.streamed.length}), and are left out",
                flush=True,
            )
        while len(self.chats) >= (1 if is_end_of_file else self.streamed.shuffle):
            chats = self.chats[: self.streamed.shuffle]
            documents = Documents(np.concatenate(chats), np.cumsum([*map(len, chats)]))
            begin = self.position
            sample_count = self.count_functions.sample_count(documents)
            self.position = Position(
                begin.window_number + 1,
                begin.first_sample + sample_count,
                begin.turn,
                self.read_counts[len(chats) - 1],
            )
            del self.chats[: len(chats)], self.read_counts[: len(chats)]
            yield Window(begin, self.position), documents


def _token_ids_and_document_sizes_from(
    streamed: StreamedCorpus, first_position: Position
) -> Iterator[tuple[NDArray[np.uint32], list[int]]]:
    corpus = streamed.corpus
    rows = _rows_printing_if_none(corpus, streamed.file_of_turn(first_position.turn))
    texts_or_chats: Iterator[tuple[Any, float]] = (
        chats_of_rows_with_fraction_of_corpus_read(rows, corpus, set())
        if streamed.chats
        else non_empty_texts_of_rows_with_fraction_of_corpus_read(rows, corpus)
    )
    # Documents of earlier windows are read, and not tokenized again.
    first_document = streamed.first_document_at(first_position)
    unwritten = itertools.islice(texts_or_chats, first_document, None)
    for encoded_chunk in encode_chunks_reading_ahead(
        chunks_of_limited_size(unwritten), streamed.encode
    ):
        yield encoded_chunk.tokens, encoded_chunk.sizes


def _rows_printing_if_none(corpus: Corpus, source_path: str) -> Iterator[Row]:
    """Yield the rows of a file; report a file without rows.

    Its turn may come after days of training, which it must not end.
    """
    try:
        yield from read_file_rows(source_path, corpus.format, corpus.document)
    except NoRows as error:
        print(f"{error}: the stream continues with the next file", flush=True)
