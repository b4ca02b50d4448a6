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
from ortlaunch.recipe.text.source_location import KeyPath, format_key_path

_CONTAINERS = (tuple, dict)


def section_models_in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
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
        yield from section_models_in_annotation(argument)


def item_models_in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models of the items of a list, or of the values of such a mapping."""
    for argument in typing.get_args(annotation):
        yield from (
            section_models_in_annotation(argument)
            if typing.get_origin(annotation) in _CONTAINERS
            else item_models_in_annotation(argument)
        )


def section_models_at_path_or_empty(key_path: KeyPath) -> list[type[BaseModel]]:
    """Return the models of the section at `key_path`, of which a value has one; [] for a plain field.

    An unknown path has none either.
    """
    models: list[type[BaseModel]] = [Recipe]
    field = None
    for key in key_path:
        if isinstance(key, int) or (field is not None and not models):
            models = [*item_models_in_annotation(field.annotation)] if field else []
            continue
        field = find_field(models, key)
        models = [*section_models_in_annotation(field.annotation)] if field else []
    return models


def find_field(models: Sequence[type[BaseModel]], field_name: int | str) -> FieldInfo | None:
    """Return a field by its name; None if none of the models has it."""
    matching_fields = (model.model_fields.get(str(field_name)) for model in models)
    return next((field for field in matching_fields if field is not None), None)


def first_model_at_path(key_path: KeyPath) -> type[BaseModel] | None:
    """Return the first model of the section at `key_path`; None for a field or an unknown path."""
    return next(iter(section_models_at_path_or_empty(key_path)), None)


def keys_accepted_by_section(section_path: KeyPath) -> tuple[str, ...]:
    """Return the keys that a section accepts."""
    # `extends` is read before validation and is therefore no field of the model.
    field_names = tuple(
        name
        for model in section_models_at_path_or_empty(section_path)
        for name in model.model_fields
    )
    return field_names if section_path else (*field_names, "extends")


def path_of_field_in_child_section(section_path: KeyPath, field_name: str) -> KeyPath | None:
    """Return the path of a field of that name in one of the section's own sections, or None."""
    model = first_model_at_path(section_path)
    for child_name, field in model.model_fields.items() if model else ():
        if any(
            field_name in inner_model.model_fields
            for inner_model in section_models_in_annotation(field.annotation)
        ):
            return (*section_path, child_name, field_name)
    return None


def _field_info(key_path: KeyPath) -> Any:
    # An index points into a list; the field is the list's.
    while key_path and isinstance(key_path[-1], int):
        key_path = key_path[:-1]
    return (
        find_field(section_models_at_path_or_empty(key_path[:-1]), key_path[-1])
        if key_path
        else None
    )


def is_required(key_path: KeyPath) -> bool:
    """Return whether the key is required."""
    field = _field_info(key_path)
    return bool(field and field.is_required())


def accepts_null(key_path: KeyPath) -> bool:
    """Return whether null is one of the field's values."""
    field = _field_info(key_path)
    return bool(field and type(None) in typing.get_args(field.annotation))


def names_accepted_by_field(key_path: KeyPath) -> tuple[str, ...]:
    """Return the names that a field of a few names accepts."""

    def names_in_annotation(annotation: Any) -> Iterator[str]:
        if isinstance(annotation, NameIn):
            yield from annotation.names
        elif typing.get_origin(annotation) is Literal:
            yield from map(str, typing.get_args(annotation))
        else:
            for argument in typing.get_args(annotation):
                yield from names_in_annotation(argument)

    field = _field_info(key_path)
    return (
        tuple(
            name
            for field_part in (field.annotation, *field.metadata)
            for name in names_in_annotation(field_part)
        )
        if field
        else ()
    )


@functools.cache
def docstring_by_section_and_field() -> dict[tuple[str, str], str]:
    """Return {(class of the section, field): docstring under the field, on one line}."""
    docstrings = dict[tuple[str, str], str]()
    # Python keeps no docstring of a field: the sources are parsed. Cached, because only error
    # messages and `ortlaunch schema` need it.
    source_paths = sorted(Path(__file__).parent.glob("*.py"))
    syntax_trees = [ast.parse(file.read_text(encoding="utf-8")) for file in source_paths]
    classes = [
        node
        for syntax_tree in syntax_trees
        for node in syntax_tree.body
        if isinstance(node, ast.ClassDef)
    ]
    for section in classes:
        bases = [ast.unparse(base) for base in section.bases]
        # Other tables of these files.
        if "NamedTuple" in bases:
            continue
        docstrings |= {
            (section.name, name): docstring
            for (owner, name), docstring in docstrings.items()
            if owner in bases
        }
        for assignment, docstring in zip(section.body, section.body[1:]):
            if (
                isinstance(assignment, ast.AnnAssign)
                and isinstance(assignment.target, ast.Name)
                and isinstance(docstring, ast.Expr)
            ):
                docstrings[section.name, assignment.target.id] = " ".join(
                    str(ast.literal_eval(docstring.value)).split()
                )
    return docstrings


def first_docstring_sentence_or_empty(key_path: KeyPath) -> str:
    """Return the first sentence of the docstring of a field or a section, or ""."""
    if not key_path or isinstance(key_path[-1], int):
        return ""
    model = first_model_at_path(key_path)
    docstrings = (
        docstring_by_section_and_field().get((section_type.__name__, key_path[-1]))
        for section_type in section_models_at_path_or_empty(key_path[:-1])
    )
    docstring = next(filter(None, docstrings), None)
    return (
        " ".join((docstring or (model.__doc__ if model else None) or "").split())
        .split(". ")[0]
        .rstrip(".")
    )


@functools.cache
def path_by_unambiguous_field_name() -> dict[str, str]:
    """Return {name: dotted path} of every field whose name occurs once and is unambiguous."""
    paths_by_name: dict[str, list[str]] = {}
    for key_path in _all_field_paths_below_section(Recipe, ()):
        paths_by_name.setdefault(str(key_path[-1]), []).append(format_key_path(key_path))
    # Names that a user may well write with another meaning in another section.
    ambiguous_names = ("r", "dropout", "split", "subset", "revision", "keep")
    return {
        name: paths[0]
        for name, paths in paths_by_name.items()
        if len(paths) == 1 and name not in ambiguous_names
    }


def _all_field_paths_below_section(
    model: type[BaseModel], section_path: KeyPath
) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        yield (*section_path, name)
        # `data.evaluation` has the same corpus fields as `data.train`: their names would occur twice.
        if name != "evaluation":
            for child in section_models_in_annotation(field.annotation):
                yield from _all_field_paths_below_section(child, (*section_path, name))
