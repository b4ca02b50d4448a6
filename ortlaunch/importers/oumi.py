"""Convert Oumi's YAML: sections whose keys are those of Hugging Face's Trainer and of peft."""

from __future__ import annotations

from functools import partial

from ortlaunch.base.errors import InputError
from ortlaunch.importers import adapters, sharding, trainer
from ortlaunch.importers.draft import Draft
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    ConfigKey,
    Rule,
    Rules,
    apply_rule_and_tell_if_converted,
    assume_defaults,
    by_text,
    drop,
    first_of,
    needless,
    put,
    refuse,
    section_values_by_rules,
)

# Sections whose keys have names of their own, so that they are read as if they were at the top.
_FLAT_SECTIONS = ("model", "training", "peft")
_NO_IMAGES = refuse("images beside text cannot be trained here")
_ALPACA: dict[str, object] = {
    "prompt_column": "instruction",
    "input_column": "input",
    "response_column": "output",
    "train_on": "all",
}
_TEXT: dict[str, object] = {"text_column": "text"}
_MESSAGES: dict[str, object] = {"messages_column": "messages", "train_on": "all"}
# Oumi's names of data sets whose rows are known -> fields of the source. Its loss counts prompts, too.
_DATASETS: dict[str, dict[str, object]] = {
    **dict.fromkeys(("yahma/alpaca-cleaned", "tatsu-lab/alpaca"), _ALPACA),
    **dict.fromkeys(
        ("HuggingFaceH4/ultrachat_200k", "allenai/tulu-3-sft-mixture", "text_sft"), _MESSAGES
    ),
    **dict.fromkeys(("HuggingFaceFW/fineweb-edu", "Salesforce/wikitext", "allenai/c4"), _TEXT),
}
_SOURCE_KEYS = {"train": "data.train", "validation": "data.evaluation"}
_TRACKERS = ("wandb", "mlflow", "tensorboard")
_TRAINERS = ("TRL_SFT", "HF", "OUMI")
_UNKNOWN_ROWS = drop("the columns of its rows are not known here: give data.train, or --base")


def convert_oumi_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it is no supervised training of text.
    """
    if not draft.config_value("training"):
        raise InputError(
            f"{draft.recipe_tree.location.source}: the config has no training: it describes none"
        )
    for name in _FLAT_SECTIONS:
        section = draft.config.pop(name, None)
        has_adapters = name != "peft" or draft.config_value("use_peft")
        if section is not None and has_adapters:
            draft.config.update({str(key): node for key, node in section.children.items()})
        elif section is not None:
            draft.add_remark("needless", name, section, "training.use_peft is false")
    for name, rule in _SECTION_RULES.items():
        section = draft.config.pop(name, None)
        if section is not None:
            apply_rule_and_tell_if_converted(ConfigKey(draft, name, section, draft.config), rule)
    adapter_defaults = {"model.lora.r": 8, "model.lora.alpha": 8}
    assume_defaults(draft, {"model.task": "causal-lm", "optimizer.name": "adamw"}, "Oumi's default")
    assume_defaults(draft, adapter_defaults if draft.config_value("use_peft") else {}, "Oumi's")
    cut_reason = "Oumi cuts at the model's own limit; longer rows are cut here"
    assume_defaults(draft, {"data.sequence_length": 2048}, cut_reason)
    trainer.convert_with_shared_arguments(draft, _RULES, trainer.DEFAULTS, "Oumi's default", 3)


def _data(key: ConfigKey) -> Rule:
    """Convert the splits of the data, of which a test has no place in a training."""
    rules: Rules = {
        **{name: partial(_split, recipe_key) for name, recipe_key in _SOURCE_KEYS.items()},
        "test": drop("ortlaunch evaluate scores a checkpoint on other data"),
    }
    return rules


def _split(recipe_key: str, key: ConfigKey) -> Rule:
    collator = str(key.child("collator_name"))
    if "vision" in collator:
        return _NO_IMAGES
    sources = [
        _source_or_none(dataset, collator, is_streamed=bool(key.child("stream")))
        for dataset in key.child_keys()["datasets"].child_keys().values()
    ]
    if not sources or None in sources:
        return _UNKNOWN_ROWS
    rules: list[Rule] = [
        put(recipe_key, sources[0] if len(sources) == 1 else [{"source": s} for s in sources])
    ]
    has_text = any(source and "text_column" in source for source in sources)
    if key.child("pack") and key.name == "train" and not has_text:
        rules.append(put("data.packing", True))
    return rules


def _source_or_none(key: ConfigKey, collator: str, is_streamed: bool) -> dict[str, object] | None:
    """Return a data set's source; None if its columns are not known."""
    fields = _DATASETS.get(str(key.child("dataset_name")))
    if fields is None:
        return None
    path = key.child("dataset_path")
    source = {"format": "hub", "name": key.child("dataset_name"), **fields}
    if path:
        source = {"format": "jsonl", "path": path, **fields}
    if "completions_only" in collator and "train_on" in source:
        source["train_on"] = "assistant"
    if is_streamed:
        source["stream"] = {}
    return {**source, **section_values_by_rules(key, _SOURCE_RULES)}


_SOURCE_RULES: Rules = {
    **dict.fromkeys(("dataset_name", "dataset_path"), ()),
    **dict.fromkeys(
        ("shuffle", "seed", "shuffle_buffer_size"), needless("samples are shuffled by seed")
    ),
    "transform_num_workers": needless("rows become tokens in processes of their own"),
    "trust_remote_code": needless("no code of a data set is run"),
    "subset": put("subset"),
    "split": lambda key: put("split") if not key.sibling("dataset_path") else NO_COUNTERPART,
    "sample_count": put("most_rows"),
}


def _trackers(key: ConfigKey) -> Rule:
    return put("log.trackers", [name for name in _TRACKERS if key.sibling(f"enable_{name}")])


def _model_name(key: ConfigKey) -> Rule:
    if key.sibling("load_pretrained_weights") is False:
        remark = drop("its weights are not loaded: give model.config, or --base")
        return (put("data.tokenizer"), remark)
    return (put("model.pretrained"), put("data.tokenizer"))


# The strategy first, which says how many copies there are.
_FSDP_RULES: Rules = {
    **sharding.SETTINGS_RULES,
    "transformer_layer_cls": sharding.SETTINGS_RULES["transformer_layer_cls_to_wrap"],
    "mixed_precision": needless("precision has it"),
    "min_num_params": needless("layers are gathered one after another"),
    "enable_fsdp": sharding.ALL_RANKS_SHARE_ONE_COPY,
}
_RULES: Rules = {
    "trainer_type": first_of(
        (lambda key: key.text in _TRAINERS, needless("supervised training")),
        otherwise=refuse("there is no preference or reinforcement learning here"),
    ),
    "tokenizer_name": put("data.tokenizer"),
    "model_name": _model_name,
    "load_pretrained_weights": (),
    "model_max_length": put("data.sequence_length"),
    "torch_dtype_str": by_text(
        {
            "bfloat16": put("precision", "bf16", "weights stay in float32, passes are in bf16"),
            "float16": put("precision", "fp16", "weights stay in float32, passes are in fp16"),
            "float32": put("precision", "fp32"),
        },
        NO_COUNTERPART,
    ),
    "mixed_precision_dtype": by_text(
        {"bf16": put("precision", "bf16"), "fp16": put("precision", "fp16")}, needless("none")
    ),
    "attn_implementation": by_text(
        dict.fromkeys(("eager", "sdpa"), put("model.attention")),
        needless("model.attention: auto is torch's sdpa, with its flash kernels"),
    ),
    "trust_remote_code": drop("models of transformers alone"),
    "freeze_layers": put("model.freeze"),
    "enable_liger_kernel": needless("engine.chunked_loss computes the loss in chunks"),
    "tokenizer_pad_token": put("data.special_tokens.pad_token"),
    "tokenizer_kwargs": {"pad_token": put("data.special_tokens.pad_token")},
    "chat_template": drop("a template of Oumi's own; give data.chat_template its file"),
    "use_peft": (),
    "optimizer": trainer.optimizer_name,
    "compile": put("engine.name", "inductor"),
    "enable_gradient_checkpointing": put("model.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": needless("it is not reentrant"),
    **{f"enable_{name}": _trackers for name in _TRACKERS},
    **dict.fromkeys(
        (
            "dataloader_num_workers",
            "dataloader_prefetch_factor",
            "dataloader_main_process_only",
            "dataloader_persistent_workers",
        ),
        needless("data.workers has a default"),
    ),
    **dict.fromkeys(
        ("include_performance_metrics", "log_model_summary", "log_examples"),
        needless("speed, memory and a sample are always shown"),
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "empty_device_cache_steps", "nccl_default_timeout_minutes"),
        needless("it is done by itself"),
    ),
    "save_final_model": needless("the model is always exported at the end"),
    "telemetry": needless("it is of Oumi's own files"),
    "profiler": drop("log.profile_steps profiles"),
    "lora_target_parameters": put("model.lora.target_parameters"),
    "lora_modules_to_save": put("model.lora.modules_to_save"),
    "lora_r": put("model.lora.r"),
    "lora_alpha": put("model.lora.alpha"),
    "lora_dropout": put("model.lora.dropout"),
    "lora_target_modules": put("model.lora.target_modules"),
    "lora_init_weights": lambda key: adapters.init_rule(
        True if key.text.lower() == "default" else key.text.lower()
    ),
    "q_lora": lambda key: (
        adapters.OTHER_FORM
        if key.sibling("q_lora_bits") not in (None, 4)
        else adapters.quantized_base_rule(
            "nf4", has_double_scales=bool(key.sibling("use_bnb_nested_quant"))
        )
    ),
    **dict.fromkeys(
        ("q_lora_bits", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), adapters.IN_QUANTIZE
    ),
    "bnb_4bit_quant_type": by_text({"nf4": adapters.IN_QUANTIZE}, adapters.OTHER_FORM),
    "bnb_4bit_compute_dtype": needless("precision has it"),
    "peft_save_mode": lambda key: put("model.lora.merge", key.text.upper() == "MERGED"),
    "data": _data,
}
# Sections whose names have another form in Trainer's arguments.
_SECTION_RULES: Rules = {
    "fsdp": first_of(
        (lambda key: key.child("enable_fsdp"), _FSDP_RULES),
        otherwise=needless("enable_fsdp is false"),
    ),
    "deepspeed": {
        # As ZERO_2.
        "zero_stage": lambda key: (
            sharding.zero_stage_rule(int(key.text[-1]), f"deepspeed.zero_stage is {key.text}")
            if key.text[-1:].isdigit()
            else NO_COUNTERPART
        ),
        **dict.fromkeys(
            ("offload_optimizer", "offload_param"), drop("zero.offload: {device: cpu}")
        ),
        ANY_KEY: needless("DeepSpeed's settings here are zero's"),
    },
}
