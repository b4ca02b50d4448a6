"""Convert keys of TRL's SFTTrainer (sft.py, the alignment handbook) for data and LoRA."""

from __future__ import annotations

from ortlaunch.importers import adapters
from ortlaunch.importers.draft import Draft
from ortlaunch.importers.rules import (
    ConfigKey,
    EvenIfEmpty,
    Rule,
    Rules,
    assume_defaults,
    drop,
    first_of,
    needless,
    put,
    refuse,
    rules_without_adapters,
)

# Keys of SFTTrainer that Trainer lacks.
_SFT_KEYS = ("chat_template", "dataset_text_field", "dataset_train_split", "dataset_test_split", "dataset_mixture",
          "assistant_only_loss", "completion_only_loss", "packing", "use_peft")  # fmt: skip
_ANSWERS_REMARK = "answers alone count in the loss of chats"


def sft_rules_with_assumed_defaults(draft: Draft) -> Rules:
    """Return the rules of SFTTrainer's keys, and set TRL's defaults; {}: the config is Trainer's.

    Without target modules peft chooses layers by the model type, as TRL does.

    Raises:
        InputError: the config has keys of another trainer of TRL.
    """
    if all(draft.config_value(key) is None for key in _SFT_KEYS):
        return {}
    assume_defaults(draft, {"model.task": "causal-lm"}, "TRL's SFTTrainer trains no other")
    defaults = {"optimizer.learning_rate": 2e-5, "data.sequence_length": 1024}
    if draft.config_value("use_peft"):
        defaults |= {"model.lora.r": 16, "model.lora.alpha": 32, "model.lora.dropout": 0.05}
    assume_defaults(draft, defaults, "TRL's default")
    without_adapters = rules_without_adapters(draft, "use_peft is not true")
    return {**_RULES, **({} if draft.config_value("use_peft") else without_adapters)}


def _has_chats(key: ConfigKey) -> bool:
    # Only chats have these; an end of a turn is the usual `eos_token`.
    return any(map(key.sibling, ("chat_template", "assistant_only_loss", "eos_token")))


def _column_fields(key: ConfigKey) -> dict[str, object]:
    """Return the settings of a source of chats or of text."""
    # TRL detects the columns when it loads the data; an import does not load them.
    if not _has_chats(key):
        return {"text_column": key.sibling("dataset_text_field") or "text"}
    loss_fields = {} if key.sibling("assistant_only_loss") else {"train_on": "all"}
    return {"messages_column": "messages", **loss_fields}


def _dataset_mixture_rule(key: ConfigKey) -> Rule:
    """Convert a mixture of data sets of the hub, of which TRL takes all rows, or a part of them."""
    parts = key.child("datasets") if isinstance(key.value, dict) else key.items
    sets = [part for part in parts if isinstance(part, dict)]
    fields = {**_column_fields(key), **({} if _has_chats(key) else {"text_column": "text"})}
    sources = [
        {
            "format": "hub",
            "name": part.get("id"),
            **{
                recipe_field: part[name]
                for name, recipe_field in (("config", "subset"), ("split", "split"))
                if part.get(name) is not None
            },
            **fields,
        }
        for part in sets
    ]
    partial_sets = [str(part.get("id")) for part in sets if (part.get("weight") or 1) != 1]
    rows_remark = (
        f"all rows of {', '.join(partial_sets)}, of which TRL takes a part (most_rows limits them)"
    )
    key.convert_child(
        "test_split_size", lambda share: put("data.evaluation", {"share": share.value})
    )
    # Without weights each sample counts alike, as in TRL.
    weighted_sources = [{"source": source, "weight": None} for source in sources]
    return put("data.train", weighted_sources, rows_remark if partial_sets else "")


def _hub_source(key: ConfigKey, split_key: str) -> dict[str, object]:
    optional_fields = {
        "subset": key.sibling("dataset_config"),
        "split": key.sibling(split_key),
    }
    return {
        "format": "hub",
        "name": key.sibling("dataset_name"),
        **{name: value for name, value in optional_fields.items() if value},
        **_column_fields(key),
    }


def _hub_data_set(key: ConfigKey) -> Rule:
    text_remark = "taken as text; for chats add data.train.messages_column=messages, and"
    remark = "" if _has_chats(key) else f"{text_remark} {_ANSWERS_REMARK}"
    return put("data.train", _hub_source(key, "dataset_train_split"), remark)


_PART_OF_SOURCE = first_of(
    (lambda key: key.sibling("dataset_name"), needless("data.train has it")),
    otherwise=drop("there is no dataset_name"),
)
_RULES: Rules = {
    **dict.fromkeys(
        ("beta", "max_prompt_length", "num_generations", "reward_model_path", "reward_funcs"),
        EvenIfEmpty(refuse("of TRL's trainers SFTTrainer alone is known here")),
    ),
    "chat_template": put("data.chat_template"),
    "dataset_mixture": _dataset_mixture_rule,
    "dataset_name": _hub_data_set,
    "dataset_config": _PART_OF_SOURCE,
    "dataset_train_split": _PART_OF_SOURCE,
    "dataset_text_field": _PART_OF_SOURCE,
    "dataset_test_split": first_of(
        (
            lambda key: (
                key.sibling("dataset_name")
                and key.sibling("eval_strategy") not in (None, False, "no")
            ),
            lambda key: put("data.evaluation", _hub_source(key, "dataset_test_split")),
        ),
        otherwise=drop("nothing asks for an evaluation of it"),
    ),
    "assistant_only_loss": needless(_ANSWERS_REMARK),
    "completion_only_loss": needless(_ANSWERS_REMARK),
    "packing": EvenIfEmpty(
        first_of(
            (lambda key: not _has_chats(key), needless("text is always packed")),
            (lambda key: key.value, put("data.packing")),
            otherwise=needless("a chat is a sample of its own"),
        )
    ),
    "use_peft": needless("model.lora says it"),
    "lora_r": put("model.lora.r"),
    "lora_alpha": put("model.lora.alpha"),
    "lora_dropout": put("model.lora.dropout"),
    "lora_target_modules": lambda key: put("model.lora.target_modules", key.items),
    "lora_target_parameters": lambda key: put("model.lora.target_parameters", key.items),
    "lora_modules_to_save": lambda key: put("model.lora.modules_to_save", key.items),
    "use_rslora": put("model.lora.rslora"),
    "use_dora": put("model.lora.dora"),
    "load_in_4bit": first_of(
        (lambda key: key.sibling("bnb_4bit_quant_type") not in (None, "nf4"), adapters.OTHER_FORM),
        otherwise=lambda key: adapters.quantized_base_rule(
            "nf4", bool(key.sibling("use_bnb_nested_quant"))
        ),
    ),
    "load_in_8bit": adapters.quantized_base_rule("int8"),
    **dict.fromkeys(("use_bnb_nested_quant", "bnb_4bit_quant_type"), adapters.IN_QUANTIZE),
    "eos_token": put("data.special_tokens.eos_token"),
    "pad_token": put("data.special_tokens.pad_token"),
}
