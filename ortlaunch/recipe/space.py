"""Check the space of a sweep: every field and value of it must make a valid recipe."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping

from ortlaunch.recipe.check import check_tree_and_drop_wrong_values
from ortlaunch.recipe.fields.sweep import Search, combinations_of_applicable_values
from ortlaunch.recipe.text.source import tree_with_overrides_or_problems
from ortlaunch.recipe.text.source_location import ProblemLine
from ortlaunch.recipe.text.tree import Tree

# Combinations of values that are checked together; each check takes some milliseconds.
_MAX_COMBINATIONS = 64


def trial_overrides(values_by_field: Mapping[str, object]) -> list[str]:
    """Return the overrides of a trial: its values, and no sweep."""
    return [
        "sweep=null",
        *(f"{name}={json.dumps(value)}" for name, value in values_by_field.items()),
    ]


def problem_lines_of_search_values_or_first_bad_combination(
    tree: Tree, search: Search
) -> list[ProblemLine]:
    """Return the problems of values in the space, else of the first bad combination of them."""
    single_problems = list(_problem_lines_of_single_values(tree, search))
    all_combinations = combinations_of_applicable_values(
        [*search.space.items()], lambda parameter: parameter.bounds_or_choices, {}
    )
    for fields in itertools.islice(all_combinations, 0 if single_problems else _MAX_COMBINATIONS):
        if texts := _recipe_problem_texts_with_values(tree, fields):
            values = ", ".join(trial_overrides(fields)[1:])
            location = tree.nearest_key_location(("sweep", "space"))
            return [ProblemLine(location, f"sweep.space: {text} (with {values})") for text in texts]
    return single_problems


def _problem_lines_of_single_values(tree: Tree, search: Search) -> Iterator[ProblemLine]:
    values_of_earlier_fields = dict[str, tuple[object, ...]]()
    for name, parameter in search.space.items():
        path = ("sweep", "space", name)
        for other_field, value in parameter.when.items():
            if value not in values_of_earlier_fields.get(other_field, ()):
                reason = "is no value of a field that the space has before this one"
                location = tree.nearest_key_location((*path, "when", other_field))
                yield ProblemLine(
                    location,
                    f"sweep.space.{name}.when: {other_field}: {json.dumps(value)} {reason}",
                )
        values_of_earlier_fields[name] = parameter.bounds_or_choices
        if name.startswith("sweep"):
            yield ProblemLine(
                tree.nearest_key_location(path),
                f"sweep.space.{name}: cannot be searched; remove it",
            )
            continue
        reported_texts = set[str]()
        for value_index, value in enumerate(parameter.bounds_or_choices):
            location = tree.nearest_key_location((*path, parameter.value_field, value_index))
            texts = [
                text
                for text in _recipe_problem_texts_with_values(tree, {**parameter.when, name: value})
                if text not in reported_texts
            ]
            reported_texts.update(texts)
            yield from (
                ProblemLine(location, f"sweep.space.{name}: {json.dumps(value)}: {text}")
                for text in texts
            )


def _recipe_problem_texts_with_values(
    tree: Tree, values_by_field: Mapping[str, object]
) -> list[str]:
    """Return the problems of the recipe with these values, without their places."""
    problems = list[ProblemLine]()
    problems += check_tree_and_drop_wrong_values(
        tree_with_overrides_or_problems(tree, trial_overrides(values_by_field), problems)
    ).problems
    return [line.text for line in problems]
