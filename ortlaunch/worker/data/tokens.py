"""A corpus as one long row of token ids in a file that is mapped into memory, cached by content.

One process of all that share the cache folder writes, under a lock file: tokenizing may outlast any collective's
timeout. What it has written is noted every few seconds, and whoever is next after it was killed goes on from there.
`tokenizers` works on all cores by threads of its own, so that one process is as fast as many, and reads on meanwhile.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from ortlaunch.cache import cache_folder, renew
from ortlaunch.recipe.data import Corpus
from ortlaunch.run.folder import read_json, write_json
from ortlaunch.worker.data.corpus import documents_read, fingerprint

Tell = Callable[[str], None]
_DOCUMENTS_AT_ONCE, _LETTERS_AT_ONCE = 1000, 4_000_000
_SAVE_SECONDS = 5.0
_TELL_SECONDS = 0.5


def silent(text: str) -> None:
    """Tell nobody."""


class Chunk(NamedTuple):
    """Some documents, and which share of the corpus is read with them."""

    texts: list[str]
    share: float


class Written(NamedTuple):
    """How far an unfinished file has come."""

    documents: int = 0
    tokens: int = 0


def begin_of_text(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text, as Llama's <s>; its models have seen no text without."""
    whole, alone = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    starts = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
    begin: list[int] = whole[: next(starts, 0)]
    return begin


def tokenized(
    source: str | Corpus, tokenizer: Any, end_of_text: bool, begin: Sequence[int] = (), tell: Tell = silent
) -> np.ndarray[Any, Any]:
    """Token ids of a corpus, (tokens,) uint32 on disk; written by whoever comes first, the others wait."""
    end = [tokenizer.eos_token_id] if end_of_text and tokenizer.eos_token_id is not None else []
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
    )
    marks = f"{[*begin]} {end}" if begin else f"{end}"  # tokens cached before there were begin marks stay good
    key = hashlib.sha256(f"{fingerprint(source)} {marks} {vocabulary}".encode()).hexdigest()[:16]
    path = cache_folder("tokens") / f"{key}.u32"
    with _alone(path, tell):
        renew(path.with_suffix(".seal"), lambda: _write_tokens(path, source, tokenizer, (begin, end), tell))
    return np.memmap(path, dtype=np.uint32, mode="r") if path.stat().st_size else np.zeros(0, np.uint32)


def _alone(path: Path, tell: Tell) -> Any:
    """The lock of a file; who waits for it says so."""
    lock, seconds = FileLock(f"{path}.lock"), 0
    while True:
        try:
            return lock.acquire(timeout=1)
        except Timeout:
            seconds += 1
            tell(f"waiting for another process that tokenizes, {seconds} s")


def _write_tokens(
    path: Path, source: str | Corpus, tokenizer: Any, marks: tuple[Sequence[int], Sequence[int]], tell: Tell
) -> list[Path]:
    """Every document between its begin and end marks; the file."""
    partial, note = path.with_suffix(".partial"), path.with_suffix(".written.json")
    before = _written(partial, note)
    chunks = _chunks(itertools.islice(documents_read(source), before.documents, None))
    with partial.open("r+b" if before.documents else "wb") as file:
        file.truncate(before.tokens * 4)
        file.seek(0, os.SEEK_END)
        _write(file, note, before, _encoded(chunks, _encoder(tokenizer), marks), tell)
    partial.replace(path)
    note.unlink(missing_ok=True)
    return [path]


def _written(partial: Path, note: Path) -> Written:
    """What an earlier process has left of this file, if it can be gone on with."""
    if not (partial.exists() and note.exists()):
        return Written()
    found = Written(**read_json(note))
    return found if partial.stat().st_size >= found.tokens * 4 else Written()


def _write(
    file: BinaryIO, note: Path, done: Written, encoded: Iterable[tuple[np.ndarray[Any, Any], Chunk]], tell: Tell
) -> None:
    began, before, saved, told = time.monotonic(), done.tokens, time.monotonic(), 0.0
    for ids, chunk in encoded:
        ids.tofile(file)
        done, now = Written(done.documents + len(chunk.texts), done.tokens + len(ids)), time.monotonic()
        if now - saved >= _SAVE_SECONDS:
            file.flush()
            os.fsync(file.fileno())
            write_json(note, done._asdict())
            saved = now
        if now - told >= _TELL_SECONDS:
            rate = (done.tokens - before) / max(now - began, 1e-9)
            tell(f"tokenizing {chunk.share:4.0%}: {done.documents:,} documents, {done.tokens:,} tokens, {rate:,.0f}/s")
            told = now


def _encoded(
    chunks: Iterator[Chunk],
    encode: Callable[[list[str]], Iterable[Sequence[int]]],
    marks: tuple[Sequence[int], Sequence[int]],
) -> Iterator[tuple[np.ndarray[Any, Any], Chunk]]:
    """Token ids of each chunk; while one is tokenized the next is read."""
    begin, end = marks

    def ids_of(chunk: Chunk) -> np.ndarray[Any, Any]:
        rows = (itertools.chain(begin, ids, end) for ids in encode(chunk.texts))
        found: np.ndarray[Any, Any] = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.uint32)
        return found

    with ThreadPoolExecutor(1) as thread:
        first = next(chunks, None)
        waiting = first and (thread.submit(ids_of, first), first)
        while waiting:
            found, following = waiting, next(chunks, None)
            waiting = following and (thread.submit(ids_of, following), following)
            yield found[0].result(), found[1]


def _encoder(tokenizer: Any) -> Callable[[list[str]], Iterable[Sequence[int]]]:
    """Texts -> token ids without special ones; a copy, for the tokenizer's own may cut off or pad."""
    if not tokenizer.is_fast:
        options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return lambda texts: tokenizer(texts, **options)["input_ids"]
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: (found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False))


def _chunks(texts: Iterable[tuple[str, float]]) -> Iterator[Chunk]:
    """Bounded in documents and letters, so that memory is too."""
    taken, letters = list[str](), 0
    for text, share in texts:
        taken.append(text)
        letters += len(text)
        if len(taken) == _DOCUMENTS_AT_ONCE or letters >= _LETTERS_AT_ONCE:
            yield Chunk(taken, share)
            taken, letters = [], 0
    if taken:
        yield Chunk(taken, 1.0)
