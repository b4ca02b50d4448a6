"""Files shipped with the code: recipes, constraints, host files, pages of the documentation.

In a checkout they are in folders of these names, in an installation under share/ortlaunch. Printing
them needs the standard library only, so that `ortlaunch constraints` runs before the dependencies
are installed.
"""

from __future__ import annotations

import difflib
import os
import re
import site
import sys
from pathlib import Path, PurePath

from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.run_folder.folder import write_text_atomically

# A module in a recipe: `module.py` or `module:function`.
_MODULE_NAME = re.compile(r"(\w+)(?:\.py\b|:\w)")


def shipped_folder_or_refuse(folder_name: str = "recipes") -> Path:
    """Return the folder of the shipped files of a kind, in a checkout or an installation.

    Raises:
        InputError: the folder does not exist.
    """
    # In a checkout the project's file is beside the package, in an installation it is not.
    project_folder = Path(__file__).parents[2]
    if (project_folder / "pyproject.toml").is_file():
        return project_folder / folder_name
    # Data files of pip with --target, without options, and with --user.
    candidate_folders = [
        Path(root, "share", "ortlaunch", folder_name)
        for root in (project_folder, sys.prefix, site.getuserbase())
    ]
    existing_folder = next(
        (candidate for candidate in candidate_folders if candidate.is_dir()), None
    )
    if existing_folder is None:
        raise InputError(
            f"the shipped {folder_name} are in none of {', '.join(map(str, candidate_folders))}; "
            "install ortlaunch again"
        )
    return existing_folder


def shipped_recipe_names() -> list[str]:
    """Return `family/recipe` for every shipped recipe."""
    return sorted(
        str(path.relative_to(shipped_folder_or_refuse()).with_suffix(""))
        for path in shipped_folder_or_refuse().rglob("*.yaml")
    )


def shipped_recipe_path_or_refuse(recipe_name: str) -> Path:
    """Return the file of a shipped recipe.

    Raises:
        InputError: no recipe has that name.
    """
    return _file_by_name_or_refuse_with_suggestion(
        "recipe",
        recipe_name.removesuffix(".yaml"),
        {
            shipped_name: shipped_folder_or_refuse() / f"{shipped_name}.yaml"
            for shipped_name in shipped_recipe_names()
        },
    )


def read_shipped_text(folder_name: str, file_name: str) -> str:
    """Return the contents of a file of `constraints`, `hostfiles` or `docs`, by its name.

    Raises:
        InputError: no file has that name.
    """
    return _file_by_name_or_refuse_with_suggestion(
        "page" if folder_name == "docs" else folder_name.removesuffix("s"),
        PurePath(file_name).stem if file_name.endswith((".md", ".txt")) else file_name,
        _shipped_texts(folder_name),
    ).read_text(encoding="utf-8")


def documentation_page_lines() -> list[str]:
    """Return `name: title` for each page of docs/, folder by folder."""
    pages = sorted(_shipped_texts("docs").values())
    return [
        f"{path.parent.name + '/' + path.stem:<28} {path.read_text(encoding='utf-8').partition(chr(10))[0].strip('# ')}"
        for path in pages
    ]


def _shipped_texts(folder_name: str) -> dict[str, Path]:
    """Return the files by name, without ending; those of docs/ are in its folders."""
    folder = shipped_folder_or_refuse(folder_name)
    form = "*/*.md" if folder_name == "docs" else "*"
    return {
        path.name.removesuffix(".txt").removesuffix(".md"): path
        for path in sorted(folder.glob(form))
    }


def _file_by_name_or_refuse_with_suggestion(
    file_noun: str, requested_name: str, path_by_name: dict[str, Path]
) -> Path:
    if requested_name in path_by_name:
        return path_by_name[requested_name]
    # A name without its folder, or one that is misspelt.
    similar_names = [
        known_name for known_name in path_by_name if known_name.rpartition("/")[2] == requested_name
    ]
    similar_names = similar_names or difflib.get_close_matches(requested_name, path_by_name, n=1)
    advice = (
        f"did you mean {' or '.join(similar_names)}?"
        if similar_names
        else f"there are {', '.join(path_by_name)}"
    )
    raise InputError(f"no shipped {file_noun} {requested_name!r}; {advice}")


def recipe_path_or_shipped_recipe(recipe_argument: Path) -> Path:
    """Return the recipe file: that path, else the shipped recipe of that name.

    Raises:
        RecipeError: it is a folder, or a likely misspelling.
    """
    if os.path.isdir(recipe_argument):
        raise RecipeError(
            [f"{recipe_argument}: {_advice_for_folder_given_as_recipe(recipe_argument)}"]
        )
    if os.path.lexists(recipe_argument):
        return recipe_argument
    recipe_name = str(recipe_argument).removesuffix(".yaml")
    known_names = shipped_recipe_names()
    if recipe_name in known_names:
        return shipped_recipe_path_or_refuse(recipe_name)
    # Imported on use: `ortlaunch constraints` has to run without dependencies.
    from ortlaunch.recipe.text.closest_names import (
        closest_or_translated_name_or_none,
        word_likeness,
    )

    # A bare file name is compared with the files beside it alone, below.
    closest_known = (
        closest_or_translated_name_or_none(recipe_name, known_names)
        if recipe_argument.parent.name
        else None
    )
    if closest_known:
        raise RecipeError(
            [f"{recipe_argument}: no such file or shipped recipe; did you mean {closest_known}?"]
        )
    rated_files = (
        (
            max(
                word_likeness(recipe_argument.name, path.name),
                word_likeness(recipe_argument.name, path.stem),
            ),
            path,
        )
        for path in recipe_argument.parent.glob("*.y*ml")
    )
    best_likeness, similar_path = max(rated_files, default=(0, recipe_argument))
    if best_likeness >= 0.8:
        raise RecipeError([f"{recipe_argument}: no such file; did you mean {similar_path}?"])
    return recipe_argument


def _advice_for_folder_given_as_recipe(given_folder: Path) -> str:
    if (given_folder / "plan.json").exists() and (given_folder / "recipe.yaml").exists():
        return (
            "is the folder of a run; to continue it: "
            f"ortlaunch train {given_folder / 'recipe.yaml'} --run-dir {given_folder} "
            "(with more steps: train.max_steps=NUMBER)"
        )
    recipe_names = sorted(path.name for path in given_folder.glob("*.yaml"))
    advice = (
        f"give one of its recipes: {', '.join(recipe_names[:8])}"
        if recipe_names
        else "give a recipe, a YAML file"
    )
    return f"is a folder; {advice}, or a name that `ortlaunch recipes list` prints"


def copy_shipped_recipe_and_dependencies(recipe_name: str, target: Path) -> list[Path]:
    """Copy a recipe, the recipes it extends and the modules that they name to `target`.

    Args:
        target: a .yaml file or a folder.

    Returns:
        The new files.

    Raises:
        InputError: a file of that name exists already, or cannot be written.
    """
    shipped_path = shipped_recipe_path_or_refuse(recipe_name)
    new_recipe_path = (
        target
        if target.suffix in (".yaml", ".yml") and not target.is_dir()
        else target / shipped_path.name
    )
    other_paths = [
        *_base_recipes(shipped_path),
        *_existing_modules_named_in_recipes([shipped_path, *_base_recipes(shipped_path)]),
    ]
    copied_pairs = [
        (shipped_path, new_recipe_path),
        *((other_path, new_recipe_path.parent / other_path.name) for other_path in other_paths),
    ]
    if existing_paths := [str(new_path) for _, new_path in copied_pairs if new_path.exists()]:
        raise InputError(f"{', '.join(existing_paths)} exists already; choose another name")
    try:
        # One new folder, as cp -r makes; a path with more is a typing error.
        new_recipe_path.parent.mkdir(exist_ok=True)
        for old_path, new_path in copied_pairs:
            file_text = old_path.read_text(encoding="utf-8")
            # An absolute path, so that an editor finds the schema from any folder.
            write_text_atomically(
                new_path,
                re.sub(
                    r"(?<=\$schema=)(\.\./)+", f"{shipped_folder_or_refuse().resolve()}/", file_text
                ),
            )
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return [new_path for _, new_path in copied_pairs]


def _base_recipes(recipe_path: Path) -> list[Path]:
    match = re.search(r"^extends:\s*(\S+)", recipe_path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        return []
    base_path = recipe_path.parent / match[1]
    return [base_path, *_base_recipes(base_path)]


def _existing_modules_named_in_recipes(recipe_paths: list[Path]) -> list[Path]:
    """Return Python files beside recipes that name them, as `module:function` or `module.py`."""
    named_modules = {
        (path.parent, module_name)
        for path in recipe_paths
        for module_name in _MODULE_NAME.findall(path.read_text(encoding="utf-8"))
    }
    return sorted(
        {
            module_folder / f"{module_name}.py"
            for module_folder, module_name in named_modules
            if (module_folder / f"{module_name}.py").is_file()
        }
    )
