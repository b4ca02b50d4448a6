"""Weights are used with the tokenizer and classes of their training, even if the corpus changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import DamagedFile, InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.resume_record import FROM_THE_BEGINNING
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.vocabulary import (
    Vocabulary,
    read_run_vocabulary_or_none,
    vocabulary_of_start_checkpoint_or_none,
    write_vocabulary_and_tokenizer_if_changed,
)
from ortlaunch.worker.evaluation.evaluate_model import load_and_evaluate_model_file
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from tests.worker.models import BERT, recipe

pytestmark = pytest.mark.usefixtures("own_cache")
# Not in alphabetical order.
NEWS = {"World": 0, "Sports": 1, "Business": 2}
TASK = "sequence-classification"


def rows(path: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return a corpus with one text for each of these labels."""
    path.write_text(
        "".join(json.dumps({"text": f"about {word}", "label": word}) + "\n" for word in words)
    )
    return {"format": "jsonl", "path": [str(path)]}


def classifier(
    tmp_path: Path, train: Sequence[str], evaluation: Sequence[str] = (), **model: Any
) -> Recipe:
    """Return a recipe that trains and evaluates on texts with these labels."""
    held_out = rows(tmp_path / "evaluation.jsonl", evaluation) if evaluation else None
    data = {"train": rows(tmp_path / "train.jsonl", train), "evaluation": held_out}
    return recipe(
        TASK, model or {"config": BERT}, data, batch={"micro_size": 2, "accumulation_steps": 1}
    )


def numbers(samples: Any) -> list[int]:
    return [int(samples.sample(index, 0)["labels"]) for index in range(len(samples))]


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    """Save a transformers classifier with its own class numbers; return its folder."""
    chosen = classifier(tmp_path, [*NEWS], config={**BERT, "label2id": NEWS})
    data = LoadedData(chosen)
    model: Any = seed_and_build_loss_module_on_cpu(chosen, data).model
    assert model.config.id2label == {number: word for word, number in NEWS.items()}
    model.save_pretrained(tmp_path / "foreign")
    data.tokenizer.save_pretrained(tmp_path / "foreign")
    return str(tmp_path / "foreign")


def test_labels_of_a_pretrained_classifier(foreign: str, tmp_path: Path) -> None:
    """A pretrained classifier's class numbers are used if it has all labels."""
    # Otherwise the labels are of another task, and numbered by the alphabet.
    chosen = classifier(tmp_path, ["Sports", "World"], ["Business"], pretrained=foreign)
    data = LoadedData(chosen)
    assert (numbers(data.train), numbers(data.evaluation), data.class_names) == (
        [1, 0],
        [2],
        [*NEWS],
    )
    assert seed_and_build_loss_module_on_cpu(chosen, data).model.config.label2id == NEWS
    assert LoadedData(classifier(tmp_path, ["World", "Art"], pretrained=foreign)).label_names == [
        "Art",
        "World",
    ]


def test_labels_that_the_recipe_numbers(tmp_path: Path) -> None:
    """A `label2id` with other labels than the data is refused."""
    chosen = classifier(
        tmp_path, ["World", "Art"], config={**BERT, "label2id": {"Art": 1, "Word": 0}}
    )
    with pytest.raises(
        InputError, match=r"model\.config\.label2id: got Art, Word, and the labels are Art, World"
    ):
        seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


@pytest.mark.parametrize("words", [["Sports"], ["Business", "World", "World"]])
def test_a_model_is_evaluated_by_its_own_labels(
    foreign: str, words: list[str], tmp_path: Path
) -> None:
    """A model is evaluated by its own labels, of which the data may have some alone."""
    # The training data of the recipe have none of its labels.
    from transformers import pipeline

    classify: Any = pipeline("text-classification", foreign)
    found = load_and_evaluate_model_file(
        classifier(tmp_path, ["x", "y"], words, pretrained=foreign), Path(foreign), tmp_path
    )
    # The accuracy must be that of transformers' own pipeline.
    right = [classify(f"about {word}")[0]["label"] == word for word in words]
    assert found.metrics["classification_accuracy"] == pytest.approx(sum(right) / len(right))


def test_a_client_has_some_of_the_labels(tmp_path: Path) -> None:
    """A client's data may have some of the labels; an unknown label is an error."""
    known = Vocabulary(None, NEWS, 3)
    chosen = classifier(tmp_path, ["Sports", "Sports"], ["x"])
    data = LoadedData(chosen, vocabulary=known)
    # Only the requested corpus is read.
    (tmp_path / "evaluation.jsonl").unlink()
    assert (numbers(data.train), data.classes, data.class_names) == ([1, 1], 3, [*NEWS])
    with pytest.raises(
        DataError, match="label 'x' is none of the model's: World, Sports, Business"
    ):
        _ = LoadedData(classifier(tmp_path, ["x"]), vocabulary=known).train


def test_a_trained_tokenizer_stays(tmp_path: Path) -> None:
    """A resumed run keeps its trained tokenizer though its corpus changes."""
    # Unless the recipe requests another tokenizer.
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"the {i % 7} cats saw {i % 5} dogs" for i in range(90)))
    chosen = recipe(
        "masked-lm", {"config": BERT}, {"train": {"format": "text", "path": [str(corpus)]}}
    )
    run = RunDir(tmp_path / "run")
    first = LoadedData(chosen)
    run.path.mkdir()
    write_vocabulary_and_tokenizer_if_changed(
        run, chosen, first.tokenizer, first.class_names, first.classes
    )
    corpus.write_text(corpus.read_text() + "\n\nquite other words")
    # The run has no checkpoint yet.
    assert vocabulary_of_start_checkpoint_or_none(run, chosen) is None
    other = LoadedData(chosen).tokenizer.get_vocab()
    assert other != first.tokenizer.get_vocab()
    run.checkpoint_folder(2).mkdir(parents=True)
    (run.checkpoint_folder(2) / "COMPLETE").touch()
    then = LoadedData(
        chosen, vocabulary=vocabulary_of_start_checkpoint_or_none(run, chosen)
    ).tokenizer
    assert then.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()
    assert then.special_tokens_map == first.tokenizer.special_tokens_map
    # A recipe with another vocabulary size trains a tokenizer of its own.
    larger = chosen.data.model_copy(
        update={"tokenizer": TokenizerTraining(train="wordpiece", vocab_size=410)}
    )
    found = vocabulary_of_start_checkpoint_or_none(run, chosen.model_copy(update={"data": larger}))
    assert found is not None
    assert found.tokenizer is None
    # With the kept tokenizer the corpus is not read.
    corpus.unlink()
    assert len(LoadedData(chosen, vocabulary=read_run_vocabulary_or_none(run)).tokenizer) == len(
        first.tokenizer
    )


@pytest.mark.parametrize("damage", [b"", b"{", None], ids=["empty", "cut", "zeros"])
def test_a_damaged_tokenizer_names_its_remedy(tmp_path: Path, damage: bytes | None) -> None:
    """A tokenizer that is not what the training wrote is an error with file and remedy."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"the {i % 7} cats saw {i % 5} dogs" for i in range(90)))
    chosen = recipe(
        "masked-lm", {"config": BERT}, {"train": {"format": "text", "path": [str(corpus)]}}
    )
    run = RunDir(tmp_path / "run")
    run.checkpoint_folder(2).mkdir(parents=True)
    (run.checkpoint_folder(2) / "COMPLETE").touch()
    write_vocabulary_and_tokenizer_if_changed(run, chosen, LoadedData(chosen).tokenizer, [], 0)
    before = run.vocabulary.stat().st_mtime_ns
    # The next start leaves it alone.
    write_vocabulary_and_tokenizer_if_changed(run, chosen, None, [], 0)  # type: ignore[arg-type]
    assert (read_run_vocabulary_or_none(run) is not None, run.vocabulary.stat().st_mtime_ns) == (
        True,
        before,
    )
    file = run.tokenizer / "tokenizer.json"
    file.write_bytes(bytes(file.stat().st_size) if damage is None else damage)
    with pytest.raises(
        DamagedFile, match=r"tokenizer: is damaged: tokenizer\.json .*delete .*vocabulary\.json"
    ):
        read_run_vocabulary_or_none(run)


def test_a_run_that_goes_on_from_another(tmp_path: Path) -> None:
    """A run that resumes from another run's checkpoint uses that run's vocabulary."""
    other = RunDir(tmp_path / "other")
    run = RunDir(tmp_path / "run")
    other.path.mkdir()
    run.path.mkdir()
    chosen = classifier(tmp_path, [*NEWS])
    write_vocabulary_and_tokenizer_if_changed(other, chosen, None, [*NEWS], 3)
    replace(
        FROM_THE_BEGINNING, checkpoint=str(other.checkpoint_folder(4)), source=str(other)
    ).write(run)
    found = vocabulary_of_start_checkpoint_or_none(run, chosen)
    assert found is not None
    assert dict(found.labels) == NEWS


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"labels"', '"lacels"', "unexpected keyword"),
        ("}", "", "not JSON"),
        ('"labels"', '"classes"', "missing|labels"),
    ],
)
def test_a_damaged_vocabulary_names_its_remedy(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    """A damaged vocabulary file is an error that names the file and the remedy."""
    run = RunDir(tmp_path)
    run.vocabulary.write_text(
        '{"trained_tokenizer": null, "labels": ["cat", "dog"], "classes": 2}'.replace(old, new)
    )
    with pytest.raises(
        DamagedFile, match=rf"vocabulary\.json: is damaged: .*({why}).*Copy it from another run"
    ):
        read_run_vocabulary_or_none(run)
