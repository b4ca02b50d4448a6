"""Paths in a recipe: variables of the environment, and the folder that a relative path starts from.

A relative path starts beside the recipe file that has it, or else in the current folder.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ortlaunch.recipe.text.source_location import KeyPath, format_key_path
from ortlaunch.recipe.text.tree import Tree

# Variables that are expanded beside those that launch.forward names.
EXPANDED_VARIABLES = ("HOME", "SCRATCH", "TMPDIR", "WORK", "DATA")
# Folders that a run writes, which start from the current folder.
_OUTPUT_PATHS: tuple[KeyPath, ...] = (
    ("engine", "save_onnx"),
    ("zero", "offload", "nvme_path"),
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand_input_paths_and_note_folders(
    tree: Tree, environ: Mapping[str, str], makes_existing_absolute: bool = False
) -> tuple[Tree, list[str]]:
    """Return the tree with its paths expanded, and a note for each path whose folder was chosen.

    Variables that are not set, or not in the list, stay.

    Args:
        makes_existing_absolute: whether paths that exist on this host become absolute, so that a later command can
            use them from any folder.
    """
    forward = tree.find_subtree(("launch", "forward"))
    forwarded_names = (
        forward.value_without_locations()
        if forward is not None and forward.node_type == "list"
        else ()
    )
    expanded_names = {*EXPANDED_VARIABLES, *map(str, forwarded_names)}
    known_variables = {
        name: value for name, value in environ.items() if name in expanded_names and value
    }
    notes = []
    for key_path in [*_key_paths_of_input_files(tree), *_OUTPUT_PATHS]:
        node = tree.find_subtree(key_path)
        if node is None or not isinstance(node.scalar, str):
            continue
        path_text = _expand_home_and_variables(node.scalar, known_variables)
        expanded_path, note = (
            (path_text, "") if key_path in _OUTPUT_PATHS else _path_and_folder_note(path_text, node)
        )
        if note:
            notes.append(f"{format_key_path(key_path)}: {note}")
        if (
            makes_existing_absolute
            and key_path not in _OUTPUT_PATHS
            and _is_local(key_path, expanded_path)
        ):
            expanded_path = os.path.abspath(expanded_path)
        if expanded_path != node.scalar:
            tree = tree.copy_with_subtree(
                key_path, replace(node, scalar=expanded_path, raw=expanded_path)
            )
    return tree, notes


def _key_paths_of_input_files(tree: Tree) -> Iterator[KeyPath]:
    """Yield the places of the files and folders that a run reads."""
    yield from (("model", "pretrained"), ("data", "tokenizer"), ("data", "processor"),
                ("data", "chat_template"))  # fmt: skip
    parts = tree.find_subtree(("data", "train"))
    source_indices = parts.children if parts is not None and parts.node_type == "list" else ()
    sources: Sequence[KeyPath] = [
        *(("data", "train", source_index, "source") for source_index in source_indices),
        ("data", "train"),
        ("data", "evaluation"),
    ]
    for source in sources:
        key_path: KeyPath = (*source, "path")
        node = tree.find_subtree(key_path)
        # One pattern, or a list of them.
        yield from (
            [(*key_path, key) for key in node.children] if node and node.children else [key_path]
        )


def _expand_home_and_variables(path_text: str, known_variables: Mapping[str, str]) -> str:
    # The text of a template is no path.
    if "{{" in path_text or "{%" in path_text:
        return path_text
    if path_text == "~" or path_text.startswith("~/"):
        path_text = known_variables.get("HOME", "~") + path_text[1:]
    return _VARIABLE.sub(
        lambda variable_match: known_variables.get(
            variable_match[1] or variable_match[2], variable_match[0]
        ),
        path_text,
    )


def _path_and_folder_note(path_text: str, node: Tree) -> tuple[str, str]:
    """Return a path as seen from the current folder, and a note if another one might be meant."""
    # A value of the command line has no line.
    folder = Path(node.location.source).parent if node.location.line else Path()
    if os.path.isabs(path_text) or "{" in path_text or "://" in path_text or _is_current(folder):
        return path_text, ""
    path_beside_recipe = str(folder / path_text)
    # The letters of a pattern in the folder's own name mean themselves.
    if glob.has_magic(path_text) and not os.path.exists(path_beside_recipe):
        path_beside_recipe = str(Path(glob.escape(str(folder)), path_text))
    is_in_current_folder = _path_exists_or_pattern_matches(path_text)
    if not _path_exists_or_pattern_matches(path_beside_recipe):
        return (
            path_text,
            f"{path_text} is in the current folder, not beside {node.location.source}"
            * is_in_current_folder,
        )
    other_note = f"; another {path_text} is in the current folder" if is_in_current_folder else ""
    return path_beside_recipe, f"{path_beside_recipe}, beside {node.location.source}{other_note}"


def _is_current(folder: Path) -> bool:
    try:
        return folder.samefile(os.curdir)
    # The current folder may have been deleted.
    except OSError:
        return True


def _is_local(key_path: KeyPath, path_text: str) -> bool:
    """Return whether the value of an input path names files or a folder that exist here."""
    # A word is the name of a known template; other texts with a brace are templates themselves.
    is_template = key_path[-1] == "chat_template" and (path_text.isidentifier() or "{" in path_text)
    return not is_template and _path_exists_or_pattern_matches(path_text)


def _path_exists_or_pattern_matches(path_or_pattern: str) -> bool:
    try:
        return (
            os.path.exists(path_or_pattern)
            or next(glob.iglob(path_or_pattern, recursive=True), None) is not None
        )
    # The check for missing files reports such a pattern.
    except (OSError, ValueError):
        return False
