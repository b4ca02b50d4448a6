"""Tests of loading, extending, overriding and writing recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ortlaunch.base.errors import RecipeError
from ortlaunch.recipe import dump_recipe_yaml, load_recipe, parse_resolved_recipe
from ortlaunch.recipe.fields.data import Corpus, TokenizerTraining
from ortlaunch.recipe.fields.field_lookup import first_model_at_path, keys_accepted_by_section
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
from ortlaunch.recipe.hints.messages import EXAMPLES
from ortlaunch.recipe.rules.rules import precision_and_engine_device_rules
from ortlaunch.recipe.text import yaml_text
from ortlaunch.recipe.text.source_location import KeyPath, format_key_path

RECIPES = Path(__file__).parents[3] / "recipes"
# Line and column of its keys are used in test_a_problem_is_placed_in_the_file_that_wrote_it.
BASE = """
name: base
model: {task: masked-lm, config: {model_type: bert, hidden_size: 128, num_attention_heads: 2}}
data:
  train: {format: text, path: [one.txt, two.txt]}
  tokenizer: bert-base-uncased
  sequence_length: 64
batch: {global_size: 32, micro_size: 16}
optimizer: {name: sgd, momentum: 0.9, learning_rate: 1e-3}
train: {max_steps: 100}
launch: {env: {NCCL_DEBUG: WARN}}
"""


def recipe(folder: Path, text: str = BASE, *overrides: str) -> Recipe:
    """Return the recipe of a text with overrides."""
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides).recipe


def top(folder: Path, text: str, *overrides: str) -> Recipe:
    """Return the recipe of a text that extends BASE."""
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    return recipe(folder, "extends: base.yaml\n" + text, *overrides)


def refused(folder: Path, *overrides: str) -> str:
    """Return the only problem of BASE with overrides."""
    with pytest.raises(RecipeError) as caught:
        recipe(folder, BASE, *overrides)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-5", 1e-5),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("+.5e-3", 5e-4),
        ("2", 2.0),
        ("1_000.5", 1000.5),
    ],
)
def test_every_way_to_write_a_number_is_a_number(
    written: str, value: float, tmp_path: Path
) -> None:
    """Every common form of a number is a number, also forms that YAML 1.1 reads as strings."""
    # In block style and in flow style.
    for style in (f"learning_rate: {written}", f"{{learning_rate: {written}}}"):
        section = style if style.startswith("{") else "\n  " + style
        found = recipe(
            tmp_path, BASE.replace("{name: sgd, momentum: 0.9, learning_rate: 1e-3}", section)
        )
        assert found.optimizer.learning_rate == value


def test_the_slow_parser_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML without libyaml gives the same recipes."""
    fast = [load_recipe(path).recipe for path in sorted(RECIPES.rglob("*.yaml"))]
    # Read at each call of the parser.
    monkeypatch.setattr(yaml_text, "_FAST_LOADER", yaml.SafeLoader)
    assert [load_recipe(path).recipe for path in sorted(RECIPES.rglob("*.yaml"))] == fast


def test_phase_2_extends_phase_1() -> None:
    """Phase 2 inherits the fields of phase 1 that it does not set."""
    first = load_recipe(RECIPES / "bert-large/phase1.yaml").recipe
    second = load_recipe(RECIPES / "bert-large/phase2.yaml").recipe
    assert second.model.config == first.model.config
    assert second.data.masked_lm is not None
    assert (second.data.masked_lm.probability, second.data.masked_lm.max_predictions) == (0.15, 80)
    assert (second.data.sequence_length, second.batch.global_size) == (512, 32768)
    assert second.optimizer.learning_rate == 4e-3
    assert second.optimizer.no_decay == first.optimizer.no_decay
    assert second.schedule.power == first.schedule.power


def test_mappings_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    """`extends` merges mappings key by key at every depth, and replaces lists."""
    found = top(
        tmp_path, "data: {train: {path: [three.txt]}}\nlaunch: {env: {OMP_NUM_THREADS: '4'}}\n"
    )
    assert isinstance(found.data.train, Corpus)
    assert found.data.train.path == ("three.txt",)
    assert found.launch.env == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}


def test_a_corpus_of_another_format_replaces_the_whole(tmp_path: Path) -> None:
    """A corpus of another format replaces the base's corpus with all its fields."""
    found = top(tmp_path, "data: {train: {format: hub, name: wikitext}}\n")
    assert found.data.train == Corpus(format="hub", name="wikitext")


def test_extends_reaches_over_several_files_and_folders(tmp_path: Path) -> None:
    """A chain of `extends` works over folders: each path is relative to the file that names it."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far/base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "far/middle.yaml").write_text(
        "extends: base.yaml\nseed: 1\nname: middle\n", encoding="utf-8"
    )
    found = recipe(tmp_path, "extends: far/middle.yaml\nname: last\n")
    assert (found.name, found.seed, found.train.max_steps) == ("last", 1, 100)


def test_null_unsets_a_key_of_the_base(tmp_path: Path) -> None:
    """null unsets a key of the base, unless null is a value of the field."""
    found = top(tmp_path, "optimizer: {name: adamw, momentum: null}\nlaunch: {env: null}\nlog:\n")
    assert found.optimizer.momentum == 0.0
    assert found.launch.env == {}
    assert found.log == Recipe.model_fields["log"].default
    assert found.checkpoint.keep == 3
    # Here null is a value: it keeps all checkpoints.
    assert top(tmp_path, "checkpoint: {keep: null}\n").checkpoint.keep is None


def test_a_problem_is_placed_in_the_file_that_wrote_it(tmp_path: Path) -> None:
    """Each problem is reported where its key was written, also after `extends`."""
    path = tmp_path / "recipe.yaml"
    with pytest.raises(RecipeError) as caught:
        top(
            tmp_path,
            "data: {sequence_length: x}\nmodel: {config: {num_attention_heads: 3}}\n",
            "seed=-1",
        )
    assert [line.split(": ")[:2] for line in caught.value.problems] == [
        [f"{path}:2:8", "data.sequence_length"],
        [f"{path}:3:18", "model.config.num_attention_heads"],
        ["override 'seed=-1'", "seed"],
    ]
    loaded = load_recipe(_written(tmp_path, "extends: base.yaml\nseed: 3\n"))
    assert loaded.located_problem_line((("seed",), "is odd")) == f"{path}:2:1: seed: is odd"
    assert loaded.located_problem_line((("optimizer.momentum",), "is high")).startswith(
        f"{tmp_path}/base.yaml:9:24: "
    )
    # A key that is written nowhere: the place of the recipe.
    assert (
        loaded.located_problem_line((("precision",), "is low")) == f"{path}:1:1: precision: is low"
    )


def _written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    """YAML's anchors and merge keys work in a recipe."""
    text = BASE.replace(
        "{format: text, path: [one.txt, two.txt]}", "&text {format: text, path: a.txt}"
    )
    found = recipe(
        tmp_path,
        text.replace(
            "  sequence_length", "  evaluation: {<<: *text, path: b.txt}\n  sequence_length"
        ),
    )
    assert isinstance(found.data.evaluation, Corpus)
    assert found.data.evaluation.path == ("b.txt",)


def test_an_override_makes_the_sections_on_its_way(tmp_path: Path) -> None:
    """An override of `zero.stage` creates the section, and a plain value becomes a mapping."""
    found = recipe(
        tmp_path,
        BASE,
        "zero.stage=1",
        "data.tokenizer.train=wordpiece",
        "data.tokenizer.vocab_size=4000",
    )
    assert found.zero is not None
    assert found.zero.stage == 1
    assert found.data.tokenizer == TokenizerTraining(train="wordpiece", vocab_size=4000)


def test_an_override_replaces_a_mapping_as_a_whole(tmp_path: Path) -> None:
    """An override of a mapping is YAML and replaces the whole mapping."""
    found = recipe(
        tmp_path, BASE, "optimizer={name: adamw, learning_rate: 2e-4}", "data.train=python-docs"
    )
    assert (found.optimizer.name, found.optimizer.momentum, found.data.train) == (
        "adamw",
        0.0,
        "python-docs",
    )


def test_an_override_reaches_into_a_list(tmp_path: Path) -> None:
    """An override can replace one item of a list, by its index."""
    found = recipe(tmp_path, BASE, "data.train.path.1=three.txt")
    assert isinstance(found.data.train, Corpus)
    assert found.data.train.path == ("one.txt", "three.txt")


def test_later_overrides_win_and_may_hold_equal_signs(tmp_path: Path) -> None:
    """The last override of a key wins, and a value may contain equal signs."""
    found = recipe(tmp_path, BASE, "seed=1", "seed=2", "launch.env.FLAGS=--a=b")
    assert (found.seed, found.launch.env["FLAGS"]) == (2, "--a=b")


def test_an_override_is_named_in_errors_that_it_causes(tmp_path: Path) -> None:
    """An error that an override causes is reported at the override, also one of a rule."""
    assert refused(
        tmp_path, "optimizer.momentum=null", "optimizer.name=lamb", "zero.stage=1"
    ).startswith("override 'optimizer.name=lamb': optimizer.name: got lamb with ZeRO 1")
    assert refused(tmp_path, "zero.stage=5").startswith(
        "override 'zero.stage=5': zero.stage: got 5; it must be <= 3"
    )


@pytest.mark.parametrize(
    "path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_resolved_recipe_is_the_same_recipe(path: Path, tmp_path: Path) -> None:
    """A resolved recipe can be parsed by the worker and loaded as a recipe, with equal results."""
    found = load_recipe(path).recipe
    text = dump_recipe_yaml(found)
    assert parse_resolved_recipe(text) == found
    assert load_recipe(_written(tmp_path, text)).recipe == found


def test_words_that_look_like_numbers_survive_being_written(tmp_path: Path) -> None:
    """Texts that look like numbers stay texts in a resolved recipe."""
    # Each would have another type, or YAML 1.1 would change it, if it were not quoted.
    words = {
        "A": "1e5",
        "B": "010",
        "C": "12:30:00",
        "D": "yes",
        "E": "2024-01-01",
        "F": "null",
        "G": "1.5e3",
        "H": "",
    }
    overrides = [f"launch.env.{name}='{word}'" for name, word in words.items()]
    found = recipe(tmp_path, BASE, *overrides)
    text = dump_recipe_yaml(found)
    assert (
        parse_resolved_recipe(text).launch.env
        == recipe(tmp_path, text).launch.env
        == {"NCCL_DEBUG": "WARN", **words}
    )


def test_a_recipe_cannot_be_changed() -> None:
    """A recipe is immutable, because many parts of the program share it."""
    found = load_recipe(RECIPES / "bert-large/tiny.yaml").recipe
    with pytest.raises(ValueError, match="frozen"):
        found.seed = 1  # type: ignore[misc]


def test_device_rules_speak_of_a_device_that_is_found_later(tmp_path: Path) -> None:
    """With `device: auto` the rules of a device apply once the launch knows the device."""
    found = recipe(tmp_path, BASE, "precision=fp16")
    assert [paths for paths, _ in precision_and_engine_device_rules(found, "cpu")] == [
        ("precision", "engine.name", "launch.device")
    ]
    assert list(precision_and_engine_device_rules(found, "cuda")) == []


def test_hints_point_at_keys_that_exist() -> None:
    """A hint that begins with a section of the recipe names an existing key of it."""
    for key, entry in FOREIGN.items():
        path = tuple(entry.recipe_key_or_remedy.split()[0].rstrip(",:").split("."))
        # Other entries are sentences, or a key with a value as `precision: fp16`.
        if path[0] in keys_accepted_by_section(()) and (
            len(path) > 1 or ":" not in entry.recipe_key_or_remedy
        ):
            assert first_model_at_path(path[:-1]) is not None, (key, entry)
            assert path[-1] in keys_accepted_by_section(path[:-1]), (key, entry)


def test_no_hint_speaks_of_a_key_that_is_ours() -> None:
    """No key at the top of a recipe is called a foreign key."""
    assert [key for key in FOREIGN if "." not in key and key in keys_accepted_by_section(())] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=format_key_path)
def test_examples_in_messages_are_valid(path: KeyPath, tmp_path: Path) -> None:
    """Every example in an error message is a valid value."""
    # BASE is changed so that no example contradicts it.
    plain = (
        "optimizer: {name: adamw, momentum: null}\nengine: {name: eager}\n"
        "model: {pretrained: some-model, config: null, lora: {target_modules: all-linear}}\n"
    )
    plain += "submit: {kubernetes: {image: a, runs: /data/runs, volumes: {training: /data}}}\n"
    top(tmp_path, plain, f"{format_key_path(path)}={EXAMPLES[path]}")
