"""Test `ortlaunch import`: configs of other tools, the report on each key, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.importers import TOOLS, ImportedRecipe, convert_config_to_recipe
from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from tests.control.foreign import config, said
from tests.control.typed import Run

CONFIGS = Path(__file__).parents[2] / "foreign_configs"
SHIPPED = Path(__file__).parents[3] / "recipes"
# File -> its tool, and the overrides that make the result a valid recipe.
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "axolotl.yml": ("axolotl", ()),
    "llama_factory.yaml": ("llama-factory", ("data.train=python-docs",)),
    "deepspeed.json": ("deepspeed", ("schedule.warmup_steps=10",)),
    "run_mlm.json": ("hf-trainer", ()),
}
# A short config of Axolotl that becomes a valid recipe.
AXOLOTL = {"base_model": "here", "datasets": [{"path": "a/b", "type": "chat_template"}],
           "sequence_len": 64, "micro_batch_size": 2, "num_epochs": 1, "learning_rate": 0.1}  # fmt: skip
# Lists of the report. Each key of a config is in one of them, or in `empty`.
ACCOUNT = ("taken", "changed", "dropped", "needless")


def imported(name: str, *more: str) -> ImportedRecipe:
    """Import one of FILES, with its overrides and `more`."""
    # A DeepSpeed config has no model and no data, so they come from a recipe.
    base = SHIPPED / "llama2-7b/tiny.yaml" if name == "deepspeed.json" else None
    return convert_config_to_recipe(CONFIGS / name, None, base, (*FILES[name][1], *more))


def recipe(found: ImportedRecipe, folder: Path) -> Recipe:
    """Write an imported recipe to a file and load it, which also validates it."""
    (folder / "made.yaml").write_text(found.commented_recipe(), encoding="utf-8")
    return load_recipe(folder / "made.yaml").recipe


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_accounted_for(name: str, tmp_path: Path) -> None:
    """The tool is detected, the recipe is valid, and each key of the config is in the report."""
    found = imported(name)
    assert found.tool == FILES[name][0]
    recipe(found, tmp_path)
    text = (CONFIGS / name).read_text()
    told = " ".join(
        [*found.import_report.empty, *(key for where in ACCOUNT for key in said(found, where))]
    )
    names = (
        told.replace(".", " ").replace(",", " ").replace("optimizer params", "optimizer").split()
    )
    aliases = {
        "optimizer": "optimizer",
        "scheduler": "scheduler",
        "zero_optimization": "zero_optimization",
    }
    assert [key for key in yaml.safe_load(text) if aliases.get(key, key) not in names] == []


def test_what_the_recipes_hold(tmp_path: Path) -> None:
    """Sizes, rates, adapters, schedules and DeepSpeed's settings have their values in the recipe."""
    one = recipe(imported("axolotl.yml"), tmp_path)
    assert one.model.lora is not None
    assert (one.model.lora.r, one.model.lora.alpha, one.model.lora.target_modules) == (
        32,
        16,
        ("all-linear",),
    )
    assert (one.batch.micro_size, one.batch.accumulation_steps, one.train.epochs) == (2, 4, 4)
    assert (one.schedule.name, one.schedule.warmup_steps, one.engine.name) == (
        "cosine",
        10,
        "eager",
    )
    assert isinstance(one.data.train, Corpus)
    assert (one.data.train.name, one.data.train.prompt) == ("mhenrichsen/alpaca_2k_test", "alpaca")
    one = recipe(imported("llama_factory.yaml"), tmp_path)
    assert (one.model.lora and one.model.lora.alpha, one.schedule.warmup_ratio, one.precision) == (
        16,
        0.1,
        "bf16",
    )
    one = recipe(imported("deepspeed.json"), tmp_path)
    assert one.zero is not None
    assert (one.batch.global_size, one.batch.micro_size, one.zero.stage) == (4, None, 2)
    assert one.zero.deepspeed["zero_optimization"] == {"overlap_comm": True}
    # The config has cpu_offload, an older key for the optimizer state alone.
    assert one.zero.offload is not None
    assert (one.zero.offload.optimizer, one.zero.offload.parameters) == ("cpu", None)
    assert one.zero.deepspeed["fp16"]["initial_scale_power"] == 15
    one = recipe(imported("run_mlm.json"), tmp_path)
    assert (one.optimizer.betas, one.train.evaluate_every_steps, one.log.trackers) == (
        (0.9, 0.98),
        200,
        ("tensorboard",),
    )
    assert (one.checkpoint.keep_best and one.checkpoint.keep_best.metric, one.model.task) == (
        "loss",
        "masked-lm",
    )


@pytest.mark.parametrize(
    ("keys", "where", "key", "text"),
    [
        ({"optim": "paged_adamw_8bit"}, "changed", "optim", "its state not paged"),
        ({"optim": "lion_32bit"}, "changed", "optim", "another optimizer"),
        (
            {"lr_scheduler_type": "cosine_with_restarts"},
            "changed",
            "lr_scheduler_type",
            "without restarts",
        ),
        ({"lr_scheduler_type": "inverse_sqrt"}, "changed", "lr_scheduler_type", "another schedule"),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 9},
            "needless",
            "warmup_steps",
            "has no warm-up",
        ),
        ({"warmup_steps": 9, "warmup_ratio": 0.1}, "needless", "warmup_ratio", "comes first"),
        ({"max_steps": 9, "num_train_epochs": 3}, "needless", "num_train_epochs", "comes first"),
        ({"save_strategy": "best"}, "dropped", "save_strategy", "every 30 minutes"),
        (
            {"eval_strategy": "steps", "eval_steps": 9},
            "dropped",
            "eval_strategy",
            "no data.evaluation",
        ),
        ({"train_file": "a.json"}, "changed", "train_file", "a row a line"),
        ({"neftune_noise_alpha": 5}, "dropped", "neftune_noise_alpha", "no counterpart"),
        ({"deepspeed": "ds_z3.json"}, "dropped", "deepspeed", "there is no such file"),
        ({"data_seed": 7, "seed": 8}, "dropped", "seed", "is set by another key"),
        (
            {"gradient_checkpointing": "unsloth"},
            "changed",
            "gradient_checkpointing",
            "gradient_checkpointing: True",
        ),
        ({"warmup_steps": 0.1, "warmup_ratio": 0.2}, "needless", "warmup_ratio", "comes first"),
        (
            {"lr_scheduler_kwargs": {"min_lr": "low"}},
            "dropped",
            "lr_scheduler_kwargs",
            "not min_lr",
        ),
    ],
)
def test_what_changes_its_meaning_is_named(
    keys: dict[str, Any], where: str, key: str, text: str, tmp_path: Path
) -> None:
    """A key that Trainer interprets differently, or that has no counterpart, is in the report."""
    found = convert_config_to_recipe(config(tmp_path, **keys), "hf-trainer", None, ())
    assert text in said(found, where)[key]
    # The recipe file has the report as comments.
    assert f"{key}: " in found.commented_recipe()


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        # Trainer's default: no limit.
        ({"max_steps": -1}, {"train": {"epochs": 3, "max_grad_norm": 1.0}}),
        # Below 1 it is a share of all steps.
        ({"warmup_steps": 0.1}, {"schedule": {"warmup_ratio": 0.1}}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.01}},
            {"schedule": {"name": "cosine", "minimum_ratio": 0.1}},
        ),
        # 1e-6 is 0.02 of Trainer's default learning rate, 5e-5.
        (
            {"lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": "absent"},
            {"schedule": {"minimum_ratio": 0.02}, "optimizer": {"learning_rate": 5e-05}},
        ),
        ({"warmup_steps": 100.0}, {"schedule": {"warmup_steps": 100}}),
        # 0 switches clipping off.
        ({"max_grad_norm": 0.0}, {"train": {"epochs": 3, "max_grad_norm": None}}),
        ({"torch_dtype": "bfloat16"}, {"precision": "bf16", "engine": {"name": "eager"}}),
        ({"bf16": True}, {"precision": "bf16", "engine": {"name": "eager"}}),
        ({"learning_rate": "absent"}, {"optimizer": {"learning_rate": 5e-05}}),
        ({"adam_beta1": 0.0, "adam_beta2": 0.99},
         {"optimizer": {"learning_rate": 0.1, "betas": [0.0, 0.99]}}),
        # A model that is trained from scratch: its configuration instead of its weights.
        ({"model_name_or_path": "absent", "tokenizer_name": "t", "model_type": "gpt2",
          "config_overrides": "n_embd=8"},
         {"model": {"config": {"model_type": "gpt2", "n_embd": 8}, "task": "causal-lm"}}),
    ],
)  # fmt: skip
def test_trainers_own_ways(keys: dict[str, Any], values: dict[str, Any], tmp_path: Path) -> None:
    """Trainer's special values (-1, 0), shares, least learning rate and defaults are converted."""
    found = convert_config_to_recipe(config(tmp_path, **keys), "hf-trainer", None, ())
    made = yaml.safe_load(found.recipe_yaml)
    assert {name: made.get(name) for name in values} == values


def test_trls_sft(tmp_path: Path) -> None:
    """TRL's SFT: datasets with splits and template, LoRA with TRL's defaults, and differences."""
    absent = dict.fromkeys(("block_size", "train_file"), "absent")
    chats = {
        "dataset_name": "a/b",
        "dataset_test_split": "test",
        "chat_template": "{{ messages }}",
        "packing": True,
        "eos_token": "<e>",
    }
    others = {
        "use_peft": True,
        "lora_r": 4,
        "eval_strategy": "epoch",
        "log_level": "info",
        "model_revision": "v2",
    }
    found = convert_config_to_recipe(
        config(tmp_path, **absent, **chats, **others), "hf-trainer", None, ()
    )
    made = yaml.safe_load(found.recipe_yaml)
    source = {"format": "hub", "name": "a/b", "messages_column": "messages", "train_on": "all"}
    assert (made["data"]["train"], made["data"]["evaluation"]) == (
        source,
        {**source, "split": "test"},
    )
    assert (made["model"]["lora"], made["model"]["task"]) == (
        {"r": 4, "alpha": 32, "dropout": 0.05},
        "causal-lm",
    )
    # alpha and dropout above are TRL's defaults; the config gives r alone.
    assert (made["data"]["chat_template"], "engine" in made) == ("{{ messages }}", False)
    assert made["data"]["special_tokens"] == {"eos_token": "<e>"}
    assert made["data"]["packing"] is True
    assert (made["model"]["pretrained"], made["data"]["tokenizer"]) == ("here@v2", "here@v2")
    with pytest.raises(InputError, match=r"beta: 0\.1: of TRL's trainers SFTTrainer alone"):
        convert_config_to_recipe(
            config(tmp_path, **absent, **chats, beta=0.1), "hf-trainer", None, ()
        )


def of_chats(source: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a config's keys with one data set of chats, which has the keys of `source`."""
    return {"datasets": [{"path": "a/b", "type": "chat_template", **source}], **keys}


@pytest.mark.parametrize(
    ("keys", "where", "key", "text"),
    [
        ({"chat_template": "llama3"}, "taken", "chat_template", "data.chat_template"),
        ({"chat_template": "jamba"}, "dropped", "chat_template",
         "can be given as data.chat_template"),
        ({"chat_template": "here_2"}, "changed", "chat_template", "the tokenizer's own is taken"),
        ({"chat_template": "llama3", "datasets": [{"path": "a/b", "type": "alpaca"}]}, "needless",
         "chat_template", "no data set has chats"),
        ({"chat_template": "tokenizer_default"}, "needless", "chat_template",
         "the tokenizer's own"),
        ({"chat_template_jinja": "a.jinja"}, "taken", "chat_template_jinja", "data.chat_template"),
        ({"sample_packing": True}, "taken", "sample_packing", "data.packing"),
        ({"sample_packing": True, "eval_sample_packing": False}, "changed", "eval_sample_packing",
         "training and evaluation"),
        ({"sample_packing": False}, "needless", "sample_packing", "a sample of its own"),
        # Plain text has no samples of its own: it is packed with or without the key.
        ({"datasets": [{"path": "a/b", "type": "completion"}], "sample_packing": True},
         "needless", "sample_packing", "always packed"),
        ({"special_tokens": {"pad_token": "<pad>", "x_token": "x"}}, "taken", "special_tokens",
         "data.special_tokens: {pad_token: <pad>}"),
        ({"special_tokens": {"x_token": "x"}}, "dropped", "special_tokens.x_token", "no counter"),
        ({"special_tokens": {"additional_special_tokens": ["<a>"]}}, "taken",
         "special_tokens.additional_special_tokens", "data.added_tokens"),
        ({"tokens": ["<a>"]}, "taken", "tokens", "data.added_tokens"),
        ({"tokens": {"bos_token": "<s>"}}, "taken", "tokens", "data.special_tokens: {bos_token"),
        ({"eot_tokens": ["<a>"]}, "needless", "eot_tokens", "counts with the answer"),
        ({"train_on_inputs": True}, "changed", "train_on_inputs", "train_on: all"),
        # Valid there; the recipe refuses both beside train_on: all.
        (of_chats({"train_on_eos": "none"}, train_on_inputs=True), "changed", "datasets.train_on_eos",
         "all of a chat counts"),
        (of_chats({"message_field_training": "train"}, train_on_inputs=True), "dropped",
         "datasets.message_field_training", "no counterpart"),
        (of_chats({"train_on_eos": "none", "train_on_eot": "turn"}, eot_tokens=["<e>"]), "changed",
         "datasets.train_on_eos", "train_on_end: true"),
        (of_chats({"train_on_eot": "none"}, eot_tokens=["<e>"]), "needless",
         "datasets.train_on_eot", "train_on_end: false"),
        (of_chats({"train_on_eot": "none"}), "changed", "datasets.train_on_eot", "train_on_end: true"),
        (of_chats({}), "changed", "datasets.type", "set data.train.system_column"),
        (of_chats({"chat_template": "chatml"}), "taken", "chat_template", "data.chat_template"),
        ({"datasets": [{"path": "a/b", "type": "chat_template", "chat_template": "chatml"},
                       {"path": "a/c", "type": "chat_template"}]},
         "dropped", "datasets[0].chat_template", "no counterpart"),
        ({"excess_length_strategy": "truncate"}, "needless", "excess_length_strategy", "cut off"),
        ({"excess_length_strategy": "drop"}, "dropped", "excess_length_strategy", "cut off"),
        ({"datasets": [{"path": "a/b", "type": {"field_system": "s", "format": "{instruction}"}}]},
         "dropped", "datasets.type.field_system", "system_column"),
        ({"datasets": [{"path": "a/b", "type": "alpaca"}]}, "taken", "datasets",
         "data.train: {format: hub, name: a/b, prompt: alpaca}"),
        ({"datasets": [{"path": "a/b", "type": "alpaca:none"}]}, "dropped", "datasets.type", "no c"),
        ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["lm_head"]},
         "dropped", "lora_target_modules", "set by another"),
        ({"adapter": "lora", "unfrozen_parameters": ["lm_head"]}, "needless",
         "unfrozen_parameters", "an adapter is trained"),
        ({"unfrozen_parameters": ["lm.(head)"]}, "dropped", "unfrozen_parameters", "model.freeze"),
        ({"attn_implementation": "flex_attention"}, "needless", "attn_implementation", "fastest"),
        ({"float16": True}, "changed", "float16", "precision: fp16; weights and optimizer state"),
        ({"dp_shard_size": 4, "tensor_parallel_size": 1}, "needless", "tensor_parallel_size",
         "1 stands for none"),
        ({"dp_shard_size": 4}, "taken", "dp_shard_size", "parallel.shard"),
        ({"dp_shard_size": 4, "deepspeed": {"zero_optimization": {"stage": 3}}}, "needless",
         "dp_shard_size", "DeepSpeed's ZeRO divides"),
        ({"context_parallel_size": 2}, "dropped", "context_parallel_size", "no counterpart"),
        ({"activation_offloading": "legacy"}, "changed", "activation_offloading", "copies"),
        ({"activation_offloading": True, "torch_compile": True}, "dropped", "torch_compile",
         "engine eager alone"),
        ({"loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3}, "changed",
         "loss_watchdog_threshold", "every step is judged"),
        ({"loss_watchdog_patience": 3}, "needless", "loss_watchdog_patience", "there is no"),
        ({"swanlab_project": "a", "use_swanlab": True}, "needless", "use_swanlab", "account"),
        ({"fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False}}, "changed",
         "fsdp_config.reshard_after_forward", "zero.stage=2 keeps them"),
        ({"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "dropped",
         "fsdp_config.auto_wrap_policy", "parallel.blocks names their classes"),
        ({"fsdp_config": {"ignored_modules": "a"}}, "dropped", "fsdp_config.ignored_modules", "no c"),
        ({"fsdp_config": {"version": 2}, "optimizer": "adamw_bnb_8bit"}, "changed", "optimizer",
         "optimizer.name: adamw; FSDP2 splits"),
        ({"fsdp_config": {"version": 2}, "optimizer": "muon"}, "changed", "optimizer",
         "without parallel; Muon updates whole tensors"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}, "optimizer": "adamw_bnb_8bit"},
         "changed", "optimizer", "ZeRO splits"),
        ({"streaming": True}, "changed", "streaming", "data.train.stream"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
         "needless", "accelerator_config", "once a step"),
        ({"accelerator_config": {"split_batches": True}}, "dropped", "accelerator_config", "no c"),
        ({"tokenizer_use_mistral_common": True}, "changed", "tokenizer_use_mistral_common",
         "transformers reads"),
        ({"tf32": True}, "taken", "tf32", "engine.matmul_precision: high"),
        ({"tf32": True, "bf16": True}, "needless", "tf32", "the precision of the passes"),
        ({"dataloader_num_workers": 4}, "taken", "dataloader_num_workers", "data.workers"),
        ({"datasets": [{"path": "a.arrow", "ds_type": "arrow", "type": "completion"}]},
         "dropped", "datasets.ds_type", "no counterpart"),
    ],
)  # fmt: skip
def test_axolotls_own_ways(
    keys: dict[str, Any], where: str, key: str, text: str, tmp_path: Path
) -> None:
    """Axolotl's keys for chats, packing, data sets, memory and precision are reported."""
    # JSON is YAML, too.
    path = tmp_path / "c.yml"
    path.write_text(json.dumps({**AXOLOTL, **keys}))
    assert text in said(convert_config_to_recipe(path, "axolotl", None, ()), where)[key]


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({"revision_of_model": "v2"}, "data.tokenizer", "here@v2"),
        ({"adapter": "lora", "lora_r": 16, "lora_alpha": 8, "peft_use_rslora": True},
         "model.lora", {"rslora": True, "r": 16, "alpha": 8}),
        ({"adapter": "lora", "lora_modules_to_save": ["lm_head"], "lora_target_linear": True,
          "lora_target_modules": ["q_proj"], "lora_target_parameters": ["mlp.experts.up_proj"]},
         "model.lora", {"modules_to_save": ["lm_head"], "target_modules": ["all-linear"],
                        "target_parameters": ["mlp.experts.up_proj"], "r": 8, "alpha": 8}),
        ({"unfrozen_parameters": ["^lm_head.weight$", "layers.1[0-1]+.mlp", "embed.*"]},
         "model.freeze",
         ["*", "!lm_head.weight", "!*layers.10.mlp*", "!*layers.11.mlp*", "!*embed*"]),
        ({"gradient_accumulation_steps": None, "batch_size": 8}, "batch.accumulation_steps", 4),
        ({"loss_watchdog_threshold": 5.0}, "train.on_spike",
         {"deviations": None, "limit": 5.0, "patience": 3}),
        ({"model_config": {"output_router_logits": True}}, "model.config",
         {"output_router_logits": True}),
        ({"lr_scheduler": "cosine", "cosine_min_lr_ratio": 1.0, "cosine_constant_lr_ratio": 0},
         "schedule.name", "constant"),
        ({"lr_quadratic_warmup": True}, "schedule",
         {"warmup_ratio": 0.03, "warmup_power": 2.0, "name": "cosine"}),
        ({"wandb_project": "p", "use_tensorboard": True}, "log.trackers", ["wandb", "tensorboard"]),
        ({"use_ray": True, "ray_num_workers": 4}, "launch.processes_per_node", 4),
        (of_chats({"field_system": "s"}), "data.train.system_column", "s"),
        # Axolotl's own begins with the begin mark.
        ({"chat_template": "phi_3"}, "data.chat_template",
         "{{ bos_token }}" + CHAT_TEMPLATES["phi_3"]),
    ],
)  # fmt: skip
def test_axolotls_values(keys: dict[str, Any], path: str, value: Any, tmp_path: Path) -> None:
    """Keys without a name of their own here become the values that have their meaning."""
    file = tmp_path / "c.yml"
    file.write_text(json.dumps({**AXOLOTL, **keys}))
    found = convert_config_to_recipe(file, "axolotl", None, ())
    made: Any = yaml.safe_load(found.recipe_yaml)
    for name in path.split("."):
        made = made[name]
    assert (made, found.import_report.dropped) == (value, [])


@pytest.mark.parametrize(
    ("keys", "parallel"),
    [
        ({"fsdp": ["full_shard", "auto_wrap"]}, {"replicate": 1}),
        ({"fsdp": True, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "ALayer,BLayer"}},
         {"blocks": ["ALayer", "BLayer"], "replicate": 1}),
        ({"fsdp": "shard_grad_op offload"}, {"replicate": 1, "offload": True}),
        ({"fsdp": "hybrid_shard", "fsdp_config": {"offload_params": True}},
         {"shard": "auto", "offload": True}),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}}, {"shard": "auto"}),
        ({"fsdp_config": {"reshard_after_forward": True, "activation_checkpointing": True}},
         {"replicate": 1}),
        ({"dp_shard_size": 4, "dp_replicate_size": 2, "fsdp_config": {"fsdp_version": 2},
          "tensor_parallel_size": 2}, {"replicate": 2, "shard": 4, "tensor": 2}),
        ({"fsdp_config": {"sharding_strategy": "NO_SHARD", "offload_params": True}}, None),
    ],
)  # fmt: skip
def test_fsdp(keys: dict[str, Any], parallel: dict[str, Any] | None, tmp_path: Path) -> None:
    """FSDP and its mesh become `parallel`, on engine eager."""
    found = convert_config_to_recipe(config(tmp_path, **keys), "hf-trainer", None, ())
    made = yaml.safe_load(found.recipe_yaml)
    assert (made.get("parallel"), found.import_report.dropped) == (parallel, [])
    assert made.get("engine") == ({"name": "eager"} if parallel else None)
    assert made["model"].get("gradient_checkpointing", False) is ("activation" in str(keys))


ROLES = {"human": "user", "gpt": "assistant"}
SHAREGPT = {"role_key": "from", "content_key": "value", "roles": ROLES}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "sharegpt"}, {"messages_column": "conversations", **SHAREGPT}),
        ({"type": "chat_template", "message_property_mappings": {"role": "from", "content": "value"},
          "roles_to_train": ["assistant"], "train_on_eos": "turn"},
         {"messages_column": "messages", **SHAREGPT}),
        ({"type": "chat_template", "field_messages": "talk", "message_field_training": "train",
          "message_field_content": "text", "roles": {"user": ["me", "user"], "assistant": ["it"]},
          "roles_to_train": ["it"], "train_on_eos": "none"},
         {"messages_column": "talk", "content_key": "text", "train_key": "train",
          "roles": {"me": "user", "it": "assistant"}, "train_on_end": False}),
        ({"type": {"format": "Q: {instruction} {input}", "no_input_format": "Q: {instruction}",
                   "field_instruction": "ask", "field_input": "more", "field_output": "say"}},
         {"prompt": {"template": "Q: {instruction} {input}", "without_input": "Q: {instruction}"},
          "prompt_column": "ask", "response_column": "say", "input_column": "more"}),
        ({"type": "chat_template", "drop_system_message": True, "data_files": ["a.jsonl"],
          "field_thinking": "thoughts", "template_thinking_key": "thoughts", "field_tools": "fns"},
         {"tools_column": "fns", "files": ["a.jsonl"], "messages_column": "messages",
          "roles": {**ROLES, "system": None}}),
        ({"type": "chat_template", "chat_template": "tokenizer_default", "train_on_eot": "none",
          "field_thinking": "thinking", "chat_template_kwargs": {"reasoning_effort": "high"}},
         {"messages_column": "messages", "roles": ROLES}),
        # A brace is doubled in Python's formats.
        ({"type": {"format": '{{"q": "{instruction}"}}', "no_input_format": "{{{instruction}}}"}},
         {"prompt": {"template": '{"q": "{instruction}"}', "without_input": "{{instruction}}"},
          "prompt_column": "instruction", "response_column": "output"}),
        ({"type": "alpaca:phi"},
         {"prompt": {"template": "<|system|>\nBelow is an instruction that describes a task, paired "
                     "with an input that provides further context. Write a response that "
                     "appropriately completes the request.<|end|>\n<|user|>\n{instruction}<|end|>"
                     "{input}<|assistant|>",
                     "without_input": "<|system|>\nBelow is an instruction that describes a task. "
                     "Write a response that appropriately completes the request.<|end|>\n<|user|>\n"
                     "{instruction}<|end|>\n<|assistant|>\n"}}),
        # Axolotl's defaults.
        ({"type": {"format": "Q: {instruction}\n{input}"}},
         {"prompt": {"template": "Q: {instruction}\n{input}", "without_input": "{instruction} "},
          "prompt_column": "instruction", "response_column": "output"}),
    ],
)  # fmt: skip
def test_axolotls_rows(given: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """Fields of messages, roles and custom prompts become fields of the source, without a loss."""
    path = tmp_path / "c.yml"
    path.write_text(json.dumps({**AXOLOTL, "datasets": [{"path": "a/b", **given}]}))
    found = convert_config_to_recipe(path, "axolotl", None, ())
    source = {"format": "hub", "name": "a/b", **expected}
    data = yaml.safe_load(found.recipe_yaml)["data"]
    assert (data["train"], found.import_report.dropped) == (source, [])
    assert data.get("template_arguments") == given.get("chat_template_kwargs")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        # Without keys: Axolotl's defaults.
        ({}, {"schedule": {"warmup_ratio": 0.03, "name": "cosine"}}),
        ({"lr_scheduler": "linear", "warmup_steps": 0}, {"schedule": {"name": "linear"}}),
        ({"lr_scheduler": "constant"}, {"schedule": {"name": "constant"}}),
        ({"lr_scheduler": "cosine", "warmup_steps": 9, "cosine_min_lr_ratio": 0.1},
         {"schedule": {"warmup_steps": 9, "name": "cosine", "minimum_ratio": 0.1}}),
    ],
)  # fmt: skip
def test_axolotls_schedule(keys: dict[str, Any], values: dict[str, Any], tmp_path: Path) -> None:
    """Axolotl's schedule is converted with Axolotl's own defaults, not with Trainer's."""
    path = tmp_path / "c.yml"
    path.write_text(json.dumps({**AXOLOTL, **keys}))
    made = yaml.safe_load(convert_config_to_recipe(path, "axolotl", None, ()).recipe_yaml)
    assert {name: made.get(name) for name in values} == values


@pytest.mark.parametrize(
    ("keys", "tool"),
    [
        ({"stage": "sft", "finetuning_type": "full", "lora_rank": 8, "lora_alpha": 16,
          "lora_target": "all"},
         "llama-factory"),
        ({**AXOLOTL, "adapter": None, "lora_r": 32, "lora_alpha": 16, "lora_target_linear": True},
         "axolotl"),
        ({"use_peft": False, "packing": True, "lora_r": 32, "lora_target_modules": ["q_proj"]},
         "hf-trainer"),
    ],
)  # fmt: skip
def test_without_adapters_their_keys_have_no_effect(
    keys: dict[str, Any], tool: str, tmp_path: Path
) -> None:
    """Without an adapter all weights are trained, and keys of LoRA are reported as needless."""
    path = tmp_path / "c.yml"
    path.write_text(json.dumps(keys))
    found = convert_config_to_recipe(
        path, tool, SHIPPED / "llama2-7b/tiny.yaml", ("data.sequence_length=64",)
    )
    assert yaml.safe_load(found.recipe_yaml)["model"].get("lora") is None
    assert {key for key in keys if key.startswith("lora_")} <= said(found, "needless").keys()


def test_full_over_a_base_with_adapters(tmp_path: Path) -> None:
    """A config of full training removes the adapters of the base recipe."""
    (tmp_path / "c.yml").write_text("model_name_or_path: here\nfinetuning_type: full\n")
    base = SHIPPED / "llama2-7b/lora-instruct.yaml"
    assert (
        yaml.safe_load(convert_config_to_recipe(tmp_path / "c.yml", None, base, ()).recipe_yaml)[
            "model"
        ]["lora"]
        is None
    )


def test_axolotls_text(tmp_path: Path) -> None:
    """Axolotl's plain text of the hub, and files with a loader's name as path, are converted."""
    path = tmp_path / "c.yml"
    text = [{"path": "a/b", "name": "en", "text_column": "body"}]
    path.write_text(json.dumps({**AXOLOTL, "datasets": None, "pretraining_dataset": text}))
    made = yaml.safe_load(convert_config_to_recipe(path, "axolotl", None, ()).recipe_yaml)
    assert made["data"]["train"] == {
        "format": "hub",
        "name": "a/b",
        "subset": "en",
        "text_column": "body",
    }
    # `path` may name a loader of the datasets library instead of a data set.
    files = [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "chat_template"}]
    path.write_text(json.dumps({**AXOLOTL, "datasets": files}))
    made = yaml.safe_load(convert_config_to_recipe(path, "axolotl", None, ()).recipe_yaml)
    expected = {"format": "jsonl", "path": ["a.jsonl", "b.jsonl"], "messages_column": "messages",
                "roles": ROLES}  # fmt: skip
    assert made["data"]["train"] == expected


def test_a_value_of_several_lines(tmp_path: Path) -> None:
    """The report has one line per key, also for a value of several lines."""
    found = convert_config_to_recipe(
        config(tmp_path, neftune_noise_alpha="a\n b" * 60), "hf-trainer", None, ()
    )
    (line,) = [line for line in str(found).splitlines() if "neftune" in line]
    assert "a ba ba" in line
    # The value itself is cut after 80 characters.
    assert len(line) < 160


def test_deepspeeds_own_ways(tmp_path: Path) -> None:
    """DeepSpeed's third batch size is left out; L2 and settings of older versions are dropped."""
    # Two of the three sizes decide the third.
    sizes = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    # adam_w_mode: false is L2 regularization, which is not AdamW's decoupled weight decay.
    optimizer = {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}
    fp16 = {"enabled": True, "fp16_master_weights_and_grads": True}
    # `auto` is a value, and a part of this name.
    parallel = {"tensor_parallel": {"autotp_size": 2}}
    text = json.dumps(
        {**sizes, **parallel, "optimizer": optimizer, "fp16": fp16, "zero_allow_it": True}
    )
    (tmp_path / "ds.json").write_text(text)
    found = convert_config_to_recipe(
        tmp_path / "ds.json", None, SHIPPED / "llama2-7b/tiny.yaml", ()
    )
    made = yaml.safe_load(found.recipe_yaml)
    assert (made["batch"], made["zero"]) == ({"global_size": 8, "micro_size": 2}, {"stage": 0})
    dropped = {
        "optimizer.params.adam_w_mode",
        "fp16.fp16_master_weights_and_grads",
        "zero_allow_it",
        "tensor_parallel",
    }
    assert said(found, "dropped").keys() == dropped


def test_deepspeeds_older_forms(tmp_path: Path) -> None:
    """DeepSpeed's older forms, its trackers, and a key beside `type` and `params` are converted.

    `zero_optimization: true` is stage 1. A key beside `type` and `params` is dropped.
    """
    optimizer = {"type": "OneBitAdam", "params": {"lr": 0.1}, "legacy_fusion": True}
    older = {
        "zero_optimization": True,
        "wandb": {"enabled": True},
        "csv_monitor": {"enabled": False},
    }
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 8, "optimizer": optimizer, **older})
    )
    found = convert_config_to_recipe(
        tmp_path / "ds.json", None, SHIPPED / "llama2-7b/tiny.yaml", ()
    )
    made = yaml.safe_load(found.recipe_yaml)
    assert (made["zero"], made["log"]["trackers"]) == ({"stage": 1}, ["wandb"])
    assert (
        "optimizer.legacy_fusion" in said(found, "dropped"),
        "csv_monitor" in found.import_report.empty,
    ) == (True, True)


def test_a_token_is_not_shown(tmp_path: Path) -> None:
    """The value of a secret key is not shown in the report."""
    # The report is part of the recipe file, and users share recipes.
    found = convert_config_to_recipe(
        config(tmp_path, hub_token="hf_secret", swanlab={"api_key": "1a"}), "hf-trainer", None, ()
    )
    assert "hub_token: (not shown)" in found.commented_recipe()
    assert not any(secret in found.commented_recipe() for secret in ("hf_secret", "1a"))


def test_deepspeeds_config_beside_another(tmp_path: Path) -> None:
    """DeepSpeed's config is read from the path in the config; values of "auto" are needless."""
    # Trainer fills in "auto".
    deepspeed = {
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
        "train_batch_size": "auto",
    }
    # YAML allows no tabs as indentation, JSON does.
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed, indent="\t"))
    found = convert_config_to_recipe(config(tmp_path, deepspeed="ds.json"), "hf-trainer", None, ())
    made = yaml.safe_load(found.recipe_yaml)
    assert (made["zero"], made["engine"]) == ({"stage": 3}, {"name": "eager"})
    assert "train_batch_size" in said(found, "needless")


@pytest.mark.parametrize(
    ("text", "tool", "error"),
    [
        ("learning_rate: fast\nblock_size: 64\nmodel_name_or_path: a\ntrain_file: a.txt\n",
         "hf-trainer",
         r"c.yaml:1:1: optimizer.learning_rate: got fast; it must be a number"),
        ("output_dir: a\nblock_size: 8\n", None,
         r"(?s)data.train: is missing.*give what is missing behind the config"),
        ("stage: dpo\nfinetuning_type: lora\n", None, "c.yaml:1:1: stage: dpo: only pt and sft"),
        ("base_model: a\nrl: dpo\n", None, "rl: dpo: there is no preference training"),
        # One key of each tool: neither can be preferred.
        ("base_model: a\nstage: sft\n", None,
         "whose config is it.*keys of axolotl and of llama-factory"),
        ("colour: red\n", None, "none of its keys"),
        ("a: [1\n", "axolotl", r"c.yaml:1:4: is not YAML"),
        ("seed: 1\nseed: 2\n", "axolotl", "already given in line 1"),
        ("- a\n", None, "a config is a mapping"),
        ("a: 1\n", "keras", f"--from: got keras; one of {', '.join(TOOLS)}"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported(text: str, tool: str | None, error: str, tmp_path: Path) -> None:
    """A config that cannot be imported is refused before anything is written.

    The message has the location of the error.
    """
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=error):
        convert_config_to_recipe(tmp_path / "c.yaml", tool, None, ())


def test_several_problems_at_once(tmp_path: Path) -> None:
    """Wrong and missing values are reported together."""
    path = config(tmp_path, learning_rate="fast", weight_decay=-1, train_file="absent")
    with pytest.raises(RecipeError, match=r"(?s)learning_rate.*weight_decay.*data.train") as raised:
        convert_config_to_recipe(path, "hf-trainer", None, ())
    assert "config.json:4:2: optimizer.learning_rate" in str(raised.value)


def test_the_command(ortlaunch: Run) -> None:
    """The command writes the recipe with the report as comments, and prints the same report.

    It replaces no file.
    """
    words = (
        "import",
        str(CONFIGS / "llama_factory.yaml"),
        "data.train=python-docs",
        "--to=made.yaml",
    )
    status, out, _ = ortlaunch(*words)
    assert (status, "recipe: made.yaml" in out, "without a counterpart:" in out) == (0, True, True)
    text = Path("made.yaml").read_text()
    assert "#   line 11: max_samples: 1000 -> give most_rows of each source" in text
    assert load_recipe("made.yaml").recipe.data.train == "python-docs"
    status, _, error = ortlaunch(*words)
    assert (status, "made.yaml exists already" in error) == (2, True)


@pytest.mark.parametrize(
    ("keys", "where", "text"),
    [
        ({"task_name": "sst2", "block_size": "absent", "max_seq_length": 64,
          "train_file": "a.jsonl"}, "changed", "data.padding: longest"),
        # Blocks of packed text all have the same length.
        ({}, "needless", "without padding"),
        # inductor compiles each length, so a few fixed lengths are recommended instead.
        ({"task_name": "sst2", "block_size": "absent", "max_seq_length": 64,
          "train_file": "a.jsonl", "torch_compile": True}, "dropped",
         "data.bucket_lengths, up to three"),
    ],
)  # fmt: skip
def test_grouping_by_length(keys: dict[str, Any], where: str, text: str, tmp_path: Path) -> None:
    """group_by_length: true becomes padding to the longest sample, if samples are padded."""
    found = convert_config_to_recipe(config(tmp_path, group_by_length=True, **keys), None, None, ())
    assert text in said(found, where)["group_by_length"]
    recipe(found, tmp_path)


def test_torch_compile(tmp_path: Path) -> None:
    """torch_compile: true becomes engine inductor, also with bf16."""
    found = convert_config_to_recipe(
        config(tmp_path, torch_compile=True, bf16=True), None, None, ()
    )
    assert recipe(found, tmp_path).engine.name == "inductor"


def test_the_words_of_a_tokenizer_are_no_secrets(tmp_path: Path) -> None:
    """The report shows pad_token, and does not show hub_token."""
    found = convert_config_to_recipe(
        config(tmp_path, special_tokens={"pad_token": "<p>"}, hub_token="s3cret"), None, None, ()
    )
    assert "<p>" in found.commented_recipe()
    assert "s3cret" not in found.commented_recipe()


def test_a_program_is_no_config(tmp_path: Path, ortlaunch: Run) -> None:
    """A Python file is refused; the message explains how to write its arguments as JSON."""
    (tmp_path / "train_hf.py").write_text("x: int = 1\n")
    ended = ortlaunch("import", "train_hf.py")
    assert ended.status == 2
    assert "give its TrainingArguments as JSON" in ended.err


def test_a_rate_of_its_own_for_adapters_and_muon(tmp_path: Path) -> None:
    """LoRA+ becomes a group with its rate, and Muon the optimizer of that name."""
    path = tmp_path / "axolotl.json"
    path.write_text(json.dumps({**AXOLOTL, "adapter": "lora", "loraplus_lr_ratio": 16}))
    (group,) = recipe(
        convert_config_to_recipe(path, "axolotl", None, ()), tmp_path
    ).optimizer.groups
    assert (group.match, group.learning_rate) == (("*lora_B*",), 1.6)
    path.write_text(json.dumps({**AXOLOTL, "optimizer": "muon"}))
    assert (
        recipe(convert_config_to_recipe(path, "axolotl", None, ()), tmp_path).optimizer.name
        == "muon"
    )
