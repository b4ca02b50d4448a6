"""Tokenizing a corpus: the tokenizer's own ids, continued after a kill, in bounded memory."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortlaunch.base import cache
from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.run_folder.folder import is_temporary_file
from ortlaunch.worker.data import shards
from ortlaunch.worker.data import token_cache as tokens
from tests.worker.data.test_corpus import Letters

TEXTS = [f"text {number} of many\n" for number in range(40)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Return a corpus of 40 paragraphs; 4 make a chunk, and the progress is saved after each."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "_DOCUMENTS_AT_ONCE", 4)
    monkeypatch.setattr(tokens, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tokens, "_SHOW_SECONDS", 0.0)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    return Corpus(format="text", path=(str(tmp_path / "a.txt"),))


class Counting(Letters):
    """A tokenizer that records its texts, and kills its own process at a text with `deadly`."""

    def __init__(self, deadly: str = "") -> None:
        super().__init__()
        self.deadly = deadly
        self.seen = list[str]()

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        self.seen += texts
        if any(self.deadly and self.deadly in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(texts, **options)


class Bytes(Letters):
    """A tokenizer of bytes, which is faster."""

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}


def test_a_killed_process_is_gone_on_from(source: Corpus) -> None:
    """After SIGKILL, the next process tokenizes the rest, with the same result."""
    killed = multiprocessing.get_context("fork").Process(
        target=tokens.load_or_tokenize_documents, args=(source, Counting("text 25"), True)
    )
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    second = Counting()
    told = list[str]()
    found = (
        tokens.load_or_tokenize_documents(source, second, True, show_progress=told.append)
        .tokens[:]
        .tolist()
    )
    assert bytes(found).decode() == "\7".join(text.removesuffix("\n") for text in TEXTS) + "\n\7"
    # At most two chunks before the kill were not saved yet.
    assert 16 <= len(second.seen) <= 24
    assert told[-1].startswith("tokenizing 100%: 40 documents, ")
    cache = Path(os.environ["ORTLAUNCH_CACHE"]) / "tokens"
    # The record of the progress is removed at the end.
    assert sorted(path.suffix for path in cache.iterdir()) == [".ends", ".lock", ".seal", ".u32"]
    ends = tokens.load_or_tokenize_documents(source, Counting(), True).ends
    assert [found[end - 1] for end in ends] == [7] * 40


def test_what_a_kill_left_is_not_trusted_beyond_its_note(source: Corpus) -> None:
    """Bytes after the saved progress are dropped; a file that is too short is made again."""
    whole = tokens.load_or_tokenize_documents(source, Letters(), True).tokens[:].tolist()
    (record,) = (Path(os.environ["ORTLAUNCH_CACHE"]) / "tokens").glob("*.seal")
    path = record.with_suffix(".00000.u32")
    content = path.read_bytes()
    # More bytes than recorded, and fewer.
    for left in (content[:400] + b"rubbish", content[:100]):
        record.unlink()
        path.write_bytes(left)
        path.with_name(f"{record.stem}.ends").write_bytes(
            np.cumsum([len(text) for text in TEXTS[:5]]).tobytes()
        )
        counted = sum(len(text) for text in TEXTS[:5])
        record.with_suffix(".written").write_text(f'{{"documents": 5, "tokens": {counted}}}')
        # The case is one of the two.
        assert counted * 4 <= 400 or len(left) < counted * 4
        assert (
            tokens.load_or_tokenize_documents(source, Letters(), True).tokens[:].tolist() == whole
        )


def test_a_process_that_is_killed_while_it_sums_loses_nothing(
    source: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed while it computes checksums loses no tokens."""
    # The checksums of terabytes take hours.
    with monkeypatch.context() as patched:
        patched.setattr(cache, "_sha256_of_file", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        killed = multiprocessing.get_context("fork").Process(
            target=tokens.load_or_tokenize_documents, args=(source, Counting(), True)
        )
        killed.start()
        killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    second = Counting()
    assert len(tokens.load_or_tokenize_documents(source, second, True).tokens) > 0
    # Only the checksums are computed again.
    assert second.seen == []


def test_a_temporary_file_of_a_killed_process_is_removed(
    source: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed while it replaces a note or a seal leaves no file behind for good."""
    monkeypatch.setattr(shards, "SHARD", 50)
    monkeypatch.setattr(tokens, "SHARD", 50)
    cache_files = Path(os.environ["ORTLAUNCH_CACHE"]) / "tokens"
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = multiprocessing.get_context("fork").Process(
            target=tokens.load_or_tokenize_documents, args=(source, Counting(), True)
        )
        killed.start()
        killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert [path for path in cache_files.iterdir() if is_temporary_file(path)]
    assert len(tokens.load_or_tokenize_documents(source, Letters(), True).tokens) > 0
    assert {path.suffix for path in cache_files.iterdir()} == {".ends", ".lock", ".seal", ".u32"}


@pytest.mark.parametrize("size", [7, 64, 100_000])
def test_shards_are_one_row(source: Corpus, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Shards of any size behave as one sequence, also for slices across shards."""
    whole = "\7".join(text.removesuffix("\n") for text in TEXTS) + "\n\7"
    monkeypatch.setattr(shards, "SHARD", size)
    monkeypatch.setattr(tokens, "SHARD", size)
    found = tokens.load_or_tokenize_documents(source, Letters(), True).tokens
    assert len(found) == len(whole)
    for start, stop in (
        (0, 5),
        (5, 9),
        # Empty and reversed slices, and one beyond the end, are among these.
        (6, 7),
        (7, 14),
        (60, 201),
        (len(whole) - 3, len(whole) + 9),
        (9, 9),
        (9, 3),
    ):
        assert bytes(found[start:stop].tolist()).decode() == whole[start:stop]
    assert (
        len(list((Path(os.environ["ORTLAUNCH_CACHE"]) / "tokens").glob("*.u32")))
        == len(whole) // size + 1
    )


def test_a_killed_process_is_gone_on_from_shard_by_shard(
    source: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, full shards are kept; if one has changed, all are made again."""
    monkeypatch.setattr(shards, "SHARD", 50)
    monkeypatch.setattr(tokens, "SHARD", 50)
    folder = Path(os.environ["ORTLAUNCH_CACHE"]) / "tokens"
    whole = "\7".join(text.removesuffix("\n") for text in TEXTS) + "\n\7"
    for damaged in (False, True):
        killed = multiprocessing.get_context("fork").Process(
            target=tokens.load_or_tokenize_documents, args=(source, Counting("text 25"), True)
        )
        killed.start()
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL
        (first, *_) = sorted(folder.glob("*.u32"))
        if damaged:
            first.write_bytes(b"?" * first.stat().st_size)
        second = Counting()
        found = tokens.load_or_tokenize_documents(source, second, True).tokens
        assert bytes(found[0 : len(found)].tolist()).decode() == whole
        assert len(second.seen) == 40 if damaged else len(second.seen) <= 24
        assert {path.suffix for path in folder.iterdir()} == {".ends", ".lock", ".seal", ".u32"}
        # The final seal includes those of the shards.
        assert len(list(folder.glob("*.seal"))) == 1
        for path in folder.iterdir():
            path.unlink()


def test_a_shard_that_changed_is_named_and_made_anew(
    source: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed shard is named, and all shards are made again."""
    monkeypatch.setattr(shards, "SHARD", 50)
    monkeypatch.setattr(tokens, "SHARD", 50)
    whole = tokens.load_or_tokenize_documents(source, Letters(), True).tokens[0:1000].tolist()
    path = sorted((Path(os.environ["ORTLAUNCH_CACHE"]) / "tokens").glob("*.u32"))[2]
    path.write_bytes(b"?" * path.stat().st_size)
    assert (
        tokens.load_or_tokenize_documents(source, Letters(), True).tokens[0:1000].tolist() == whole
    )
    assert take_cache_notes() == [f"{path}: differs from the recorded checksum; rebuilt"]


def test_ids_are_the_tokenizers_own(source: Corpus, tmp_path: Path) -> None:
    """Token ids are the tokenizer's own, also if it was saved with truncation and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    expected = [
        word
        for text in TEXTS
        for word in backend.encode(text.removesuffix("\n"), add_special_tokens=False).ids
    ]
    # The file ends with a line end, which belongs to the last paragraph.
    expected += backend.encode("\n", add_special_tokens=False).ids
    # The tokenizer's own settings must not apply to the corpus.
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")
    assert (
        tokens.load_or_tokenize_documents(source, tokenizer, False).tokens[:].tolist() == expected
    )
    # The tokenizer itself was not changed.
    assert tokenizer.backend_tokenizer.truncation is not None


def test_memory_is_flat_over_a_corpus_many_times_as_large(
    source: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times the documents take about the same memory."""
    # Chunks are bounded in characters too, so that long documents do not matter.
    monkeypatch.setattr(tokens, "_LETTERS_AT_ONCE", 20_000)

    def peak(count: int) -> int:
        def read(_: Any) -> Iterator[tuple[str, float]]:
            return (("x" * (2000 + n % 7), 0.0) for n in range(count))

        monkeypatch.setattr(tokens, "read_texts_with_fraction_of_corpus_read", read)
        monkeypatch.setattr(tokens, "corpus_fingerprint", lambda _: str(count))
        tracemalloc.start()
        found = len(tokens.load_or_tokenize_documents(source, Bytes(), False).tokens)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found > count * 2000
        return most

    assert peak(1500) < 1.2 * peak(150)


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    """A full disk raises ENOSPC, by which `train` reports it."""
    # NumPy's `tofile` reports only the amount written.
    ids = np.zeros(1 << 20, dtype=np.uint32)
    encoded = tokens.EncodedChunk(ids, [len(ids)], tokens.Chunk([], 1.0))
    writer = shards.ShardWriter(tmp_path / "corpus", 0)
    writer.file.close()
    with open("/dev/full", "wb") as full:
        writer.file = full
        with pytest.raises(OSError, match="No space left") as caught:
            tokens._append_chunks_and_save_progress(
                writer, full, tmp_path / "note", tokens.WriteProgress(), [encoded], lambda *_: None
            )
    assert caught.value.errno == errno.ENOSPC
