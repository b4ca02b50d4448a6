"""Convert Axolotl's YAML: causal language models, with a list of datasets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

from ortlaunch.importers import adapters, trainer
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    WITHOUT_EFFECT,
    ConfigKey,
    EvenIfEmpty,
    Rule,
    Rules,
    apply_rule_and_tell_if_converted,
    assume,
    assume_defaults,
    by_text,
    drop,
    first_of,
    needless,
    put,
    refuse,
    report_change,
    rules_without_adapters,
    section_values_by_rules,
)
from ortlaunch.recipe.fields.data import SpecialToken
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES, PROMPTS
from ortlaunch.recipe.text.tree import Tree

# `ds_type` or the file's suffix -> format of the recipe.
_SUFFIXES = {"json": "jsonl", "jsonl": "jsonl", "text": "text", "txt": "text", "csv": "csv",
             "parquet": "parquet"}  # fmt: skip
# Types of chats, with the usual column of the messages.
_CHAT_TYPES = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "sharegpt": "conversations",
}
_DATA_KEYS = ("datasets", "pretraining_dataset", "test_datasets")
_TEMPLATE_KEYS = ("chat_template", "chat_template_jinja", "chat_template_kwargs")
# Keys of thoughts that a template gets by its own name of them.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
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


class _RowForm(NamedTuple):
    """A form of the rows of a data set."""

    rules: Rules
    """Rules of the keys that such data sets have."""
    values: dict[str, object]
    """Fields of the source, unless a rule puts them."""


def convert_axolotl_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it trains in a way that ortlaunch does not have.
    """
    _add_chat_template_of_all_sets(draft)
    has_adapter = draft.config_value("adapter")
    assume_defaults(draft, {"model.task": "causal-lm"}, "Axolotl trains no other")
    published = adapters.published_adapters_rules(draft, "lora_model_dir", ("lora_", "peft_"))
    if has_adapter and not published:
        assume_defaults(draft, {"model.lora.r": 8, "model.lora.alpha": 8}, "peft's default")
    warmups = [draft.config_value(name) for name in ("warmup_steps", "warmup_ratio")]
    if draft.config_value("lr_scheduler") != "constant" and warmups == [None, None]:
        reason = "Axolotl's default, there with at most 100 steps"
        assume_defaults(draft, {"schedule.warmup_ratio": 0.03}, reason)
    defaults = {
        "batch.accumulation_steps": 1,
        "train.max_grad_norm": 1.0,
        "schedule.name": "cosine",
    }
    trainer.convert_with_shared_arguments(
        draft,
        {
            **_RULES,
            **(published if has_adapter else rules_without_adapters(draft, "there is no adapter")),
        },
        {**defaults, **_every_epoch_evaluation_and_save_unless_given(draft)},
        "Axolotl's default",
        1,  # Trainer's default is three
    )


def _every_epoch_evaluation_and_save_unless_given(draft: Draft) -> dict[str, object]:
    """Return an evaluation of held out data and a checkpoint each epoch, if others are not given."""
    strategies = ("eval_strategy", "evaluation_strategy", "save_strategy")
    # `false` is a strategy, YAML's form of an unquoted `no`; a number of 0 stands for none given.
    given_keys = {
        name
        for name, node in draft.config.items()
        if node.scalar or node.children or name in strategies
    }
    has_data = {"val_set_size", "test_datasets"} & given_keys or draft.base_tree.find_subtree(
        ("data", "evaluation")
    )
    evaluation_keys = {*strategies[:2], "eval_steps", "evals_per_epoch"}
    save_keys = {"save_strategy", "save_steps", "saves_per_epoch"}
    return {
        **(
            {"train.evaluate_every_epochs": 1.0}
            if has_data and not evaluation_keys & given_keys
            else {}
        ),
        **({} if save_keys & given_keys else {"checkpoint.every_epochs": 1.0}),
    }


def _pretrained_model_and_tokenizer(key: ConfigKey) -> Rule:
    revision = key.sibling("revision_of_model")
    source = f"{key.text}@{revision}" if revision else key.text
    tokenizer_source = key.sibling("tokenizer_config") or source
    return (
        put("model.pretrained", source),
        assume("data.tokenizer", tokenizer_source, "it lies with the model"),
    )


def _unfrozen_parameters(key: ConfigKey) -> Rule:
    """Convert Axolotl's patterns of parameters that are trained."""
    patterns = [
        _freeze_pattern_of_regex_or_none(expression)
        for pattern in key.items
        for expression in _expand_digit_range_expressions(str(pattern))
    ]
    if not all(patterns):
        return drop("write them as model.freeze: ['*', '!...']")
    return put("model.freeze", ["*", *map("!{}".format, patterns)])


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
    any_prefix = "" if regular_expression.startswith("^") else "*"
    return f"{any_prefix}{bare_name}{'' if regular_expression.endswith('$') else '*'}"


def _loss_watchdog(key: ConfigKey) -> Rule:
    """Convert the loss that ends a training, and how often it may come."""
    patience = number_or_none(key.sibling("loss_watchdog_patience")) or 3
    spike_settings = {"deviations": None, "limit": key.value, "patience": patience}
    return put("train.on_spike", spike_settings, "every step is judged, not every log line")


def _rule_for_train_or_test_data_sets(key: ConfigKey) -> Rule:
    nodes = _set_nodes(key.node)
    if key.path != "test_datasets" and len(nodes) > 1:
        item_keys = [
            key._replace(path=f"{key.path}[{index}]", node=node) for index, node in enumerate(nodes)
        ]
        sources = [
            {"source": _data_source_reporting_lost_settings(item_key), "weight": 1.0}
            for item_key in item_keys
        ]
        share_remark = "each has the same share of the samples; Axolotl puts them one after another"
        return put("data.train", sources, share_remark)
    for index, node in enumerate(nodes[1:], 1):
        other_key = key._replace(path=f"{key.path}[{index}]", node=node)
        apply_rule_and_tell_if_converted(other_key, drop("data.evaluation is one corpus"))
    recipe_part = "evaluation" if key.path == "test_datasets" else "train"
    return put(
        f"data.{recipe_part}", _data_source_reporting_lost_settings(key._replace(node=nodes[0]))
    )


def _add_chat_template_of_all_sets(draft: Draft) -> None:
    """Give the config a chat template that all of its data sets have."""
    for key_name, name in itertools.product(_DATA_KEYS, _TEMPLATE_KEYS):
        sets_node = draft.config.get(key_name)
        nodes = [node.find_subtree((name,)) for node in _set_nodes(sets_node)] if sets_node else []
        values = [node and node.value_without_locations() for node in nodes]
        is_shared = values.count(values[0]) == len(values) if values else False
        if is_shared and nodes[0] is not None:
            draft.config.setdefault(name, nodes[0])


def _set_nodes(sets_node: Tree) -> list[Tree]:
    return [*sets_node.children.values()] if sets_node.node_type == "list" else [sets_node]


def _data_source_reporting_lost_settings(key: ConfigKey) -> dict[str, object]:
    """Return a data source from its path and type; settings without a counterpart are reported."""
    if key.node.node_type != "mapping":
        node = Tree(key.node.location, node_type="mapping", children={"path": key.node})
        key = key._replace(node=node)
    path = str(key.child("path") or "")
    file_format = _SUFFIXES.get(str(key.child("ds_type") or path.rpartition(".")[2]))
    # Such as `path: json`: the name of a loader, whose file is in data_files.
    files = key.child("data_files") if path in _SUFFIXES else None
    source = (
        {"format": file_format, "path": files or path}
        if file_format
        else {"format": "hub", "name": path}
    )
    hub_rules: Rules = {
        "name": put("subset"),
        "split": put("split"),
        "revision": put("revision"),
        "data_files": put("files"),
    }
    file_rules: Rules = {"ds_type": (), **({"data_files": ()} if files else {})}
    is_plain_by_itself = key.path.startswith("pretraining_dataset")
    source_type = key.child("type") or ("pretrain" if is_plain_by_itself else None)
    form = _source_form(key, source_type)
    source_rules: Rules = {"path": (), **(file_rules if file_format else hub_rules), **form.rules}
    values = {**source, **form.values, **section_values_by_rules(key, source_rules)}
    return {
        name: value
        for name, value in values.items()
        if (name, value) not in (("role_key", "role"), ("content_key", "content"))
    }


def _source_form(key: ConfigKey, source_type: object) -> _RowForm:
    loss_fields = {"train_on": "all"} if key.draft.config_value("train_on_inputs") else {}
    family, _, style = str(source_type).partition(":")
    if source_type in ("completion", "pretrain"):
        return _RowForm(_TEXT_RULES, {"text_column": "text"})
    # A mapping is Axolotl's form of a custom prompt.
    if isinstance(source_type, dict):
        return _RowForm({"type": _PROMPT_RULES}, {**_prompt_values(source_type), **loss_fields})
    if source_type in _CHAT_TYPES:
        return _RowForm(_CHAT_RULES, {**_chat_values(key, str(source_type)), **loss_fields})
    if family == "alpaca" and (style in _STYLES or not style):
        prompt = _alpaca_templates_in_style(style) if style else "alpaca"
        return _RowForm({"type": ()}, {"prompt": prompt, **loss_fields})
    columns_text = "columns are named by text_column, messages_column, prompt_column"
    return _RowForm({"type": drop(f"no counterpart; {columns_text}")}, {})


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


def _prompt_values(settings: Mapping[str, str]) -> dict[str, object]:
    """Return the fields of a custom prompt: a format, and the names of its columns."""
    # Axolotl's own defaults, the second also beside a `format`.
    default_formats = {"format": "{instruction} {input} ", "no_input_format": "{instruction} "}
    # In Python's formats a brace is doubled; in the recipe's templates it is written once.
    template, template_without_input = (
        (settings.get(name) or text).replace("{{", "{").replace("}}", "}")
        for name, text in default_formats.items()
    )
    return {
        "prompt": {"template": template, "without_input": template_without_input},
        "prompt_column": "instruction",
        "response_column": "output",
    }


def _ortlaunch_role_by_name(
    configured_roles: Mapping[str, Sequence[str]] | None,
) -> dict[str, str]:
    names_by_role = configured_roles or {}
    return {name: role for role, names in names_by_role.items() for name in names} or _ROLES


def _chat_values(key: ConfigKey, chat_type: str) -> dict[str, object]:
    """Return the fields of a data set of chats."""
    settings = key.value
    roles = {
        name: role
        for name, role in _ortlaunch_role_by_name(settings.get("roles")).items()
        if name != role
    }
    key_fields = {"role_key": "from", "content_key": "value"} if chat_type == "sharegpt" else {}
    return {
        "messages_column": _CHAT_TYPES[chat_type],
        "roles": {**roles, "system": None} if settings.get("drop_system_message") else roles,
        **key_fields,
        **({} if _counts_end_mark(key.draft, settings) else {"train_on_end": False}),
    }


def _roles_to_train(key: ConfigKey) -> Rule:
    roles = _ortlaunch_role_by_name(key.sibling("roles"))
    return () if {roles.get(name, name) for name in key.items} == {"assistant"} else NO_COUNTERPART


def _counts_end_mark(draft: Draft, settings: dict[str, object]) -> bool:
    """Return whether the end mark of an answer counts.

    `train_on_eot` is about `eot_tokens`. Without these both keys are about the tokenizer's end
    mark, which counts if one of them says so.
    """
    eos_choice = settings.get("train_on_eos") or "turn"
    eot_choice = settings.get("train_on_eot") or eos_choice
    choices = {eot_choice} if draft.config_value("eot_tokens") else {eot_choice, eos_choice}
    return bool(draft.config_value("train_on_inputs")) or choices != {"none"}


def _train_on_end(key: ConfigKey) -> Rule:
    if key.value not in ("none", "turn"):
        return NO_COUNTERPART
    settings = {name: key.sibling(name) for name in ("train_on_eos", "train_on_eot")}
    counts = _counts_end_mark(key.draft, settings)
    trains_on_everything = key.draft.config_value("train_on_inputs")
    end_text = f"train_on_end: {str(counts).lower()}"
    reason = "all of a chat counts" if trains_on_everything else end_text
    return needless(reason) if (key.value == "turn") is counts else report_change(reason)


def _special_tokens_rule(key: ConfigKey) -> Rule:
    """Convert special tokens, and further tokens of the vocabulary."""
    # An older form of `tokens` is a mapping, as `special_tokens`.
    if key.node.node_type != "mapping":
        return put("data.added_tokens")
    special_tokens = {name: key.value[name] for name in key.value if name in get_args(SpecialToken)}
    other_rules: Rules = {
        **dict.fromkeys(special_tokens, ()),
        ANY_KEY: lambda token_key: (
            put("data.added_tokens") if isinstance(token_key.value, list) else NO_COUNTERPART
        ),
    }
    given_tokens = {name: token for name, token in special_tokens.items() if token}
    return (other_rules, put("data.special_tokens", given_tokens) if given_tokens else ())


def _has_chats(key: ConfigKey) -> bool:
    # By text, because data.train may be one source or a list of them. A corpus that the command
    # names replaces the config's.
    source_text = str(key.recipe_value("data.train"))
    return any(mark in source_text for mark in ("messages_column", "prompt", "python-chats"))


def _is_packed(key: ConfigKey) -> bool:
    return _has_chats(key) and bool(key.sibling("sample_packing"))


def _names_own_family(key: ConfigKey) -> bool:
    """Return whether a template is named for the family of the model."""
    family = re.split("[^a-z]", key.text.lower())[0]
    return family in str(key.recipe_value("data.tokenizer")).lower()


_ONE_CHAT = needless("a chat is a sample of its own")
_TEXT_IS_PACKED = needless("text is always packed")
_OTHER_TEMPLATE = (
    "the tokenizer's own is taken; Axolotl's of that name can be given as data.chat_template"
)
_TEMPLATE_OF_ALL_SETS = first_of(
    (lambda key: key.value == key.draft.config_value(key.name), ()), otherwise=NO_COUNTERPART
)
_THINKING_KEY = first_of(
    (
        lambda key: (
            key.sibling("field_thinking")
            in (key.sibling("template_thinking_key") or "reasoning_content", *_THOUGHTS)
        ),
        needless("a message's other keys are given to the chat template by their names"),
    ),
    otherwise=NO_COUNTERPART,
)
_TRUNCATION = "chats are cut off at data.sequence_length"
_TEMPLATE_TEXT = "write it into the template of data.train.prompt (with {system}: system_column)"
_NO_PREFERENCES = refuse("there is no preference training here")
_TEXT_RULES: Rules = {"type": (), "field": put("text_column"), "text_column": put("text_column")}
_PROMPT_RULES: Rules = {
    "format": (),
    "no_input_format": (),
    "field_instruction": put("prompt_column"),
    "field_output": put("response_column"),
    "field_input": first_of(
        (lambda key: "{input}" in (key.sibling("format") or "{input}"), put("input_column")),
        otherwise=(),
    ),
    "system_format": lambda key: () if key.value == "{system}" else drop(_TEMPLATE_TEXT),
    ANY_KEY: drop(_TEMPLATE_TEXT),
}
_CHAT_RULES: Rules = {
    # The column may be missing in all rows, which this import does not read.
    "type": first_of(
        (lambda key: any(map(key.sibling, ("field_system", "drop_system_message"))), ()),
        otherwise=report_change(
            "chats; rows with a column `system`, which Axolotl reads: set data.train.system_column"
        ),
    ),
    "message_property_mappings": {"role": put("role_key"), "content": put("content_key")},
    "message_field_role": put("role_key"),
    "message_field_content": put("content_key"),
    "roles": (),
    "roles_to_train": _roles_to_train,
    # With train_on_inputs all of a chat counts, and the key has no effect.
    "message_field_training": first_of(
        (lambda key: key.draft.config_value("train_on_inputs"), NO_COUNTERPART),
        otherwise=put("train_key"),
    ),
    "train_on_eos": _train_on_end,
    "train_on_eot": _train_on_end,
    "chat_template": _TEMPLATE_OF_ALL_SETS,
    "chat_template_jinja": _TEMPLATE_OF_ALL_SETS,
    "chat_template_kwargs": _TEMPLATE_OF_ALL_SETS,
    "field_tools": put("tools_column"),
    "field_system": lambda key: () if key.sibling("drop_system_message") else put("system_column"),
    "drop_system_message": (),
    "field_thinking": _THINKING_KEY,
    "template_thinking_key": _THINKING_KEY,
    "field_messages": put("messages_column"),
}
_RULES: Rules = {
    "rl": _NO_PREFERENCES,
    "reward_model": _NO_PREFERENCES,
    "process_reward_model": _NO_PREFERENCES,
    "processor_type": refuse("images and sound beside text cannot be trained here"),
    "base_model": _pretrained_model_and_tokenizer,
    "revision_of_model": needless("model.pretrained has it"),
    "tokenizer_config": needless("data.tokenizer has it"),
    "tokenizer_use_mistral_common": report_change(
        "the tokenizer that transformers reads for the model, with its chat template"
    ),
    "model_type": needless("the pretrained model's config says it"),
    "adapter": by_text(
        {
            "lora": needless("model.lora is there"),
            "qlora": first_of(
                (lambda key: key.sibling("load_in_4bit"), needless("model.quantize is there")),
                otherwise=adapters.quantized_base_rule("nf4"),
            ),
        },
        refuse("adapters here are lora"),
    ),
    "load_in_4bit": lambda key: adapters.quantized_base_rule(
        "nf4", (key.sibling("bnb_config_kwargs") or {}).get("bnb_4bit_use_double_quant", True)
    ),
    "load_in_8bit": adapters.quantized_base_rule("int8"),
    "bnb_config_kwargs": {"bnb_4bit_use_double_quant": EvenIfEmpty(adapters.IN_QUANTIZE)},
    "gptq": adapters.OTHER_FORM,
    "peft_use_rslora": put("model.lora.rslora"),
    "peft_use_dora": put("model.lora.dora"),
    "peft_init_lora_weights": lambda key: adapters.init_rule(key.value),
    "lora_target_linear": put("model.lora.target_modules", ["all-linear"]),
    # A linear layer that the list names, too; the head and the word table are none of them.
    "lora_target_modules": first_of(
        (
            lambda key: (
                key.sibling("lora_target_linear")
                and not {"lm_head", "embed_tokens"} & {*map(str, key.items)}
            ),
            needless("all-linear has them"),
        ),
        otherwise=put("model.lora.target_modules"),
    ),
    "lora_target_parameters": (
        put("model.lora.target_parameters"),
        assume("engine.name", "eager", "lora_target_parameters requires it"),
    ),
    "lora_r": put("model.lora.r"),
    "lora_alpha": put("model.lora.alpha"),
    **dict.fromkeys(_DATA_KEYS, _rule_for_train_or_test_data_sets),
    "val_set_size": trainer.held_out_data,
    "chat_template_jinja": put("data.chat_template"),
    "chat_template_kwargs": put("data.template_arguments"),
    "chat_template": first_of(
        (
            lambda key: "messages_column" not in str(key.recipe_value("data.train")),
            needless("of no effect there: no data set has chats"),
        ),
        (
            lambda key: (
                key.sibling("chat_template_jinja") or key.text.startswith("tokenizer_default")
            ),
            needless("data.chat_template, or the tokenizer's own if there is none"),
        ),
        # Axolotl's begins with the begin mark, as the first version of the model's own did.
        (
            lambda key: key.value == "phi_3",
            put("data.chat_template", "{{ bos_token }}" + CHAT_TEMPLATES["phi_3"]),
        ),
        (lambda key: key.value in CHAT_TEMPLATES, put("data.chat_template")),
        # Axolotl's template of a family is a copy of the family's own.
        (_names_own_family, report_change(_OTHER_TEMPLATE)),
        otherwise=drop(_OTHER_TEMPLATE),
    ),
    "special_tokens": _special_tokens_rule,
    "tokens": _special_tokens_rule,
    "eot_tokens": needless(
        "the end mark that the chat template writes after an answer counts with the answer"
    ),
    "train_on_inputs": EvenIfEmpty(
        lambda key: (
            report_change("train_on: all; of a chat its role marks count, too")
            if key.value
            else needless("answers alone count in the loss of chats")
        )
    ),
    "excess_length_strategy": by_text({"truncate": needless(_TRUNCATION)}, drop(_TRUNCATION)),
    "sample_packing": EvenIfEmpty(
        first_of(
            (lambda key: key.value is None, WITHOUT_EFFECT),
            (
                lambda key: (
                    _is_packed(key) and "text_column" in str(key.recipe_value("data.train"))
                ),
                (
                    put("data.packing"),
                    assume(
                        "data.attend_across_documents",
                        False,
                        "with data.packing no document attends to another",
                    ),
                ),
            ),
            (_is_packed, put("data.packing")),
            (_has_chats, _ONE_CHAT),
            otherwise=_TEXT_IS_PACKED,
        )
    ),
    "eval_sample_packing": EvenIfEmpty(
        first_of(
            (lambda key: key.value is None, WITHOUT_EFFECT),
            (lambda key: not _has_chats(key), _TEXT_IS_PACKED),
            (lambda key: _is_packed(key) and key.value, needless("data.packing has it")),
            (
                lambda key: _is_packed(key) or key.value,
                report_change("data.packing is for training and evaluation"),
            ),
            otherwise=_ONE_CHAT,
        )
    ),
    "wandb_project": (
        put("log.project"),
        assume("log.trackers", ["wandb"], "wandb_project requires it"),
    ),
    "use_tensorboard": lambda key: put(
        "log.trackers",
        ["wandb", "tensorboard"] if key.sibling("wandb_project") else ["tensorboard"],
    ),
    "unfrozen_parameters": first_of(
        (
            lambda key: key.recipe_value("model.lora.r"),
            needless("an adapter is trained, no weight of the model"),
        ),
        otherwise=_unfrozen_parameters,
    ),
    "activation_offloading": trainer.offload_activations,
    "attn_implementation": by_text(
        dict.fromkeys(("eager", "sdpa"), put("model.attention")),
        needless("the fastest that works is chosen"),
    ),
    "streaming": report_change(
        "rows are read and shuffled before step 1; data.train.stream streams text"
    ),
    "accelerator_config": lambda key: (
        needless("it is for memory; gradients are averaged once a step")
        if key.value == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        else None
    ),
    "float16": put("precision", "fp16", "weights and optimizer state are in 32 bits"),
    "bfloat16": put("precision", "bf16", "weights and optimizer state are in 32 bits"),
    "batch_size": lambda key: put(
        "batch.accumulation_steps",
        max(
            1,
            int((key.numeric_value or 1) // (number_or_none(key.sibling("micro_batch_size")) or 1)),
        ),
    ),
    "optimizer": trainer.optimizer_name,
    "cosine_min_lr_ratio": lambda key: (
        put("schedule.name", "constant") if key.numeric_value == 1 else None
    ),
    "cosine_constant_lr_ratio": lambda key: (
        None if key.numeric_value else needless("0 stands for none")
    ),
    "lr_quadratic_warmup": put("schedule.warmup_power", 2.0),
    "lr_scheduler": lambda key: (
        needless("a cosine down to the same rate is constant")
        if key.sibling("cosine_min_lr_ratio") == 1
        else trainer.schedule_name
    ),
    "loss_watchdog_threshold": _loss_watchdog,
    "loss_watchdog_patience": lambda key: needless(
        "train.on_spike has it"
        if key.sibling("loss_watchdog_threshold")
        else "there is no loss_watchdog_threshold"
    ),
}
