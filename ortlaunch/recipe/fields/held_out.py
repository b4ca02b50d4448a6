"""The error for a recipe without data.evaluation, with overrides that add a held-out corpus."""

from __future__ import annotations

import shlex

from ortlaunch.recipe.fields.data import Corpus, Data
from ortlaunch.recipe.fields.section import chosen

_BUILT_IN = {
    "python-docs": Corpus(format="text"),
    "python-chats": Corpus(format="jsonl", messages_column="messages"),
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


def no_evaluation(source: object, data: Data) -> str:
    """Return the error for a recipe without `data.evaluation`.

    It ends with overrides of the same format as the training corpus, quoted for a shell.
    """
    # Of a mixture the first source is the example.
    trained = data.parts[0].source
    kind = _BUILT_IN[trained] if isinstance(trained, str) else trained
    words = {
        key: value
        for key, value in kind.model_dump().items()
        if key in chosen(kind) and key not in _PLACES
    }
    if kind.format == "hub":
        words["split"] = "test"
    elif kind.factory is not None:
        words["factory"] = f"{kind.factory.partition(':')[0]}:held_out"
    else:
        words["path"] = _FILES[kind.format]
    typed = " ".join(shlex.quote(f"data.evaluation.{key}={value}") for key, value in words.items())
    return f"{source} has no data.evaluation; set it, as {typed}"
