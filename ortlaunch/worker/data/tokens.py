"""A corpus as one long row of token ids, cached by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ortlaunch.cache import cache_folder, renew
from ortlaunch.recipe.data import Corpus
from ortlaunch.worker.data.corpus import documents, fingerprint

_DOCUMENTS_AT_ONCE = 1000


def begin_of_text(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text, as Llama's <s>; its models have seen no text without."""
    whole, alone = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    starts = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
    begin: list[int] = whole[: next(starts, 0)]
    return begin


def tokenized(
    source: str | Corpus, tokenizer: Any, end_of_text: bool, begin: Sequence[int] = ()
) -> np.ndarray[Any, Any]:
    """Token ids of a corpus, (tokens,) uint32 on disk; written by whoever comes first on this machine."""
    end = [tokenizer.eos_token_id] if end_of_text and tokenizer.eos_token_id is not None else []
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
    )
    marks = f"{[*begin]} {end}" if begin else f"{end}"  # tokens cached before there were begin marks stay good
    key = hashlib.sha256(f"{fingerprint(source)} {marks} {vocabulary}".encode()).hexdigest()[:16]
    path = cache_folder("tokens") / f"{key}.u32"
    # A lock, not a barrier: tokenizing may outlast any collective's timeout.
    with FileLock(f"{path}.lock"):
        renew(path.with_suffix(".seal"), lambda: _write_tokens(path, source, tokenizer, (begin, end)))
    return np.memmap(path, dtype=np.uint32, mode="r") if path.stat().st_size else np.zeros(0, np.uint32)


def _write_tokens(
    path: Path, source: str | Corpus, tokenizer: Any, marks: tuple[Sequence[int], Sequence[int]]
) -> list[Path]:
    """Every document between its begin and end marks; the file."""
    begin, end = marks
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for texts in _chunks(documents(source)):
            for ids in tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]:
                np.asarray([*begin, *ids, *end], dtype=np.uint32).tofile(file)
    partial.replace(path)
    return [path]


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == _DOCUMENTS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
