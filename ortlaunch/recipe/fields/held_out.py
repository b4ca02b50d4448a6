"""No data.evaluation: what to type for a held-out corpus, of the kind that the training corpus
is."""

from __future__ import annotations

import shlex

from ortlaunch.recipe.fields.data import Corpus, Data
from ortlaunch.recipe.fields.section import chosen

_BUILT_IN = {
    "python-docs": Corpus(format="text"),
    "python-chats": Corpus(format="jsonl", messages_column="messages"),
}
_FILES = {"text": "held-out.txt", "jsonl": "held-out.jsonl", "parquet": "held-out.parquet"}
_PLACES = ("path", "split", "factory", "arguments")  # of the training samples themselves


def no_evaluation(source: object, data: Data) -> str:
    """The error, for a recipe that has none; its words can be typed as they are."""
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
    return f"{source} has no data.evaluation; give one, as {typed}"
