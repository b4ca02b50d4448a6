"""Read another tool's YAML or JSON config as a tree with locations."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.recipe.text.source import read_recipe_text_or_refuse
from ortlaunch.recipe.text.source_location import ProblemLine, SourceError
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import parse_yaml_tree


def read_config_tree_or_refuse(config_path: Path) -> Tree:
    """Read a config.

    Raises:
        InputError: the file is a Python program.
        RecipeError: the file is missing, is not YAML or JSON, or not a mapping, or has duplicate
            keys; all of them are named.
    """
    problems: list[ProblemLine] = []
    if config_path.suffix == ".py":
        writing_call = "open('args.json', 'w').write(args.to_json_string())"
        raise InputError(
            f"{config_path}: is a Python program; give its TrainingArguments as JSON, which it "
            f"writes with {writing_call}"
        )
    try:
        text = read_recipe_text_or_refuse(config_path)
        # JSON is YAML except for tabs, which YAML does not accept as indentation.
        tree = parse_yaml_tree(
            text.expandtabs(1) if config_path.suffix == ".json" else text,
            str(config_path),
            problems,
        )
    except SourceError as error:
        raise RecipeError([str(line) for line in (*problems, error.line)]) from None
    if tree.node_type != "mapping":
        problems.append(ProblemLine(tree.location, "a config is a mapping of keys and values"))
    if problems:
        raise RecipeError([str(line) for line in problems])
    return tree
