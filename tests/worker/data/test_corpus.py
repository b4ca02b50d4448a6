"""Text from files and Hugging Face datasets, and the cache of its tokens."""

from __future__ import annotations

import csv
import functools
import gzip
import inspect
import io
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data import corpus as corpus_module
from ortlaunch.worker.data import token_cache as tokens_module
from ortlaunch.worker.data.corpus import (
    corpus_fingerprint,
    files_of_corpus_patterns,
    read_corpus_rows_up_to_limit,
    read_texts_with_fraction_of_corpus_read,
)
from ortlaunch.worker.data.file_rows import DataError, hash_of_size_and_first_middle_last_blocks

TEXTS = ["the first", "the second\nwith two lines", "näïve ünïcode", "the last"]


def corpus_texts(source: str | Corpus) -> Iterator[str]:
    """Yield the texts of a corpus."""
    return (text for text, _ in read_texts_with_fraction_of_corpus_read(source))


def write(
    folder: Path, kind: str, texts: list[Any], name: str = "part", column: str = "text"
) -> str:
    """Write a file of one format; return its path."""
    path = folder / f"{name}.{kind}"
    if kind == "text":
        path.write_text("\n\n".join(texts), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text(
            "".join(json.dumps({column: text, "other": 1}) + "\n" for text in texts),
            encoding="utf-8",
        )
    elif kind == "csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            rows = [(column, "other"), *((text, 1) for text in texts)]
            csv.writer(file, delimiter=";", quoting=csv.QUOTE_ALL).writerows(rows)
    else:
        parquet.write_table(pyarrow.table({column: texts, "other": [1] * len(texts)}), path)
    return str(path)


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "parquet"])
def test_every_format_gives_the_same_documents(kind: str, tmp_path: Path) -> None:
    """Text, JSON lines and Parquet files give the same documents in order, in UTF-8."""
    assert list(corpus_texts(Corpus(format=kind, path=(write(tmp_path, kind, TEXTS),)))) == TEXTS


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_many_files_in_a_fixed_order(kind: str, tmp_path: Path) -> None:
    """Files come in the order of the patterns, sorted within each; `**` matches folders."""
    (tmp_path / "sub").mkdir()
    for name in ("b", "a", "sub/c"):
        write(tmp_path, kind, [f"of {name}"], name)
    # The pattern of the folder comes first, so that its file does.
    source = Corpus(
        format=kind, path=(str(tmp_path / f"sub/*.{kind}"), str(tmp_path / f"[ab].{kind}"))
    )
    assert list(corpus_texts(source)) == ["of sub/c", "of a", "of b"]
    everything = Corpus(format=kind, path=(str(tmp_path / f"**/*.{kind}"),))
    assert list(corpus_texts(everything)) == ["of a", "of b", "of sub/c"]


def test_empty_rows_are_left_out(tmp_path: Path) -> None:
    """A row with an empty text or null gives no document."""
    assert list(
        corpus_texts(Corpus(format="jsonl", path=(write(tmp_path, "jsonl", ["a", None, "", "b"]),)))
    ) == ["a", "b"]


def test_an_error_of_datasets_is_not_called_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RuntimeError of `datasets` is reported with its own message."""
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no decoder here")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"x")
    with pytest.raises(DataError, match="cannot be read as jsonl: no decoder here"):
        list(corpus_texts(Corpus(format="jsonl", path=(str(path),))))


def test_another_column(tmp_path: Path) -> None:
    """`text_column` names the column of the text."""
    path = write(tmp_path, "jsonl", TEXTS, column="body")
    assert list(corpus_texts(Corpus(format="jsonl", path=(path,), text_column="body"))) == TEXTS
    with pytest.raises(DataError, match=r"part.jsonl:1: no column 'text'; it has body, other"):
        list(corpus_texts(Corpus(format="jsonl", path=(path,))))


def test_the_built_in_corpus() -> None:
    """`python-docs` is the language reference, always in the same order."""
    texts = list(corpus_texts("python-docs"))
    assert sum(map(len, texts)) > 300_000
    assert texts == list(corpus_texts("python-docs"))
    assert any("The Python Language Reference" in text or "statement" in text for text in texts)


@pytest.mark.parametrize("pattern", ["none.txt", "none/*.txt", "folder"])
def test_a_pattern_without_files(pattern: str, tmp_path: Path) -> None:
    """A pattern that matches no file, or only a folder, is named with the current folder."""
    (tmp_path / "folder").mkdir()
    source = Corpus(format="text", path=(write(tmp_path, "text", TEXTS), str(tmp_path / pattern)))
    with pytest.raises(
        DataError, match=rf"'{tmp_path}/.*' matches no file \(current folder: {os.getcwd()}\)"
    ):
        files_of_corpus_patterns(source)


GOOD = b'{"text": "a"}\n'
# A fixed time: the content is in the tests' names, which xdist compares between its processes.
packed = functools.partial(gzip.compress, mtime=0)
# A valid Parquet file without rows.
NO_ROWS = io.BytesIO()
parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), NO_ROWS)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("text", b"", ": is empty"),
        ("text", "one\n\ntwo".encode("utf-16"), ":1: is not UTF-8: .*; it begins as UTF-16 does"),
        ("jsonl", b"\n\n", ": has no rows"),
        ("jsonl", b'{"text": "a"\n', ":1:13: is no JSON: .*; a line must be a whole object"),
        ("jsonl.gz", packed(GOOD + b'{"text": b}\n'), ":2:10: is no JSON: Expecting value"),
        (
            "jsonl.gz",
            packed(GOOD * 999)[:-30],
            ": cannot be read as jsonl: Compressed file ended before",
        ),
        ("jsonl.gz", GOOD, ": cannot be read as jsonl: Not a gzipped file"),
        ("jsonl.zip", GOOD, ": cannot be read as jsonl: File is not a zip file"),
        ("text.xz", lzma.compress(b"one\n\n\xff"), ":3: is not UTF-8"),
        ("parquet", NO_ROWS.getvalue(), ": has no rows"),
        ("text", b"one\n\ntwo\n\xff\xfe", ":4: is not UTF-8"),
        ("jsonl", b"", ": is empty"),
        ("jsonl", GOOD + b'{"text": b}\n', ":2:10: is no JSON: Expecting value"),
        ("jsonl", GOOD * 9 + b'{"text": "a', ":10:10: is no JSON: Unterminated string"),
        ("jsonl", GOOD + b'{"text": "\xe9t\xe9"}\n', ":2: is not UTF-8: invalid continuation byte"),
        ("jsonl", b'[{"text": "a"},\n {"text" "b"}]', ":2:10: is no JSON: Expecting ':'"),
        ("jsonl", b'[{"text": "a"}, 7]', ": row 2: is a int; it must be an object"),
        ("jsonl", b'[{"text": "\\ud800"}]', ": row 1: 'text' has .*half of a surrogate pair"),
        ("jsonl", GOOD + b'["a"]\n', ":2: is a list; a line must be an object"),
        ("jsonl", GOOD + b'{"txt": "a"}\n', ":2: no column 'text'; it has txt"),
        ("jsonl", b'{"text": 1}\n', ":1: column 'text' holds 1; it must be text"),
        (
            "jsonl",
            GOOD + b'{"text": "bad \\ud83d"}\n',
            r":2: 'text' has \\ud83d, half of a surrogate pair",
        ),
        (
            "jsonl",
            b'{"text": [{"a": "\\uDC00\\ud83d"}]}\n',
            r":1: 'text' has \\udc00, half of a surrogate pair",
        ),
        ("jsonl", b'{"text": ["a"]}\n', r":1: column 'text' holds \['a'\]; it must be text"),
        ("csv", b"text\na,b\n", ":2: has 2 cells, and the first line 1; put a cell with a ','"),
        ("csv", b"text\tx\na\tb\n\nc\n", r":4: has 1 cells, and .* cell with a '.t' or a line"),
        ("csv", b'text,x\n"a\nb",1\nc,"d\ne\n', ":4: is no CSV: unexpected end of data; a cell in"),
        ("csv", b'text\n"a"b\n', ":2: is no CSV: ',' expected after '\"'; a cell in double"),
        ("csv", b"text,x,text\na,b,c\n", ":1: two columns are named 'text'"),
        ("csv", b"nice film,1\nbad film,0\n", ":2: no column 'text'; it has 1, nice film"),
        ("csv", b"text\n \n", ": has no rows"),
        ("csv", "text\nü\n".encode("latin-1"), ":2: is not UTF-8: "),
        ("parquet", b"", ": is empty"),
        ("parquet", b"no parquet", ": cannot be read as parquet: "),
    ],
)
def test_files_that_are_not_what_they_should_be(
    kind: str, content: bytes, message: str, tmp_path: Path
) -> None:
    """A file with invalid content gives an error with file and line."""
    path = tmp_path / f"x.{kind}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}{message}"):
        list(corpus_texts(Corpus(format=kind.partition(".")[0], path=(str(path),))))


def test_a_whole_surrogate_pair_is_a_letter(tmp_path: Path) -> None:
    """A whole surrogate pair in JSON is one character; an escaped backslash begins no escape."""
    # `json.dumps` writes characters outside the basic plane as pairs.
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a \U0001f600"}) + "\n" + json.dumps({"text": "\\ud83d"}))
    assert list(corpus_texts(Corpus(format="jsonl", path=(str(path),)))) == [
        "a \U0001f600",
        "\\ud83d",
    ]


def test_a_shard_that_was_cut_off(tmp_path: Path) -> None:
    """The truncated one of several files is named."""
    good, bad = (Path(write(tmp_path, "parquet", TEXTS, name)) for name in ("a", "b"))
    # A Parquet file has its metadata at the end.
    bad.write_bytes(bad.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"^{bad}: cannot be read as parquet: "):
        list(corpus_texts(Corpus(format="parquet", path=(str(good), str(bad)))))


@pytest.mark.parametrize(
    "kind", ["text", "jsonl", "csv", "parquet", "text.gz", "jsonl.xz", "csv.gz"]
)
def test_rows_are_those_of_datasets(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are equal to those of `datasets`, also across chunks, and their share goes up to 1."""
    import datasets

    # Small chunks, so that paragraphs span several of them.
    monkeypatch.setattr("ortlaunch.worker.data.file_rows._LETTERS_AT_ONCE", 7)
    texts = [
        "a",
        "",
        "\nb",
        "c\n",
        "d\r\ne",
        "näïve\u2028ünïcode",
        *("word " * n for n in range(30)),
        "\n",
    ]
    form = kind.partition(".")[0]
    path = write(tmp_path, form, texts)
    if kind != form:
        packed = {"gz": gzip, "xz": lzma}[kind.partition(".")[2]].compress(Path(path).read_bytes())
        path = str(tmp_path / f"part.{kind}")
        Path(path).write_bytes(packed)
    # A cell of ours is text, also an empty one.
    words = datasets.Features(dict.fromkeys(("text", "other"), datasets.Value("string")))
    cells = {"sep": ";", "features": words, "keep_default_na": False}
    options: Any = {"text": {"sample_by": "paragraph"}, "csv": cells}.get(form, {})
    builder = {"jsonl": "json"}.get(form, form)
    theirs: Any = datasets.load_dataset(
        builder, data_files=path, split="train", streaming=True, **options
    )
    ours = list(read_corpus_rows_up_to_limit(Corpus(format=form, path=(path,))))
    # A rest of blank lines is no text of ours.
    assert [row.values for row in ours] == [
        row for row in theirs if form != "text" or row["text"].strip()
    ]
    assert [row.share for row in ours] == sorted(row.share for row in ours)
    assert ours[-1].share == 1


def test_an_unreachable_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set that the hub does not have, or cannot deliver, is named in the error."""
    import datasets

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError(
            "Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed.\nmore"
        )

    monkeypatch.setattr(datasets, "load_dataset", gone)
    with pytest.raises(
        DataError, match=r"data \(hub nobody/nothing\): cannot be read: Dataset .* accessed\.$"
    ):
        list(read_corpus_rows_up_to_limit(Corpus(format="hub", name="nobody/nothing")))


@pytest.mark.parametrize("limit", [corpus_module._WHOLE_BYTES, 0], ids=["whole", "blocks"])
def test_fingerprint_tells_corpora_apart(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint depends on files, contents, column and format, and nothing else.

    That of a large corpus depends on dates, too.
    """
    monkeypatch.setattr(corpus_module, "_WHOLE_BYTES", limit)
    a, b = (write(tmp_path, "jsonl", TEXTS, name) for name in ("a", "b"))
    both = Corpus(format="jsonl", path=(a, b))
    others = [
        Corpus(format="jsonl", path=(b, a)),
        Corpus(format="jsonl", path=(a,)),
        Corpus(format="text", path=(a, b)),
        Corpus(format="jsonl", path=(a, b), text_column="other"),
        "python-docs",
    ]
    first = corpus_fingerprint(both)
    # The column of labels does not change the tokens of texts.
    assert corpus_fingerprint(Corpus(format="jsonl", path=(a, b), label_column="z")) == first
    assert len({first, *(corpus_fingerprint(other) for other in others)}) == 6
    os.utime(a, ns=(1, 1))
    second = corpus_fingerprint(both)
    assert (first == second) == (limit > 0)
    # Other contents of the same size and time, as unpacked or copied files may have.
    Path(a).write_text(Path(a).read_text().replace("a", "x", 1))
    os.utime(a, ns=(1, 1))
    assert corpus_fingerprint(both) not in (first, second)


@pytest.mark.parametrize("changed", [0, 40, 99])
def test_blocks_show_another_file(changed: int, tmp_path: Path) -> None:
    """The first, middle and last block of a file are hashed, and the whole of a small one."""
    path = tmp_path / "x"
    content = bytes(100)
    path.write_bytes(content)
    hashes = {
        hash_of_size_and_first_middle_last_blocks(str(path), 20),
        hash_of_size_and_first_middle_last_blocks(str(path), 100),
    }
    path.write_bytes(content[:changed] + b"x" + content[changed + 1 :])
    assert not hashes & {
        hash_of_size_and_first_middle_last_blocks(str(path), 20),
        hash_of_size_and_first_middle_last_blocks(str(path), 100),
    }


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_corpus_is_known_by_its_revision(tmp_path: Path) -> None:
    """The fingerprint of a hub data set changes with its content, files, split and column."""
    # A local folder stands for the hub's data set.
    source = Corpus(format="hub", name=str(tmp_path))
    path = Path(write(tmp_path, "jsonl", TEXTS))
    first = corpus_fingerprint(source)
    assert corpus_fingerprint(source) == first
    one = source.model_copy(update={"files": (path.name,)})
    assert list(read_corpus_rows_up_to_limit(one)) == list(read_corpus_rows_up_to_limit(source))
    (tmp_path / "more.jsonl").write_text(path.read_text())
    assert len(list(read_corpus_rows_up_to_limit(source))) == 2 * len(
        list(read_corpus_rows_up_to_limit(one))
    )
    first = corpus_fingerprint(source)
    others = [
        source.model_copy(update=changed)
        for changed in ({"split": "test"}, {"text_column": "z"}, {"files": (path.name,)})
    ]
    with path.open("a") as file:
        file.write('{"text": "one more", "other": 1}\n')
    second = corpus_fingerprint(source)
    assert len({first, second, *map(corpus_fingerprint, others)}) == 5
    # Other contents of the same size and time.
    stat = path.stat()
    path.write_text(path.read_text().replace("one more", "two more"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert corpus_fingerprint(source) not in (first, second)


def test_a_commit_of_the_hub_needs_no_network_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full commit needs no network; for a branch, the error recommends the commit."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    found = [
        corpus_fingerprint(Corpus(format="hub", name=name, revision=COMMIT))
        for name in ("a/b", "a/b", "a/c")
    ]
    assert found[0] == found[1] != found[2]
    with pytest.raises(
        DataError, match=r"data \(hub a/b\): .*offline, give the commit as data\.\*\.revision"
    ):
        corpus_fingerprint(Corpus(format="hub", name="a/b", revision="main"))


def test_the_revision_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`revision` is passed to the library that reads the data set."""
    import datasets

    asked = []
    empty = datasets.Dataset.from_list([])
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *args, **options: asked.append(options["revision"]) or empty
    )
    assert list(read_corpus_rows_up_to_limit(Corpus(format="hub", name="a/b", revision="v1"))) == []
    assert asked == ["v1"]


# ------------------------------------------------------------------------------------------- the cache of tokens


class Letters:
    """A tokenizer whose tokens are the codes of characters, plus a shift."""

    is_fast = False
    eos_token_id = 7

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {"a": self.shift}

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [[ord(letter) + self.shift for letter in text] for text in texts]}


def test_tokens_are_kept_until_the_corpus_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are read from the cache until file, tokenizer or end mark changes."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    written = []
    original = tokens_module._write_missing_tokens_and_list_files
    monkeypatch.setattr(
        tokens_module,
        "_write_missing_tokens_and_list_files",
        lambda *args: (written.append(args[0]), original(*args))[1],
    )
    path = write(tmp_path, "text", ["ab", "c"])
    source = Corpus(format="text", path=(path,))

    def tokens(tokenizer: Any = None, end_of_text: bool = False) -> list[int]:
        return list(
            tokens_module.load_or_tokenize_documents(source, tokenizer or Letters(), end_of_text)
            .tokens[:]
            .tolist()
        )

    assert [tokens(), tokens()] == [[97, 98, 99]] * 2
    assert len(written) == 1
    # 7 is the end mark.
    assert tokens(end_of_text=True) == [97, 98, 7, 99, 7]
    assert tokens(Letters(shift=1)) == [98, 99, 100]
    assert len(written) == 3
    Path(path).write_text("b")
    assert tokens() == [98]
    assert len(written) == 4


def test_half_written_tokens_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a failed tokenization are not used by the next run."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    source = Corpus(format="text", path=(write(tmp_path, "text", ["ab", "c"]),))
    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "_DOCUMENTS_AT_ONCE", 1)
        read = [("ab", 0.5), ("c", 1.0)]
        patch.setattr(
            tokens_module, "read_texts_with_fraction_of_corpus_read", lambda source: iter(read)
        )
        # None is no token: the second document raises TypeError.
        patch.setattr(
            tokens_module,
            "_encoder_without_special_tokens",
            lambda _: lambda texts: [[3 if texts == ["ab"] else None]],
        )
        with pytest.raises(TypeError):
            tokens_module.load_or_tokenize_documents(source, Letters(), False)
    assert tokens_module.load_or_tokenize_documents(source, Letters(), False).tokens[
        :
    ].tolist() == [
        97,
        98,
        99,
    ]


def test_changed_tokens_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed file of tokens is detected, written again, and reported once."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    source = Corpus(format="text", path=(write(tmp_path, "text", ["ab", "cd"]),))
    before = tokens_module.load_or_tokenize_documents(source, Letters(), False).tokens[:].tolist()
    (path,) = (tmp_path / "cache" / "tokens").glob("*.u32")
    # Two of four tokens.
    path.write_bytes(path.read_bytes()[:8])
    assert (
        tokens_module.load_or_tokenize_documents(source, Letters(), False).tokens[:].tolist()
        == before
    )
    assert take_cache_notes() == [f"{path}: has 8 bytes, and had 16; rebuilt"]
    assert (
        tokens_module.load_or_tokenize_documents(source, Letters(), False).tokens[:].tolist()
        == before
    )
    assert take_cache_notes() == []


def test_more_documents_than_fit_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No document is lost between chunks of documents."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens_module, "_DOCUMENTS_AT_ONCE", 3)
    letters = "abcdefg"
    source = Corpus(format="text", path=(write(tmp_path, "text", list(letters)),))
    np.testing.assert_array_equal(
        tokens_module.load_or_tokenize_documents(source, Letters(), False).tokens,
        [ord(letter) for letter in letters],
    )


# The program of each process: it records that it tokenizes, and takes time for it.
_BUILD = """
import sys, time
from pathlib import Path
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data import token_cache as tokens
original = tokens._write_missing_tokens_and_list_files
def slowly(*args):
    with open(sys.argv[1] + ".builds", "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    return original(*args)
tokens._write_missing_tokens_and_list_files = slowly
print("ready", flush=True)
sys.stdin.readline()
print(tokens.load_or_tokenize_documents(Corpus(format="text", path=(sys.argv[1],)), Letters(), False).tokens.tolist())
"""


def test_two_ranks_at_once_tokenize_once(tmp_path: Path) -> None:
    """Of two processes that start together one tokenizes, and both read the same."""
    path = write(tmp_path, "text", ["ab", "c"])
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(tmp_path / "cache")}
    program = f"from __future__ import annotations\n{inspect.getsource(Letters)}{_BUILD}"
    command = [sys.executable, "-c", program, path]
    ranks = [
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    # Both have finished their imports before either begins.
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        found = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    # A failed assertion must leave no process behind.
    finally:
        for rank in ranks:
            rank.kill()
    assert found == ["[97, 98, 99]"] * 2
    assert Path(f"{path}.builds").read_text() == "built\n"
