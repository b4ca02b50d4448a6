"""The vocabulary of trained weights: tokenizer and class names, kept in the folder of the run.

The corpus may change after a training, and with it a tokenizer that is trained on it and the class
numbers of label names. So code that loads weights loads the vocabulary with them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ortlaunch.base.errors import DamagedFile
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Data as Fields
from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.run_folder.file_sums import (
    file_difference_text_or_empty,
    flush_and_checksum_files,
    list_files_below,
)
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import VocabularyRecord, json_values_of_record
from ortlaunch.run_folder.resume_record import ResumeRecord
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.worker.data.tokenizer import download_revision_or_keep_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class Vocabulary(NamedTuple):
    """The vocabulary of existing weights."""

    tokenizer: Path | None
    """Folder of the tokenizer; None: the recipe's tokenizer is used."""
    labels: Mapping[str, int]
    """Class name to class number; empty if classes have no names."""
    classes: int = 0
    """Number of classes of the training data; 0: unknown, or no classes."""


def read_run_vocabulary_or_none(run: RunDir) -> Vocabulary | None:
    """Return the vocabulary that a run keeps; None if there is none, as before its training.

    Raises:
        DamagedFile: the record cannot be read.
    """
    if not run.vocabulary.exists():
        return None
    try:
        record = VocabularyRecord(**read_json_or_raise_damaged(run.vocabulary))
        labels = {str(word): class_number for class_number, word in enumerate(record.labels)}
        for name, file in record.tokenizer_files.items():
            if damage := file_difference_text_or_empty(run.tokenizer / name, file):
                raise DamagedFile(f"{run.tokenizer}: is damaged: {damage}")
    except (DamagedFile, TypeError) as error:
        raise DamagedFile(
            f"{error if isinstance(error, DamagedFile) else f'{run.vocabulary}: is damaged: {error}'}. "
            f"Copy it from another run of this recipe and data, or delete {run.vocabulary}: it is "
            "then rebuilt from the data, which must not have changed since the run began"
        ) from error
    return Vocabulary(run.tokenizer if run.tokenizer.exists() else None, labels, record.classes)


def vocabulary_of_start_checkpoint_or_none(run: RunDir, recipe: Recipe) -> Vocabulary | None:
    """Return the vocabulary of the checkpoint from which a run resumes.

    None if there is no such checkpoint, or if its run keeps no vocabulary.
    """
    source_run = _run_of_start_checkpoint(run)
    kept_vocabulary = read_run_vocabulary_or_none(source_run) if source_run is not None else None
    if source_run is None or kept_vocabulary is None:
        return None
    # A kept tokenizer is used only if the recipe trains the same one. A tokenizer that the recipe
    # names is loaded by its name, as it was for the data's identity in the checkpoint.
    is_same_training = (
        read_json_or_raise_damaged(source_run.vocabulary)["trained_tokenizer"]
        == _tokenizer_training_settings_or_none(recipe.data)
        is not None
    )
    return kept_vocabulary if is_same_training else kept_vocabulary._replace(tokenizer=None)


def _run_of_start_checkpoint(run: RunDir) -> RunDir | None:
    """Return the run whose checkpoint is loaded: this one, or the one of `resume`."""
    if run.complete_checkpoints():
        return run
    checkpoint_path = ResumeRecord.read_or_from_the_beginning(run).checkpoint
    return RunDir(Path(checkpoint_path).parents[1]) if checkpoint_path else None


def vocabulary_of_transformers_config(config: PreTrainedConfig | None, task: str) -> Vocabulary:
    """Return the vocabulary of a transformers model, whose config.json has its class names.

    config: None for any other model, of which nothing is known.
    """
    traits = MODEL_TASKS[task]
    if config is None or not traits.has_classes:
        return Vocabulary(None, {})
    numbers = {
        str(word): int(class_number) for word, class_number in (config.label2id or {}).items()
    }
    return Vocabulary(None, numbers, config.num_labels or 0)


def write_vocabulary_and_tokenizer_if_changed(
    run: RunDir,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    class_names: list[str],
    class_count: int,
) -> None:
    """Write the vocabulary of the training into the run's folder (rank 0)."""
    record = VocabularyRecord(
        trained_tokenizer=_tokenizer_training_settings_or_none(recipe.data),
        labels=class_names,
        classes=class_count,
    )
    # The vocabulary that the checkpoints were written with stays if it is the same.
    if (
        run.complete_checkpoints()
        and run.vocabulary.exists()
        and {**read_json_or_raise_damaged(run.vocabulary), "tokenizer_files": {}}
        == json_values_of_record(record)
    ):
        return
    shutil.rmtree(run.tokenizer, ignore_errors=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(run.tokenizer)
        names = [str(path.relative_to(run.tokenizer)) for path in list_files_below(run.tokenizer)]
        record.tokenizer_files = flush_and_checksum_files(run.tokenizer, names)
    write_json_atomically(run.vocabulary, json_values_of_record(record))


def _tokenizer_training_settings_or_none(data: Fields) -> dict[str, object] | None:
    if not isinstance(data.tokenizer, TokenizerTraining):
        return None
    return {**data.tokenizer.model_dump(mode="json"), "chat_template": data.chat_template}


def class_number_by_label_of_recipe_or_pretrained(recipe: Recipe) -> Mapping[str, int]:
    """Return the class numbers of label names, of `model.config` or else of `model.pretrained`."""
    model = recipe.model
    recipe_labels = class_number_by_label_in_recipe(recipe)
    return (
        recipe_labels
        or vocabulary_of_transformers_config(
            _pretrained_config_or_none(model.pretrained), model.task
        ).labels
    )


def class_count_of_recipe_or_pretrained(recipe: Recipe) -> int:
    """Return the least number of classes of the model, before the data are known."""
    config = recipe.model.config or {}
    if "num_labels" in config:
        return int(config["num_labels"])
    pretrained_config = _pretrained_config_or_none(recipe.model.pretrained)
    labels = class_number_by_label_in_recipe(recipe)
    # transformers gives a model without labels two.
    return len(labels) or (pretrained_config.num_labels if pretrained_config else 2)


def _pretrained_config_or_none(pretrained: str | None) -> PreTrainedConfig | None:
    """Return the config of a pretrained model; None where there is none or it cannot be read."""
    if pretrained is None:
        return None
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            download_revision_or_keep_name(pretrained)
        )
    except (OSError, ValueError):
        # The same error is reported when the model is built.
        return None
    return config


def class_number_by_label_in_recipe(recipe: Recipe) -> Mapping[str, int]:
    """Return the class numbers of label names in `model.config`."""
    model_config = recipe.model.config or {}
    pairs = [*model_config.get("label2id", {}).items()] or [
        (word, class_number) for class_number, word in model_config.get("id2label", {}).items()
    ]
    return {str(word): int(class_number) for word, class_number in pairs}
