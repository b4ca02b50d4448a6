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

from ortlaunch.base.cache import (
    create_private_cache_folder_or_refuse,
    write_files_and_checksums_unless_they_match,
)
from ortlaunch.base.errors import DamagedFile
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.run_folder.folder import (
    is_temporary_file,
    read_json_or_raise_damaged,
    write_json_atomically,
)
from ortlaunch.worker.data.corpus import corpus_fingerprint, read_texts_with_fraction_of_corpus_read
from ortlaunch.worker.data.shards import (
    SHARD,
    ShardWriter,
    Tokens,
    map_file_as_array,
    map_shards_as_one_sequence,
    shard_damage_or_empty,
    sorted_shard_paths,
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


def ignore_progress(text: str) -> None:
    """Ignore a progress message."""


class Documents(NamedTuple):
    """A tokenized corpus."""

    tokens: Tokens
    """(tokens,) uint32, document after document."""
    ends: NDArray[np.int64]
    """(documents,) int64: the end of each document in `tokens`; a document may have no tokens."""


def token_range_of_document(ends: NDArray[np.int64], document_index: int) -> range:
    """Return the positions of a document's tokens; `ends` as in `Documents`."""
    return range(int(ends[document_index - 1]) if document_index else 0, int(ends[document_index]))


class TokenizeWork(NamedTuple):
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


class EncodedChunk(NamedTuple):
    """The tokens of a chunk, document after document, and the number of tokens of each."""

    tokens: NDArray[np.uint32]
    sizes: list[int]
    chunk: Chunk


class WriteProgress(NamedTuple):
    """The progress of unfinished files: documents and tokens written."""

    documents: int = 0
    tokens: int = 0


def begin_token_ids_added_to_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, for example Llama's <s>."""
    # The tokenizer's models have seen no text without them.
    ids_with_begin, plain_ids = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    starts = (
        start
        for start in range(len(ids_with_begin))
        if ids_with_begin[start : start + len(plain_ids)] == plain_ids
    )
    begin: list[int] = ids_with_begin[: next(starts, 0)]
    return begin


def load_or_tokenize_documents(
    source: str | Corpus,
    tokenizer: PreTrainedTokenizerBase,
    adds_end_mark: bool,
    begin_token_ids: Sequence[int] = (),
    show_progress: ShowProgress = ignore_progress,
) -> Documents:
    """Return the token ids of a corpus, with the ends of its documents.

    Args:
        source: the corpus.
        tokenizer: the tokenizer.
        adds_end_mark: whether the tokenizer's end mark follows each document.
        begin_token_ids: tokens before each document.
        show_progress: called with progress messages.
    """
    settings, encode = cache_key_text_and_encoder_with_marks(
        tokenizer, adds_end_mark, begin_token_ids
    )
    key = f"texts with ends {corpus_fingerprint(source)} {settings}"
    return load_or_write_cached_tokens(
        TokenizeWork(key, lambda: read_texts_with_fraction_of_corpus_read(source), encode),
        show_progress,
    )


def cache_key_text_and_encoder_with_marks(
    tokenizer: PreTrainedTokenizerBase, adds_end_mark: bool, begin_token_ids: Sequence[int]
) -> tuple[str, Callable[[list[str]], Iterable[Sequence[int]]]]:
    """Return the function from texts to tokens with marks, and a text that determines it."""
    end_ids = (
        [tokenizer.eos_token_id] if adds_end_mark and tokenizer.eos_token_id is not None else []
    )
    encode = _encoder_without_special_tokens(tokenizer)

    def encode_with_marks(texts: list[str]) -> Iterator[list[int]]:
        return ([*begin_token_ids, *ids, *end_ids] for ids in encode(texts))

    return (
        f"{[*begin_token_ids]} {end_ids} {tokenizer_text_for_cache_key(tokenizer)}",
        encode_with_marks,
    )


def tokenizer_text_for_cache_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that determines how the tokenizer splits texts, for a cache key."""
    return (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else str(sorted(tokenizer.get_vocab().items()))
    )


def load_or_write_cached_tokens(
    tokenize_work: TokenizeWork, show_progress: ShowProgress = ignore_progress
) -> Documents:
    """Return the tokens from the cache; the first process writes them, the others wait."""
    base = (
        create_private_cache_folder_or_refuse("tokens")
        / hashlib.sha256(f"{SHARD} {tokenize_work.key}".encode()).hexdigest()[:16]
    )
    with _acquire_corpus_lock_showing_wait(base, show_progress):
        write_files_and_checksums_unless_they_match(
            base.with_suffix(".seal"),
            lambda: _write_missing_tokens_and_list_files(base, tokenize_work, show_progress),
        )
        # Removed only after the seal, as sealing may be interrupted too.
        base.with_suffix(".written").unlink(missing_ok=True)
    return Documents(
        map_shards_as_one_sequence(base), map_file_as_array(base.with_suffix(".ends"), np.int64)
    )


def _acquire_corpus_lock_showing_wait(
    base_path: Path, show_progress: ShowProgress
) -> contextlib.AbstractContextManager[object]:
    lock = FileLock(base_path.with_suffix(".lock"))
    seconds = 0
    while True:
        try:
            return lock.acquire(timeout=1)
        except Timeout:
            seconds += 1
            show_progress(f"waiting for another process that tokenizes, {seconds} s")


def _write_missing_tokens_and_list_files(
    base_path: Path, work: TokenizeWork, show_progress: ShowProgress
) -> list[Path]:
    ends_path = base_path.with_suffix(".ends")
    progress_path = base_path.with_suffix(".written")
    # A process killed while it wrote a note or a seal left a temporary file. This process has the
    # lock, so no other one is writing them.
    for temporary_file in filter(is_temporary_file, base_path.parent.glob(f".{base_path.name}.*")):
        temporary_file.unlink()
    earlier_progress = _intact_progress_to_continue_or_zero(base_path, ends_path, progress_path)
    unwritten = chunks_of_limited_size(
        itertools.islice(work.items(), earlier_progress.documents, None)
    )
    # A new file is made, as another process may have mapped the earlier one.
    if not earlier_progress.documents:
        ends_path.unlink(missing_ok=True)
    with (
        contextlib.closing(ShardWriter(base_path, earlier_progress.tokens)) as tokens,
        ends_path.open("ab") as ends_file,
    ):
        # 8 bytes (int64) for each document; ends written after the last save are dropped.
        ends_file.truncate(earlier_progress.documents * 8)
        _append_chunks_and_save_progress(
            tokens,
            ends_file,
            progress_path,
            earlier_progress,
            encode_chunks_reading_ahead(unwritten, work.encode),
            show_progress,
        )
    return [*sorted_shard_paths(base_path), ends_path]


def _intact_progress_to_continue_or_zero(
    base_path: Path, ends_path: Path, progress_path: Path
) -> WriteProgress:
    """Return the progress of an interrupted process, or none if its files cannot be continued."""
    if not all(path.exists() for path in (ends_path, progress_path)):
        return WriteProgress()
    try:
        progress = WriteProgress(**read_json_or_raise_damaged(progress_path))
    except (DamagedFile, TypeError):
        return WriteProgress()
    is_whole = ends_path.stat().st_size >= progress.documents * 8 and not shard_damage_or_empty(
        base_path, progress.tokens
    )
    return progress if is_whole else WriteProgress()


def _append_chunks_and_save_progress(
    shard_writer: ShardWriter,
    ends_file: IO[bytes],
    progress_path: Path,
    progress: WriteProgress,
    encoded_chunks: Iterable[EncodedChunk],
    show_progress: ShowProgress,
) -> None:
    began = time.monotonic()
    tokens_before = progress.tokens
    saved_at = time.monotonic()
    shown_at = 0.0
    for ids, sizes, chunk in encoded_chunks:
        shard_writer.append_tokens_and_checksum_full_shards(ids)
        ends_file.write((progress.tokens + np.cumsum(sizes, dtype=np.int64)).data)
        progress = WriteProgress(progress.documents + len(chunk.items), progress.tokens + len(ids))
        current_time = time.monotonic()
        if current_time - saved_at >= _SAVE_SECONDS:
            _flush_and_save_progress(shard_writer, ends_file, progress_path, progress)
            saved_at = current_time
        if current_time - shown_at >= _SHOW_SECONDS:
            rate = (progress.tokens - tokens_before) / max(current_time - began, 1e-9)
            show_progress(
                f"tokenizing {chunk.share:4.0%}: {progress.documents:,} documents, "
                f"{progress.tokens:,} tokens, {rate:,.0f}/s"
            )
            shown_at = current_time
    _flush_and_save_progress(shard_writer, ends_file, progress_path, progress)


def _flush_and_save_progress(
    shard_writer: ShardWriter, ends_file: IO[bytes], progress_path: Path, progress: WriteProgress
) -> None:
    """Save the progress, from which another process can continue."""
    # The note comes last: it must not count data that is not on the disk.
    shard_writer.flush_to_disk()
    ends_file.flush()
    os.fsync(ends_file.fileno())
    write_json_atomically(progress_path, progress._asdict())


def encode_chunks_reading_ahead(
    chunks: Iterator[Chunk], encode: Callable[[list[Any]], Iterable[Sequence[int]]]
) -> Iterator[EncodedChunk]:
    """Yield the token ids of each chunk; the next chunk is read while one is tokenized."""

    def encode_chunk(chunk: Chunk) -> EncodedChunk:
        sizes: list[int] = []

        def encode_and_count() -> Iterator[Sequence[int]]:
            for ids in encode(chunk.items):
                sizes.append(len(ids))
                yield ids

        token_ids = np.fromiter(itertools.chain.from_iterable(encode_and_count()), dtype=np.uint32)
        return EncodedChunk(token_ids, sizes, chunk)

    with ThreadPoolExecutor(1) as thread:
        first_chunk = next(chunks, None)
        pending = thread.submit(encode_chunk, first_chunk) if first_chunk else None
        while pending:
            finished = pending
            following = next(chunks, None)
            pending = thread.submit(encode_chunk, following) if following else None
            yield finished.result()


def _encoder_without_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[list[str]], Iterable[Sequence[int]]]:
    if not tokenizer.is_fast:
        options = {
            "add_special_tokens": False,
            "return_attention_mask": False,
            "verbose": False,
        }
        return lambda texts: tokenizer(texts, **options)["input_ids"]
    backend = backend_without_truncation_or_padding(tokenizer)
    return lambda texts: (
        encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)
    )


def backend_without_truncation_or_padding(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a copy of a fast tokenizer's backend that neither truncates nor pads."""
    # Of a copy, as the tokenizer keeps the settings of its last call.
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def chunks_of_limited_size(
    items_and_fractions_read: Iterable[tuple[Any, float]],
) -> Iterator[Chunk]:
    """Yield chunks that are bounded in documents and characters, which bounds memory."""
    chunk_items = list[object]()
    characters = 0
    for item, share in items_and_fractions_read:
        chunk_items.append(item)
        characters += len(item)
        if len(chunk_items) == _DOCUMENTS_AT_ONCE or characters >= _LETTERS_AT_ONCE:
            yield Chunk(chunk_items, share)
            chunk_items = []
            characters = 0
    if chunk_items:
        yield Chunk(chunk_items, 1.0)
