"""Convert keys of TRL's SFTTrainer (sft.py, the alignment handbook) for data and LoRA.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.base.errors import InputError
from ortlaunch.importers.draft import Draft, is_empty, null_at_node, one_line_text
from ortlaunch.recipe.text.tree import Tree

# Keys of SFTTrainer that Trainer lacks.
_SFT_KEYS = ("chat_template", "dataset_text_field", "dataset_train_split", "dataset_test_split", "dataset_mixture",
          "assistant_only_loss", "completion_only_loss", "packing", "use_peft")  # fmt: skip
# Keys of TRL's trainers with preferences or rewards.
_OTHER_TRAINERS_KEYS = (
    "beta",
    "max_prompt_length",
    "num_generations",
    "reward_model_path",
    "reward_funcs",
)
_ANSWERS_REMARK = "answers alone count in the loss of chats"


def is_sft_config_refusing_other_trl_trainers(draft: Draft) -> bool:
    """Return whether a config has keys of SFTTrainer that Trainer lacks.

    Raises:
        InputError: the config has keys of another trainer of TRL.
    """
    has_sft_keys = any(draft.config_value(key) is not None for key in _SFT_KEYS)
    for key in _OTHER_TRAINERS_KEYS if has_sft_keys else ():
        node = draft.unconverted.get(key)
        if node is not None:
            location = node.key_location or node.location
            raise InputError(
                f"{location}: {key}: {one_line_text(node)}: of TRL's trainers SFTTrainer alone is known here"
            )
    return has_sft_keys


def convert_sft_keys(draft: Draft) -> None:
    """Convert the keys that Trainer lacks; the others remain for trainer.py."""
    # Assumed before Trainer's defaults, which differ: the first value of a key wins.
    draft.assume_default("model.task", "causal-lm", "TRL's SFTTrainer trains no other")
    draft.assume_default("optimizer.learning_rate", 2e-5, "TRL's default")
    draft.assume_default("data.sequence_length", 1024, "TRL's default")
    template_node = draft.take_key("chat_template")
    mixture_node = draft.take_key("dataset_mixture")
    # Only chats have these; an end of a turn is the usual `eos_token`.
    chat_nodes = (
        template_node,
        draft.unconverted.get("assistant_only_loss"),
        draft.unconverted.get("eos_token"),
    )
    has_chats = any(node is not None and not is_empty(node) for node in chat_nodes)
    draft.set_recipe_key_unless_set_and_report("data.chat_template", template_node, "chat_template")
    if mixture_node is not None:
        _convert_hub_mixture(draft, mixture_node, has_chats)
    _convert_hub_data_set(draft, has_chats)
    _convert_chat_packing(draft, has_chats)
    _convert_lora_if_use_peft(draft)
    for key in ("eos_token", "pad_token"):
        draft.set_recipe_key_from_config_key_if_present(f"data.special_tokens.{key}", key)


def _convert_hub_mixture(draft: Draft, mixture_node: Tree, has_chats: bool) -> None:
    """Convert a mixture of data sets of the hub, of which TRL takes all rows, or a part of them."""
    parts_node = mixture_node.find_subtree(("datasets",)) or mixture_node
    columns = _chat_or_text_column_fields(
        has_chats, None, draft.config_value("assistant_only_loss")
    )
    sources, partial_sets = [], []
    for part_node in parts_node.children.values():
        part_values = (
            part_node.value_without_locations() if part_node.node_type == "mapping" else {}
        )
        source = {
            "format": "hub",
            "name": part_values.get("id"),
            "subset": part_values.get("config"),
        }
        source["split"] = part_values.get("split")
        given_fields = {key: value for key, value in source.items() if value is not None}
        # Without weights each sample counts alike, as in TRL.
        sources.append({"source": {**given_fields, **columns}, "weight": null_at_node(part_node)})
        partial_sets += (
            [str(part_values.get("id"))] if (part_values.get("weight") or 1) != 1 else []
        )
    rows_remark = (
        f"all rows of {', '.join(partial_sets)}, of which TRL takes a part (most_rows limits them)"
    )
    draft.set_recipe_key_unless_set_and_report(
        "data.train", mixture_node, "dataset_mixture", sources, rows_remark if partial_sets else ""
    )
    share_node = mixture_node.find_subtree(("test_split_size",))
    if share_node is not None and not is_empty(share_node):
        draft.set_recipe_key_unless_set_and_report(
            "data.evaluation", share_node, "test_split_size", {"share": share_node.scalar}
        )


def _chat_or_text_column_fields(
    has_chats: bool, text_column: str | None, trains_on_answers_alone: object
) -> dict[str, str]:
    """Return the settings of a source of chats or of text."""
    if not has_chats:
        return {"text_column": text_column or "text"}
    return {
        "messages_column": "messages",
        **({} if trains_on_answers_alone else {"train_on": "all"}),
    }


def _convert_hub_data_set(draft: Draft, has_chats: bool) -> None:
    """Convert a data set of the hub."""
    # TRL detects the columns when it loads the data; an import does not load them.
    hub_node = draft.take_key("dataset_name")
    subset_node = draft.take_key("dataset_config")
    train_split_node = draft.take_key("dataset_train_split")
    test_split_node = draft.take_key("dataset_test_split")
    text_field_node = draft.take_key("dataset_text_field")
    answers_node = draft.take_key("assistant_only_loss")
    if hub_node is not None:
        source = {
            "format": "hub",
            "name": hub_node.scalar,
            **({"subset": one_line_text(subset_node)} if subset_node else {}),
            **_chat_or_text_column_fields(
                has_chats, one_line_text(text_field_node) if text_field_node else None, answers_node
            ),
        }
        remark = f"taken as text; for chats add data.train.messages_column=messages, and {_ANSWERS_REMARK}"
        split_field = {"split": one_line_text(train_split_node)} if train_split_node else {}
        draft.set_recipe_key_unless_set_and_report(
            "data.train",
            hub_node,
            "dataset_name",
            {**source, **split_field},
            "" if has_chats else remark,
        )
        if test_split_node is not None and draft.config_value("eval_strategy") not in (
            None,
            False,
            "no",
        ):
            draft.set_recipe_key_unless_set_and_report(
                "data.evaluation",
                test_split_node,
                "dataset_test_split",
                {**source, "split": one_line_text(test_split_node)},
            )
            test_split_node = None  # converted, so the report below must not name it
    for key, node in (
        ("dataset_config", subset_node),
        ("dataset_train_split", train_split_node),
        ("dataset_text_field", text_field_node),
    ):
        if hub_node is not None:
            draft.report_needless(key, node, "data.train has it")
        else:
            draft.report_dropped(key, node, "there is no dataset_name")
    draft.report_dropped(
        "dataset_test_split", test_split_node, "nothing asks for an evaluation of it"
    )
    draft.report_needless("assistant_only_loss", answers_node, _ANSWERS_REMARK)
    draft.report_if_needless("completion_only_loss", _ANSWERS_REMARK)


def _convert_chat_packing(draft: Draft, has_chats: bool) -> None:
    # Not `pop`: `packing: false` has a meaning, too.
    packing_node = draft.unconverted.pop("packing", None)
    if packing_node is not None and has_chats and packing_node.scalar:
        draft.set_recipe_key_unless_set_and_report("data.packing", packing_node, "packing")
    elif packing_node is not None:
        reason = "a chat is a sample of its own" if has_chats else "text is always packed"
        draft.report_needless("packing", packing_node, reason)


def _convert_lora_if_use_peft(draft: Draft) -> None:
    """Convert the keys of LoRA, which TRL uses only with use_peft.

    Without target modules peft chooses layers by the model type, as TRL does.
    """
    use_peft_node = draft.take_key("use_peft")
    if use_peft_node is None:
        return draft.report_adapters_unused("use_peft is not true")
    draft.report_needless("use_peft", use_peft_node, "model.lora says it")
    for key, lora_field, usual_value in (
        ("lora_r", "r", 16),
        ("lora_alpha", "alpha", 32),
        ("lora_dropout", "dropout", 0.05),
    ):
        draft.set_recipe_key_from_config_key_if_present(f"model.lora.{lora_field}", key)
        draft.assume_default(f"model.lora.{lora_field}", usual_value, "TRL's default")
    targets_node = draft.take_key("lora_target_modules")
    if targets_node is not None:
        target_names = (
            targets_node.value_without_locations()
            if targets_node.node_type == "list"
            else [targets_node.scalar]
        )
        draft.set_recipe_key_unless_set_and_report(
            "model.lora.target_modules", targets_node, "lora_target_modules", target_names
        )
    return None
