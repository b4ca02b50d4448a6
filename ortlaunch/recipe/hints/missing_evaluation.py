"""The error for a recipe without data.evaluation, with overrides that add a held-out corpus."""

from __future__ import annotations

import shlex

from ortlaunch.recipe.fields.data import Corpus, Data
from ortlaunch.recipe.fields.section import names_of_non_default_fields

_BUILT_IN = {
    "python-docs": Corpus(format="text"),
    "python-chats": Corpus(format="jsonl", messages_column="messages"),
    "python-pairs": Corpus(format="jsonl", text_columns=("query", "positive", "negative")),
}
# Placeholders that the user replaces.
_FILES = {
    "text": "held-out.txt",
    "jsonl": "held-out.jsonl",
    "csv": "held-out.csv",
    "folder": "held-out",
    "parquet": "held-out.parquet",
}
# Fields that point at the training samples themselves; a held-out corpus has others.
_PLACES = ("path", "split", "factory", "arguments")


def missing_evaluation_message_with_example(recipe_name: object, data: Data) -> str:
    """Return the error for a recipe without `data.evaluation`.

    It ends with overrides of the same format as the training corpus, quoted for a shell.
    """
    # Of a mixture the first source is the example.
    training_source = data.parts[0].source
    example_source = (
        _BUILT_IN[training_source] if isinstance(training_source, str) else training_source
    )
    values_by_field = {
        key: value
        for key, value in example_source.model_dump().items()
        if key in names_of_non_default_fields(example_source) and key not in _PLACES
    }
    if example_source.format == "hub":
        values_by_field["split"] = "test"
    elif example_source.factory is not None:
        values_by_field["factory"] = f"{example_source.factory.partition(':')[0]}:held_out"
    else:
        values_by_field["path"] = _FILES[example_source.format]
    overrides_text = " ".join(
        shlex.quote(f"data.evaluation.{key}={value}") for key, value in values_by_field.items()
    )
    return f"{recipe_name} has no data.evaluation; set it, as {overrides_text}"
