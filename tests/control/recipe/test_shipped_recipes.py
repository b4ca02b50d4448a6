"""Tests that shipped recipes load, have the published values, and are valid by the schema."""

from __future__ import annotations

import functools
import json
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.recipe.fields.field_lookup import (
    _all_field_paths_below_section,
    first_model_at_path,
    section_models_in_annotation,
)
from ortlaunch.recipe.manual.reference import recipe_manual_page_markdown
from ortlaunch.recipe.manual.schema import editor_schema_json_text
from ortlaunch.recipe.rules.resume_rules import RULES
from ortlaunch.recipe.text import yaml_text
from ortlaunch.recipe.text.source_location import format_key_path

RECIPES = Path(__file__).parents[3] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
each_recipe = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)


def shipped(name: str, *overrides: str) -> Recipe:
    """Return a shipped recipe by name."""
    return load_recipe(RECIPES / f"{name}.yaml", overrides).recipe


def as_editors_read(text: str) -> Any:
    """Return the plain values of a YAML text, with `1e-5` as a number, as in YAML 1.2."""
    return yaml_text.parse_yaml_tree(text, "recipe", []).value_without_locations()


@functools.cache
def schema() -> dict[str, Any]:
    """Return the JSON schema."""
    return dict(json.loads(editor_schema_json_text()))


@functools.cache
def page() -> list[str]:
    """Return the lines of docs/reference/recipe.md."""
    return recipe_manual_page_markdown().splitlines()


@functools.cache
def editor() -> Any:
    """Return a validator for the schema, as editors use it."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def test_the_families_are_complete() -> None:
    """Both families have recipes from the published size to a laptop's, and there are examples."""
    names = {str(path.relative_to(RECIPES).with_suffix("")) for path in FILES}
    bert = {f"bert-large/{name}" for name in ("phase1", "phase1-linear", "phase2", "tiny")}
    own = (
        "pretrain",
        "finetune",
        "fsdp",
        "fsdp-tp",
        "lora",
        "lora-classification",
        "lora-instruct",
        "tiny",
        "tiny-chat",
    )
    llama = {f"llama2-7b/{name}" for name in own}
    examples = {
        f"examples/{name}"
        for name in (
            "gpt2",
            "on-device/bytes",
            "own-module",
            "questions",
            "summary",
            "text-classification",
            "vit",
            "whisper",
        )
    }
    # tests/e2e/test_models.py counts those of recipes/models.
    assert names - {name for name in names if name.startswith("models/")} == bert | llama | examples


@each_recipe
def test_a_shipped_recipe_loads_and_names_the_schema(path: Path) -> None:
    """A recipe's first line names the schema by its relative path, for editors."""
    load_recipe(path)
    # The comment that editors' YAML language servers read.
    key, schema = path.read_text(encoding="utf-8").splitlines()[0].split("$schema=")
    assert key == "# yaml-language-server: "
    assert schema == os.path.relpath(RECIPES / "schema.json", path.parent)


@each_recipe
def test_a_shipped_recipe_is_valid_by_the_schema(path: Path) -> None:
    """A recipe that `ortlaunch validate` accepts is valid by the schema."""
    editor().validate(as_editors_read(path.read_text(encoding="utf-8")))


# pydantic's schema depends on its version; the files in the repository are those of newer ones.
as_newer_pydantic_words_it = pytest.mark.skipif(
    tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 11),
    reason="older pydantic words it otherwise",
)


@as_newer_pydantic_words_it
def test_the_schema_file_is_up_to_date() -> None:
    """recipes/schema.json is the output of `ortlaunch schema`."""
    assert (RECIPES / "schema.json").read_text(encoding="utf-8") == editor_schema_json_text()


@as_newer_pydantic_words_it
def test_each_row_of_the_manual_has_four_cells() -> None:
    """A bar in a pattern or a text does not end a cell."""
    rows = [line for line in page() if line.startswith("| `")]
    assert rows
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_the_reference_is_up_to_date() -> None:
    """docs/reference/recipe.md is the output of `ortlaunch schema --markdown`."""
    assert (RECIPES.parent / "docs" / "reference" / "recipe.md").read_text(
        encoding="utf-8"
    ) == recipe_manual_page_markdown()


@pytest.mark.parametrize(
    "row",
    [
        "| `name` | text `^[A-Za-z0-9][A-Za-z0-9._-]*$` | **required** | Name of the run:",
        "| `seed` | integer ≥ 0 < 2,147,483,648 | `42` | Seeds",
        "| `engine` | [engine](#Engine) |  | The engine that runs the model. |",
        "| `zero` | [zero](#Zero) or null | `null` | DeepSpeed ZeRO.",
        "## `data.train`, `data.train[].source`, `data.evaluation`",
        "| `betas` | [number ≥ 0 < 1, number ≥ 0 < 1] | `[0.9, 0.999]` | Decay",
        '| `target_modules` | text or list of text | `["q_proj", "v_proj"]` | Names',
        "| `env` | mapping of text | `{}` | Environment",
        "| `micro_size` | integer ≥ 1 ≤ 1,000,000,000 or `auto` or null | `null` | Samples",
    ],
)
def test_the_reference_says_kind_bounds_default_and_manual(row: str) -> None:
    """The reference has the exact row of one field of every type."""
    assert any(line.startswith(row) for line in page())


def test_the_reference_has_every_field_in_the_recipes_order() -> None:
    """The reference has every field, in the resolved recipe's order."""
    fields = [line.split("`")[1] for line in page() if line.startswith("| `")]
    # The first row is `extends`, which is no field of the model.
    assert fields[1 : 1 + len(Recipe.model_fields)] == list(Recipe.model_fields)
    properties = [set(schema()["properties"])]
    properties += [set(section["properties"]) for section in schema()["$defs"].values()]
    assert sorted(fields) == sorted(name for names in properties for name in names)


def test_the_schema_is_the_models_with_extends() -> None:
    """The schema is sorted, and has every field with its manual.

    It requires nothing of a file with `extends`.
    """
    assert editor_schema_json_text() == json.dumps(schema(), indent=2, sort_keys=True) + "\n"
    assert set(schema()["properties"]) == {*Recipe.model_fields, "extends"}
    assert schema()["properties"]["extends"]["type"] == "string"
    assert schema()["$schema"].startswith("https://json-schema.org/")
    for section in schema()["$defs"].values():
        for name, field in section["properties"].items():
            assert field.get("description"), name
    assert schema()["anyOf"] == [
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
    """Unknown keys, wrong names, wrong types and missing sections are invalid by the schema."""
    assert not editor().is_valid(as_editors_read(text))


def test_null_is_the_default_for_editors_too(tmp_path: Path) -> None:
    """null is valid by the schema for every field with a default, as error messages advise it."""
    whole = json.loads(editor_schema_json_text())
    for name, field in whole["properties"].items():
        assert editor().is_valid({"extends": "a.yaml", name: None}) == ("default" in field), name
    for section in ("engine", "launch", "log", "schedule", "checkpoint"):
        fields = dict.fromkeys(whole["$defs"][section.title()]["properties"])
        editor().validate({"extends": "a.yaml", section: fields})
        # The loader must accept the same nulls as the schema.
        text = f"extends: {RECIPES}/bert-large/tiny.yaml\n{section}: {json.dumps(fields)}\n"
        (tmp_path / "recipe.yaml").write_text(text)
        load_recipe(tmp_path / "recipe.yaml")


def test_the_schema_takes_one_path_or_a_list() -> None:
    """The schema accepts one path or a list of paths, as the loader does."""
    for path in ("a.txt", "[a.txt, b.txt]"):
        text = f"extends: a.yaml\ndata: {{train: {{format: text, path: {path}}}}}"
        editor().validate(as_editors_read(text))


# Field by field, copied from the publications that the recipes name, not from the recipes.
BERT_CONFIG = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 30528, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
BOTH_PHASES = {
    "seed": 42, "precision": "fp16", "zero": None, "model.task": "pretraining", "data.masked_lm.probability": 0.15,
    "optimizer.name": "lamb", "optimizer.betas": [0.9, 0.999], "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay": 0.01, "optimizer.no_decay": ["bias", "LayerNorm", "gamma", "beta"],
    "schedule.name": "polynomial", "schedule.power": 0.5, "schedule.warmup_steps": None,
    "schedule.minimum_ratio": 0.0, "train.max_grad_norm": 1.0, "checkpoint.every_steps": 200,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "bert-large/phase1": {
        # 8 GPUs of 8192 samples each, in 128 passes.
        **BOTH_PHASES, "model.config": BERT_CONFIG, "model.pretrained": None, "data.sequence_length": 128,
        "data.masked_lm.max_predictions": 20, "data.tokenizer.vocab_size": 30522, "batch.global_size": 8 * 8192,
        "batch.micro_size": 8192 // 128, "optimizer.learning_rate": 6e-3, "schedule.warmup_ratio": 0.2843,
        "train.max_steps": 7038,
    },
    "bert-large/phase2": {
        # 8 GPUs of 4096 samples each, in 512 passes.
        **BOTH_PHASES, "model.config": BERT_CONFIG, "model.pretrained": "runs/bert-large-phase1/export",
        "data.sequence_length": 512, "data.masked_lm.max_predictions": 80, "batch.global_size": 8 * 4096,
        "batch.micro_size": 4096 // 512, "optimizer.learning_rate": 4e-3, "schedule.warmup_ratio": 0.128,
        "train.max_steps": 1563,
    },
    "bert-large/phase1-linear": {
        **BOTH_PHASES, "data.sequence_length": 128, "schedule.name": "linear", "schedule.power": 1.0,
        "batch.global_size": 64000, "batch.micro_size": 40, "optimizer.learning_rate": 6e-3,
        "schedule.warmup_ratio": 0.2843, "train.max_steps": 7038,
    },
    "llama2-7b/pretrain": {
        "model.pretrained": None, "model.lora": None, "optimizer.name": "fused_adam", "batch.global_size": 1024,
        "train.max_steps": 500_000,
        "model.config": {
            "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        "data.sequence_length": 4096, "optimizer.learning_rate": 3e-4, "optimizer.betas": [0.9, 0.95],
        "optimizer.epsilon": 1e-5, "optimizer.weight_decay": 0.1, "schedule.name": "cosine",
        "schedule.warmup_ratio": 2000 / 500_000, "schedule.minimum_ratio": 0.1, "train.max_grad_norm": 1.0,
    },
    "llama2-7b/finetune": {
        "data.sequence_length": 2048, "batch.global_size": 128, "optimizer.learning_rate": 2e-5,
        "optimizer.weight_decay": 0.0, "schedule.name": "cosine", "schedule.warmup_ratio": 0.03,
        "schedule.minimum_ratio": 0.0, "zero.stage": 2,
    },
    "llama2-7b/lora": {
        "model.lora.r": 8, "model.lora.alpha": 32, "data.sequence_length": 2048, "batch.micro_size": 1,
        "batch.accumulation_steps": 1, "optimizer.learning_rate": 2e-5, "schedule.name": "linear",
        "schedule.minimum_ratio": 0.0, "zero.stage": 2,
    },
    "llama2-7b/lora-classification": {
        "model.task": "sequence-classification", "model.lora.r": 2, "model.lora.alpha": 32, "model.lora.dropout": 0.1,
        "model.lora.target_modules": ["q_proj", "v_proj"], "data.sequence_length": 128, "batch.micro_size": 16,
        "batch.accumulation_steps": 1, "optimizer.learning_rate": 2e-5, "optimizer.weight_decay": 0.0,
        "schedule.name": "linear", "schedule.warmup_ratio": None, "schedule.warmup_steps": None, "precision": "fp16",
        "zero.stage": 2, "zero.deepspeed": {"fp16": {"initial_scale_power": 12}}, "train.epochs": 1.0,
        "train.max_grad_norm": 1.0,
    },
    "llama2-7b/lora-instruct": {
        "model.task": "causal-lm", "model.lora.r": 8, "model.lora.alpha": 16, "model.lora.dropout": 0.05,
        "model.lora.target_modules": ["q_proj", "v_proj"], "data.sequence_length": 256, "batch.global_size": 128,
        "batch.micro_size": 4, "optimizer.learning_rate": 3e-4, "optimizer.weight_decay": 0.0,
        "schedule.name": "linear", "schedule.warmup_steps": 100, "precision": "fp16", "train.epochs": 3.0,
        "train.max_grad_norm": 1.0, "train.evaluate_every_steps": 200, "checkpoint.every_steps": 200,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_as_published(name: str) -> None:
    """A recipe has every value of its publication.

    BERT's phases can also run on four nodes of 8 GPUs.
    """
    made = shipped(name).model_dump(mode="json")
    found = {
        field: reduce(lambda at, key: at[key], field.split("."), made) for field in PUBLISHED[name]
    }
    assert found == PUBLISHED[name]
    if name.startswith("bert"):
        load_recipe(RECIPES / f"{name}.yaml", ["launch={nodes: 4, processes_per_node: 8}"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_value_says_whence_it_is(name: str) -> None:
    """Every number in a recipe's data, batch and later sections has its source in a comment."""
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("data:", "batch:")))
    numbers = [line for line in lines[start:] if re.search(r": *\[?[0-9]", line.partition("#")[0])]
    assert numbers
    assert [line for line in numbers if not re.search(r"# \[\w+\]", line)] == []


def test_full_size_bert_large_takes_the_overrides_of_a_trial() -> None:
    """Full-size BERT-large accepts overrides for a trial on a laptop, also with sharding."""
    trial = (
        "train.max_steps=2",
        "batch={global_size: 2, micro_size: 1}",
        "precision=fp32",
        "data.train=python-docs",
    )
    assert shipped("bert-large/phase1", *trial).optimizer.name == "lamb"
    sharded = shipped("bert-large/phase1", *trial, "optimizer.name=fused_adam", "zero.stage=1")
    assert sharded.zero is not None
    assert sharded.zero.stage == 1


def test_parameters_are_those_of_the_published_models() -> None:
    """The published models have 336 million and 6.74 billion parameters."""
    bert = estimate_rank_memory_or_none(shipped("bert-large/phase1"), 1, 8)
    llama = estimate_rank_memory_or_none(shipped("llama2-7b/pretrain"), 1, 8)
    assert bert is not None
    assert llama is not None
    assert round(bert.parameters / 1e6) == 336
    assert llama.parameters == 6_738_415_616


def test_llama_sees_four_million_tokens_a_step_and_two_trillion_in_all() -> None:
    """The Llama 2 recipe has the paper's 4 million tokens in a step and 2 trillion in all."""
    recipe = shipped("llama2-7b/pretrain")
    tokens = (recipe.batch.global_size or 0) * (recipe.data.sequence_length or 0)
    assert tokens == 4 * 2**20
    assert 2.0e12 < tokens * recipe.train.max_steps < 2.2e12


@pytest.mark.parametrize("name", ["bert-large/tiny", "llama2-7b/tiny"])
@pytest.mark.parametrize("engine", ["eager", "inductor", "ort"])
@pytest.mark.parametrize("zero", ["null", "{stage: 1}", "{stage: 2}"])
def test_tiny_recipes_take_every_engine_and_sharding(name: str, engine: str, zero: str) -> None:
    """The tiny recipes, which loss curves compare, are valid with every engine and sharding."""
    recipe = shipped(name, f"engine.name={engine}", f"zero={zero}", "train.max_steps=20")
    assert recipe.engine.name == engine
    assert recipe.precision == "fp32"


def test_every_field_says_what_a_resume_does_with_it() -> None:
    """Every field has a rule (recipe/fields/section.py), its own or its section's.

    A section that may also be null or a plain value needs one, too.
    """
    paths = {format_key_path(path) for path in _all_field_paths_below_section(Recipe, ())}
    sections = {
        path
        for path in paths
        if first_model_at_path(tuple(path.split("."))) and not _is_optional(path)
    }
    assert paths - sections - set(RULES) == set(), (
        "without a rule of ortlaunch/recipe/fields/section.py"
    )
    assert set(RULES) - (paths - sections) == set(), "rules of no field"


def _is_optional(path: str) -> bool:
    """Return whether the field may have another value than the section itself."""
    *above, name = path.split(".")
    section = first_model_at_path(tuple(above))
    assert section is not None
    annotation = section.model_fields[name].annotation
    return annotation not in section_models_in_annotation(annotation)
