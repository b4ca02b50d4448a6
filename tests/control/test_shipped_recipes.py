"""Every shipped recipe loads, says what was published, and is valid for editors too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ortlaunch.planning.memory import estimate
from ortlaunch.recipe import Recipe, load, yaml_text
from ortlaunch.recipe.fields import _paths, models_in, section_at
from ortlaunch.recipe.place import dotted
from ortlaunch.recipe.reference import markdown
from ortlaunch.recipe.resume_rules import RULES
from ortlaunch.recipe.schema import json_schema

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
each_recipe = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")


def shipped(name: str, *overrides: str) -> Recipe:
    """A shipped recipe by name."""
    return load(RECIPES / f"{name}.yaml", overrides).recipe


def as_editors_read(text: str) -> Any:
    """Plain values of a YAML text, `1e-5` a number as in YAML 1.2."""
    return yaml_text.parse(text, "recipe", []).plain()


def test_the_families_are_complete() -> None:
    """Both families, from the published size to one for a laptop."""
    names = {str(path.relative_to(RECIPES).with_suffix("")) for path in FILES}
    bert = {f"bert-large/{name}" for name in ("phase1", "phase2", "tiny")}
    llama = {f"llama2-7b/{name}" for name in ("pretrain", "finetune", "lora", "tiny")}
    assert names == bert | llama


@each_recipe
def test_a_shipped_recipe_loads_and_names_the_schema(path: Path) -> None:
    """The first line points an editor at the schema, from wherever the recipe lies."""
    load(path)
    key, schema = path.read_text(encoding="utf-8").splitlines()[0].split("$schema=")
    assert key == "# yaml-language-server: "
    assert schema == os.path.relpath(RECIPES / "schema.json", path.parent)


@each_recipe
def test_a_shipped_recipe_is_valid_by_the_schema(path: Path) -> None:
    """Editors show no error where `ortlaunch validate` finds none."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(as_editors_read(path.read_text(encoding="utf-8")), json.loads(json_schema()))


as_newer_pydantic_words_it = pytest.mark.skipif(
    tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 11), reason="older pydantic words it otherwise"
)


@as_newer_pydantic_words_it
def test_the_schema_file_is_up_to_date() -> None:
    """`ortlaunch schema > recipes/schema.json` after every change of a field."""
    assert (RECIPES / "schema.json").read_text(encoding="utf-8") == json_schema()


@as_newer_pydantic_words_it
def test_the_reference_is_up_to_date() -> None:
    """`ortlaunch schema --markdown > docs/recipe.md` after every change of a field."""
    assert (RECIPES.parent / "docs" / "recipe.md").read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize(
    "row",
    [
        "| `name` | text `^[A-Za-z0-9][A-Za-z0-9._-]*$` | **required** | Name of the run:",
        "| `seed` | integer ≥ 0 < 2,147,483,648 | `42` | Seeds",
        "| `engine` | [engine](#Engine) |  | What runs the model. |",
        "| `zero` | [zero](#Zero) or null | `null` | DeepSpeed ZeRO.",
        "## `data.train`, `data.evaluation`",
        "| `betas` | [number ≥ 0 < 1, number ≥ 0 < 1] | `[0.9, 0.999]` | Decay",
        '| `target_modules` | text or list of text | `["q_proj", "v_proj"]` | Names',
        "| `env` | mapping of text | `{}` | Environment",
        "| `micro_size` | integer ≥ 1 ≤ 1,000,000,000 or `auto` or null | `null` | Samples",
    ],
)
def test_the_reference_says_kind_bounds_default_and_manual(row: str) -> None:
    """One field of every kind, word for word."""
    assert any(line.startswith(row) for line in markdown().splitlines())


def test_the_reference_has_every_field_in_the_recipes_order() -> None:
    """The page's rows are the resolved recipe's keys, section by section."""
    fields = [line.split("`")[1] for line in markdown().splitlines() if line.startswith("| `")]
    assert fields[1 : 1 + len(Recipe.model_fields)] == list(Recipe.model_fields)
    properties = [set(json.loads(json_schema())["properties"])]
    properties += [set(section["properties"]) for section in json.loads(json_schema())["$defs"].values()]
    assert sorted(fields) == sorted(name for names in properties for name in names)


def test_the_schema_is_the_models_with_extends() -> None:
    """All fields with their manual; sorted; what a file that extends another leaves out is not demanded of it."""
    schema = json.loads(json_schema())
    assert json_schema() == json.dumps(schema, indent=2, sort_keys=True) + "\n"
    assert set(schema["properties"]) == {*Recipe.model_fields, "extends"}
    assert schema["properties"]["extends"]["type"] == "string"
    assert schema["$schema"].startswith("https://json-schema.org/")
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            assert field.get("description"), name
    assert schema["anyOf"] == [
        {"required": ["extends"]},
        {"required": ["name", "model", "data", "batch", "optimizer", "train"]},
    ]


@pytest.mark.parametrize(
    "text",
    [
        "extends: a.yaml\nbacth: {}",
        "extends: a.yaml\noptimizer: {name: adam}",
        "extends: a.yaml\nbatch: {micro_size: many}",
        "extends: a.yaml\ndata: {train: {format: text, path: []}}",
        "name: x",
    ],
)
def test_the_schema_finds_faults(text: str) -> None:
    """Unknown keys, wrong words, wrong kinds, missing sections are underlined while typing."""
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(as_editors_read(text), json.loads(json_schema()))


def test_the_schema_takes_one_path_or_a_list() -> None:
    """As the loader does."""
    jsonschema = pytest.importorskip("jsonschema")
    for path in ("a.txt", "[a.txt, b.txt]"):
        text = f"extends: a.yaml\ndata: {{train: {{format: text, path: {path}}}}}"
        jsonschema.validate(as_editors_read(text), json.loads(json_schema()))


def test_bert_large_is_as_published() -> None:
    """Steps, batches, lengths and rates of NVIDIA's two phases; global batches divide on 8 GPUs."""
    for name, length, predictions, total, rate, warmup, steps in (
        ("bert-large/phase1", 128, 20, 65536, 6e-3, 0.2843, 7038),
        ("bert-large/phase2", 512, 80, 32768, 4e-3, 0.128, 1563),
    ):
        recipe = shipped(name)
        assert recipe.data.masked_lm is not None
        assert (recipe.data.sequence_length, recipe.data.masked_lm.max_predictions) == (length, predictions)
        assert (recipe.batch.global_size, recipe.train.max_steps) == (total, steps)
        assert (recipe.optimizer.name, recipe.optimizer.learning_rate) == ("lamb", rate)
        assert (recipe.schedule.name, recipe.schedule.power, recipe.schedule.warmup_ratio) == (
            "polynomial",
            0.5,
            warmup,
        )
        assert (recipe.precision, recipe.engine.name, recipe.zero) == ("fp16", "ort", None)
        assert total % (recipe.batch.micro_size or 0) == 0
        load(RECIPES / f"{name}.yaml", ["launch={nodes: 4, processes_per_node: 8}"])


def test_full_size_bert_large_takes_the_overrides_of_a_trial() -> None:
    """A few steps on a laptop, as published and sharded."""
    trial = ("train.max_steps=2", "batch={global_size: 2, micro_size: 1}", "precision=fp32", "data.train=python-docs")
    assert shipped("bert-large/phase1", *trial).optimizer.name == "lamb"
    sharded = shipped("bert-large/phase1", *trial, "optimizer.name=fused_adam", "zero.stage=1")
    assert sharded.zero is not None
    assert sharded.zero.stage == 1


def test_parameters_are_those_of_the_published_models() -> None:
    """335 million and 6.74 billion."""
    bert, llama = estimate(shipped("bert-large/phase1"), 1, 8), estimate(shipped("llama2-7b/pretrain"), 1, 8)
    assert bert is not None
    assert llama is not None
    assert round(bert.parameters / 1e6) == 336
    assert llama.parameters == 6_738_415_616


def test_llama_sees_four_million_tokens_a_step_and_two_trillion_in_all() -> None:
    """The paper's budget."""
    recipe = shipped("llama2-7b/pretrain")
    tokens = (recipe.batch.global_size or 0) * (recipe.data.sequence_length or 0)
    assert tokens == 4 * 2**20
    assert 2.0e12 < tokens * recipe.train.max_steps < 2.2e12


@pytest.mark.parametrize("name", ["bert-large/tiny", "llama2-7b/tiny"])
@pytest.mark.parametrize("engine", ["eager", "inductor", "ort"])
@pytest.mark.parametrize("zero", ["null", "{stage: 1}", "{stage: 2}"])
def test_tiny_recipes_take_every_engine_and_sharding(name: str, engine: str, zero: str) -> None:
    """They are what the loss curves are compared on."""
    recipe = shipped(name, f"engine.name={engine}", f"zero={zero}", "train.max_steps=20")
    assert recipe.engine.name == engine
    assert recipe.precision == "fp32"


def test_every_field_says_what_a_resume_does_with_it() -> None:
    """A new field takes a rule in recipe/resume_rules.py; so does a section that may be null or a word."""
    paths = {dotted(path) for path in _paths(Recipe, ())}
    sections = {path for path in paths if section_at(tuple(path.split("."))) and not _is_optional(path)}
    assert paths - sections - set(RULES) == set(), "without a rule in ortlaunch/recipe/resume_rules.py"
    assert set(RULES) - (paths - sections) == set(), "rules of no field"


def _is_optional(path: str) -> bool:
    """Whether something else than the section itself may stand there."""
    *above, name = path.split(".")
    section = section_at(tuple(above))
    assert section is not None
    annotation = section.model_fields[name].annotation
    return annotation not in models_in(annotation)
