"""Tokenizers: trained once on the corpus, equal in every process, or loaded from a folder."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.data import Data
from ortlaunch.worker.data import tokenizer as tokenizer_module
from ortlaunch.worker.data.tokenizer import (
    download_revision_or_keep_name,
    load_tokenizer_with_added_tokens_or_none,
)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a corpus of random words; the cache is temporary."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz→é中文жф0123456789!?."
    words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(400)]
    path = tmp_path / "corpus.txt"
    path.write_text(
        "\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(60)), encoding="utf-8"
    )
    return path


def data(corpus: Path, tokenizer: Any) -> Data:
    source = {"format": "text", "path": [str(corpus)]}
    return Data.model_validate({"train": source, "tokenizer": tokenizer, "sequence_length": 16})


_TRAIN = """
import sys
from ortlaunch.recipe.fields.data import Data
from ortlaunch.worker.data import tokenizer
for kind, letters in (("wordpiece", 1000), ("wordpiece", 20), ("bpe", 1000)):
    tokenizer._MAX_CHARACTERS = letters
    made = tokenizer.load_tokenizer_with_added_tokens_or_none(Data.model_validate({
        "train": {"format": "text", "path": [sys.argv[1]]},
        "tokenizer": {"train": kind, "vocab_size": 410 + letters // 100}, "sequence_length": 16}))
    print(made.backend_tokenizer.to_str())
"""


def test_training_gives_the_same_words_in_every_process(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Processes without a common cache train the same tokenizer."""
    # Hosts may share no cache, and all ranks must have the same vocabulary.
    # Another hash seed gives another order of Python's sets.
    environment = {
        **os.environ,
        "ORTLAUNCH_CACHE": str(tmp_path / "elsewhere"),
        "PYTHONHASHSEED": "1",
    }
    command = [sys.executable, "-c", _TRAIN, str(corpus)]
    there = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    ).stdout
    monkeypatch.setattr(sys, "argv", ["-c", str(corpus)])
    # The code of _TRAIN sets this constant; monkeypatch restores it.
    monkeypatch.setattr(tokenizer_module, "_MAX_CHARACTERS", tokenizer_module._MAX_CHARACTERS)
    # In this process strings have other hashes.
    exec(_TRAIN, {})
    here = capsys.readouterr().out
    assert [len(json.loads(text)["model"]["vocab"]) for text in here.splitlines()] == [
        420,
        410,
        420,
    ]
    assert there == here


def test_wordpiece_is_berts(corpus: Path) -> None:
    """A trained WordPiece tokenizer has BERT's normalization, special tokens and layout."""
    made = load_tokenizer_with_added_tokens_or_none(
        data(corpus, {"train": "wordpiece", "vocab_size": 420})
    )
    assert len(made) == 420
    assert made.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert set(made.all_special_tokens) == {"[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"}
    assert made.convert_ids_to_tokens(made("AbC!")["input_ids"]) == [
        "[CLS]",
        *made.tokenize("abc!"),
        "[SEP]",
    ]
    assert (
        made("Éa", add_special_tokens=False)["input_ids"]
        == made("ea", add_special_tokens=False)["input_ids"]
    )
    first = made("a b", "c")["input_ids"]
    second = made("a b", "c")["token_type_ids"]
    assert (first.count(made.sep_token_id), second) == (2, [0, 0, 0, 0, 1, 1])
    assert made.decode(made("abcabc")["input_ids"], skip_special_tokens=True) == "abcabc"
    assert (
        made.convert_ids_to_tokens(made("a中b", add_special_tokens=False)["input_ids"])[1] == "中"
    )


def test_the_pieces_of_words_are_no_special_words(corpus: Path) -> None:
    """`##a` in a text is two signs and a letter, and no special token."""
    made = load_tokenizer_with_added_tokens_or_none(
        data(corpus, {"train": "wordpiece", "vocab_size": 420})
    )
    assert "##a" in made.get_vocab()
    assert set(made.get_added_vocab()) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert made.tokenize("##a")[-1] == "a"


def test_rare_letters_are_unknown(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the most frequent characters get a token of their own."""
    monkeypatch.setattr(tokenizer_module, "_MAX_CHARACTERS", 10)
    made = load_tokenizer_with_added_tokens_or_none(
        data(corpus, {"train": "wordpiece", "vocab_size": 420})
    )
    letters = {
        word.removeprefix("##") for word in made.get_vocab() if len(word.removeprefix("##")) == 1
    }
    # With and without `##` a letter counts once.
    assert len(letters) == 10


def test_bpe_is_byte_level(corpus: Path) -> None:
    """A BPE tokenizer restores any text; `</s>` is both end mark and padding."""
    made = load_tokenizer_with_added_tokens_or_none(
        data(corpus, {"train": "bpe", "vocab_size": 420})
    )
    assert len(made) == 420
    text = "Never seen: Жук 🎈\n\ttab"
    assert made.decode(made(text)["input_ids"]) == text
    assert (made.eos_token, made.pad_token, made.bos_token, made.eos_token_id) == (
        "</s>",
        "</s>",
        "<s>",
        2,
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
@pytest.mark.parametrize("sign", ["letters", "="])
def test_a_word_without_end(kind: str, sign: str, corpus: Path) -> None:
    """A text without blanks is cut into words for the training, which else takes hours."""
    draw = random.Random(0)
    word = "".join(draw.choices("abcdefghij", k=200_000)) if sign == "letters" else 200_000 * sign
    corpus.write_text(word)
    made = load_tokenizer_with_added_tokens_or_none(
        data(corpus, {"train": kind, "vocab_size": 420})
    )
    assert len(made) <= 420
    assert {*take_cache_notes()} == {
        "data.tokenizer: words of more than 1,000 characters were cut to train it"
    }


def test_trained_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer is trained once for each corpus and vocabulary size."""
    trained = []
    original = tokenizer_module._train_llama_byte_level_bpe_tokenizer
    monkeypatch.setattr(
        tokenizer_module,
        "_train_llama_byte_level_bpe_tokenizer",
        lambda data, size: (trained.append(size), original(data, size))[1],
    )
    for size in (300, 300, 310):
        load_tokenizer_with_added_tokens_or_none(data(corpus, {"train": "bpe", "vocab_size": size}))
    assert trained == [300, 310]
    corpus.write_text("another corpus")
    load_tokenizer_with_added_tokens_or_none(data(corpus, {"train": "bpe", "vocab_size": 300}))
    assert trained == [300, 310, 300]


def test_a_training_that_died_is_done_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without its seal is trained again."""
    chosen = data(corpus, {"train": "bpe", "vocab_size": 300})
    first = load_tokenizer_with_added_tokens_or_none(chosen)
    folder = Path(first.name_or_path)
    # The seal is written last.
    folder.with_suffix(".seal").unlink()
    (folder / "tokenizer.json").write_text("{")
    assert load_tokenizer_with_added_tokens_or_none(chosen).get_vocab() == first.get_vocab()


def test_a_changed_tokenizer_is_trained_again(corpus: Path) -> None:
    """A changed tokenizer in the cache is trained again and reported."""
    chosen = data(corpus, {"train": "bpe", "vocab_size": 300})
    first = load_tokenizer_with_added_tokens_or_none(chosen)
    changed = Path(first.name_or_path) / "tokenizer.json"
    text = changed.read_text()
    changed.write_text(text.replace('"a"', '"A"', 1))
    assert load_tokenizer_with_added_tokens_or_none(chosen).get_vocab() == first.get_vocab()
    assert take_cache_notes() == [f"{changed}: differs from the recorded checksum; rebuilt"]


def test_from_a_folder(corpus: Path, tmp_path: Path) -> None:
    """A tokenizer loaded from its folder equals the saved one."""
    made = load_tokenizer_with_added_tokens_or_none(
        data(corpus, {"train": "wordpiece", "vocab_size": 350})
    )
    made.save_pretrained(tmp_path / "saved")
    again = load_tokenizer_with_added_tokens_or_none(data(corpus, str(tmp_path / "saved")))
    assert again.get_vocab() == made.get_vocab()
    assert again("a b c")["input_ids"] == made("a b c")["input_ids"]


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_folder_without_tokenizer(content: str | None, corpus: Path, tmp_path: Path) -> None:
    """A folder without a valid tokenizer is named, with the alternatives."""
    folder = tmp_path / "empty"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(
        InputError,
        match=rf"data.tokenizer: cannot load '{folder}': .*; give a local folder, a hub id",
    ):
        load_tokenizer_with_added_tokens_or_none(data(corpus, str(folder)))


def test_a_revision_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NAME@REVISION is that revision's folder in the hub's cache; other names stay as they are."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "models--a--b"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "v2").write_text(commit)
    assert download_revision_or_keep_name("a/b@v2") == str(model / "snapshots" / commit)
    assert download_revision_or_keep_name("a/b") == "a/b"
    with pytest.raises(OSError, match="cached snapshot"):
        download_revision_or_keep_name("a/b@v3")
