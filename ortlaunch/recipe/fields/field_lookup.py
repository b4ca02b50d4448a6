"""Look-ups in the recipe's models: the fields of a section, a field's docstring, its names."""

from __future__ import annotations

import ast
import functools
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import NameIn
from ortlaunch.recipe.text.place import KeyPath, dotted

_CONTAINERS = (tuple, dict)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models inside Optional, Union and Annotated.

    The items of a list, and the values of a mapping with keys of the user's, are not a section.
    """
    if typing.get_origin(annotation) in _CONTAINERS:
        return
    if (
        typing.get_origin(annotation) is None
        and isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
    ):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def items_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models of the items of a list, or of the values of such a mapping."""
    inside = typing.get_args(annotation)
    for argument in inside:
        yield from (
            models_in(argument)
            if typing.get_origin(annotation) in _CONTAINERS
            else items_in(argument)
        )


def sections_at(path: KeyPath) -> list[type[BaseModel]]:
    """Return the models of the section at `path`, of which a value has one; [] for a plain field.

    An unknown path has none either.
    """
    models: list[type[BaseModel]] = [Recipe]
    info = None
    for key in path:
        if isinstance(key, int) or (info is not None and not models):
            models = [*items_in(info.annotation)] if info else []
            continue
        info = field_of(models, key)
        models = [*models_in(info.annotation)] if info else []
    return models


def field_of(models: Sequence[type[BaseModel]], key: int | str) -> FieldInfo | None:
    """Return a field by its name; None if none of the models has it."""
    infos = (model.model_fields.get(str(key)) for model in models)
    return next((info for info in infos if info is not None), None)


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """Return the first model of the section at `path`; None for a field or an unknown path."""
    return next(iter(sections_at(path)), None)


def names_in(section: KeyPath) -> tuple[str, ...]:
    """Return the keys that a section accepts."""
    # `extends` is read before validation and is therefore no field of the model.
    names = tuple(name for model in sections_at(section) for name in model.model_fields)
    return names if section else (*names, "extends")


def below(section: KeyPath, name: str) -> KeyPath | None:
    """Return the path of a field of that name in one of the section's own sections, or None."""
    model = section_at(section)
    for child, info in model.model_fields.items() if model else ():
        if any(name in inner.model_fields for inner in models_in(info.annotation)):
            return (*section, child, name)
    return None


def _info(path: KeyPath) -> Any:
    # An index points into a list; the field is the list's.
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return field_of(sections_at(path[:-1]), path[-1]) if path else None


def is_required(path: KeyPath) -> bool:
    """Return whether the key is required."""
    info = _info(path)
    return bool(info and info.is_required())


def takes_null(path: KeyPath) -> bool:
    """Return whether null is one of the field's values."""
    info = _info(path)
    return bool(info and type(None) in typing.get_args(info.annotation))


def choices(path: KeyPath) -> tuple[str, ...]:
    """Return the names that a field of a few names accepts."""

    def inside(annotation: Any) -> Iterator[str]:
        if isinstance(annotation, NameIn):
            yield from annotation.names
        elif typing.get_origin(annotation) is Literal:
            yield from map(str, typing.get_args(annotation))
        else:
            for argument in typing.get_args(annotation):
                yield from inside(argument)

    info = _info(path)
    return (
        tuple(name for each in (info.annotation, *info.metadata) for name in inside(each))
        if info
        else ()
    )


@functools.cache
def manual() -> dict[tuple[str, str], str]:
    """Return {(class of the section, field): docstring under the field, on one line}."""
    found = dict[tuple[str, str], str]()
    # Python keeps no docstring of a field: the sources are parsed. Cached, because only error
    # messages and `ortlaunch schema` need it.
    files = sorted(Path(__file__).parent.glob("*.py"))
    sources = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [node for each in sources for node in each.body if isinstance(node, ast.ClassDef)]
    for section in classes:
        bases = [ast.unparse(base) for base in section.bases]
        # Other tables of these files.
        if "NamedTuple" in bases:
            continue
        found |= {
            (section.name, name): text for (owner, name), text in found.items() if owner in bases
        }
        for above, text in zip(section.body, section.body[1:]):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(text, ast.Expr)
            ):
                found[section.name, above.target.id] = " ".join(
                    str(ast.literal_eval(text.value)).split()
                )
    return found


def description(path: KeyPath) -> str:
    """Return the first sentence of the docstring of a field or a section, or ""."""
    if not path or isinstance(path[-1], int):
        return ""
    model = section_at(path)
    texts = (manual().get((each.__name__, path[-1])) for each in sections_at(path[:-1]))
    text = next(filter(None, texts), None)
    return (
        " ".join((text or (model.__doc__ if model else None) or "").split())
        .split(". ")[0]
        .rstrip(".")
    )


@functools.cache
def everywhere() -> dict[str, str]:
    """Return {name: dotted path} of every field whose name occurs once and is unambiguous."""
    found: dict[str, list[str]] = {}
    for path in _paths(Recipe, ()):
        found.setdefault(str(path[-1]), []).append(dotted(path))
    # Names that a user may well write with another meaning in another section.
    vague = ("r", "dropout", "split", "subset", "revision", "keep")
    return {
        name: paths[0] for name, paths in found.items() if len(paths) == 1 and name not in vague
    }


def _paths(model: type[BaseModel], prefix: KeyPath) -> Iterator[KeyPath]:
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        # `data.evaluation` has the same corpus fields as `data.train`: their names would occur twice.
        if name != "evaluation":
            for child in models_in(info.annotation):
                yield from _paths(child, (*prefix, name))
