"""What a model's numbers stand for, words by its tokenizer and classes by its labels, as a run keeps it in its folder.

The corpus may change after a training, and with it what is made of it: a tokenizer that is trained on it, and the
numbers of labels that are words. Whoever takes weights takes these with them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ortlaunch.errors import DamagedFile
from ortlaunch.json_types import Json
from ortlaunch.model_tasks import MODEL_TASKS
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Data as Fields
from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.run_folder.records import VocabularyRecord, as_json
from ortlaunch.run_folder.resume_record import ResumeRecord

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class Vocabulary(NamedTuple):
    """Of weights that are there already."""

    tokenizer: Path | None
    """A folder; None: the recipe's is taken."""
    labels: Mapping[str, int]
    """Numbers of classes by their names; none where they have none."""
    classes: int = 0
    """How many the training data had; 0: not known, or none."""


def of_run(run: RunDir) -> Vocabulary | None:
    """What a run keeps; None: nothing, as one that has not begun."""
    if not run.vocabulary.exists():
        return None
    try:
        found = VocabularyRecord(**read_json(run.vocabulary))
        labels = {str(word): number for number, word in enumerate(found.labels)}
    except (DamagedFile, TypeError) as error:
        raise DamagedFile(
            f"{error if isinstance(error, DamagedFile) else f'{run.vocabulary}: is damaged: {error}'}. Copy it from "
            "another run of this recipe and data, or delete it: it is then made from the data again, which have to be "
            "those that the run began with"
        ) from error
    return Vocabulary(run.tokenizer if run.tokenizer.exists() else None, labels, found.classes)


def goes_on_with(run: RunDir, recipe: Recipe) -> Vocabulary | None:
    """Of the checkpoint that a run goes on from; None: it begins, or that is of another kind.

    A tokenizer that the recipe names is taken by its name, as the data's identity in the checkpoint was.
    """
    source = _source(run)
    found = of_run(source) if source is not None else None
    if source is None or found is None:
        return None
    same = read_json(source.vocabulary)["trained_tokenizer"] == _asked(recipe.data) is not None
    return found if same else found._replace(tokenizer=None)


def _source(run: RunDir) -> RunDir | None:
    """The run whose checkpoint is taken."""
    if run.complete_checkpoints():
        return run
    taken = ResumeRecord.read(run).checkpoint
    return RunDir(Path(taken).parents[1]) if taken else None


def of_config(config: PreTrainedConfig | None, task: str) -> Vocabulary:
    """Of a model of transformers, whose config.json names its classes; of any other one, None, nothing is known."""
    if config is None or MODEL_TASKS[task].label not in ("class", "word"):
        return Vocabulary(None, {})
    numbers = {str(word): int(number) for word, number in (config.label2id or {}).items()}
    return Vocabulary(None, numbers, config.num_labels or 0)


def keep(
    run: RunDir, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, labels: list[str], classes: int
) -> None:
    """Write what is trained with, unless that is there since checkpoints were written (rank 0)."""
    record = VocabularyRecord(trained_tokenizer=_asked(recipe.data), labels=labels, classes=classes)
    if (
        run.complete_checkpoints()
        and run.vocabulary.exists()
        and read_json(run.vocabulary) == as_json(record)
    ):
        return
    shutil.rmtree(run.tokenizer, ignore_errors=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(run.tokenizer)
    write_json(run.vocabulary, as_json(record))


def _asked(data: Fields) -> Json | None:
    """The tokenizer that is trained on the corpus."""
    if not isinstance(data.tokenizer, TokenizerTraining):
        return None
    return {**data.tokenizer.model_dump(mode="json"), "chat_template": data.chat_template}


def labels_of_model(recipe: Recipe) -> Mapping[str, int]:
    """The numbers that labels have in the recipe's `model.config`, or else in the model that it begins with."""
    model = recipe.model
    given = labels_of_recipe(recipe)
    if given or model.pretrained is None:
        return given
    from transformers import AutoConfig

    try:
        return of_config(AutoConfig.from_pretrained(model.pretrained), model.task).labels
    except (OSError, ValueError):
        return {}  # building the model tells why


def labels_of_recipe(recipe: Recipe) -> Mapping[str, int]:
    """The numbers that labels have in `model.config`."""
    given = recipe.model.config or {}
    pairs = [*given.get("label2id", {}).items()] or [
        (word, number) for number, word in given.get("id2label", {}).items()
    ]
    return {str(word): int(number) for word, number in pairs}
