"""Read another tool's YAML or JSON config as a tree with locations."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.errors import InputError, RecipeError
from ortlaunch.recipe.text.place import Line, SourceError
from ortlaunch.recipe.text.source import text_of
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import parse


def config(path: Path) -> Tree:
    """Read a config.

    Raises:
        InputError: the file is a Python program.
        RecipeError: the file is missing, is not YAML or JSON, or not a mapping, or has duplicate
            keys; all of them are named.
    """
    problems: list[Line] = []
    if path.suffix == ".py":
        write = "open('args.json', 'w').write(args.to_json_string())"
        raise InputError(
            f"{path}: is a Python program; give its TrainingArguments as JSON, which it "
            f"writes with {write}"
        )
    try:
        text = text_of(path)
        # JSON is YAML except for tabs, which YAML does not accept as indentation.
        tree = parse(text.expandtabs(1) if path.suffix == ".json" else text, str(path), problems)
    except SourceError as error:
        raise RecipeError([str(line) for line in (*problems, error.line)]) from None
    if tree.kind != "mapping":
        problems.append(Line(tree.place, "a config is a mapping of keys and values"))
    if problems:
        raise RecipeError([str(line) for line in problems])
    return tree
