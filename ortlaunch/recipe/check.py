"""Tree -> Recipe: pydantic finds what is wrong, this says it with place, value and what would be right."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Literal, Optional

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ortlaunch.recipe.dialects import advise, closest
from ortlaunch.recipe.models import MAPPING, WORD, Recipe
from ortlaunch.recipe.source import KeyPath, Tree, parse, put

_YAML_1_1_BOOLEANS = ("y", "n", "yes", "no", "on", "off")
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a word",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
# Stand in for what is missing, so that the rules can still look at the rest.
_PLACEHOLDERS: dict[KeyPath, str] = {
    ("name",): "x",
    ("model",): "{task: custom}",
    ("model", "task"): "custom",
    ("data",): "{train: python-docs}",
    ("data", "train"): "python-docs",
    ("data", "train", "format"): "custom",
    ("data", "evaluation", "format"): "custom",
    ("data", "tokenizer", "train"): "bpe",
    ("batch",): "{}",
    ("optimizer",): "{learning_rate: 1.0}",
    ("optimizer", "learning_rate"): "1.0",
    ("train",): "{max_steps: 1}",
    ("train", "max_steps"): "1",
}
_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


def dotted(path: KeyPath) -> str:
    """`("data", "train", "path", 0)` -> `data.train.path[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def check(tree: Tree) -> tuple[Recipe | None, list[tuple[KeyPath, str]]]:
    """Validate; return the recipe (None if it has none) and the problems as (path, message).

    With problems, the recipe is what is left when the wrong keys are taken out, so that cross-field
    rules can still speak of the rest.
    """
    problems: list[tuple[KeyPath, str]] = []
    for _ in range(3):  # a removed key can uncover one more error, never an endless row
        try:
            return Recipe.model_validate(tree.plain()), problems
        except ValidationError as error:
            found = [(_path(details, tree), details) for details in error.errors()]
            fresh = [(path, _message(path, details, tree)) for path, details in found]
            problems += [item for item in fresh if item[0] not in [path for path, _ in problems]]
            for path, details in found:
                tree = _mended(tree, path, details["type"])
    return None, problems


def _mended(tree: Tree, path: KeyPath, kind: str) -> Tree:
    """The tree with a wrong key taken out, or a missing one stood in for."""
    if path in _PLACEHOLDERS and kind != "extra_forbidden":
        return put(tree, [str(key) for key in path], parse(_PLACEHOLDERS[path], "", []))
    return tree.without(path)


def _path(details: ErrorDetails, tree: Tree) -> KeyPath:
    """pydantic's location without the names of union branches."""
    path: KeyPath = ()
    for key in details["loc"]:
        here = tree.find(path)
        if key in (MAPPING, WORD):
            continue
        if here is not None and here.kind == "scalar":
            break  # `path: 3` is one value that may also be a list
        path = (*path, key)
    return path


def _message(path: KeyPath, details: ErrorDetails, tree: Tree) -> str:
    kind, written = details["type"], tree.find(path)
    if kind == "missing":
        return f"is missing{_description(path)}"
    if kind == "extra_forbidden":
        return f"unknown key; {_advise(path)}"
    raw = written.raw if written is not None and written.raw is not None else repr(details["input"])
    if written is not None and isinstance(written.scalar, bool) and (written.raw or "").lower() in _YAML_1_1_BOOLEANS:
        quote = f'. Write "{raw}" in quotes if the word is meant' if kind in ("string_type", "literal_error") else ""
        return f"got {raw}, which YAML reads as {str(written.scalar).lower()}; {_wanted(details, path)}{quote}"
    if details["input"] is None:
        return f"got null; {_wanted(details, path)}"
    return f"got {_shorten(raw)}; {_wanted(details, path)}{_quoted_number(written)}"


def _wanted(details: ErrorDetails, path: KeyPath) -> str:
    """What would be right."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        guess = closest(str(details["input"]), _choices(path))
        return f"one of {', '.join(_choices(path)) or context['expected']}" + (
            f" (did you mean {guess}?)" if guess else ""
        )
    if kind in _BOUNDS:
        bound = next(iter(context.values()))
        return (
            f"it must be {_BOUNDS[kind]} {bound:g}" if isinstance(bound, (int, float)) else f"{_BOUNDS[kind]} {bound}"
        )
    if kind in _KINDS:
        return f"it must be {_KINDS[kind]}{_description(path, brief=True)}"
    if kind == "string_pattern_mismatch":
        return "use letters, digits, `.`, `_` and `-`, and begin with a letter or a digit"
    if kind == "too_short":
        return "give at least one"
    message: str = details["msg"]
    return message[0].lower() + message[1:]


def _quoted_number(written: Tree | None) -> str:
    text = written.scalar if written is not None and isinstance(written.scalar, str) else ""
    try:
        float(text)
    except ValueError:
        return ""
    return ". It is quoted, so it is a word: leave the quotes out"


def _shorten(raw: str) -> str:
    return raw if len(raw) <= 80 else raw[:77] + "..."


def _advise(path: KeyPath) -> str:
    section = path[:-1]
    model = _model_at(section)
    here = tuple(model.model_fields) if model else ()
    return advise(str(path[-1]), here, dotted(section), {n: p for n, p in _all_fields() if n not in here})


def _all_fields() -> Iterator[tuple[str, str]]:
    """(name, dotted path) of every field of every section, top fields last so that they win in a dict."""

    def below(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
        for name, info in model.model_fields.items():
            for child in _models_in(info.annotation):
                yield from below(child, f"{prefix}{name}.")
            yield name, f"{prefix}{name}"

    ambiguous = {"name", "every_steps", "arguments", "path", "env", "train", "stage", "format", "split"}
    return ((name, path) for name, path in below(Recipe, "") if name not in ambiguous)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models inside Optional, Union and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _model_at(path: KeyPath) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Recipe
    for key in path:
        info = model.model_fields.get(str(key)) if model else None
        model = next(_models_in(info.annotation), None) if info else None
    return model


def _annotation_at(path: KeyPath) -> Any:
    names = [key for key in path if isinstance(key, str)]
    model = _model_at(tuple(names[:-1]))
    info = model.model_fields.get(names[-1]) if model and names else None
    return info.annotation if info else None


def _choices(path: KeyPath) -> tuple[str, ...]:
    """The words or numbers of a Literal field."""

    def inside(annotation: Any) -> Iterator[str]:
        if typing.get_origin(annotation) is Literal:
            yield from map(str, typing.get_args(annotation))
        else:
            for argument in typing.get_args(annotation):
                yield from inside(argument)

    return tuple(inside(_annotation_at(path)))


def _description(path: KeyPath, brief: bool = False) -> str:
    """What the field is, from its docstring."""
    model = _model_at(path[:-1])
    info = model.model_fields.get(str(path[-1])) if model and path else None
    text = " ".join((info.description or "").split()) if info else ""
    if not text:
        model = _model_at(path)
        text = " ".join((model.__doc__ or "").split()) if model and not brief else ""
    first = text.split(". ")[0].rstrip(".")
    return f": {first}" if first else ""
