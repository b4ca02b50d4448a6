"""Convert LLaMA-Factory's YAML: Trainer's arguments, and its own for model, method and data."""

from __future__ import annotations

from ortlaunch.importers import adapters, llama_data, llama_v1, trainer
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.rules import (
    ConfigKey,
    EvenIfEmpty,
    Rule,
    Rules,
    by_text,
    drop,
    first_of,
    needless,
    put,
    refuse,
    report_change,
    rules_without_adapters,
)


def convert_llama_factory_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it trains in a way that ortlaunch does not have, or not at all.
    """
    is_second_schema = any(key in draft.config for key in llama_v1.SECOND_SCHEMA_KEYS)
    if is_second_schema:
        llama_v1.rename_second_schema_keys(draft)
    is_full = draft.config_value("finetuning_type") == "full"
    defaults: dict[str, object] = {
        **trainer.DEFAULTS,
        "model.task": "causal-lm",
        "model.gradient_checkpointing": True,
        "data.sequence_length": 2048,
    }
    if is_second_schema:
        defaults |= {"schedule.name": "constant", "precision": "bf16"}
        defaults |= {"optimizer.learning_rate": 1e-4}
    published: Rules = {}
    if not draft.config_value("create_new_adapter"):
        published = adapters.published_adapters_rules(
            draft, "adapter_name_or_path", ("lora_", "pissa_", "use_rslora", "use_dora")
        )
    if not is_full and not published:
        # Without finetuning_type LLaMA-Factory trains adapters.
        rank = number_or_none(draft.config_value("lora_rank")) or 8
        lora_values = {"r": 8, "alpha": 2 * rank, "dropout": 0.0, "target_modules": ["all-linear"]}
        defaults |= {f"model.lora.{name}": value for name, value in lora_values.items()}
    rules: Rules = {
        **llama_v1.RULES,
        **_METHOD_RULES,
        **published,
        **trainer.MODEL_RULES,
        **llama_data.rules_by_dataset_info(draft, _has_chats(draft), _loss_fields(draft)),
        **_DATA_RULES,
        **(rules_without_adapters(draft, "finetuning_type is full") if is_full else {}),
    }
    trainer.convert_with_shared_arguments(draft, rules, defaults, "LLaMA-Factory's default", 3)


def _lora_target(key: ConfigKey) -> Rule:
    is_text = isinstance(key.value, str)
    names = [name.strip() for name in key.text.split(",")] if is_text else key.value
    return put("model.lora.target_modules", ["all-linear"] if names == ["all"] else names)


def _has_chats(draft: Draft) -> bool:
    """Return whether the rows are chats, not those of pre-training."""
    return draft.config_value("stage") in (None, "sft")


def _loss_fields(draft: Draft) -> dict[str, object]:
    """Return the choice of what counts in the loss of chats, for each source."""
    chosen_parts = [part for key, part in _LOSS_PARTS.items() if draft.config_value(key)]
    return {"train_on": chosen_parts[0]} if chosen_parts and _has_chats(draft) else {}


def _loss_part(key: ConfigKey) -> Rule | None:
    part_rule = needless(f"train_on: {_LOSS_PARTS[key.name]} of each source has it")
    return part_rule if _has_chats(key.draft) else None


def _quantized_in_4_bits(key: ConfigKey) -> Rule:
    if key.sibling("quantization_type") not in (None, "nf4"):
        return adapters.OTHER_FORM
    return adapters.quantized_base_rule("nf4", key.sibling("double_quantization") is not False)


_THINKING_REMARK = "only for a chat template that names it; the thoughts of rows stay"
_LOSS_PARTS = {"train_on_prompt": "all", "mask_history": "last"}
_METHOD_RULES: Rules = {
    **dict.fromkeys(
        ("export_dir", "infer_backend", "do_predict"),
        lambda key: None if key.sibling("do_train") else refuse("the config describes no training"),
    ),
    # The other stages train with preferences or rewards.
    "stage": by_text(
        dict.fromkeys(("pt", "sft"), put("model.task", "causal-lm")),
        refuse("only pt and sft can be trained here"),
    ),
    "finetuning_type": by_text(
        {"lora": needless("model.lora says it"), "full": put("model.lora", None)},
        refuse("only lora and full can be trained here"),
    ),
    "lora_target": _lora_target,
    "lora_rank": put("model.lora.r"),
    "lora_alpha": put("model.lora.alpha"),
    "lora_dropout": put("model.lora.dropout"),
    "use_rslora": put("model.lora.rslora"),
    "use_dora": put("model.lora.dora"),
    "additional_target": lambda key: put(
        "model.lora.modules_to_save", [name.strip() for name in key.text.split(",")]
    ),
    "pissa_init": lambda key: adapters.init_rule(
        {None: "pissa_niter_16", -1: "pissa"}.get(
            key.sibling("pissa_iter"), f"pissa_niter_{key.sibling('pissa_iter')}"
        )
    ),
    "pissa_iter": needless("model.lora.init has it"),
    "pissa_convert": needless("the export is merged"),
    "adapter_name_or_path": drop(
        "with create_new_adapter: export those merged, and begin with that model"
    ),
    "quantization_bit": by_text(
        {"8": adapters.quantized_base_rule("int8"), "4": _quantized_in_4_bits}, adapters.OTHER_FORM
    ),
    "quantization_type": by_text({"nf4": adapters.IN_QUANTIZE}, adapters.OTHER_FORM),
    "quantization_method": by_text(
        dict.fromkeys(("bnb", "bitsandbytes"), adapters.IN_QUANTIZE), adapters.OTHER_FORM
    ),
    "double_quantization": EvenIfEmpty(adapters.IN_QUANTIZE),
    **dict.fromkeys(_LOSS_PARTS, _loss_part),
}
_DATA_RULES: Rules = {
    "template": lambda key: (
        report_change(
            "the tokenizer's own chat template, or data.chat_template; LLaMA-Factory's may differ "
            "in its system message"
        )
        if _has_chats(key.draft)
        else needless("of no effect there: pre-training is on plain text")
    ),
    "enable_thinking": EvenIfEmpty(
        put("data.template_arguments.enable_thinking", difference=_THINKING_REMARK)
    ),
    # It implies packing there.
    "neat_packing": lambda key: (
        put("data.packing", True)
        if _has_chats(key.draft)
        else put("data.attend_across_documents", False)
    ),
    "packing": EvenIfEmpty(
        first_of(
            (lambda key: not _has_chats(key.draft), needless("text is always packed")),
            (lambda key: not key.value, needless("a chat is a sample of its own")),
            (lambda key: key.sibling("neat_packing"), put("data.packing", True)),
            otherwise=put("data.packing", True, "packed chats do not attend to each other here"),
        )
    ),
    "val_size": trainer.held_out_data,
    "flash_attn": by_text(
        {"disabled": put("model.attention", "eager"), "sdpa": put("model.attention")},
        needless("model.attention chooses the fastest that works"),
    ),
    "pure_bf16": put("precision", "bf16", "weights and optimizer state are in 32 bits"),
    "disable_gradient_checkpointing": put("model.gradient_checkpointing", False),
    "cutoff_len": put("data.sequence_length"),
}
