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

from ortlaunch.recipe.text.place import KeyPath, dotted
from ortlaunch.recipe.text.tree import Tree

# Variables that are expanded beside those that launch.forward names.
EXPANDED = ("HOME", "SCRATCH", "TMPDIR", "WORK", "DATA")
# Folders that a run writes, which start from the current folder.
_OUTPUT_PATHS: tuple[KeyPath, ...] = (
    ("engine", "save_onnx"),
    ("engine", "tuning_results"),
    ("zero", "offload", "nvme_path"),
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand_paths(
    tree: Tree, environ: Mapping[str, str], absolute: bool = False
) -> tuple[Tree, list[str]]:
    """Return the tree with its paths expanded, and a note for each path whose folder was chosen.

    Variables that are not set, or not in the list, stay.

    Args:
        absolute: whether paths that exist on this host become absolute, so that a later command can
            use them from any folder.
    """
    forward = tree.find(("launch", "forward"))
    own = forward.plain() if forward is not None and forward.kind == "list" else ()
    names = {*EXPANDED, *map(str, own)}
    known = {name: value for name, value in environ.items() if name in names and value}
    notes = []
    for path in [*_input_paths(tree), *_OUTPUT_PATHS]:
        node = tree.find(path)
        if node is None or not isinstance(node.scalar, str):
            continue
        text = _with_variables(node.scalar, known)
        found, note = (text, "") if path in _OUTPUT_PATHS else _from_folder(text, node)
        if note:
            notes.append(f"{dotted(path)}: {note}")
        if absolute and path not in _OUTPUT_PATHS and _is_local(path, found):
            found = os.path.abspath(found)
        if found != node.scalar:
            tree = tree.put(path, replace(node, scalar=found, raw=found))
    return tree, notes


def _input_paths(tree: Tree) -> Iterator[KeyPath]:
    """Yield the places of the files and folders that a run reads."""
    yield from (("model", "pretrained"), ("data", "tokenizer"), ("data", "processor"),
                ("data", "chat_template"))  # fmt: skip
    parts = tree.find(("data", "train"))
    numbers = parts.children if parts is not None and parts.kind == "list" else ()
    sources: Sequence[KeyPath] = [
        *(("data", "train", number, "source") for number in numbers),
        ("data", "train"),
        ("data", "evaluation"),
    ]
    for source in sources:
        path: KeyPath = (*source, "path")
        node = tree.find(path)
        # One pattern, or a list of them.
        yield from [(*path, key) for key in node.children] if node and node.children else [path]


def _with_variables(text: str, known: Mapping[str, str]) -> str:
    # The text of a template is no path.
    if "{{" in text or "{%" in text:
        return text
    if text == "~" or text.startswith("~/"):
        text = known.get("HOME", "~") + text[1:]
    return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[0]), text)


def _from_folder(text: str, node: Tree) -> tuple[str, str]:
    """Return a path as seen from the current folder, and a note if another one might be meant."""
    # A value of the command line has no line.
    folder = Path(node.place.source).parent if node.place.line else Path()
    if os.path.isabs(text) or "{" in text or "://" in text or _is_current(folder):
        return text, ""
    beside = str(folder / text)
    # The letters of a pattern in the folder's own name mean themselves.
    if glob.has_magic(text) and not os.path.exists(beside):
        beside = str(Path(glob.escape(str(folder)), text))
    here = _is_there(text)
    if not _is_there(beside):
        return text, f"{text} is in the current folder, not beside {node.place.source}" * here
    also = f"; another {text} is in the current folder" if here else ""
    return beside, f"{beside}, beside {node.place.source}{also}"


def _is_current(folder: Path) -> bool:
    try:
        return folder.samefile(os.curdir)
    # The current folder may have been deleted.
    except OSError:
        return True


def _is_local(path: KeyPath, text: str) -> bool:
    """Return whether the value of an input path names files or a folder that exist here."""
    # A word is the name of a known template; other texts with a brace are templates themselves.
    is_template = path[-1] == "chat_template" and (text.isidentifier() or "{" in text)
    return not is_template and _is_there(text)


def _is_there(path: str) -> bool:
    try:
        return os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None
    # The check for missing files reports such a pattern.
    except (OSError, ValueError):
        return False
