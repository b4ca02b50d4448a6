"""Samples of texts, numbers and words with labels; invalid rows are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data import (
    IGNORED,
    LabelledTexts,
    LabelSets,
    Mixture,
    ScoredTexts,
    TaggedWords,
    collate,
    cut_padding_to_shortest_fitting_bucket,
    label_rows,
)
from ortlaunch.worker.data import labelled_samples as labelled_module
from ortlaunch.worker.data.file_rows import DataError, Row
from ortlaunch.worker.data.labelled_samples import (
    class_and_rare_class_lines,
    class_names_of_integer_labels,
    renumber_labels_and_list_class_names,
    renumber_labels_by_class_names_or_numbers,
    set_class_count_of_label_sets,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def words() -> Any:
    """Return a tokenizer of the words a, b and c."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")


def labelled(path: Path, lines: str, kind: Any = LabelledTexts, **columns: str) -> Any:
    path.write_text(lines)
    return kind(Corpus(format="jsonl", path=(str(path),), **columns), words(), 4)


def test_labelled_texts(tmp_path: Path) -> None:
    """Texts are cut or padded to one length, with a mask and their class, without an end mark."""
    samples = labelled(
        tmp_path / "x.jsonl",
        '{"body": "a b", "stars": 0}\n{"body": "a b c a b c", "stars": 4}\n',
        text_column="body",
        label_column="stars",
    )
    assert (len(samples), samples.classes) == (2, 5)
    # One text is padded, the other one is cut.
    short = samples.sample(0, 0)
    long = samples.sample(1, 0)
    assert {name: value.tolist() for name, value in short.items()} == {
        "input_ids": [1, 2, 0, 0],
        "attention_mask": [1, 1, 0, 0],
        "labels": 0,
    }
    assert (long["input_ids"].tolist(), int(long["labels"])) == ([1, 2, 3, 1], 4)


GOOD = '{"text": "a", "label": 1}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}', "x.jsonl:1: no column 'label'; it has text"),
        ('{"label": 1}', "x.jsonl:1: no column 'text'; it has label"),
        (
            '{"text": "a", "label": ""}',
            "x.jsonl:1: label is ''; a class is a name, or an integer from 0",
        ),
        (
            GOOD + '{"text": "a", "label": "good"}',
            "x.jsonl:2: label is 'good', and the first row's is 1; use only names",
        ),
        (
            '{"text": "a", "label": 0.5}',
            "x.jsonl:1: label is 0.5; a class is a name, or an integer from 0",
        ),
        (
            '{"text": "a", "label": true}',
            "x.jsonl:1: label is True; a class is a name, or an integer from 0",
        ),
        ('{"text": ["a", "b"], "label": 1}', r"x.jsonl:1: text is \['a', 'b'\]; it must be text"),
        (
            GOOD + '{"text": "a", "label": -1}',
            "x.jsonl:2: label is -1; a class is a name, or an integer from 0",
        ),
        (
            GOOD + '{"text": "a", "label": 1000000}',
            r"x.jsonl:2: label 1000000 is too large: .* from 0 to 999,999",
        ),
        (
            GOOD + '{"text": "a", "label": null}',
            "x.jsonl:2: label is None; a class is a name, or an integer from 0",
        ),
        (GOOD * 2 + '{"text": null, "label": 1}', "x.jsonl:3: text is None; it must be text"),
        ("", "x.jsonl: is empty"),
    ],
)
def test_bad_rows_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """A row without a valid text or class is an error with file and line."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines)


def test_words_are_numbered_as_datasets_numbers_them(tmp_path: Path) -> None:
    """Label names are numbered as `datasets` does, over all sources and the evaluation."""
    import datasets

    # Upper case sorts before lower case, and "ä" after "z".
    words = ["good", "bad", "very bad", "bad", "Good", "äh"]
    lines = [json.dumps({"text": "a", "label": word}) + "\n" for word in words]
    # Two sources of a mixture, and an evaluation with one of the labels.
    one, other, held_out = (
        labelled(tmp_path / f"{n}.jsonl", "".join(part))
        for n, part in enumerate((lines[:3], lines[3:], lines[1:2]))
    )
    mixture = Mixture([one, other], [1, 1])
    theirs = datasets.Dataset.from_dict({"label": words}).class_encode_column("label")
    assert renumber_labels_and_list_class_names(mixture, held_out) == theirs.features["label"].names
    assert [int(mixture.sample(i, 0)["labels"]) for i in range(6)] == theirs["label"][:]
    assert int(held_out.sample(0, 0)["labels"]) == theirs["label"][1]
    assert mixture.classes == 5


def rows_of(*labels: Any) -> str:
    """Return one row for each label, as JSON lines."""
    return "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels)


CHECK = "; check data.train's labels"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["torch", "numpy"] * 2 + ["torhc"],
         ["classes: 3 (numpy, torch, torhc)", f"classes: a single training row has class torhc{CHECK}"]),
        ([1, 2, 1, 2], ["classes: 3", f"classes: no training row has class 0{CHECK}"]),
        ([0, 0, 99], ["classes: 100", f"classes: no training row has class 1, 2, 3, 4, 5, 6 and 92 more{CHECK}",
                      f"classes: a single training row has class 99{CHECK}"]),
        ([*"aabbccddeeffgg"], ["classes: 7 (a, b, c, d, e, f and 1 more)"]),
    ],
)  # fmt: skip
def test_classes_are_printed(labels: list[Any], expected: list[str], tmp_path: Path) -> None:
    """The number of classes, their names, and classes with at most one training row are printed."""
    # Such classes are often misspelt or misnumbered labels.
    parts = [
        labelled(tmp_path / f"{n}.jsonl", rows_of(*part))
        for n, part in enumerate((labels[:2], labels[2:]))
    ]
    samples = Mixture(parts, [1, 1])
    names = renumber_labels_and_list_class_names(samples, None)
    assert [*class_and_rare_class_lines(samples, names, samples.classes)] == expected


def test_regressions_print_no_classes(tmp_path: Path) -> None:
    """A regression has no classes to print."""
    assert [
        *class_and_rare_class_lines(
            labelled(tmp_path / "x.jsonl", rows_of(1, 0.5), ScoredTexts), [], 0
        )
    ] == []


@pytest.mark.parametrize("source", ["hub", "parquet"])
@pytest.mark.parametrize("kind", [LabelledTexts, TaggedWords])
def test_names_of_numbers(source: str, kind: Any, tmp_path: Path) -> None:
    """Class names come from a ClassLabel in its order; sources with different names are refused."""
    import datasets

    def of(names: list[str]) -> Any:
        folder = tmp_path / names[0]
        folder.mkdir()
        label: Any = datasets.ClassLabel(names=names)
        row: dict[str, Any] = {"text": "a", "label": 1}
        if kind is TaggedWords:
            label = datasets.Sequence(label)
            row = {name: [value] for name, value in row.items()}
        rows = datasets.Dataset.from_list([row]).cast_column("label", label)
        rows.to_parquet(str(folder / "train.parquet"))
        place: Any = (
            {"name": str(folder)} if source == "hub" else {"path": (str(folder / "train.parquet"),)}
        )
        return kind(Corpus(format=source, **place), words(), 4)

    one = of(["so-so", "good", "bad"])
    # Labels that are integers are not numbered again.
    assert renumber_labels_and_list_class_names(one, one) == []
    assert class_names_of_integer_labels(one, one) == ["so-so", "good", "bad"]
    with pytest.raises(
        DataError, match="so-so, good, bad in one source and good, bad, so-so in another"
    ):
        class_names_of_integer_labels(one, of(["good", "bad", "so-so"]))


def test_labels_that_do_not_go_together(tmp_path: Path) -> None:
    """Unknown names, a single name, and names mixed with integers are refused."""
    word, number, same = (
        labelled(
            tmp_path / f"{n}.jsonl",
            "".join(f'{{"text": "a", "label": {label}}}\n' for label in rows),
        )
        for n, rows in enumerate((('"a"', '"b"'), (1, 0), ('"b"', '"b"')))
    )
    unknown = labelled(tmp_path / "c.jsonl", '{"text": "a", "label": "c"}')
    with pytest.raises(DataError, match="names in one source and numbers in another"):
        renumber_labels_and_list_class_names(Mixture([word, number], [1, 1]), None)
    with pytest.raises(
        DataError,
        match=r"data.evaluation: label 'c' is in no row of data.train, whose labels are a, b",
    ):
        renumber_labels_and_list_class_names(word, unknown)
    with pytest.raises(DataError, match="every label is 'b'"):
        renumber_labels_and_list_class_names(same, None)
    assert renumber_labels_and_list_class_names(number, number) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"text": "a", "label": "good"}',
            "x.jsonl:1: label is 'good'; sequence-regression needs a number",
        ),
        (
            '{"text": "a", "label": 1}\n{"text": "a", "label": NaN}',
            "x.jsonl:2: label is nan; sequence-reg",
        ),
        (
            '{"text": "a", "label": true}',
            "x.jsonl:1: label is True; sequence-regression needs a number",
        ),
        ('{"text": "a"}', "x.jsonl:1: no column 'label'; it has text"),
    ],
)
def test_bad_numbers_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """A label that is no finite number is an error with file and line."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines, ScoredTexts)


def test_numbers_are_float_labels(tmp_path: Path) -> None:
    """Labels of a regression are float32, integers included, and there are no classes."""
    samples = labelled(
        tmp_path / "x.jsonl",
        '{"text": "a", "label": -1}\n{"text": "b", "label": 0.5}\n',
        ScoredTexts,
    )
    found = torch.stack([samples.sample(index, 0)["labels"] for index in (0, 1)])
    assert (found.dtype, found.tolist(), samples.classes) == (torch.float32, [-1.0, 0.5], 0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"text": "a b", "label": [0, 1]}',
            "x.jsonl:1: text is 'a b'; token-classification needs a list with one label per word",
        ),
        ('{"text": ["a"], "label": 0}', "x.jsonl:1: label is 0; token-classification needs a list"),
        ('{"text": ["a", "b"], "label": [0]}', "x.jsonl:1: text has 2 words, and label 1 tags"),
        ('{"text": ["a", " "], "label": [0, 1]}', "x.jsonl:1: text has ' '; it must be a word"),
        (
            '{"text": ["a", "b"], "label": [0, "B"]}',
            "x.jsonl:1: label is 'B', and the first row's is 0; use only names",
        ),
        (
            '{"text": ["a"], "label": ["O"]}\n{"text": ["a"], "label": [-1]}',
            "x.jsonl:2: label is -1; a class is",
        ),
    ],
)
def test_bad_tags_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """Rows whose words and tags do not match, or are invalid, are errors with file and line."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines, TaggedWords)


@pytest.mark.parametrize("has_numbers", [False, True])
@pytest.mark.parametrize("label_pieces", ["first", "all"])
def test_tags_of_pieces(
    label_pieces: str, has_numbers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of each word has its tag, or all have, as in transformers' run_ner example."""
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {
        name: number
        for number, name in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "ab", "##c", "##d", "e"))
    }
    backend = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    text = ["abcd", "e", "abc-e", "e"]
    tag_names = ["B-X", "I-X", "O"]
    row = {"text": text, "label": [0, 2, 1, 2] if has_numbers else ["B-X", "O", "I-X", "O"]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    if has_numbers:
        own = Row(row, "x", 1.0, {"label": tuple(tag_names)})
        monkeypatch.setattr(label_rows, "read_corpus_rows_up_to_limit", lambda _: iter([own]))
    source = Corpus(format="jsonl", path=(str(tmp_path / "x.jsonl"),))
    samples = TaggedWords(source, tokenizer, 12, label_pieces=label_pieces)
    assert renumber_labels_and_list_class_names(samples, None) == ([] if has_numbers else tag_names)
    encoded = tokenizer(
        text, is_split_into_words=True, truncation=True, padding="max_length", max_length=12
    )
    # B-X, O, I-X, O in alphabetical numbers.
    tags = [0, 2, 1, 2]
    before = None
    expected = []
    # The rule of run_ner.py's tokenize_and_align_labels, and its b_to_i_label.
    b_to_i_label = [1, 1, 2]
    for word in encoded.word_ids():
        if word is None:
            expected.append(IGNORED)
        elif word != before:
            expected.append(tags[word])
        else:
            expected.append(b_to_i_label[tags[word]] if label_pieces == "all" else IGNORED)
        before = word
    sample = samples.sample(0, 0)
    later = [1, 1, -100] if label_pieces == "all" else [-100] * 3
    assert sample["labels"].tolist() == expected
    assert expected[:7] == [-100, 0, *later[:2], 2, 1, later[0]]
    assert sample["input_ids"].tolist() == encoded["input_ids"]


def test_no_rows_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source without rows is an error."""
    monkeypatch.setattr(label_rows, "read_corpus_rows_up_to_limit", lambda source: iter(()))
    monkeypatch.setattr(labelled_module, "corpus_fingerprint", lambda source: "")
    with pytest.raises(DataError, match=": has no rows"):
        LabelledTexts(Corpus(format="hub", name="some/set"), words(), 4)


# Names that are whole numbers, names that are words, and transformers' own for classes without names.
STARS = {str(star): star - 1 for star in range(1, 6)}
NAMED = {"bad": 0, "good": 1}
DEFAULT = {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}


@pytest.mark.parametrize(
    ("labels", "known", "expected"),
    [
        (["5", "2"], STARS, [4, 1]),
        ([5, 2], STARS, [4, 1]),
        ([0, 4], STARS, "data: label 0 is none of the model's: 1, 2, 3, 4, 5"),
        (["good"], STARS, "data: label 'good' is none of the model's: 1, 2, 3, 4, 5"),
        ([1, 0], NAMED, [1, 0]),
        ([1, 7], NAMED, "x.jsonl:2: label 7 is none of the model's: bad, good"),
        (["1", "0"], NAMED, "data: label '1' is none of the model's: bad, good"),
        (["2", "0"], DEFAULT, [2, 0]),
        (["2", "0"], {}, [2, 0]),
        ([2, 0], {}, [2, 0]),
        (["3"], DEFAULT, "data: label '3' is none of the model's: it has only numbers from 0 to 2"),
        (["LABEL_1"], DEFAULT, [1]),
    ],
)
@pytest.mark.parametrize("kind", [LabelledTexts, TaggedWords])
def test_labels_of_a_trained_model(
    labels: list[Any], known: dict[str, int], expected: Any, kind: Any, tmp_path: Path
) -> None:
    """For a trained model a word and a whole number are one label; what is no class is refused."""
    rows = [
        {"text": "a", "label": label}
        if kind is LabelledTexts
        else {"text": ["a"], "label": [label]}
        for label in labels
    ]
    samples = labelled(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)), kind)
    classes = len(known) or 3
    take_cache_notes()
    if isinstance(expected, str):
        with pytest.raises(DataError, match=re.escape(expected)):
            renumber_labels_by_class_names_or_numbers(samples, known, classes)
        return
    renumber_labels_by_class_names_or_numbers(samples, known, classes)
    assert samples.labels == expected
    # Class numbers of classes with names may be a mistake.
    noted = ["data: labels are whole numbers and no class names; they are read as class numbers: "
             "0 is 'bad'"]  # fmt: skip
    assert take_cache_notes() == (noted if known is NAMED else [])


def test_names_of_numbers_in_another_order(tmp_path: Path) -> None:
    """Integers that a data set describes by names are the trained classes of these names."""
    import datasets

    rows = datasets.Dataset.from_list([{"text": "a", "label": 1}, {"text": "a", "label": 0}])
    label = datasets.ClassLabel(names=["good", "bad"])
    rows.cast_column("label", label).to_parquet(str(tmp_path / "x.parquet"))
    samples = LabelledTexts(
        Corpus(format="parquet", path=(str(tmp_path / "x.parquet"),)), words(), 4
    )
    renumber_labels_by_class_names_or_numbers(samples, NAMED, 2)
    # The row's 1 is "bad", the model's class 0.
    assert samples.labels == [0, 1]


def test_whole_numbers_as_names_are_in_their_order(tmp_path: Path) -> None:
    """Class names that are whole numbers are numbered by value; one that is a word, by letters."""
    names = [str(number) for number in range(12)]
    assert (
        renumber_labels_and_list_class_names(
            labelled(tmp_path / "x.jsonl", rows_of(*names[::-1])), None
        )
        == names
    )
    mixed = renumber_labels_and_list_class_names(
        labelled(tmp_path / "y.jsonl", rows_of("10", "9", "x")), None
    )
    assert mixed == ["10", "9", "x"]
    # A model to be trained that knows the names already.
    stars = labelled(tmp_path / "z.jsonl", rows_of(5, 1))
    assert renumber_labels_and_list_class_names(stars, None, STARS) == [*STARS]
    assert stars.labels == [4, 0]


def test_cells_of_csv_are_labels(tmp_path: Path) -> None:
    """Cells that are numbers are classes in their order, or the numbers of a regression."""
    path = tmp_path / "x.csv"
    path.write_text("text;label\na;10\nb;9\nc; -1.5e1\n")
    source = Corpus(format="csv", path=(str(path),), most_rows=2)
    made = LabelledTexts(source, words(), 8)
    assert renumber_labels_and_list_class_names(made, None) == ["9", "10"]
    assert [int(made.sample(n, 0)["labels"]) for n in range(2)] == [1, 0]
    numbers = ScoredTexts(source.model_copy(update={"most_rows": None}), words(), 8)
    assert [float(numbers.sample(n, 0)["labels"]) for n in range(3)] == [10, 9, -15]
    path.write_text("text;label\na;ten\n")
    with pytest.raises(DataError, match=r"x.csv:2: label is 'ten'; sequence-regression needs a n"):
        ScoredTexts(source, words(), 8)


def test_class_sets(tmp_path: Path) -> None:
    """A list of classes is a float for each class of the model, also where a source has fewer."""
    one, other = (
        labelled(tmp_path / f"{n}.jsonl", rows_of(*lists), LabelSets)
        for n, lists in enumerate(([["b", "a"], []], [["d"], ["b"], []]))
    )
    assert renumber_labels_and_list_class_names(Mixture([one, other], [1, 1]), None) == [*"abd"]
    set_class_count_of_label_sets(3, Mixture([one, other], [1, 1]))
    vectors = [samples.sample(n, 0)["labels"] for samples in (one, other) for n in range(2)]
    assert torch.stack(vectors).tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert vectors[0].dtype == torch.float32
    assert one.sample(0, 0)["input_ids"].tolist() == [1, 0, 0, 0]
    assert one.some() == [("a", [1, 0]), ("a", [])]
    # As many classes as tokens: the padding of tokens is cut, and no class.
    set_class_count_of_label_sets(4, one)
    batch = cut_padding_to_shortest_fitting_bucket(collate([one.sample(0, 0)]), [2])
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((1, 2), (1, 4))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a"], "x.jsonl:1: label is 'a'; multi-label-classification needs a list of classes"),
        ([[], ["a", "b", "a"]], "x.jsonl:2: label has 'a' twice"),
        ([["a"], [1]], "x.jsonl:2: label is 1, and the first row's is 'a'"),
        ([["a", None]], "x.jsonl:1: label is None; a class is a name"),
        ([[], []], "x.jsonl.*: no row has a class"),
    ],
)
def test_bad_class_sets_are_named(labels: list[Any], message: str, tmp_path: Path) -> None:
    """A label that is no list of different classes is an error with file and line."""
    with pytest.raises(DataError, match=message):
        set_class_count_of_label_sets(
            0, labelled(tmp_path / "x.jsonl", rows_of(*labels), LabelSets)
        )
