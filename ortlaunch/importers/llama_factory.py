"""Convert LLaMA-Factory's YAML: Trainer's arguments, and its own for model, method and data.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.importers import llama_data, llama_v1, trainer
from ortlaunch.importers.draft import (
    Draft,
    null_at_node,
    number_of_node,
    one_line_text,
    refusal_error,
)

# Pre-training and supervised fine-tuning; the others train with preferences or rewards.
_STAGES = ("pt", "sft")


def convert_llama_factory_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it trains in a way that ortlaunch does not have, or not at all.
    """
    is_second_schema = any(key in draft.unconverted for key in llama_v1.SECOND_SCHEMA_KEYS)
    if is_second_schema:
        llama_v1.rename_second_schema_keys_and_split_sections(draft)
    for key in ("export_dir", "infer_backend", "do_predict"):
        node = draft.take_key(key)
        if node is not None and not draft.config_value("do_train"):
            raise refusal_error(key, node, "the config describes no training")
    stage_node = draft.take_key("stage")
    finetuning_node = draft.take_key("finetuning_type")
    if stage_node is not None and stage_node.scalar not in _STAGES:
        raise refusal_error(
            "stage", stage_node, f"only {' and '.join(_STAGES)} can be trained here"
        )
    if finetuning_node is not None and finetuning_node.scalar not in ("lora", "full"):
        raise refusal_error(
            "finetuning_type", finetuning_node, "only lora and full can be trained here"
        )
    draft.set_recipe_key_unless_set_and_report("model.task", stage_node, "stage", "causal-lm")
    draft.assume_default("model.task", "causal-lm", "LLaMA-Factory's default, sft")
    trainer.convert_model_tokenizer_and_config(draft)
    if finetuning_node is not None and finetuning_node.scalar == "full":
        draft.set_recipe_key_unless_set_and_report(
            "model.lora", finetuning_node, "finetuning_type", null_at_node(finetuning_node)
        )
        draft.report_adapters_unused("finetuning_type is full")
    # Without finetuning_type LLaMA-Factory trains adapters.
    else:
        _convert_lora_and_assume_defaults(draft)
        draft.report_needless("finetuning_type", finetuning_node, "model.lora says it")
    _convert_data_template_and_packing(draft, stage_node is None or stage_node.scalar == "sft")
    trainer.convert_held_out_share_or_samples(draft, "val_size")
    _convert_attention_precision_and_checkpointing(draft)
    trainer.convert_shared_trainer_arguments(draft)
    if is_second_schema:
        draft.assume_default("schedule.name", "constant", "LLaMA-Factory's default")
        draft.assume_default("precision", "bf16", "LLaMA-Factory's default")
        draft.assume_default("optimizer.learning_rate", 1e-4, "LLaMA-Factory's default")
    _assume_defaults(draft)


def _convert_lora_and_assume_defaults(draft: Draft) -> None:
    target_node = draft.take_key("lora_target")
    rank = number_of_node(draft.unconverted.get("lora_rank")) or 8
    if target_node is not None:
        target_names = (
            [target_name.strip() for target_name in one_line_text(target_node).split(",")]
            if target_node.node_type == "scalar"
            else target_node.value_without_locations()
        )
        draft.set_recipe_key_unless_set_and_report(
            "model.lora.target_modules",
            target_node,
            "lora_target",
            ["all-linear"] if target_names == ["all"] else target_names,
        )
    for key, lora_field in (
        ("lora_rank", "r"),
        ("lora_alpha", "alpha"),
        ("lora_dropout", "dropout"),
    ):
        draft.set_recipe_key_from_config_key_if_present(f"model.lora.{lora_field}", key)
    # LLaMA-Factory's default of lora_alpha is twice the rank.
    values = {"r": 8, "alpha": 2 * rank, "dropout": 0.0, "target_modules": ["all-linear"]}
    for key, value in values.items():
        draft.assume_default(f"model.lora.{key}", value, "LLaMA-Factory's default")


def _convert_data_template_and_packing(draft: Draft, has_chats: bool) -> None:
    # Not `take`: `packing: false` has a meaning, too.
    packing_node = draft.unconverted.pop("packing", None)
    neat_packing_node = draft.take_key("neat_packing")
    llama_data.convert_data_sets_by_dataset_info(
        draft, has_chats, _take_train_on_field_or_empty(draft) if has_chats else {}
    )
    template_node = draft.take_key("template")
    if not has_chats:
        draft.report_needless(
            "template", template_node, "of no effect there: pre-training is on plain text"
        )
    else:
        draft.report_altered(
            "template",
            template_node,
            "the tokenizer's own chat template, or data.chat_template; LLaMA-Factory's may differ "
            "in its system message",
        )
    if has_chats and packing_node is not None and packing_node.scalar:
        reason = (
            "" if neat_packing_node is not None else "packed chats do not attend to each other here"
        )
        draft.set_recipe_key_unless_set_and_report(
            "data.packing", packing_node, "packing", difference=reason
        )
    else:
        reason = "a chat is a sample of its own" if has_chats else "text is always packed"
        draft.report_needless("packing", packing_node, reason)
    # There it implies packing.
    if has_chats:
        draft.set_recipe_key_unless_set_and_report(
            "data.packing", neat_packing_node, "neat_packing"
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            "data.attend_across_documents", neat_packing_node, "neat_packing", recipe_value=False
        )


def _convert_attention_precision_and_checkpointing(draft: Draft) -> None:
    """Convert attention, precision and recomputation."""
    attention_node = draft.take_key("flash_attn")
    if attention_node is not None and attention_node.scalar in ("disabled", "sdpa"):
        attention_name = "eager" if attention_node.scalar == "disabled" else "sdpa"
        draft.set_recipe_key_unless_set_and_report(
            "model.attention", attention_node, "flash_attn", attention_name
        )
    else:
        draft.report_needless(
            "flash_attn", attention_node, "model.attention chooses the fastest that works"
        )
    draft.set_recipe_key_from_config_key_if_present(
        "precision", "pure_bf16", "bf16", "weights and optimizer state are in 32 bits"
    )
    draft.set_recipe_key_from_config_key_if_present(
        "model.gradient_checkpointing", "disable_gradient_checkpointing", recipe_value=False
    )
    draft.assume_default("model.gradient_checkpointing", True, "LLaMA-Factory's default")


def _take_train_on_field_or_empty(draft: Draft) -> dict[str, str]:
    """Convert the choice of what counts in the loss of chats."""
    for key, loss_part in (("train_on_prompt", "all"), ("mask_history", "last")):
        node = draft.take_key(key)
        if node is not None:
            draft.report_needless(key, node, f"train_on: {loss_part} of each source has it")
            return {"train_on": loss_part}
    return {}


def _assume_defaults(draft: Draft) -> None:
    draft.set_recipe_key_from_config_key_if_present("data.sequence_length", "cutoff_len")
    draft.assume_default("data.sequence_length", 2048, "LLaMA-Factory's default")
    trainer.assume_defaults(draft, "LLaMA-Factory's")
