"""A tokenized corpus: one long sequence of token ids in shards, and the end of each document.

Both are files mapped into memory, cached by content. Of all processes that share the cache folder
one writes, under a lock file, because tokenizing may take longer than the timeout of any
collective. Its progress is saved every few seconds; if it is killed, the next process continues
from there. One process is as fast as many, as `tokenizers` uses all cores with its own threads;
the process reads the next documents meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from ortlaunch.cache import make_cache_folder, rebuild_if_changed
from ortlaunch.errors import DamagedFile
from ortlaunch.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.run_folder.folder import is_temporary_file, read_own_json, write_json_atomically
from ortlaunch.worker.data.corpus import documents_read, fingerprint
from ortlaunch.worker.data.shards import (
    SHARD,
    ShardWriter,
    Tokens,
    joined,
    mapped,
    shard_paths,
    wrong,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ShowProgress = Callable[[str], None]
# Limits of a chunk of documents, so that memory is bounded.
_DOCUMENTS_AT_ONCE = 1000
_LETTERS_AT_ONCE = 4_000_000
# Seconds between saves of the progress, and between progress messages.
_SAVE_SECONDS = 5.0
_SHOW_SECONDS = 0.5


def silent(text: str) -> None:
    """Ignore a progress message."""


class Documents(NamedTuple):
    """A tokenized corpus."""

    tokens: Tokens
    """(tokens,) uint32, document after document."""
    ends: NDArray[np.int64]
    """(documents,) int64: the end of each document in `tokens`; a document may have no tokens."""


class Work(NamedTuple):
    """Items to tokenize: texts, or other objects that have a length and that `encode` accepts."""

    key: str
    """The cache key: everything that the tokens depend on."""
    items: Callable[[], Iterable[tuple[Any, float]]]
    """Returns all items, each with the share (0 to 1) of the corpus that has been read after it."""
    encode: Callable[[list[Any]], Iterable[Sequence[int]]]
    """Items -> the token ids of each."""


class Chunk(NamedTuple):
    """Some documents, and the share (0 to 1) of the corpus that has been read after them."""

    items: list[Any]
    share: float


class Encoded(NamedTuple):
    """The tokens of a chunk, document after document, and the number of tokens of each."""

    tokens: NDArray[np.uint32]
    sizes: list[int]
    chunk: Chunk


class Written(NamedTuple):
    """The progress of unfinished files: documents and tokens written."""

    documents: int = 0
    tokens: int = 0


def begin_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, for example Llama's <s>."""
    # The tokenizer's models have seen no text without them.
    whole, alone = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    starts = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
    begin: list[int] = whole[: next(starts, 0)]
    return begin


def tokenized_documents(
    source: str | Corpus,
    tokenizer: PreTrainedTokenizerBase,
    end_of_text: bool,
    begin: Sequence[int] = (),
    show_progress: ShowProgress = silent,
) -> Documents:
    """Return the token ids of a corpus, with the ends of its documents.

    Args:
        source: the corpus.
        tokenizer: the tokenizer.
        end_of_text: whether the tokenizer's end mark follows each document.
        begin: tokens before each document.
        show_progress: called with progress messages.
    """
    settings, encode = marked(tokenizer, end_of_text, begin)
    key = f"texts with ends {fingerprint(source)} {settings}"
    return stored(Work(key, lambda: documents_read(source), encode), show_progress)


def marked(
    tokenizer: PreTrainedTokenizerBase, end_of_text: bool, begin: Sequence[int]
) -> tuple[str, Callable[[list[str]], Iterable[Sequence[int]]]]:
    """Return the function from texts to tokens with marks, and a text that determines it."""
    end = [tokenizer.eos_token_id] if end_of_text and tokenizer.eos_token_id is not None else []
    encode = _encoder(tokenizer)

    def between_marks(texts: list[str]) -> Iterator[list[int]]:
        return ([*begin, *ids, *end] for ids in encode(texts))

    return f"{[*begin]} {end} {vocabulary_of(tokenizer)}", between_marks


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that determines how the tokenizer splits texts, for a cache key."""
    return (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else str(sorted(tokenizer.get_vocab().items()))
    )


def stored(work: Work, show_progress: ShowProgress = silent) -> Documents:
    """Return the tokens from the cache; the first process writes them, the others wait."""
    base = (
        make_cache_folder("tokens")
        / hashlib.sha256(f"{SHARD} {work.key}".encode()).hexdigest()[:16]
    )
    with _alone(base, show_progress):
        rebuild_if_changed(
            base.with_suffix(".seal"), lambda: _write_tokens(base, work, show_progress)
        )
        # Removed only after the seal, as sealing may be interrupted too.
        base.with_suffix(".written").unlink(missing_ok=True)
    return Documents(joined(base), mapped(base.with_suffix(".ends"), np.int64))


def _alone(base: Path, show_progress: ShowProgress) -> contextlib.AbstractContextManager[object]:
    """Acquire the lock of a corpus; report the waiting time each second."""
    lock = FileLock(base.with_suffix(".lock"))
    seconds = 0
    while True:
        try:
            return lock.acquire(timeout=1)
        except Timeout:
            seconds += 1
            show_progress(f"waiting for another process that tokenizes, {seconds} s")


def _write_tokens(base: Path, work: Work, show_progress: ShowProgress) -> list[Path]:
    """Write all documents that are not written yet; return the files."""
    ends = base.with_suffix(".ends")
    note = base.with_suffix(".written")
    # A process killed while it wrote a note or a seal left a temporary file. This process has the
    # lock, so no other one is writing them.
    for left in filter(is_temporary_file, base.parent.glob(f".{base.name}.*")):
        left.unlink()
    before = _written(base, ends, note)
    unwritten = chunks(itertools.islice(work.items(), before.documents, None))
    # A new file is made, as another process may have mapped the earlier one.
    if not before.documents:
        ends.unlink(missing_ok=True)
    with contextlib.closing(ShardWriter(base, before.tokens)) as tokens, ends.open("ab") as after:
        # 8 bytes (int64) for each document; ends written after the last save are dropped.
        after.truncate(before.documents * 8)
        _write(tokens, after, note, before, encoded(unwritten, work.encode), show_progress)
    return [*shard_paths(base), ends]


def _written(base: Path, ends: Path, note: Path) -> Written:
    """Return the progress of an interrupted process, or none if its files cannot be continued."""
    if not all(path.exists() for path in (ends, note)):
        return Written()
    try:
        found = Written(**read_own_json(note))
    except (DamagedFile, TypeError):
        return Written()
    whole = ends.stat().st_size >= found.documents * 8 and not wrong(base, found.tokens)
    return found if whole else Written()


def _write(
    tokens: ShardWriter,
    after: IO[bytes],
    note: Path,
    done: Written,
    encoded: Iterable[Encoded],
    show_progress: ShowProgress,
) -> None:
    began = time.monotonic()
    before = done.tokens
    saved = time.monotonic()
    shown = 0.0
    for ids, sizes, chunk in encoded:
        tokens.write(ids)
        after.write((done.tokens + np.cumsum(sizes, dtype=np.int64)).data)
        done = Written(done.documents + len(chunk.items), done.tokens + len(ids))
        now = time.monotonic()
        if now - saved >= _SAVE_SECONDS:
            _save(tokens, after, note, done)
            saved = now
        if now - shown >= _SHOW_SECONDS:
            rate = (done.tokens - before) / max(now - began, 1e-9)
            show_progress(
                f"tokenizing {chunk.share:4.0%}: {done.documents:,} documents, "
                f"{done.tokens:,} tokens, {rate:,.0f}/s"
            )
            shown = now
    _save(tokens, after, note, done)


def _save(tokens: ShardWriter, after: IO[bytes], note: Path, done: Written) -> None:
    """Save the progress, from which another process can continue."""
    # The note comes last: it must not count data that is not on the disk.
    tokens.sync()
    after.flush()
    os.fsync(after.fileno())
    write_json_atomically(note, done._asdict())


def encoded(
    chunks: Iterator[Chunk], encode: Callable[[list[Any]], Iterable[Sequence[int]]]
) -> Iterator[Encoded]:
    """Yield the token ids of each chunk; the next chunk is read while one is tokenized."""

    def ids_of(chunk: Chunk) -> Encoded:
        sizes: list[int] = []

        def counted() -> Iterator[Sequence[int]]:
            for ids in encode(chunk.items):
                sizes.append(len(ids))
                yield ids

        found = np.fromiter(itertools.chain.from_iterable(counted()), dtype=np.uint32)
        return Encoded(found, sizes, chunk)

    with ThreadPoolExecutor(1) as thread:
        first = next(chunks, None)
        waiting = thread.submit(ids_of, first) if first else None
        while waiting:
            found = waiting
            following = next(chunks, None)
            waiting = thread.submit(ids_of, following) if following else None
            yield found.result()


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Iterable[Sequence[int]]]:
    """Return the function from texts to token ids without special tokens."""
    if not tokenizer.is_fast:
        options: Json = {
            "add_special_tokens": False,
            "return_attention_mask": False,
            "verbose": False,
        }
        return lambda texts: tokenizer(texts, **options)["input_ids"]
    backend = plain_backend(tokenizer)
    return lambda texts: (
        found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)
    )


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a copy of a fast tokenizer's backend that neither truncates nor pads."""
    # Of a copy, as the tokenizer keeps the settings of its last call.
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def chunks(items: Iterable[tuple[Any, float]]) -> Iterator[Chunk]:
    """Yield chunks that are bounded in documents and characters, which bounds memory."""
    taken = list[object]()
    letters = 0
    for item, share in items:
        taken.append(item)
        letters += len(item)
        if len(taken) == _DOCUMENTS_AT_ONCE or letters >= _LETTERS_AT_ONCE:
            yield Chunk(taken, share)
            taken = []
            letters = 0
    if taken:
        yield Chunk(taken, 1.0)
