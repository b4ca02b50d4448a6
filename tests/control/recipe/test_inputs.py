"""Tests of a recipe's inputs before a start: files, folders and functions of the user."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import InputError, OrtlaunchError, RecipeError
from ortlaunch.importers import convert_config_to_recipe
from ortlaunch.planning.hosts import read_hostfile
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import load_recipe
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.first_rows import missing_column_and_media_file_problems
from ortlaunch.recipe.inputs import (
    absent_or_lfs_pointer_input_problems,
    column_and_vocabulary_problems,
    file_or_sorted_pattern_matches,
    model_type_unknown_to_library_problems,
    refuse_lfs_pointers_and_unreadable_files,
    repeated_file_and_high_learning_rate_problems,
)
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.user_modules import unloadable_factory_problems
from tests.control.typed import Run
from tests.makers import CUSTOM, OWN_MODULE, WORDS, bert, recipe

# Other hosts than this one.
HOSTS = "a slots=1\nb slots=1\n"
# Sections with an absent data file, and with an absent function.
NO_FILE = {"model": {"task": "masked-lm", "config": {"model_type": "bert"}},
           "data": {**WORDS, "train": {"format": "text", "path": ["no.txt"]}}}  # fmt: skip
NO_FUNCTION = {"model": {"task": "custom", "factory": "mine:none"}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the user's module and one data file."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)
    Path("data").mkdir()
    Path("data/a.txt").touch()


def says(factory: str) -> list[str]:
    """Return the errors of a model's factory."""
    made = recipe(model={"task": "custom", "factory": factory})
    return [
        text.replace(str(Path.cwd()), "HERE")
        for paths, text in unloadable_factory_problems(made, Path("beside"))
    ]


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("mine:model", None),
        ("mine:modell", "got mine:modell; HERE/mine.py has no modell; did you mean model?"),
        (
            "minne:model",
            "got minne:model; no module minne beside the recipe, in HERE or installed",
        ),
        # `net` is an imported name inside an `if`.
        ("pkg.models:net", None),
        ("pkg.models:other", "got pkg.models:other; HERE/beside/pkg/models.py has no other"),
        (
            "pkg.absent:net",
            "got pkg.absent:net; no module pkg.absent beside the recipe, in HERE or installed",
        ),
        ("broken:net", "got broken:net; HERE/broken.py:2: invalid syntax"),
        # The source shows no `net`, but uses globals().
        ("dynamic:net", None),
        # os.path is no file of a package, so only an import could check it.
        ("os.path:join", None),
        ("json:loads", None),
    ],
)
def test_a_factory_is_found_without_being_run(factory: str, said: str | None) -> None:
    """A factory is located in its source, beside the recipe, in this folder or installed."""
    # Importing these modules would end the process.
    package = Path("beside/pkg")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('was run')\n")
    (package / "models.py").write_text(
        "if True:\n    from x import (\n        y as net,\n    )\nraise SystemExit\n"
    )
    Path("broken.py").write_text("x = 1\ndef net(:\n")
    Path("dynamic.py").write_text("globals()['net'] = len\n")
    assert says(factory) == ([said] if said else [])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {**WORDS, "train": {"format": "text", "path": ["data/*.txt"]}}}, []),
        (
            {"data": {**WORDS, "train": {"format": "text", "path": ["data"]}}},
            ["got data, which is a folder; give its files: data/*"],
        ),
        (
            {
                "data": {
                    **WORDS,
                    "train": {"format": "text", "path": ["a.txt", "data/a.txt", "data/*.json"]},
                }
            },
            [
                "got a.txt, which matches no file here",
                "got data/*.json, which matches no file here",
            ],
        ),
        (
            {
                "data": {
                    **WORDS,
                    "evaluation": {"format": "text", "path": ["no.txt"]},
                    "tokenizer": "./none",
                }
            },
            ["got no.txt, which matches no file", "got ./none, and no such folder exists here"],
        ),
        (
            {"model": {"task": "masked-lm", "pretrained": "/none/bert"}},
            ["got /none/bert, and no such folder exists"],
        ),
        ({"model": {"task": "masked-lm", "pretrained": "bert-base-uncased"}}, []),
    ],
)
def test_missing_files(sections: dict[str, Any], said: list[str]) -> None:
    """Each pattern without a match is reported, but no name of a model on the hub."""
    found = [text for paths, text in absent_or_lfs_pointer_input_problems(bert(**sections))]
    assert [text.startswith(part) for text, part in zip(found, said)] == [True] * len(said)
    assert len(found) == len(said)


CSV = {"format": "csv", "text_column": "reviews"}
LABELS = {"format": "csv", "text_column": "review", "label_column": "verdict"}
CHAT = {"format": "jsonl", "path": "c.jsonl"}


@pytest.mark.parametrize(
    ("task", "train", "evaluation", "said"),
    [
        # Every source and column at once; labels of another task do not count.
        ("sequence-classification", {**CSV, "path": "a.csv"}, {**LABELS, "path": "b.csv"},
         ["data.train.text_column got reviews; a.csv has review, verdict; did you mean review?",
          "data.train.label_column got label; a.csv has review, verdict"]),
        ("sequence-classification", {**LABELS, "path": "a.csv"}, {"format": "csv", "path": "b.csv"},
         ["data.evaluation.text_column got text; b.csv has review, verdict",
          "data.evaluation.label_column got label; b.csv has review, verdict"]),
        ("masked-lm", {**CSV, "path": "b.csv.gz", "text_column": "review"}, None, []),
        ("masked-lm", {**CSV, "path": "b.csv.gz"}, None,
         ["data.train.text_column got reviews; b.csv.gz has review, verdict; did you mean review?"]),
        ("causal-lm", {**CHAT, "messages_column": "nope"}, {**CHAT, "messages_column": "messages"},
         ["data.train.messages_column got nope; c.jsonl has messages"]),
        ("causal-lm", {**CHAT, "prompt": "alpaca"}, None,
         ["data.train.prompt_column got instruction; c.jsonl has messages",
          "data.train.response_column got output; c.jsonl has messages"]),
        # One array of objects; what is no JSON, or no UTF-8, is left to the reader.
        ("masked-lm", {"format": "jsonl", "path": "array.json"}, None,
         ["data.train.text_column got text; array.json has a, b"]),
        ("masked-lm", {"format": "jsonl", "path": "a.csv"}, None, []),
        ("masked-lm", {"format": "csv", "path": "utf16.csv"}, None, []),
    ],
)  # fmt: skip
def test_columns_of_the_first_row(
    task: str, train: dict[str, Any], evaluation: dict[str, Any] | None, said: list[str]
) -> None:
    """A column that the first row of a source lacks is reported with the columns that exist."""
    table = "review;verdict\ngood, really;1\n"
    Path("a.csv").write_text("review\tverdict\n\ngood\t1\n")
    Path("b.csv").write_text("\ufeff" + table)
    Path("b.csv.gz").write_bytes(gzip.compress(table.encode()))
    Path("c.jsonl").write_text('{"messages": []}\n' * 9)
    Path("array.json").write_text('[ {"a": 1, "b": 2}, {"text": 1}]')
    Path("utf16.csv").write_text(table, encoding="utf-16")
    data = {**WORDS, "train": train, "evaluation": evaluation}
    found = column_and_vocabulary_problems(bert(model={"task": task}, data=data))
    assert [f"{paths[0]} {text}" for paths, text in found] == said


def test_media_files_of_metadata() -> None:
    """A file that metadata names and that does not exist is reported, as is a wrong column."""
    Path("data/metadata.csv").write_text("file_name,said\na.txt,yes\nno.wav,no\n")
    source = Corpus(format="folder", path=("data",), file_column="file_name", text_column="text")
    made = SimpleNamespace(model=SimpleNamespace(traits=MODEL_TASKS["speech-seq2seq"]))
    found = [
        text
        for _, text in missing_column_and_media_file_problems(made, "data.train", source, "data")
    ]  # type: ignore[arg-type]
    assert found == [
        "got text; data/metadata.csv has file_name, said",
        "data/metadata.csv names no.wav, which does not exist",
    ]


# The whole text of such a file.
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"


@pytest.mark.parametrize(
    ("pointers", "others", "sections", "said"),
    [
        (["data/b.txt"], [], {"data": {**WORDS, "train": {"format": "text", "path": ["data/*.txt"]}}}, ["data/b.txt"]),
        (["m/model.safetensors"], [], {}, ["m/model.safetensors"]),
        (["m/config.json", "m/tokenizer.json"], [], {}, ["m/config.json", "m/tokenizer.json"]),
        (["m/pytorch_model-00001-of-00002.bin", "m/README.md"], [], {}, ["m/pytorch_model-00001-of-00002.bin"]),
        # Of two formats transformers reads safetensors.
        (["m/pytorch_model.bin", "m/consolidated.pth"], ["m/model.safetensors"], {}, []),
        # A short file, and no files.
        ([], ["m/vocab.txt"], {}, []),
        ([], [], {}, []),
    ],
)  # fmt: skip
def test_pointers_of_git_lfs(
    pointers: list[str], others: list[str], sections: dict[str, Any], said: list[str]
) -> None:
    """Files that git-lfs has not fetched are named, if a run would read them."""
    Path("m").mkdir()
    for name in (*pointers, *others):
        Path(name).write_text(POINTER if name in pointers else "version")
    made = bert(
        model={"task": "masked-lm", "pretrained": "m"},
        **{"data": {**WORDS, "tokenizer": "m"}, **sections},
    )
    # The tokenizer is in the same folder.
    found = [*dict.fromkeys(text for _, text in absent_or_lfs_pointer_input_problems(made))]
    assert found == [
        f"{name} is a pointer of git-lfs in place of the file; type in its folder: git lfs pull"
        for name in said
    ]


def test_files_that_are_not_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data file that the user may not read is named before a start, and by the ranks' check."""
    Path("rows.txt").write_text("a")
    # Root may read any file.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
    said = "rows.txt cannot be read by this user: check its owner and mode (ls -l)"
    made = bert(data={**WORDS, "train": {"format": "text", "path": "rows.txt"}})
    assert (("data.train.path",), said) in absent_or_lfs_pointer_input_problems(made)
    with pytest.raises(InputError, match=re.escape(said)):
        refuse_lfs_pointers_and_unreadable_files(["rows.txt"])


@pytest.mark.parametrize(
    "read",
    [load_recipe, read_hostfile, lambda path: convert_config_to_recipe(path, None, None, ())],
)
def test_pointers_in_place_of_what_a_person_writes(read: Callable[[Path], object]) -> None:
    """A recipe, a host file and another tool's config may be kept in git-lfs, as *.json often is."""
    Path("file").write_text(POINTER)
    with pytest.raises(OrtlaunchError, match=r"file:? is a pointer of git-lfs"):
        read(Path("file"))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"special_tokens": {"pad_token": "<pad>"}}, []),
        ({"special_tokens": {"pad_token": "<pad>"}, "added_tokens": ["<a>", "b"]},
         ["got 5, and the tokenizer has 6 words; 8 adds new ones"]),
        ({"special_tokens": {"pad_token": "b"}}, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "vocabulary", [{"a": 0, "b": 1, "c": 2}, [["a", 0.1], ["b", 0.2], ["c", 0]]]
)
def test_more_tokens_than_rows(vocabulary: Any, sections: dict[str, Any], said: list[str]) -> None:
    """New tokens that local weights have no rows for are an error before the start."""
    Path("m").mkdir()
    Path("m/config.json").write_text('{"vocab_size": 5}')
    added = [{"id": 3, "content": "<s>"}, {"id": 0, "content": "a"}]
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": added}
    Path("m/tokenizer.json").write_text(json.dumps(tokenizer))
    model = {"task": "masked-lm", "pretrained": "m"}
    data = {**WORDS, "tokenizer": "m", **sections}
    # "a" is added and in the vocabulary, and counts once.
    assert [
        text for _, text in column_and_vocabulary_problems(bert(model=model, data=data))
    ] == said
    larger = {**model, "config": {"vocab_size": 6}}
    assert not list(column_and_vocabulary_problems(bert(model=larger, data=data)))
    # What transformers alone can read is left to it.
    Path("m/tokenizer.json").write_text("[]")
    assert not list(column_and_vocabulary_problems(bert(model=model, data=data)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"config": {"model_type": "bert", "hidden_size": 32}}, ["got 64, and the model's vectors have 32 values"]),
        ({"config": {"model_type": "distilbert", "dim": 48}}, ["got 64, and the model's vectors have 48 values"]),
        ({"config": {"model_type": "bert"}}, []),
        ({"pretrained": "m"}, ["got 64, and the model's vectors have 16 values"]),
        ({"pretrained": "owner/name", "config": {"model_type": "bert"}}, []),
    ],
)  # fmt: skip
def test_dimensions_above_the_width(model: dict[str, Any], said: list[str]) -> None:
    """An embedding's beginning that is longer than the vector is an error before the start."""
    Path("m").mkdir()
    Path("m/config.json").write_text('{"model_type": "bert", "hidden_size": 16}')
    settings = {"task": "embedding", "embedding": {"dimensions": [8, 64]}, **model}
    made = bert(model=settings, data={"train": "python-pairs"})
    assert [text for _, text in column_and_vocabulary_problems(made)] == said


def test_a_name_with_letters_of_patterns() -> None:
    """A file is found by its name, though the name is a pattern that does not match it."""
    Path("data/c [v2].txt").touch()
    named = {**WORDS, "train": {"format": "text", "path": ["data/c [v2].txt"]}}
    assert list(absent_or_lfs_pointer_input_problems(bert(data=named))) == []
    assert file_or_sorted_pattern_matches("data/c [v2].txt") == ["data/c [v2].txt"]
    assert file_or_sorted_pattern_matches("data/[ab].txt") == ["data/a.txt"]


def test_a_file_that_is_listed_twice() -> None:
    """A file that several entries name is reported, whatever they are called."""
    Path("data/link.txt").symlink_to("a.txt")
    for paths, count in (
        (["data/a.txt", "data/../data/a.txt"], 2),
        (["data/*.txt", "data/a.txt"], 3),
    ):
        made = bert(data={**WORDS, "train": {"format": "text", "path": paths}})
        text = f"{Path('data/a.txt').resolve()} is listed {count} times, and is read as often"
        assert list(repeated_file_and_high_learning_rate_problems(made)) == [
            (("data.train.path",), text)
        ]
    assert (
        list(
            repeated_file_and_high_learning_rate_problems(
                bert(data={**WORDS, "train": {"format": "text", "path": ["data/a.txt"]}})
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {**WORDS, "train": {"format": "text", "path": ["c/*.txt"]}}},
         "nor beside the recipe"),
        ({"model": {"task": "masked-lm", "pretrained": "~other/base"}},
         "write the full path"),
        ({"data": {**WORDS, "tokenizer": "s3://b/tokenizer"}}, "copy or mount it"),
        ({"data": {**WORDS, "train": {"format": "text", "path": ["$NONE_SUCH/x"]}}},
         "the names in launch.forward are expanded, where they are set"),
    ],
)  # fmt: skip
def test_where_a_path_leads(sections: dict[str, Any], text: str) -> None:
    """A missing file, a URL and a variable that is not expanded are reported with a remedy."""
    ((_, found),) = absent_or_lfs_pointer_input_problems(bert(**sections))
    assert text in found


def test_a_model_type_that_transformers_does_not_have() -> None:
    """An unknown model type is refused with the nearest known name."""
    # The known types are read from the source of transformers.
    config = {"model_type": "llamma", "vocab_size": 64}
    ((_, text),) = model_type_unknown_to_library_problems(
        bert(model={"task": "causal-lm", "config": config})
    )
    assert text.endswith("did you mean llama?")
    # Names with a hyphen are types as well.
    for known in ("gpt2", "modernbert", "gpt-sw3"):
        assert (
            list(
                model_type_unknown_to_library_problems(
                    bert(model={"task": "causal-lm", "config": {**config, "model_type": known}})
                )
            )
            == []
        )


@pytest.mark.parametrize(
    ("recipe", "overrides", "status"),
    [
        (NO_FILE, (), 2),
        # A recipe for other machines may have files that this one lacks.
        (NO_FILE, ("--elsewhere",), 0),
        (NO_FILE, ("--no-files",), 0),
        (NO_FILE, ("launch.nodes=2",), 0),
        ({}, ("model={task: causal-lm, config: {model_type: llamma}}", "data=null"), 2),
    ],
)
def test_validate_requires_what_the_recipe_reads(
    recipe: dict[str, Any], overrides: tuple[str, ...], status: int, ortlaunch: Run
) -> None:
    """`validate` fails for missing files and unknown types, but not for other machines' recipes."""
    Path("recipe.yaml").write_text(yaml.safe_dump({**CUSTOM, **recipe}))
    ended = ortlaunch("validate", "recipe.yaml", *overrides)
    assert ended.status == status
    if recipe:
        assert "no.txt, which matches no file here" in (ended.err if status else ended.out)


def test_a_learning_rate_that_is_most_likely_a_slip(ortlaunch: Run) -> None:
    """`validate` and `plan` print a note for adamw's learning rate of 300."""
    rate = ("optimizer.name=adamw", "optimizer.learning_rate=300")
    for verb in ("validate", "plan"):
        assert "got 300: adamw changes each weight" in ortlaunch(verb, "good.yaml", *rate).out


def resolved(asked: LaunchOptions, **sections: Any) -> ResolvedRun:
    """Resolve a recipe with these sections, which is written to this folder."""
    Path("recipe.yaml").write_text(yaml.safe_dump({**CUSTOM, **sections}))
    return load_and_resolve_recipe(Path("recipe.yaml"), (), asked, {})


@pytest.mark.parametrize(
    ("sections", "planned_only", "refused"),
    [
        (NO_FILE, True, False),
        (NO_FILE, False, True),
        (NO_FUNCTION, True, True),
        (NO_FUNCTION, False, True),
    ],
)
def test_a_run_here_needs_them_here(
    sections: dict[str, Any], planned_only: bool, refused: bool
) -> None:
    """A run needs its files and functions here, a plan only the functions."""
    # Files may still be created before the run.
    asked = LaunchOptions(planned_only=planned_only)
    if refused:
        with pytest.raises(
            RecipeError,
            match=r"^recipe.yaml:\d+:\d+: (data.train.path|model.factory): got (no|mine)",
        ):
            resolved(asked, **sections)
    else:
        assert (
            f"no file here (current folder: {Path.cwd()})" in resolved(asked, **sections).notes[0]
        )


@pytest.mark.parametrize("sections", [NO_FILE, NO_FUNCTION])
def test_other_hosts_may_have_them(sections: dict[str, Any]) -> None:
    """With other hosts, missing inputs give a note instead of an error."""
    Path("hosts").write_text(HOSTS)
    asked = LaunchOptions(hostfile="hosts")
    assert any(
        ": got " in note
        for note in resolved(
            asked, batch={"micro_size": 2, "accumulation_steps": 1}, **sections
        ).notes
    )
