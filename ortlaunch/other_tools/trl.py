"""Convert keys of TRL's SFTTrainer (sft.py, the alignment handbook) for data and LoRA.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.errors import InputError
from ortlaunch.other_tools.draft import Draft, in_one_line, is_empty, null
from ortlaunch.recipe.text.tree import Tree

# Keys of SFTTrainer that Trainer lacks.
_MARKS = ("chat_template", "dataset_text_field", "dataset_train_split", "dataset_test_split", "dataset_mixture",
          "assistant_only_loss", "completion_only_loss", "packing", "use_peft")  # fmt: skip
# Keys of TRL's trainers with preferences or rewards.
_OTHERS = ("beta", "max_prompt_length", "num_generations", "reward_model_path", "reward_funcs")
_ANSWERS = "answers alone count in the loss of chats"


def is_sft(draft: Draft) -> bool:
    """Return whether a config has keys of SFTTrainer that Trainer lacks.

    Raises:
        InputError: the config has keys of another trainer of TRL.
    """
    found = any(draft.value(key) is not None for key in _MARKS)
    for key in _OTHERS if found else ():
        node = draft.left.get(key)
        if node is not None:
            place = node.key_place or node.place
            raise InputError(
                f"{place}: {key}: {in_one_line(node)}: of TRL's trainers SFTTrainer alone is known here"
            )
    return found


def convert(draft: Draft) -> None:
    """Convert the keys that Trainer lacks; the others remain for trainer.py."""
    # Assumed before Trainer's defaults, which differ: the first value of a key wins.
    draft.assume("model.task", "causal-lm", "TRL's SFTTrainer trains no other")
    draft.assume("optimizer.learning_rate", 2e-5, "TRL's default")
    draft.assume("data.sequence_length", 1024, "TRL's default")
    template = draft.pop("chat_template")
    mixture = draft.pop("dataset_mixture")
    # Only chats have these; an end of a turn is the usual `eos_token`.
    signs = (template, draft.left.get("assistant_only_loss"), draft.left.get("eos_token"))
    chats = any(node is not None and not is_empty(node) for node in signs)
    draft.put("data.chat_template", template, "chat_template")
    if mixture is not None:
        _mixture(draft, mixture, chats)
    _data(draft, chats)
    _packing(draft, chats)
    _adapters(draft)
    for key in ("eos_token", "pad_token"):
        draft.move(f"data.special_tokens.{key}", key)


def _mixture(draft: Draft, node: Tree, chats: bool) -> None:
    """Convert a mixture of data sets of the hub, of which TRL takes all rows, or a part of them."""
    parts = node.find(("datasets",)) or node
    columns = _columns(chats, None, draft.value("assistant_only_loss"))
    sources, less = [], []
    for part in parts.children.values():
        given = part.plain() if part.kind == "mapping" else {}
        source = {"format": "hub", "name": given.get("id"), "subset": given.get("config")}
        source["split"] = given.get("split")
        present = {key: value for key, value in source.items() if value is not None}
        # Without weights each sample counts alike, as in TRL.
        sources.append({"source": {**present, **columns}, "weight": null(part)})
        less += [str(given.get("id"))] if (given.get("weight") or 1) != 1 else []
    rows = f"all rows of {', '.join(less)}, of which TRL takes a part (most_rows limits them)"
    draft.put("data.train", node, "dataset_mixture", sources, rows if less else "")
    share = node.find(("test_split_size",))
    if share is not None and not is_empty(share):
        draft.put("data.evaluation", share, "test_split_size", {"share": share.scalar})


def _columns(chats: bool, field: str | None, answers_alone: object) -> dict[str, str]:
    """Return the settings of a source of chats or of text."""
    if not chats:
        return {"text_column": field or "text"}
    return {"messages_column": "messages", **({} if answers_alone else {"train_on": "all"})}


def _data(draft: Draft, chats: bool) -> None:
    """Convert a data set of the hub."""
    # TRL detects the columns when it loads the data; an import does not load them.
    hub = draft.pop("dataset_name")
    subset = draft.pop("dataset_config")
    first = draft.pop("dataset_train_split")
    second = draft.pop("dataset_test_split")
    field = draft.pop("dataset_text_field")
    answers = draft.pop("assistant_only_loss")
    if hub is not None:
        source = {
            "format": "hub",
            "name": hub.scalar,
            **({"subset": in_one_line(subset)} if subset else {}),
            **_columns(chats, in_one_line(field) if field else None, answers),
        }
        why = f"taken as text; for chats add data.train.messages_column=messages, and {_ANSWERS}"
        split = {"split": in_one_line(first)} if first else {}
        draft.put("data.train", hub, "dataset_name", {**source, **split}, "" if chats else why)
        if second is not None and draft.value("eval_strategy") not in (None, False, "no"):
            draft.put(
                "data.evaluation",
                second,
                "dataset_test_split",
                {**source, "split": in_one_line(second)},
            )
            second = None  # converted, so the report below must not name it
    for key, node in (
        ("dataset_config", subset),
        ("dataset_train_split", first),
        ("dataset_text_field", field),
    ):
        if hub is not None:
            draft.needless(key, node, "data.train has it")
        else:
            draft.drop(key, node, "there is no dataset_name")
    draft.drop("dataset_test_split", second, "nothing asks for an evaluation of it")
    draft.needless("assistant_only_loss", answers, _ANSWERS)
    draft.leave_out("completion_only_loss", _ANSWERS)


def _packing(draft: Draft, chats: bool) -> None:
    # Not `pop`: `packing: false` has a meaning, too.
    packed = draft.left.pop("packing", None)
    if packed is not None and chats and packed.scalar:
        draft.put("data.packing", packed, "packing")
    elif packed is not None:
        why = "a chat is a sample of its own" if chats else "text is always packed"
        draft.needless("packing", packed, why)


def _adapters(draft: Draft) -> None:
    """Convert the keys of LoRA, which TRL uses only with use_peft.

    Without target modules peft chooses layers by the model type, as TRL does.
    """
    wanted = draft.pop("use_peft")
    if wanted is None:
        return draft.without_adapters("use_peft is not true")
    draft.needless("use_peft", wanted, "model.lora says it")
    for key, ours, usual in (
        ("lora_r", "r", 16),
        ("lora_alpha", "alpha", 32),
        ("lora_dropout", "dropout", 0.05),
    ):
        draft.move(f"model.lora.{ours}", key)
        draft.assume(f"model.lora.{ours}", usual, "TRL's default")
    names = draft.pop("lora_target_modules")
    if names is not None:
        asked = names.plain() if names.kind == "list" else [names.scalar]
        draft.put("model.lora.target_modules", names, "lora_target_modules", asked)
    return None
