"""Tests that broken recipes are refused with place, key, cause and remedy, without a traceback."""

from __future__ import annotations

import functools
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import RecipeError
from ortlaunch.recipe import dump_recipe_yaml, load_recipe
from ortlaunch.recipe.text import yaml_text

FOLDER = Path(__file__).parents[2] / "recipes_broken"
RECIPES = Path(__file__).parents[3] / "recipes"
EXPECTED = yaml.safe_load((FOLDER / "expected.yaml").read_text(encoding="utf-8"))
CASES = {**{name: [line] for name, line in EXPECTED["typos"].items()}, **EXPECTED["files"]}
# The first is libyaml's only where PyYAML was built with it.
LOADERS = {"libyaml": yaml_text._FAST_LOADER, "pyyaml": yaml.SafeLoader}


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    """Return the problems of a recipe; () for a valid one."""
    try:
        load_recipe(path, overrides)
    except RecipeError as error:
        return error.problems
    return ()


def says(line: str, expected: str, name: str) -> bool:
    """Return whether a reported line has the expected place, key and text."""
    place, key, part = (*expected.split(": ", 2), "")[:3]
    file = "" if ".yaml:" in place else f"{name}.yaml:"
    return line.startswith(f"{FOLDER}/{file}{place}: {key}") and part in line


# Several tests use the same reports.
@functools.cache
def reported(name: str, loader: str) -> tuple[str, ...]:
    """Return the problems of a broken recipe, as one of the parsers reports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_text, "_FAST_LOADER", LOADERS[loader])
        return problems(FOLDER / f"{name}.yaml")


def suggests(name: str, expected: str) -> bool:
    found = reported(name, "libyaml")
    return len(found) == 1 and says(found[0], expected, name)


@pytest.mark.parametrize("name", CASES)
def test_every_broken_recipe_reports_what_is_expected_and_nothing_else(name: str) -> None:
    """Each broken recipe gives the expected lines in the file's order, with both YAML parsers."""
    for loader in LOADERS:
        found = reported(name, loader)
        assert len(found) == len(CASES[name]), "\n".join(found)
        for line, expected in zip(found, CASES[name]):
            assert says(line, expected, name), f"{loader}: {line}\nexpected: {expected}"


def test_every_line_begins_with_file_line_and_column() -> None:
    """Every line begins with file, line and column, so that editors can jump to it."""
    # Lines and columns begin at 1.
    place = re.compile(re.escape(str(FOLDER)) + r"/[\w-]+\.yaml:[1-9]\d*:[1-9]\d*: \S")
    lines = [line for name in CASES for line in reported(name, "libyaml")]
    assert [line for line in lines if not place.match(line) or "\n" in line] == []


def test_the_corpus_is_complete_and_large() -> None:
    """Every file is a case, and there are at least 80."""
    files = {path.stem for path in FOLDER.glob("*.yaml")} - {"base", "expected"}
    assert files == set(CASES)
    assert len(files) >= 80
    assert problems(FOLDER / "base.yaml") == ()


def test_typos_get_the_right_suggestion() -> None:
    """At least nine of ten typing errors get the right suggestion; a failure lists the others."""
    missed = [name for name, expected in EXPECTED["typos"].items() if not suggests(name, expected)]
    assert len(EXPECTED["typos"]) >= 30
    assert len(missed) <= len(EXPECTED["typos"]) // 10, missed


def test_five_errors_are_reported_as_five() -> None:
    """Five errors in one file are reported at once, each once."""
    assert len(reported("five-errors", "libyaml")) == 5


@pytest.mark.parametrize("assignment", EXPECTED["overrides"])
def test_a_broken_override_is_named(assignment: str) -> None:
    """A broken override is quoted in its error instead of a file and line."""
    found = problems(FOLDER / "base.yaml", assignment)
    assert len(found) == 1, found
    assert found[0].startswith(f"override {assignment!r}: {EXPECTED['overrides'][assignment]}"), (
        found[0]
    )


def test_a_refused_secret_is_not_shown() -> None:
    """An error does not show the value of an override that looks like a secret."""
    found = problems(RECIPES / "bert-large/tiny.yaml", "launch.env.HF_TOKEN=hf_abc123")
    assert found[0].startswith(
        "override 'launch.env.HF_TOKEN=...': launch.env.HF_TOKEN: looks like a secret"
    ), found[0]
    assert "hf_abc123" not in found[0]


def test_errors_of_file_and_overrides_come_together() -> None:
    """Errors of the file, of its base and of the overrides are reported together."""
    found = problems(FOLDER / "extends-broken.yaml", "nam=x", "train.max_steps")
    starts = [line.split(": ")[0].replace(f"{FOLDER}/", "") for line in found]
    assert starts == [
        "extends-broken.yaml:2:1",
        "rule-heads.yaml:2:18",
        "override 'train.max_steps'",
        "override 'nam=x'",
    ]


def test_a_missing_recipe_is_an_error_with_its_path(tmp_path: Path) -> None:
    """A missing recipe, or a folder, is an error with its path."""
    assert problems(tmp_path / "none.yaml") == (
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory",
    )
    assert problems(tmp_path) == (f"{tmp_path}: cannot be read: Is a directory",)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A pipe, a device and a huge file are refused at once, without reading them."""
    pipe = tmp_path / "pipe"
    huge = tmp_path / "huge.yaml"
    # Opening a pipe without a writer would block.
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        # A sparse file: 1 TiB that takes no space.
        file.truncate(1 << 40)
    assert problems(pipe) == (
        f"{pipe}: is a pipe; a recipe is a regular file, which is read more than once",
    )
    assert problems(Path("/dev/zero"))[0].startswith(
        "/dev/zero: is a device or a socket; a recipe is a regular file"
    )
    assert problems(huge) == (f"{huge}:1:1: has more than 1,000,000 bytes, too many for a recipe",)


def test_a_long_chain_of_recipes_is_refused(tmp_path: Path) -> None:
    """A chain of 1,500 recipes is refused with one line, at the recipe that exceeds the limit."""
    for number in range(1_500):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    found = problems(tmp_path / "0.yaml")
    assert found == (
        f"{tmp_path}/20.yaml:1:1: extends: 20 recipes extend each other up to here; merge some of "
        "them",
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "- " * 10_000 + "a",
        "a: " + "{a: " * 5_000 + "1" + "}" * 5_000,
        # Aliases of aliases: 2^31 values if they were unfolded.
        "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(30)),
        # 300,000 characters, more than a recipe may have.
        "a: 1\n" * 60_000,
        # Python refuses to print an integer of more than 4300 digits.
        "seed: 0x" + "f" * 9_000,
        "seed: " + "9" * 9_000,
        # Half a surrogate pair cannot be encoded.
        'name: "\\ud800"',
        '"\\ud800": 1',
        '"a\\nb\\e[31m": 1',
        "name: !!int ''",
        "name: !!bool maybe",
        "name: !!timestamp x",
        "name: !!binary eA==",
        # A key that is a list.
        "? [a]\n: 1",
        "'': 1",
        "extends: \"a\\0b\"",
        f"extends: {'a' * 5_000}",
        "optimizer.: 1",
        ".: 1",
        "<<: [1]",
        "model: {config: {model_type: {a: b}, hidden_size: [1]}}",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_strange_text_is_refused_without_a_traceback(text: str, tmp_path: Path) -> None:
    """Deep, large or strange YAML is refused quickly, with one printable line for each problem."""
    path = tmp_path / "strange.yaml"
    path.write_text(text, encoding="utf-8")
    found = problems(path)
    assert found
    assert all(line.startswith(f"{path}:") and line.isprintable() for line in found)


def test_a_file_that_is_no_recipe_is_told_so_shortly(tmp_path: Path) -> None:
    """A file with a thousand unknown keys gives 100 lines and a summary."""
    path = tmp_path / "vocabulary.yaml"
    path.write_text("".join(f"word{i}: {i}\n" for i in range(1_000)), encoding="utf-8")
    found = problems(path)
    # 100 unknown keys and the summary.
    assert len(found) == 101
    assert found[-1] == f"{path}:101:1: word100: unknown key, like 899 more; is this a recipe?"


# Pieces that have a meaning in YAML or in a recipe.
FRAGMENTS = [
    ":", ": ", "{", "}", "[", "]", ",", "-", "- ", "\n", "\n  ", "\t", "'", '"', "#", "&a ", "*a", "!x ", "? ", "|\n",
    "---\n",
    "null", "true", "no", "0", "-1", "1e5", ".inf", "1_0", "0x1", "name", "train", "model", "config", "zero", "stage",
    "deepspeed", "extends", "<<", "é", "\u2028", "\x00", "%", "@", "~", "custom", "text", "path", "lora", "{}", "[]",
]  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """Return a recipe's text with random parts removed, doubled, swapped or replaced."""
    for _ in range(chance.randint(1, 4)):
        lines = text.split("\n")
        at = chance.randrange(len(text) + 1)
        line = chance.randrange(len(lines))
        kind = chance.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + chance.randint(1, 8) :]
        elif kind == 1:
            text = text[:at] + chance.choice(FRAGMENTS) + text[at + chance.randint(0, 6) :]
        elif kind == 2:
            text = "\n".join(lines[:line] + lines[line + 1 :])
        elif kind == 3:
            text = "\n".join([*lines[:line], lines[chance.randrange(len(lines))], *lines[line:]])
        else:
            text = re.sub(
                r"(?<=: )[\w.]+", lambda found: chance.choice([found[0]] * 6 + FRAGMENTS), text
            )
    return text


def test_mutated_recipes_load_or_are_refused(tmp_path: Path) -> None:
    """Randomly damaged recipes load, or raise RecipeError and no other exception."""
    # A fixed seed: a failure can be repeated.
    chance = random.Random(7)
    texts = [
        path.read_text(encoding="utf-8")
        for path in sorted(RECIPES.rglob("*.yaml"))
        if path.stem != "phase2"
    ]
    texts.append((FOLDER / "base.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "mutated.yaml"
    refused = 0
    for _ in range(300):
        path.write_bytes(mutated(chance.choice(texts), chance).encode("utf-8", "replace"))
        found = problems(
            path,
            *chance.sample(
                ["zero.stage=1", "model.config=null", "train=1", "data.train.path=x"], 1
            ),
        )
        refused += bool(found)
        assert all(line.isprintable() for line in found)
    # Both outcomes must occur, or the damage is too small or too large.
    assert 0 < refused < 300


@pytest.mark.parametrize("value", [[], {}, "x", -1], ids=repr)
def test_every_field_of_another_kind_is_a_message(value: Any, tmp_path: Path) -> None:
    """A wrong type in all fields at once gives a message for each field, and no traceback."""
    whole = yaml.safe_load(
        dump_recipe_yaml(load_recipe(RECIPES / "llama2-7b" / "tiny.yaml").recipe)
    )
    sections = {
        name: dict.fromkeys(section, value)
        for name, section in whole.items()
        if isinstance(section, dict)
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "x", **sections}))
    found = problems(path)
    assert len(found) > 30
    assert [
        # Each message must name the accepted values.
        line
        for line in found
        if " got " in line and not re.search("; (it must|use|write) ", line)
    ] == []
    assert any("engine.parity_steps: got" in line for line in found)
