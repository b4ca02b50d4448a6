"""Convert torchtune's YAML: a component for each part, with its arguments."""

from __future__ import annotations

import re

from ortlaunch.base.errors import InputError
from ortlaunch.importers import sharding, trainer
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.renamed_keys import convert_config_by_rules
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    OTHER_OPTIMIZER,
    OTHER_SCHEDULE,
    ConfigKey,
    EvenIfEmpty,
    Outcome,
    Rule,
    Rules,
    assume,
    assume_defaults,
    by_text,
    drop,
    first_of,
    needless,
    put,
    refuse,
    report_change,
    section_values_by_rules,
)

_COMPONENT = "_component_"
_NO_TRAINING_MESSAGE = "the config has no data set and no optimizer: it describes no training"
_NO_PREFERENCES = refuse("there is no preference training here")
# torchtune's names of layers -> transformers'.
_LAYER_NAMES = {"output_proj": "o_proj"}
_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
# A component of a data set -> its name on the hub, and fields of the source. torchtune learns the
# prompts of the first two, too.
_ALPACA_FIELDS: dict[str, object] = {"prompt": "alpaca", "train_on": "all"}
_DATASETS: dict[str, tuple[str | None, dict[str, object]]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", _ALPACA_FIELDS),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", _ALPACA_FIELDS),
    "chat_dataset": (None, {"messages_column": "messages"}),
    "text_completion_dataset": (None, {"text_column": "text"}),
}
_ANSWERS = "answers alone count in the loss of chats"
_NF4_BY_BITSANDBYTES = put("model.quantize", {"type": "nf4"}, "by bitsandbytes, not torchao")
_NOT_PAGED = "with its state not paged"
# torchtune's component -> the recipe's optimizer, and how the meaning differs.
_OPTIMIZERS = {
    "torch.optim.AdamW": ("adamw", ""),
    "torch.optim.SGD": ("sgd", ""),
    "bitsandbytes.optim.AdamW8bit": ("adamw_8bit", ""),
    "bitsandbytes.optim.PagedAdamW8bit": ("adamw_8bit", _NOT_PAGED),
    "bitsandbytes.optim.PagedAdamW": ("adamw", _NOT_PAGED),
}


def convert_torchtune_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it is no supervised training of text.
    """
    convert_config_by_rules(draft, _RULES)
    if not (draft.config_value("dataset") and draft.config_value("optimizer")):
        raise InputError(f"{draft.recipe_tree.location.source}: {_NO_TRAINING_MESSAGE}")
    assume_defaults(draft, {"model.task": "causal-lm"}, "torchtune trains no other")
    assume_defaults(
        draft, {"schedule.name": "constant", "batch.accumulation_steps": 1}, "torchtune's default"
    )
    cut_reason = "torchtune cuts nothing by itself; longer samples are cut"
    assume_defaults(draft, {"data.sequence_length": 2048}, cut_reason)


def _adapter_rule(outcome: Outcome) -> Rule:
    """Return the rule of an argument of adapters, which have no place without layers for them."""
    return lambda key: outcome if key.sibling("lora_attn_modules") else NO_COUNTERPART


def _lora_target_modules(key: ConfigKey) -> Rule:
    layer_names = [_LAYER_NAMES.get(layer_name, layer_name) for layer_name in key.value]
    layer_names += _MLP_LAYERS if key.sibling("apply_lora_to_mlp") else ()
    layer_names += ["lm_head"] if key.sibling("apply_lora_to_output") else []
    return put("model.lora.target_modules", layer_names)


def _data_set(key: ConfigKey) -> Rule:
    """Convert a data set: a component of torchtune, with its arguments."""
    component = str(key.child(_COMPONENT)).rpartition(".")[2]
    hub_name, fields = _DATASETS.get(component, (None, {}))
    if component not in _DATASETS or not (key.child("source") or hub_name):
        return refuse("its component is none of " + ", ".join(_DATASETS))
    source = {"format": "hub", "name": hub_name, **fields}
    source.update(section_values_by_rules(key, _SOURCE_RULES))
    if "text_column" in fields:
        key.convert_child("packed", needless("text is always packed"))
        return put(_CORPORA[key.path], source)
    if key.path == "dataset":
        key.convert_child("packed", put("data.packing"))
    marks_remark = "torchtune writes the model's marks of a chat around it"
    return put(_CORPORA[key.path], source, marks_remark)


def _metric_logger(key: ConfigKey) -> Rule:
    trackers = [name for name in ("wandb", "tensorboard") if name in key.text.lower()]
    return assume("log.trackers", trackers, key.text) if trackers else ()


_CORPORA = {"dataset": "data.train", "dataset_val": "data.evaluation"}
_SOURCE_RULES: Rules = {
    _COMPONENT: (),
    "source": put("name"),
    "split": put("split"),
    "data_files": lambda key: put("files", [key.text]),
    "conversation_column": put("messages_column"),
    "conversation_style": by_text(
        {
            "openai": needless("messages have a role and a content"),
            "sharegpt": (
                put("role_key", "from"),
                put("content_key", "value"),
                put("roles", {"human": "user", "gpt": "assistant"}),
            ),
        },
        NO_COUNTERPART,
    ),
    "train_on_input": EvenIfEmpty(
        first_of((lambda key: key.value, put("train_on", "all")), otherwise=needless(_ANSWERS))
    ),
    "packed": (),
}
_RULES: Rules = {
    "teacher_model": refuse("there is no distillation here"),
    "ref_checkpointer": _NO_PREFERENCES,
    **dict.fromkeys(
        ("reward_functions", "reward_and_value_model"),
        refuse("there is no reinforcement learning here"),
    ),
    "loss": lambda key: _NO_PREFERENCES if "rlhf" in key.text else None,
    "checkpointer": {
        "checkpoint_dir": (put("model.pretrained"), put("data.tokenizer")),
        "keep_last_n_checkpoints": put("checkpoint.keep"),
        ANY_KEY: needless("it is of torchtune's own files"),
    },
    "model": {
        _COMPONENT: first_of(
            (
                lambda key: "vision" in key.text,
                refuse("images beside text cannot be trained here"),
            ),
            (
                lambda key: ".qlora_" in key.text and key.sibling("lora_attn_modules"),
                _NF4_BY_BITSANDBYTES,
            ),
            otherwise=(),
        ),
        "lora_attn_modules": _lora_target_modules,
        **dict.fromkeys(
            ("apply_lora_to_mlp", "apply_lora_to_output"),
            _adapter_rule(needless("model.lora.target_modules has it")),
        ),
        "lora_rank": _adapter_rule(put("model.lora.r")),
        "lora_alpha": _adapter_rule(put("model.lora.alpha")),
        "lora_dropout": _adapter_rule(put("model.lora.dropout")),
        "use_dora": _adapter_rule(put("model.lora.dora")),
        "quantize_base": _adapter_rule(_NF4_BY_BITSANDBYTES),
    },
    "dataset": _data_set,
    "dataset_val": _data_set,
    "tokenizer": {
        _COMPONENT: (),
        "max_seq_len": put("data.sequence_length"),
        # Files of the folder of weights, which has the same tokenizer in transformers' form.
        ANY_KEY: lambda key: (
            needless("data.tokenizer is the folder of the weights")
            if re.search("path|file", key.name)
            else NO_COUNTERPART
        ),
    },
    "optimizer": {
        _COMPONENT: first_of(
            (
                lambda key: key.text not in _OPTIMIZERS,
                put("optimizer.name", "adamw", OTHER_OPTIMIZER),
            ),
            (
                lambda key: key.sibling("fused") and _OPTIMIZERS[key.text][0] == "adamw",
                lambda key: put("optimizer.name", "fused_adam", _OPTIMIZERS[key.text][1]),
            ),
            otherwise=lambda key: put("optimizer.name", *_OPTIMIZERS[key.text]),
        ),
        "fused": needless("optimizer.name has it"),
        "lr": put("optimizer.learning_rate"),
        "weight_decay": put("optimizer.weight_decay"),
        "eps": put("optimizer.epsilon"),
        "betas": put("optimizer.betas"),
    },
    "lr_scheduler": {
        _COMPONENT: lambda key: (
            put("schedule.name", "cosine")
            if "cosine" in key.text
            else put("schedule.name", "linear", OTHER_SCHEDULE)
        ),
        "num_warmup_steps": put("schedule.warmup_steps"),
    },
    "dtype": put("precision"),
    "enable_activation_offloading": trainer.offload_activations,
    "compile": put("engine.name", "inductor"),
    "metric_logger": {
        _COMPONENT: _metric_logger,
        "project": put("log.project"),
        ANY_KEY: needless("it is of torchtune's own files"),
    },
    "profiler": lambda key: (drop if key.child("enabled") else needless)(
        "log.profile_steps profiles"
    ),
    "quantizer": drop("there is no training of quantized weights"),
    **sharding.FSDP_RULES,
    "fsdp_cpu_offload": (sharding.ALL_RANKS_SHARE_ONE_COPY, put("parallel.offload", True)),
    "custom_sharded_layers": (
        report_change("parallel; these are gathered with all that is in no layer"),
        sharding.ALL_RANKS_SHARE_ONE_COPY,
    ),
    "tensor_parallel_plan": lambda key: (
        needless("tensor_parallel_dim is 1: no parallelism")
        if key.sibling("tensor_parallel_dim") in (None, 1)
        else needless("transformers' plan for the model takes its place")
    ),
    "fsdp": (sharding.SETTINGS_RULES, sharding.ALL_RANKS_SHARE_ONE_COPY),
    **trainer.RUN_NAME_RULES,
    "batch_size": put("batch.micro_size"),
    "max_steps_per_epoch": lambda key: put(
        "train.max_steps",
        int((key.numeric_value or 1) * (number_or_none(key.sibling("epochs")) or 1)),
    ),
    "epochs": lambda key: (
        needless("train.max_steps has it")
        if key.sibling("max_steps_per_epoch")
        else put("train.epochs")
    ),
    "save_adapter_weights_only": put("model.lora.merge", False),
}
