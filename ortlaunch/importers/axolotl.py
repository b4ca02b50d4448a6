"""Convert Axolotl's YAML: causal language models, with a list of datasets.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from ortlaunch.importers import sharding, trainer
from ortlaunch.importers.draft import (
    Draft,
    is_empty,
    null_at_node,
    number_of_node,
    one_line_text,
    refusal_error,
)
from ortlaunch.importers.rules import convert_keys_by_rules
from ortlaunch.recipe.fields.data import SpecialToken
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES, PROMPTS
from ortlaunch.recipe.text.tree import Tree

# Keys of a training that ortlaunch does not have.
_REFUSED_KEYS = {
    "rl": "there is no preference training here",
    "reward_model": "there is no preference training here",
    "process_reward_model": "there is no preference training here",
    "processor_type": "images and sound beside text cannot be trained here",
}
# `ds_type` or the file's suffix -> format of the recipe.
_SUFFIXES = {"json": "jsonl", "jsonl": "jsonl", "text": "text", "txt": "text", "csv": "csv",
             "parquet": "parquet"}  # fmt: skip
_TEXT_TYPES = ("completion", "pretrain")
_CHAT_TYPES = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "sharegpt": "conversations",
}
_TEMPLATE_KEYS = ("chat_template", "chat_template_jinja")
_SYSTEM_REMARK = (
    "chats; rows with a column `system`, which Axolotl reads: set data.train.system_column"
)
_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
# Axolotl's names of roles, beside the chat template's.
_ROLES = {"human": "user", "gpt": "assistant"}
# Axolotl's styles of an Alpaca prompt: its system message, its turn, and its turn without input.
_STYLES = {
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}


def convert_axolotl_config(draft: Draft) -> None:
    """Convert a config."""
    draft.refuse_config_with_keys(_REFUSED_KEYS)
    draft.assume_default("model.task", "causal-lm", "Axolotl trains no other")
    _convert_base_model_and_tokenizer(draft)
    _convert_lora_adapter_or_refuse_other(draft)
    _convert_train_and_evaluation_datasets(draft)
    trainer.convert_held_out_share_or_samples(draft, "val_set_size")
    _convert_chat_template(draft)
    _convert_special_and_added_tokens(draft)
    _convert_packing_and_loss_on_prompts(draft)
    _convert_wandb_and_tensorboard(draft)
    _convert_freezing_sharding_attention_and_batch(draft)
    trainer.convert_optimizer_name_betas_and_lora_plus_ratio(draft, "optimizer")
    _convert_schedule_and_assume_cosine(draft)
    _convert_loss_watchdog_to_spike_limit(draft)
    trainer.convert_shared_trainer_arguments(draft)
    trainer.convert_max_steps_or_epochs(draft, 1)  # Axolotl's default is one epoch, Trainer's three
    for recipe_key, value in (("batch.accumulation_steps", 1), ("train.max_grad_norm", 1.0)):
        draft.assume_default(recipe_key, value, "Axolotl's default")


def _convert_base_model_and_tokenizer(draft: Draft) -> None:
    base_node = draft.take_key("base_model")
    tokenizer_node = draft.take_key("tokenizer_config")
    draft.report_altered(
        "tokenizer_use_mistral_common",
        draft.take_key("tokenizer_use_mistral_common"),
        "the tokenizer that transformers reads for the model, with its chat template",
    )
    revision_node = draft.take_key("revision_of_model") if base_node is not None else None
    if base_node is not None:
        model_source = one_line_text(base_node) + (
            f"@{one_line_text(revision_node)}" if revision_node else ""
        )
        draft.set_recipe_key_unless_set_and_report(
            "model.pretrained", base_node, "base_model", model_source
        )
        tokenizer_source = (
            one_line_text(tokenizer_node) if tokenizer_node is not None else model_source
        )
        draft.assume_default("data.tokenizer", tokenizer_source, "it lies with the model")
    draft.report_needless("revision_of_model", revision_node, "model.pretrained has it")
    draft.report_needless("tokenizer_config", tokenizer_node, "data.tokenizer has it")
    draft.report_if_needless("model_type", "the pretrained model's config says it")


def _convert_lora_adapter_or_refuse_other(draft: Draft) -> None:
    adapter_node = draft.take_key("adapter")
    if adapter_node is None:
        return draft.report_adapters_unused("there is no adapter")
    if adapter_node.scalar not in ("lora", "qlora"):
        raise refusal_error("adapter", adapter_node, "adapters here are lora")
    # LoRA without quantization trains the same adapters, so qlora is converted with a remark.
    if adapter_node.scalar == "qlora":
        draft.report_dropped(
            "adapter", adapter_node, "model.lora, whose base weights are not quantized"
        )
    else:
        draft.report_needless("adapter", adapter_node, "model.lora is there")
    # If both are given, `draft.put` reports the second as dropped.
    all_linear_node = draft.take_key("lora_target_linear")
    names_node = draft.take_key("lora_target_modules")
    draft.set_recipe_key_unless_set_and_report(
        "model.lora.target_modules", all_linear_node, "lora_target_linear", ["all-linear"]
    )
    target_names = (
        names_node.value_without_locations()
        if names_node is not None and names_node.node_type == "list"
        else []
    )
    # A linear layer that the list names, too; the head and the word table are none of them.
    if all_linear_node is not None and not {*target_names} & {"lm_head", "embed_tokens"}:
        draft.report_needless("lora_target_modules", names_node, "all-linear has them")
    else:
        draft.set_recipe_key_unless_set_and_report(
            "model.lora.target_modules", names_node, "lora_target_modules"
        )
    parameters_node = draft.take_key("lora_target_parameters")
    if parameters_node is not None:
        draft.set_recipe_key_unless_set_and_report(
            "model.lora.target_parameters", parameters_node, "lora_target_parameters"
        )
        draft.assume_default("engine.name", "eager", "lora_target_parameters requires it")
    rank_node = draft.take_key("lora_r")
    alpha_node = draft.take_key("lora_alpha")
    rslora_node = draft.take_key("peft_use_rslora")
    if rslora_node is not None:
        # It divides alpha by the root of the rank, peft's usual scale by the rank.
        scaled_alpha = (number_of_node(alpha_node) or 8) * math.sqrt(number_of_node(rank_node) or 8)
        draft.set_recipe_key_unless_set_and_report(
            "model.lora.alpha", rslora_node, "lora_alpha, peft_use_rslora", round(scaled_alpha, 6)
        )
        alpha_node = None
    for node, key, lora_field in ((rank_node, "lora_r", "r"), (alpha_node, "lora_alpha", "alpha")):
        draft.set_recipe_key_unless_set_and_report(f"model.lora.{lora_field}", node, key)
        draft.assume_default(f"model.lora.{lora_field}", 8, "peft's default")
    return None


def _convert_freezing_sharding_attention_and_batch(draft: Draft) -> None:
    """Convert settings that decide where weights are, and which of them are trained."""
    _convert_unfrozen_to_freeze_patterns(draft)
    shard_size_node = draft.take_key("dp_shard_size")
    if (number_of_node(shard_size_node) or 0) > 1:
        sharding.assume_zero_stage_and_eager_for_stage_3(draft, 3, "by dp_shard_size")
        draft.report_altered(
            "dp_shard_size", shard_size_node, "zero.stage; weights are sharded over all ranks"
        )
    else:
        draft.report_needless("dp_shard_size", shard_size_node, "1 stands for none")
    convert_keys_by_rules(draft, {"activation_offloading": trainer.offload_activations})
    attention_node = draft.take_key("attn_implementation")
    if attention_node is not None and attention_node.scalar in ("eager", "sdpa"):
        draft.set_recipe_key_unless_set_and_report(
            "model.attention", attention_node, "attn_implementation"
        )
    else:
        draft.report_needless(
            "attn_implementation", attention_node, "the fastest that works is chosen"
        )
    draft.report_altered(
        "streaming",
        draft.take_key("streaming"),
        "rows are read and shuffled before step 1; data.train.stream streams text",
    )
    accelerator_node = draft.unconverted.get("accelerator_config")
    if accelerator_node is not None and accelerator_node.value_without_locations() == _EACH_BATCH:
        draft.report_needless("accelerator_config", draft.unconverted.pop("accelerator_config"),
                       "it is for memory; gradients are averaged once a step")  # fmt: skip
    for key, precision_name in (("float16", "fp16"), ("bfloat16", "bf16")):
        draft.set_recipe_key_from_config_key_if_present(
            "precision", key, precision_name, "weights and optimizer state are in 32 bits"
        )
    batch_size_node = draft.take_key("batch_size")
    micro_size = number_of_node(draft.unconverted.get("micro_batch_size")) or 1
    if batch_size_node is not None:
        accumulation_steps = max(1, int((number_of_node(batch_size_node) or 1) // micro_size))
        draft.set_recipe_key_unless_set_and_report(
            "batch.accumulation_steps", batch_size_node, "batch_size", accumulation_steps
        )


def _convert_unfrozen_to_freeze_patterns(draft: Draft) -> None:
    """Convert Axolotl's patterns of parameters that are trained."""
    node = draft.take_key("unfrozen_parameters")
    if node is None:
        return
    patterns = [
        _freeze_pattern_of_regex_or_none(expression)
        for pattern in node.value_without_locations()
        for expression in _expand_digit_range_expressions(str(pattern))
    ]
    if draft.expected_recipe_value_or_none("model.lora.r"):
        draft.report_needless(
            "unfrozen_parameters", node, "an adapter is trained, no weight of the model"
        )
    elif node.node_type != "list" or not all(patterns):
        draft.report_dropped(
            "unfrozen_parameters", node, "write them as model.freeze: ['*', '!...']"
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            "model.freeze", node, "unfrozen_parameters", ["*", *map("!{}".format, patterns)]
        )


def _expand_digit_range_expressions(expression: str) -> list[str]:
    """Return an expression for each digit of a range, as of layers 4[0-9]+."""
    digit_range = re.search(r"\[(\d)-(\d)\]\+?", expression)
    if digit_range is None:
        return [expression]
    digits = range(int(digit_range[1]), int(digit_range[2]) + 1)
    return [
        expanded
        for digit in digits
        for expanded in _expand_digit_range_expressions(
            expression.replace(digit_range[0], str(digit), 1)
        )
    ]


def _freeze_pattern_of_regex_or_none(regular_expression: str) -> str | None:
    """Return the recipe's pattern for a regular expression; None if there is none.

    In Axolotl's expressions a dot is a dot, and one without ^ matches anywhere.
    """
    bare_name = regular_expression.removeprefix("^").removesuffix("$").removesuffix(".*")
    if not re.fullmatch(r"[\w.]+", bare_name):
        return None
    before = "" if regular_expression.startswith("^") else "*"
    return f"{before}{bare_name}{'' if regular_expression.endswith('$') else '*'}"


def _convert_loss_watchdog_to_spike_limit(draft: Draft) -> None:
    """Convert the loss that ends a training, and how often it may come."""
    limit_node = draft.take_key("loss_watchdog_threshold")
    patience_node = draft.take_key("loss_watchdog_patience")
    if limit_node is not None:
        spike_settings = {
            "deviations": null_at_node(limit_node),
            "limit": limit_node,
            "patience": number_of_node(patience_node) or 3,
        }
        draft.set_recipe_key_unless_set_and_report(
            "train.on_spike",
            limit_node,
            "loss_watchdog_threshold",
            spike_settings,
            "every step is judged, not every log line",
        )
    reason = (
        "there is no loss_watchdog_threshold" if limit_node is None else "train.on_spike has it"
    )
    draft.report_needless("loss_watchdog_patience", patience_node, reason)


def _convert_train_and_evaluation_datasets(draft: Draft) -> None:
    # A second source of the same part is reported as dropped by `draft.put`.
    for key, recipe_part in (
        ("datasets", "train"),
        ("pretraining_dataset", "train"),
        ("test_datasets", "evaluation"),
    ):
        node = draft.take_key(key)
        if node is None:
            continue
        usual_type = "pretrain" if key == "pretraining_dataset" else None
        sources = [node] if node.node_type != "list" else list(node.children.values())
        _copy_chat_template_of_all_sets_to_config(draft, sources)
        if recipe_part == "train" and len(sources) > 1:
            weighted_sources = [
                {
                    "source": _recipe_source_of_data_set_and_report_rest(
                        draft, source_node, f"{key}[{source_index}]", usual_type
                    ),
                    "weight": 1.0,
                }
                for source_index, source_node in enumerate(sources)
            ]
            draft.set_recipe_key_unless_set_and_report(
                "data.train",
                node,
                key,
                weighted_sources,
                "each has the same share of the samples; Axolotl puts them one after another",
            )
        else:
            draft.set_recipe_key_unless_set_and_report(
                f"data.{recipe_part}",
                sources[0],
                key,
                _recipe_source_of_data_set_and_report_rest(draft, sources[0], key, usual_type),
            )
            for source_index, source_node in enumerate(sources[1:], 1):
                draft.report_dropped(
                    f"{key}[{source_index}]", source_node, "data.evaluation is one corpus"
                )


def _copy_chat_template_of_all_sets_to_config(draft: Draft, sources: list[Tree]) -> None:
    """Give the config a chat template that all of its data sets have, for `_template`."""
    for key in _TEMPLATE_KEYS:
        template_nodes = [node.find_subtree((key,)) for node in sources]
        first_template = template_nodes[0]
        if (
            first_template is not None
            and len({node and node.scalar for node in template_nodes}) == 1
        ):
            draft.unconverted.setdefault(key, first_template)


def _recipe_source_of_data_set_and_report_rest(
    draft: Draft, data_set_node: Tree, source_key: str, usual_type: str | None
) -> dict[str, object]:
    """Return a data source from its path and type; settings without a counterpart are reported."""
    values = (
        data_set_node.value_without_locations()
        if data_set_node.node_type == "mapping"
        else {"path": data_set_node.scalar}
    )
    path = values.pop("path", "")
    type_name = values.pop("type", usual_type)
    file_format = _SUFFIXES.get(str(values.get("ds_type") or str(path).rpartition(".")[2]))
    if file_format:
        values.pop("ds_type", None)
    # Such as `path: json`: the name of a loader, whose file is in data_files.
    if str(path) in _SUFFIXES and values.get("data_files"):
        path = values.pop("data_files")
    source: dict[str, object] = (
        {"format": file_format, "path": path} if file_format else {"format": "hub", "name": path}
    )
    for config_field, recipe_field in (
        ("name", "subset"),
        ("split", "split"),
        ("revision", "revision"),
    ):
        if values.get(config_field) and not file_format:
            source[recipe_field] = values.pop(config_field)
    if values.get("data_files") and not file_format:
        source["files"] = values.pop("data_files")
    source.update(
        _take_columns_and_prompt_of_data_set(draft, data_set_node, source_key, type_name, values)
    )
    for name, value in values.items():
        if value not in (None, False, ""):
            draft.report_dropped(
                f"{source_key}.{name}",
                data_set_node.find_subtree((name,)) or data_set_node,
                "no counterpart",
            )
    return source


def _take_columns_and_prompt_of_data_set(
    draft: Draft,
    data_set_node: Tree,
    source_key: str,
    source_type: object,
    remaining_settings: dict[str, object],
) -> dict[str, object]:
    type_node = data_set_node.find_subtree(("type",)) or data_set_node
    if source_type in _TEXT_TYPES:
        return {
            "text_column": remaining_settings.pop("field", None)
            or remaining_settings.pop("text_column", None)
            or "text"
        }
    loss_fields = {"train_on": "all"} if draft.config_value("train_on_inputs") else {}
    # A mapping is Axolotl's form of a custom prompt.
    if isinstance(source_type, dict):
        return {
            **_take_prompt_template_and_columns(
                draft, type_node, f"{source_key}.type", source_type
            ),
            **loss_fields,
        }
    if source_type in _CHAT_TYPES:
        return {
            **_take_chat_columns_keys_and_roles(
                draft, data_set_node, source_key, str(source_type), remaining_settings
            ),
            **loss_fields,
        }
    if source_type == "alpaca":
        return {"prompt": "alpaca", **loss_fields}
    family, _, style = str(source_type).partition(":")
    if family == "alpaca" and style in _STYLES:
        return {"prompt": _alpaca_templates_in_style(style), **loss_fields}
    if source_type is not None:
        draft.report_dropped(
            f"{source_key}.type",
            type_node,
            "no counterpart; columns are named by text_column, messages_column, prompt_column",
        )
    return {}


def _alpaca_templates_in_style(style_name: str) -> dict[str, str]:
    """Return the template of an Alpaca prompt in another style."""
    system_text, turn_text, turn_without_input = _STYLES[style_name]
    alpaca = PROMPTS["alpaca"]
    # The sentence before the first heading.
    texts = (str(text).partition("\n\n")[0] for text in (alpaca.template, alpaca.without_input))
    template_text, template_without_input = (
        system_text.replace("{system}", text) for text in texts
    )
    return {
        "template": template_text + turn_text,
        "without_input": template_without_input + turn_without_input,
    }


def _take_chat_columns_keys_and_roles(
    draft: Draft,
    data_set_node: Tree,
    source_key: str,
    chat_type: str,
    remaining_settings: dict[str, Any],
) -> dict[str, object]:
    """Convert the keys of a data set of chats."""
    property_names = remaining_settings.pop("message_property_mappings", None) or {}
    recipe_fields = dict[str, Any]()
    for property_name, sharegpt_name in (("role", "from"), ("content", "value")):
        configured_value = property_names.pop(property_name, None) or remaining_settings.pop(
            f"message_field_{property_name}", None
        )
        used_name = configured_value or (
            sharegpt_name if chat_type == "sharegpt" else property_name
        )
        recipe_fields |= {f"{property_name}_key": used_name} if used_name != property_name else {}
    if property_names:
        remaining_settings["message_property_mappings"] = property_names
    configured_value = remaining_settings.pop("roles", None)
    roles = {
        role_name: role for role, names in (configured_value or {}).items() for role_name in names
    } or _ROLES
    recipe_fields["roles"] = {name: role for name, role in roles.items() if name != role}
    if {
        roles.get(role_name, role_name)
        for role_name in remaining_settings.get("roles_to_train") or ()
    } == {"assistant"}:
        del remaining_settings["roles_to_train"]
    # With train_on_inputs all of a chat counts, and neither key has an effect.
    if remaining_settings.get("message_field_training") and not draft.config_value(
        "train_on_inputs"
    ):
        recipe_fields["train_key"] = remaining_settings.pop("message_field_training")
    recipe_fields |= _take_end_mark_settings_as_train_on_end(
        draft, data_set_node, source_key, remaining_settings
    )
    for config_field in _TEMPLATE_KEYS:
        if remaining_settings.get(config_field) and remaining_settings[
            config_field
        ] == draft.config_value(config_field):
            del remaining_settings[config_field]
    system_column = remaining_settings.pop("field_system", None)
    if remaining_settings.pop("drop_system_message", None):
        recipe_fields["roles"] = {**recipe_fields["roles"], "system": None}
    elif system_column:
        recipe_fields["system_column"] = system_column
    else:
        # The column may be missing in all rows, which this import does not read.
        draft.report_altered(
            f"{source_key}.type",
            data_set_node.find_subtree(("type",)) or data_set_node,
            _SYSTEM_REMARK,
        )
    thinking_key = remaining_settings.get("field_thinking")
    if (
        thinking_key
        and remaining_settings.get("template_thinking_key", "reasoning_content") == thinking_key
    ):
        for config_field in ("field_thinking", "template_thinking_key"):
            if remaining_settings.pop(config_field, None):
                draft.report_needless(
                    f"{source_key}.{config_field}",
                    data_set_node.find_subtree((config_field,)) or data_set_node,
                    "a message's other keys are given to the chat template by their names",
                )
    return {
        "messages_column": remaining_settings.pop("field_messages", None) or _CHAT_TYPES[chat_type],
        **recipe_fields,
    }


def _take_end_mark_settings_as_train_on_end(
    draft: Draft, data_set_node: Tree, source_key: str, remaining_settings: dict[str, Any]
) -> dict[str, object]:
    """Convert the two keys that decide whether the end mark of an answer counts.

    `train_on_eot` is about `eot_tokens`. Without these both keys are about the tokenizer's end
    mark, which counts if one of them says so.
    """
    eos_choice = remaining_settings.get("train_on_eos") or "turn"
    eot_choice = remaining_settings.get("train_on_eot") or eos_choice
    counted_choices = {eot_choice} if draft.config_value("eot_tokens") else {eot_choice, eos_choice}
    trains_on_everything = bool(draft.config_value("train_on_inputs"))
    counts_end_mark = trains_on_everything or counted_choices != {"none"}
    reason = (
        "all of a chat counts"
        if trains_on_everything
        else f"train_on_end: {str(counts_end_mark).lower()}"
    )
    for config_field in ("train_on_eos", "train_on_eot"):
        if remaining_settings.get(config_field) in ("none", "turn"):
            add_remark = (
                draft.report_needless
                if (remaining_settings.pop(config_field) == "turn") is counts_end_mark
                else draft.report_altered
            )
            add_remark(
                f"{source_key}.{config_field}",
                data_set_node.find_subtree((config_field,)) or data_set_node,
                reason,
            )
    return {} if counts_end_mark else {"train_on_end": False}


def _take_prompt_template_and_columns(
    draft: Draft, type_node: Tree, type_key: str, prompt_settings: dict[str, Any]
) -> dict[str, object]:
    """Convert a custom prompt: a format, and the names of its columns."""
    # Axolotl's own defaults, the second also beside a `format`.
    default_formats = {"format": "{instruction} {input} ", "no_input_format": "{instruction} "}
    # In Python's formats a brace is doubled; in the recipe's templates it is written once.
    template, template_without_input = (
        (prompt_settings.pop(name, None) or text).replace("{{", "{").replace("}}", "}")
        for name, text in default_formats.items()
    )
    source: dict[str, object] = {
        "prompt": {"template": template, "without_input": template_without_input},
        "prompt_column": prompt_settings.pop("field_instruction", None) or "instruction",
        "response_column": prompt_settings.pop("field_output", None) or "output",
    }
    input_column = prompt_settings.pop("field_input", None)
    if input_column and "{input}" in template:
        source["input_column"] = input_column
    if prompt_settings.get("system_format") == "{system}":
        del prompt_settings["system_format"]
    for name, value in prompt_settings.items():
        if value not in (None, ""):
            draft.report_dropped(
                f"{type_key}.{name}",
                type_node.find_subtree((name,)) or type_node,
                "write it into the template of data.train.prompt (with {system}: system_column)",
            )
    return source


def _convert_special_and_added_tokens(draft: Draft) -> None:
    """Convert special tokens, and further tokens of the vocabulary."""
    # An older form of `tokens` is a mapping, as `special_tokens`.
    for key in ("special_tokens", "tokens"):
        tokens = draft.take_key(key)
        if tokens is None:
            continue
        if tokens.node_type != "mapping":
            draft.set_recipe_key_unless_set_and_report("data.added_tokens", tokens, key)
            continue
        special_tokens = {}
        for name, node in tokens.children.items():
            if name in get_args(SpecialToken) and node.scalar:
                special_tokens[str(name)] = node.scalar
            elif node.node_type == "list":
                draft.set_recipe_key_unless_set_and_report(
                    "data.added_tokens", node, f"{key}.{name}"
                )
            elif not is_empty(node):
                draft.report_dropped(f"{key}.{name}", node, "no counterpart")
        if special_tokens:
            draft.set_recipe_key_unless_set_and_report(
                "data.special_tokens", tokens, key, special_tokens
            )
    draft.report_if_needless(
        "eot_tokens",
        "the end mark that the chat template writes after an answer counts with the answer",
    )


def _convert_chat_template(draft: Draft) -> None:
    """Convert the chat template."""
    template_node = draft.take_key("chat_template")
    jinja_node = draft.take_key("chat_template_jinja")
    train_source_text = str(draft.expected_recipe_value_or_none("data.train"))
    if template_node is not None and "messages_column" not in train_source_text:
        draft.report_needless(
            "chat_template", template_node, "of no effect there: no data set has chats"
        )
        return
    draft.set_recipe_key_unless_set_and_report(
        "data.chat_template", jinja_node, "chat_template_jinja"
    )
    model_family = (
        re.match("[a-z]*", str(template_node.scalar).lower()) if template_node is not None else None
    )
    if template_node is not None and (
        jinja_node is not None or str(template_node.scalar).startswith("tokenizer_default")
    ):
        draft.report_needless(
            "chat_template",
            template_node,
            "data.chat_template, or the tokenizer's own if there is none",
        )
    elif template_node is not None and template_node.scalar in CHAT_TEMPLATES:
        # Axolotl's Phi-3 begins with the begin mark, as the first version of the model's own did.
        template_with_begin_mark = (
            "{{ bos_token }}" + CHAT_TEMPLATES["phi_3"] if template_node.scalar == "phi_3" else None
        )
        draft.set_recipe_key_unless_set_and_report(
            "data.chat_template", template_node, "chat_template", template_with_begin_mark
        )
    elif template_node is not None:
        reason = (
            "the tokenizer's own is taken; Axolotl's of that name can be given as "
            "data.chat_template"
        )
        # Axolotl's template of a family is a copy of the family's own.
        is_familys_own = (
            model_family is not None
            and model_family[0]
            in str(draft.expected_recipe_value_or_none("data.tokenizer")).lower()
        )
        (draft.report_altered if is_familys_own else draft.report_dropped)(
            "chat_template", template_node, reason
        )


def _convert_schedule_and_assume_cosine(draft: Draft) -> None:
    """Convert the schedule; Axolotl's defaults are a cosine and a warm-up of 3 % of the steps."""
    min_ratio_node = draft.unconverted.get("cosine_min_lr_ratio")
    if min_ratio_node is not None and number_of_node(min_ratio_node) == 1:
        min_ratio_key = "cosine_min_lr_ratio"
        draft.set_recipe_key_unless_set_and_report(
            "schedule.name", draft.unconverted.pop(min_ratio_key), min_ratio_key, "constant"
        )
        draft.report_if_needless("lr_scheduler", "a cosine down to the same rate is constant")
    constant_ratio_node = draft.unconverted.get("cosine_constant_lr_ratio")
    if constant_ratio_node is not None and not number_of_node(constant_ratio_node):
        draft.report_needless("cosine_constant_lr_ratio", draft.unconverted.pop("cosine_constant_lr_ratio"),
                       "0 stands for none")  # fmt: skip
    draft.set_recipe_key_from_config_key_if_present(
        "schedule.warmup_power", "lr_quadratic_warmup", 2.0
    )
    scheduler_name = draft.config_value("lr_scheduler")
    if (
        scheduler_name != "constant"
        and draft.config_value("warmup_steps") is None
        and draft.config_value("warmup_ratio") is None
    ):
        draft.assume_default(
            "schedule.warmup_ratio", 0.03, "Axolotl's default, there with at most 100 steps"
        )
    draft.assume_default("schedule.name", "cosine", "Axolotl's default")
    trainer.convert_schedule_and_warmup(draft, "lr_scheduler")


def _has_chats(draft: Draft) -> bool:
    # By text, because data.train may be one source or a list of them. A corpus that the command
    # names replaces the config's.
    source_text = str(draft.expected_recipe_value_or_none("data.train"))
    return any(mark in source_text for mark in ("messages_column", "prompt", "python-chats"))


def _convert_packing_and_loss_on_prompts(draft: Draft) -> None:
    """Convert packing and the loss on prompts. Here plain text is always packed."""
    # Not `pop`, here and below: false has a meaning, too.
    inputs_node = draft.unconverted.pop("train_on_inputs", None)
    if inputs_node is not None and inputs_node.scalar:
        draft.report_altered(
            "train_on_inputs", inputs_node, "train_on: all; of a chat its role marks count, too"
        )
    else:
        draft.report_needless(
            "train_on_inputs", inputs_node, "answers alone count in the loss of chats"
        )
    key = "excess_length_strategy"
    add_remark = (
        draft.report_needless if draft.config_value(key) == "truncate" else draft.report_dropped
    )
    add_remark(key, draft.take_key(key), "chats are cut off at data.sequence_length")
    has_chats = _has_chats(draft)
    is_packed = has_chats and bool(draft.config_value("sample_packing"))
    reason = "a chat is a sample of its own" if has_chats else "text is always packed"
    for key in ("sample_packing", "eval_sample_packing"):
        if draft.config_value(key) is None:
            continue
        node = draft.unconverted.pop(key)
        if is_packed and key == "sample_packing":
            draft.set_recipe_key_unless_set_and_report("data.packing", node, key)
        elif not has_chats or bool(node.scalar) == is_packed:
            draft.report_needless(key, node, "data.packing has it" if is_packed else reason)
        else:
            draft.report_altered(key, node, "data.packing is for training and evaluation")
    if is_packed and "text_column" in str(draft.expected_recipe_value_or_none("data.train")):
        draft.assume_default(
            "data.attend_across_documents",
            False,
            "with data.packing no document attends to another",
        )


def _convert_wandb_and_tensorboard(draft: Draft) -> None:
    project_node = draft.take_key("wandb_project")
    if project_node is not None:
        draft.set_recipe_key_unless_set_and_report("log.project", project_node, "wandb_project")
        draft.assume_default("log.trackers", ["wandb"], "wandb_project requires it")
    tensorboard_node = draft.take_key("use_tensorboard")
    if tensorboard_node is not None:
        tracker_names = ["wandb", "tensorboard"] if project_node is not None else ["tensorboard"]
        draft.set_recipe_key_unless_set_and_report(
            "log.trackers", tensorboard_node, "use_tensorboard", tracker_names
        )
