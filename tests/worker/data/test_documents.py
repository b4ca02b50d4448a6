"""The field `document`: how text files are split into documents, which pairs and packing use."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.corpus import corpus_fingerprint
from ortlaunch.worker.data.file_rows import DataError, read_file_rows
from tests.worker.data.test_corpus import corpus_texts

TEXT = "One. A line\nof it.\n\nTwo, ünd more.\n"
EXPECTED = {
    "paragraph": ["One. A line\nof it.", "Two, ünd more.\n"],
    "line": ["One. A line", "of it.", "Two, ünd more."],
    "file": [TEXT],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_documents_of_a_file(kind: str, tmp_path: Path) -> None:
    """Documents are paragraphs, lines or whole files, each with a fingerprint of its own."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    source = Corpus(format="text", path=(str(tmp_path / "a.txt"),), document=kind)
    assert list(corpus_texts(source)) == EXPECTED[kind]
    assert (
        len({corpus_fingerprint(source.model_copy(update={"document": each})) for each in EXPECTED})
        == 3
    )


@pytest.mark.parametrize("blank", ["", " ", "\t \t", "\u00a0", "\r"])
@pytest.mark.parametrize("name", ["a.txt", "a.zip"])
def test_a_line_of_blanks_is_an_empty_line(
    blank: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of blanks ends a paragraph, also at the border of two chunks; line numbers stay."""
    monkeypatch.setattr("ortlaunch.worker.data.file_rows._LETTERS_AT_ONCE", 7)
    text = f"A b.\n{blank}\nC\n d.\n{blank}\n{blank}\n".encode()
    path = tmp_path / name
    if name == "a.zip":
        with zipfile.ZipFile(path, "w") as packed:
            packed.writestr("a.txt", text)
    else:
        path.write_bytes(text)
    rows = list(read_file_rows(str(path), "text"))
    assert [row.values["text"].strip() for row in rows] == ["A b.", "C\n d."]
    assert name == "a.zip" or [row.location for row in rows] == [f"{path}:1", f"{path}:3"]


def test_a_paragraph_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paragraph that is too long is an error with its first line, and with the remedy."""
    # A file with a document in each line would be one paragraph in memory.
    monkeypatch.setattr("ortlaunch.worker.data.file_rows._LETTERS_AT_ONCE", 8)
    monkeypatch.setattr("ortlaunch.worker.data.file_rows._LONGEST_PARAGRAPH", 32)
    (tmp_path / "a.txt").write_text("One.\n\n" + "A line.\n" * 9)
    source = Corpus(format="text", path=(str(tmp_path / "a.txt"),))
    with pytest.raises(
        DataError, match=r"a\.txt:3: no blank line ends this paragraph .*`document: line`"
    ):
        list(corpus_texts(source))
    assert len(list(corpus_texts(source.model_copy(update={"document": "line"})))) == 10


@pytest.mark.parametrize(
    ("form", "word"),
    [("jsonl", "a.file:2: this row is longer than 64 b"), ("text", ":1: text has ")],
)
def test_a_text_that_no_tokenizer_takes(
    form: Any, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row beyond the limit is refused with its location in each format."""
    # Small limits in place of 64 MB and 16 million characters.
    monkeypatch.setattr("ortlaunch.worker.data.file_rows._LONGEST_ROW", 64)
    monkeypatch.setattr("ortlaunch.worker.data.corpus.LONGEST_TEXT", 32)
    rows = {"jsonl": '{"text": "a"}\n{"text": "' + "b" * 99 + '"}\n', "text": "b" * 33}
    (tmp_path / "a.file").write_text(rows[form])
    with pytest.raises(DataError, match=f"{word}.*split its text into several rows"):
        list(corpus_texts(Corpus(format=form, path=(str(tmp_path / "a.file"),), document="file")))


def test_documents_of_a_compressed_file(tmp_path: Path) -> None:
    """A compressed file has the same documents."""
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8") as file:
        file.write(TEXT)
    for kind, expected in EXPECTED.items():
        source = Corpus(format="text", path=(str(tmp_path / "a.txt.gz"),), document=kind)
        assert [text.strip() for text in corpus_texts(source)] == [
            text.strip() for text in expected
        ]
