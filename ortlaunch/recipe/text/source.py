"""A recipe file, the recipes that it extends, and `key.path=value` overrides, as one tree.

Independent of the recipe's fields.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ortlaunch.base.errors import IS_LFS_POINTER, LFS_POINTER
from ortlaunch.recipe.text.python_values import json_value_or_importable_name_or_add_problem
from ortlaunch.recipe.text.source_location import (
    SECRET_NAME,
    ProblemLine,
    SourceError,
    SourceLocation,
    format_key_path,
)
from ortlaunch.recipe.text.tree import Tree, merge_trees_of_same_format
from ortlaunch.recipe.text.yaml_text import MAX_CHARACTERS, parse_yaml_tree

# UTF-8 has up to four bytes for a character.
_MAX_BYTES = 4 * MAX_CHARACTERS
# Maximum length of a chain of recipes that extend each other.
_MAX_BASES = 20


def read_recipe_tree_with_bases(
    recipe_path: Path, problems: list[ProblemLine], extending_paths: Sequence[Path] = ()
) -> Tree:
    """Read a recipe file and the recipes that it extends; duplicate keys go to `problems`.

    Raises: SourceError: the file is missing, is not UTF-8 or YAML, is no mapping, or extends
    itself.
    """
    return _tree_merged_over_extended_recipes(
        parse_yaml_tree(read_recipe_text_or_refuse(recipe_path), str(recipe_path), problems),
        recipe_path,
        problems,
        extending_paths,
    )


def tree_of_python_values(values: Mapping[str, object], problems: list[ProblemLine]) -> Tree:
    """Return the tree of a recipe that is a mapping in Python; raises as `read_recipe_tree_with_bases`.

    `extends` in it is relative to the current folder. Every place is the text `recipe`.
    """
    name = "recipe"
    messages: list[str] = []
    # JSON is YAML, so that values have the same rules as in a file.
    text = json.dumps(json_value_or_importable_name_or_add_problem(values, (), messages))
    if messages:
        problems += [ProblemLine(SourceLocation(name), message) for message in messages[1:]]
        raise SourceError(SourceLocation(name), messages[0])
    return _tree_merged_over_extended_recipes(
        _set_all_locations(parse_yaml_tree(text, name, problems), SourceLocation(name)),
        Path(name),
        problems,
        (),
    )


def _tree_merged_over_extended_recipes(
    tree: Tree, recipe_path: Path, problems: list[ProblemLine], extending_paths: Sequence[Path]
) -> Tree:
    if tree.node_type == "scalar" and tree.raw is None:
        raise SourceError(
            tree.location, "the recipe is empty; `ortlaunch recipes list` prints examples"
        )
    if tree.node_type != "mapping":
        value_form = "a list" if tree.node_type == "list" else "a single value"
        raise SourceError(
            tree.location, f"a recipe is a mapping of `key: value` lines, this is {value_form}"
        )
    base = tree.find_subtree(("extends",))
    # Keys that begin with `x-` or `.` only hold YAML anchors.
    for key in (
        "extends",
        *(key for key in tree.children if str(key).startswith(("x-", "."))),
    ):
        tree = tree.remove_key((key,))
    return (
        tree
        if base is None
        else merge_trees_of_same_format(
            _read_extended_recipe_or_refuse(base, recipe_path, problems, extending_paths), tree
        )
    )


def read_recipe_text_or_refuse(recipe_path: Path) -> str:
    """Return the text of a regular file.

    Raises: SourceError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = _read_regular_file_or_refuse(recipe_path)
    except (OSError, ValueError) as error:
        raise SourceError(
            SourceLocation(str(recipe_path)),
            f"cannot be read: {getattr(error, 'strerror', None) or error}",
        ) from None
    if data.startswith(LFS_POINTER):
        raise SourceError(SourceLocation(str(recipe_path)), IS_LFS_POINTER)
    try:
        # Editors on Windows may write a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        valid_data = data[: error.start]
        location = SourceLocation(
            str(recipe_path), valid_data.count(b"\n") + 1, error.start - valid_data.rfind(b"\n")
        )
        raise SourceError(
            location, f"is not UTF-8 text (byte {data[error.start]:#x}); save it as UTF-8"
        ) from None


def _read_regular_file_or_refuse(recipe_path: Path) -> bytes:
    """Return a regular file's bytes; a pipe or a device may block, or never end."""
    file_mode = recipe_path.stat().st_mode
    # A folder passes: opening it raises a clear error.
    if not stat.S_ISREG(file_mode) and not stat.S_ISDIR(file_mode):
        file_type = "a pipe" if stat.S_ISFIFO(file_mode) else "a device or a socket"
        raise SourceError(
            SourceLocation(str(recipe_path)),
            f"is {file_type}; a recipe is a regular file, which is read more than once",
        )
    with recipe_path.open("rb") as file:
        # One byte more than the limit shows that the file exceeds it.
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise SourceError(
            SourceLocation(str(recipe_path), 1, 1),
            f"has more than {_MAX_BYTES:,} bytes, too many for a recipe",
        )
    return data


def _read_extended_recipe_or_refuse(
    extends_node: Tree,
    recipe_path: Path,
    problems: list[ProblemLine],
    extending_paths: Sequence[Path],
) -> Tree:
    location = extends_node.key_location or extends_node.location
    if not isinstance(extends_node.scalar, str) or not extends_node.scalar:
        value_text = extends_node.raw or (
            "nothing"
            if extends_node.node_type == "scalar"
            else extends_node.value_without_locations()
        )
        raise SourceError(location, f"extends: got {value_text}; give the path of one recipe file")
    base_path = recipe_path.parent / extends_node.scalar
    try:
        recipe_realpath, target_realpath, target_exists = (
            recipe_path.resolve(),
            base_path.resolve(),
            base_path.is_file(),
        )
    # A name that is too long, a null character, a loop of links.
    except (OSError, ValueError, RuntimeError):
        target_exists = False
    if not target_exists:
        raise SourceError(
            location, f"extends: no file {base_path} (the path is relative to {recipe_path})"
        )
    if target_realpath in (recipe_realpath, *extending_paths):
        raise SourceError(
            location, f"extends: {extends_node.scalar} extends itself through other files"
        )
    if len(extending_paths) >= _MAX_BASES:
        raise SourceError(
            location,
            f"extends: {_MAX_BASES} recipes extend each other up to here; merge some of them",
        )
    return read_recipe_tree_with_bases(base_path, problems, (*extending_paths, recipe_realpath))


def tree_with_overrides_or_problems(
    tree: Tree, assignments: Iterable[str], problems: list[ProblemLine]
) -> Tree:
    """Return `tree` with every `key.path=value` set; values are YAML and replace the old ones."""
    for assignment in assignments:
        dotted_path, equals, text = assignment.partition("=")
        # A secret's value is not printed.
        location = SourceLocation(
            f"override {dotted_path + '=...' if SECRET_NAME.search(dotted_path.strip()) else assignment!r}"
        )
        key_names = tuple(name.strip() for name in dotted_path.split("."))
        if not equals or not all(key_names) or dotted_path.startswith("-"):
            problems.append(
                ProblemLine(location, "write it as key.path=value, for example train.max_steps=100")
            )
            continue
        # Places inside the value are replaced by the override itself.
        value_problems: list[ProblemLine] = []
        try:
            value = parse_yaml_tree(text, "", value_problems, override_path=key_names)
        except SourceError as error:
            problems.append(ProblemLine(location, error.line.text))
            continue
        problems += [ProblemLine(location, line.text) for line in value_problems]
        if value.node_type == "scalar" and value.raw is None:
            name = format_key_path(key_names)
            problems.append(
                ProblemLine(location, f"{name}: has no value; write {name}=null to unset it")
            )
        else:
            tree = tree.copy_with_subtree(key_names, _set_all_locations(value, location))
    return tree


def _set_all_locations(tree: Tree, location: SourceLocation) -> Tree:
    children = {key: _set_all_locations(child, location) for key, child in tree.children.items()}
    return replace(tree, location=location, key_location=location, children=children)
