"""Every broken recipe is refused with place, key, cause and mend; nothing that is written can make a traceback."""

from __future__ import annotations

import functools
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.errors import RecipeError
from ortlaunch.recipe import load, to_yaml
from ortlaunch.recipe.text import yaml_text

FOLDER = Path(__file__).parents[2] / "recipes_broken"
RECIPES = Path(__file__).parents[3] / "recipes"
EXPECTED = yaml.safe_load((FOLDER / "expected.yaml").read_text(encoding="utf-8"))
CASES = {**{name: [line] for name, line in EXPECTED["typos"].items()}, **EXPECTED["files"]}
LOADERS = {"libyaml": yaml_text._FAST_LOADER, "pyyaml": yaml.SafeLoader}


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    """What is wrong with a recipe; () if nothing is."""
    try:
        load(path, overrides)
    except RecipeError as error:
        return error.problems
    return ()


def says(line: str, expected: str, name: str) -> bool:
    """Whether a reported line begins with the expected place and key and holds the expected part."""
    place, key, part = (*expected.split(": ", 2), "")[:3]
    file = "" if ".yaml:" in place else f"{name}.yaml:"
    return line.startswith(f"{FOLDER}/{file}{place}: {key}") and part in line


@functools.cache
def reported(name: str, loader: str) -> tuple[str, ...]:
    """What is wrong with a broken recipe, by one of the parsers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_text, "_FAST_LOADER", LOADERS[loader])
        return problems(FOLDER / f"{name}.yaml")


def suggests(name: str, expected: str) -> bool:
    found = reported(name, "libyaml")
    return len(found) == 1 and says(found[0], expected, name)


@pytest.mark.parametrize("name", CASES)
def test_every_broken_recipe_reports_what_is_expected_and_nothing_else(name: str) -> None:
    """The lines come in the order of the file, whichever parser PyYAML was built with."""
    for loader in LOADERS:
        found = reported(name, loader)
        assert len(found) == len(CASES[name]), "\n".join(found)
        for line, expected in zip(found, CASES[name]):
            assert says(line, expected, name), f"{loader}: {line}\nexpected: {expected}"


def test_every_line_begins_with_file_line_and_column() -> None:
    """Editors and people can jump to each problem."""
    place = re.compile(re.escape(str(FOLDER)) + r"/[\w-]+\.yaml:[1-9]\d*:[1-9]\d*: \S")
    lines = [line for name in CASES for line in reported(name, "libyaml")]
    assert [line for line in lines if not place.match(line) or "\n" in line] == []


def test_the_corpus_is_complete_and_large() -> None:
    """Every file is a case, and there are enough of them."""
    files = {path.stem for path in FOLDER.glob("*.yaml")} - {"base", "expected"}
    assert files == set(CASES)
    assert len(files) >= 80
    assert problems(FOLDER / "base.yaml") == ()


def test_typos_get_the_right_suggestion() -> None:
    """Did-you-mean is right for at least nine typos in ten; the rest would be named here."""
    missed = [name for name, expected in EXPECTED["typos"].items() if not suggests(name, expected)]
    assert len(EXPECTED["typos"]) >= 30
    assert len(missed) <= len(EXPECTED["typos"]) // 10, missed


def test_five_errors_are_reported_as_five() -> None:
    """All errors at once, each once."""
    assert len(reported("five-errors", "libyaml")) == 5


@pytest.mark.parametrize("assignment", EXPECTED["overrides"])
def test_a_broken_override_is_named(assignment: str) -> None:
    """An override is quoted as it was typed, in place of a file's line."""
    found = problems(FOLDER / "base.yaml", assignment)
    assert len(found) == 1, found
    assert found[0].startswith(f"override {assignment!r}: {EXPECTED['overrides'][assignment]}"), (
        found[0]
    )


def test_a_refused_secret_is_not_shown() -> None:
    """The value of an override that looks like a secret stays out of the error, which may be logged."""
    found = problems(RECIPES / "bert-large/tiny.yaml", "launch.env.HF_TOKEN=hf_abc123")
    assert found[0].startswith(
        "override 'launch.env.HF_TOKEN=...': launch.env.HF_TOKEN: looks like a secret"
    ), found[0]
    assert "hf_abc123" not in found[0]


def test_errors_of_file_and_overrides_come_together() -> None:
    """One run shows what is wrong in the file, in what it extends and on the command line."""
    found = problems(FOLDER / "extends-broken.yaml", "nam=x", "train.max_steps")
    starts = [line.split(": ")[0].replace(f"{FOLDER}/", "") for line in found]
    assert starts == [
        "extends-broken.yaml:2:1",
        "rule-heads.yaml:2:18",
        "override 'train.max_steps'",
        "override 'nam=x'",
    ]


def test_a_missing_recipe_is_an_error_with_its_path(tmp_path: Path) -> None:
    """No traceback for a path that is not there, or is a folder."""
    assert problems(tmp_path / "none.yaml") == (
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory",
    )
    assert problems(tmp_path) == (f"{tmp_path}: cannot be read: Is a directory",)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to, a device without an end and a file without measure end at once."""
    pipe = tmp_path / "pipe"
    huge = tmp_path / "huge.yaml"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    assert problems(pipe) == (
        f"{pipe}: is a pipe; a recipe is a regular file, which is read more than once",
    )
    assert problems(Path("/dev/zero"))[0].startswith(
        "/dev/zero: is a device or a socket; a recipe is a regular file"
    )
    assert problems(huge) == (f"{huge}:1:1: has over 1,000,000 bytes, too many for a recipe",)


def test_a_long_chain_of_recipes_is_refused(tmp_path: Path) -> None:
    """1,500 that extend each other: one line, at the one where it is enough."""
    for number in range(1_500):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    found = problems(tmp_path / "0.yaml")
    assert found == (
        f"{tmp_path}/20.yaml:1:1: extends: 20 recipes extend each other up to here; merge some of them",
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "- " * 10_000 + "a",
        "a: " + "{a: " * 5_000 + "1" + "}" * 5_000,
        "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(30)),
        "a: 1\n" * 60_000,
        "seed: 0x" + "f" * 9_000,
        "seed: " + "9" * 9_000,
        'name: "\\ud800"',
        '"\\ud800": 1',
        '"a\\nb\\e[31m": 1',
        "name: !!int ''",
        "name: !!bool maybe",
        "name: !!timestamp x",
        "name: !!binary eA==",
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
    """Depth, size, aliases of aliases, odd characters and tags: one line each, quickly."""
    path = tmp_path / "strange.yaml"
    path.write_text(text, encoding="utf-8")
    found = problems(path)
    assert found
    assert all(line.startswith(f"{path}:") and line.isprintable() for line in found)


def test_a_file_that_is_no_recipe_is_told_so_shortly(tmp_path: Path) -> None:
    """A vocabulary or a log with a thousand keys gives a page, not a book."""
    path = tmp_path / "vocabulary.yaml"
    path.write_text("".join(f"word{i}: {i}\n" for i in range(1_000)), encoding="utf-8")
    found = problems(path)
    assert len(found) == 101
    assert found[-1] == f"{path}:101:1: word100: unknown key, like 899 more; is this a recipe?"


FRAGMENTS = [
    ":", ": ", "{", "}", "[", "]", ",", "-", "- ", "\n", "\n  ", "\t", "'", '"', "#", "&a ", "*a", "!x ", "? ", "|\n",
    "---\n",
    "null", "true", "no", "0", "-1", "1e5", ".inf", "1_0", "0x1", "name", "train", "model", "config", "zero", "stage",
    "deepspeed", "extends", "<<", "é", "\u2028", "\x00", "%", "@", "~", "custom", "text", "path", "lora", "{}", "[]",
]  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """A few characters, lines or words of a recipe cut, doubled, swapped or replaced."""
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
    """Random damage to the shipped recipes gives a recipe or a RecipeError, never another exception."""
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
    assert 0 < refused < 300


@pytest.mark.parametrize("value", [[], {}, "x", -1], ids=repr)
def test_every_field_of_another_kind_is_a_message(value: Any, tmp_path: Path) -> None:
    """All fields at once hold what few of them take: a line for each that does not, and no traceback."""
    whole = yaml.safe_load(to_yaml(load(RECIPES / "llama2-7b" / "tiny.yaml").recipe))
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
        line for line in found if " got " in line and not re.search("; (it must|use|write) ", line)
    ] == []
    assert any("engine.parity_steps: got" in line for line in found)
