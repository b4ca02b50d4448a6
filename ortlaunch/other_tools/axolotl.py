"""Convert Axolotl's YAML: causal language models, with a list of datasets.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from ortlaunch.other_tools import sharding, trainer
from ortlaunch.other_tools.draft import Draft, in_one_line, is_empty, null, number, refused
from ortlaunch.recipe.fields.data import SpecialToken
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES, PROMPTS
from ortlaunch.recipe.text.tree import Tree

# Keys of a training that ortlaunch does not have.
_REFUSED = {
    "rl": "there is no preference training here",
    "reward_model": "there is no preference training here",
    "process_reward_model": "there is no preference training here",
    "processor_type": "images and sound beside text cannot be trained here",
}
# `ds_type` or the file's suffix -> format of the recipe.
_SUFFIXES = {"json": "jsonl", "jsonl": "jsonl", "text": "text", "txt": "text", "csv": "csv",
             "parquet": "parquet"}  # fmt: skip
_TEXT = ("completion", "pretrain")
_CHATS = {
    "chat_template": "messages",
    "chat_template.default": "messages",
    "sharegpt": "conversations",
}
_TEMPLATES = ("chat_template", "chat_template_jinja")
_SYSTEM = "chats; rows with a column `system`, which Axolotl reads: set data.train.system_column"
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


def convert(draft: Draft) -> None:
    """Convert a config."""
    draft.refuse(_REFUSED)
    draft.assume("model.task", "causal-lm", "Axolotl trains no other")
    _model(draft)
    _adapter(draft)
    _datasets(draft)
    trainer.held_out(draft, "val_set_size")
    _template(draft)
    _tokens(draft)
    _packing(draft)
    _trackers(draft)
    _memory(draft)
    trainer.optimizer(draft, "optimizer")
    _schedule(draft)
    _watchdog(draft)
    trainer.training(draft)
    trainer.length(draft, 1)  # Axolotl's default is one epoch, Trainer's three
    for path, value in (("batch.accumulation_steps", 1), ("train.max_grad_norm", 1.0)):
        draft.assume(path, value, "Axolotl's default")


def _model(draft: Draft) -> None:
    base = draft.pop("base_model")
    tokenizer = draft.pop("tokenizer_config")
    draft.alter(
        "tokenizer_use_mistral_common",
        draft.pop("tokenizer_use_mistral_common"),
        "the tokenizer that transformers reads for the model, with its chat template",
    )
    revision = draft.pop("revision_of_model") if base is not None else None
    if base is not None:
        source = in_one_line(base) + (f"@{in_one_line(revision)}" if revision else "")
        draft.put("model.pretrained", base, "base_model", source)
        own = in_one_line(tokenizer) if tokenizer is not None else source
        draft.assume("data.tokenizer", own, "it lies with the model")
    draft.needless("revision_of_model", revision, "model.pretrained has it")
    draft.needless("tokenizer_config", tokenizer, "data.tokenizer has it")
    draft.leave_out("model_type", "the pretrained model's config says it")


def _adapter(draft: Draft) -> None:
    adapter = draft.pop("adapter")
    if adapter is None:
        return draft.without_adapters("there is no adapter")
    if adapter.scalar not in ("lora", "qlora"):
        raise refused("adapter", adapter, "adapters here are lora")
    # LoRA without quantization trains the same adapters, so qlora is converted with a remark.
    if adapter.scalar == "qlora":
        draft.drop("adapter", adapter, "model.lora, whose base weights are not quantized")
    else:
        draft.needless("adapter", adapter, "model.lora is there")
    # If both are given, `draft.put` reports the second as dropped.
    every = draft.pop("lora_target_linear")
    names = draft.pop("lora_target_modules")
    draft.put("model.lora.target_modules", every, "lora_target_linear", ["all-linear"])
    given = names.plain() if names is not None and names.kind == "list" else []
    # A linear layer that the list names, too; the head and the word table are none of them.
    if every is not None and not {*given} & {"lm_head", "embed_tokens"}:
        draft.needless("lora_target_modules", names, "all-linear has them")
    else:
        draft.put("model.lora.target_modules", names, "lora_target_modules")
    experts = draft.pop("lora_target_parameters")
    if experts is not None:
        draft.put("model.lora.target_parameters", experts, "lora_target_parameters")
        draft.assume("engine.name", "eager", "lora_target_parameters requires it")
    rank = draft.pop("lora_r")
    alpha = draft.pop("lora_alpha")
    root = draft.pop("peft_use_rslora")
    if root is not None:
        # It divides alpha by the root of the rank, peft's usual scale by the rank.
        rooted = (number(alpha) or 8) * math.sqrt(number(rank) or 8)
        draft.put("model.lora.alpha", root, "lora_alpha, peft_use_rslora", round(rooted, 6))
        alpha = None
    for node, key, ours in ((rank, "lora_r", "r"), (alpha, "lora_alpha", "alpha")):
        draft.put(f"model.lora.{ours}", node, key)
        draft.assume(f"model.lora.{ours}", 8, "peft's default")
    return None


def _memory(draft: Draft) -> None:
    """Convert settings that decide where weights are, and which of them are trained."""
    _parts_of_model(draft)
    each = draft.pop("dp_shard_size")
    if (number(each) or 0) > 1:
        sharding.shard(draft, 3, "by dp_shard_size")
        draft.alter("dp_shard_size", each, "zero.stage; weights are sharded over all ranks")
    else:
        draft.needless("dp_shard_size", each, "1 stands for none")
    trainer.offloading(draft, "activation_offloading")
    attention = draft.pop("attn_implementation")
    if attention is not None and attention.scalar in ("eager", "sdpa"):
        draft.put("model.attention", attention, "attn_implementation")
    else:
        draft.needless("attn_implementation", attention, "the fastest that works is chosen")
    draft.alter(
        "streaming",
        draft.pop("streaming"),
        "rows are read and shuffled before step 1; data.train.stream streams text",
    )
    summed = draft.left.get("accelerator_config")
    if summed is not None and summed.plain() == _EACH_BATCH:
        draft.needless("accelerator_config", draft.left.pop("accelerator_config"),
                       "it is for memory; gradients are averaged once a step")  # fmt: skip
    for key, ours in (("float16", "fp16"), ("bfloat16", "bf16")):
        draft.move("precision", key, ours, "weights and optimizer state are in 32 bits")
    total = draft.pop("batch_size")
    micro = number(draft.left.get("micro_batch_size")) or 1
    if total is not None:
        passes = max(1, int((number(total) or 1) // micro))
        draft.put("batch.accumulation_steps", total, "batch_size", passes)


def _parts_of_model(draft: Draft) -> None:
    """Convert Axolotl's patterns of parameters that are trained."""
    node = draft.pop("unfrozen_parameters")
    if node is None:
        return
    patterns = [_pattern(one) for each in node.plain() for one in _expanded(str(each))]
    if draft.expected("model.lora.r"):
        draft.needless("unfrozen_parameters", node, "an adapter is trained, no weight of the model")
    elif node.kind != "list" or not all(patterns):
        draft.drop("unfrozen_parameters", node, "write them as model.freeze: ['*', '!...']")
    else:
        draft.put("model.freeze", node, "unfrozen_parameters", ["*", *map("!{}".format, patterns)])


def _expanded(theirs: str) -> list[str]:
    """Return an expression for each digit of a range, as of layers 4[0-9]+."""
    found = re.search(r"\[(\d)-(\d)\]\+?", theirs)
    if found is None:
        return [theirs]
    digits = range(int(found[1]), int(found[2]) + 1)
    return [each for d in digits for each in _expanded(theirs.replace(found[0], str(d), 1))]


def _pattern(theirs: str) -> str | None:
    """Return the recipe's pattern for a regular expression; None if there is none.

    In Axolotl's expressions a dot is a dot, and one without ^ matches anywhere.
    """
    bare = theirs.removeprefix("^").removesuffix("$").removesuffix(".*")
    if not re.fullmatch(r"[\w.]+", bare):
        return None
    return f"{'' if theirs.startswith('^') else '*'}{bare}{'' if theirs.endswith('$') else '*'}"


def _watchdog(draft: Draft) -> None:
    """Convert the loss that ends a training, and how often it may come."""
    limit = draft.pop("loss_watchdog_threshold")
    times = draft.pop("loss_watchdog_patience")
    if limit is not None:
        spike = {"deviations": null(limit), "limit": limit, "patience": number(times) or 3}
        draft.put(
            "train.on_spike",
            limit,
            "loss_watchdog_threshold",
            spike,
            "every step is judged, not every log line",
        )
    why = "there is no loss_watchdog_threshold" if limit is None else "train.on_spike has it"
    draft.needless("loss_watchdog_patience", times, why)


def _datasets(draft: Draft) -> None:
    # A second source of the same part is reported as dropped by `draft.put`.
    for key, part in (
        ("datasets", "train"),
        ("pretraining_dataset", "train"),
        ("test_datasets", "evaluation"),
    ):
        node = draft.pop(key)
        if node is None:
            continue
        usual = "pretrain" if key == "pretraining_dataset" else None
        sources = [node] if node.kind != "list" else list(node.children.values())
        _own_template(draft, sources)
        if part == "train" and len(sources) > 1:
            parts = [
                {"source": _source(draft, each, f"{key}[{at}]", usual), "weight": 1.0}
                for at, each in enumerate(sources)
            ]
            draft.put(
                "data.train",
                node,
                key,
                parts,
                "each has the same share of the samples; Axolotl puts them one after another",
            )
        else:
            draft.put(f"data.{part}", sources[0], key, _source(draft, sources[0], key, usual))
            for at, each in enumerate(sources[1:], 1):
                draft.drop(f"{key}[{at}]", each, "data.evaluation is one corpus")


def _own_template(draft: Draft, sources: list[Tree]) -> None:
    """Give the config a chat template that all of its data sets have, for `_template`."""
    for key in _TEMPLATES:
        found = [each.find((key,)) for each in sources]
        own = found[0]
        if own is not None and len({each and each.scalar for each in found}) == 1:
            draft.left.setdefault(key, own)


def _source(draft: Draft, node: Tree, key: str, usual: str | None) -> dict[str, object]:
    """Return a data source from its path and type; settings without a counterpart are reported."""
    values = node.plain() if node.kind == "mapping" else {"path": node.scalar}
    path = values.pop("path", "")
    kind = values.pop("type", usual)
    form = _SUFFIXES.get(str(values.get("ds_type") or str(path).rpartition(".")[2]))
    if form:
        values.pop("ds_type", None)
    # Such as `path: json`: the name of a loader, whose file is in data_files.
    if str(path) in _SUFFIXES and values.get("data_files"):
        path = values.pop("data_files")
    source: dict[str, object] = (
        {"format": form, "path": path} if form else {"format": "hub", "name": path}
    )
    for theirs, ours in (("name", "subset"), ("split", "split"), ("revision", "revision")):
        if values.get(theirs) and not form:
            source[ours] = values.pop(theirs)
    if values.get("data_files") and not form:
        source["files"] = values.pop("data_files")
    source.update(_columns(draft, node, key, kind, values))
    for name, value in values.items():
        if value not in (None, False, ""):
            draft.drop(f"{key}.{name}", node.find((name,)) or node, "no counterpart")
    return source


def _columns(
    draft: Draft, node: Tree, key: str, kind: object, values: dict[str, object]
) -> dict[str, object]:
    here = node.find(("type",)) or node
    if kind in _TEXT:
        return {
            "text_column": values.pop("field", None) or values.pop("text_column", None) or "text"
        }
    learned = {"train_on": "all"} if draft.value("train_on_inputs") else {}
    # A mapping is Axolotl's form of a custom prompt.
    if isinstance(kind, dict):
        return {**_prompt(draft, here, f"{key}.type", kind), **learned}
    if kind in _CHATS:
        return {**_messages(draft, node, key, str(kind), values), **learned}
    if kind == "alpaca":
        return {"prompt": "alpaca", **learned}
    family, _, style = str(kind).partition(":")
    if family == "alpaca" and style in _STYLES:
        return {"prompt": _styled(style), **learned}
    if kind is not None:
        draft.drop(
            f"{key}.type",
            here,
            "no counterpart; columns are named by text_column, messages_column, prompt_column",
        )
    return {}


def _styled(style: str) -> dict[str, str]:
    """Return the template of an Alpaca prompt in another style."""
    system, turn, without = _STYLES[style]
    alpaca = PROMPTS["alpaca"]
    # The sentence before the first heading.
    texts = (str(text).partition("\n\n")[0] for text in (alpaca.template, alpaca.without_input))
    whole, short = (system.replace("{system}", text) for text in texts)
    return {"template": whole + turn, "without_input": short + without}


def _messages(
    draft: Draft, node: Tree, key: str, kind: str, values: dict[str, Any]
) -> dict[str, object]:
    """Convert the keys of a data set of chats."""
    named = values.pop("message_property_mappings", None) or {}
    keys = dict[str, Any]()
    for ours, usual in (("role", "from"), ("content", "value")):
        given = named.pop(ours, None) or values.pop(f"message_field_{ours}", None)
        found = given or (usual if kind == "sharegpt" else ours)
        keys |= {f"{ours}_key": found} if found != ours else {}
    if named:
        values["message_property_mappings"] = named
    given = values.pop("roles", None)
    roles = {each: role for role, names in (given or {}).items() for each in names} or _ROLES
    keys["roles"] = {name: role for name, role in roles.items() if name != role}
    if {roles.get(each, each) for each in values.get("roles_to_train") or ()} == {"assistant"}:
        del values["roles_to_train"]
    # With train_on_inputs all of a chat counts, and neither key has an effect.
    if values.get("message_field_training") and not draft.value("train_on_inputs"):
        keys["train_key"] = values.pop("message_field_training")
    keys |= _end_marks(draft, node, key, values)
    for theirs in _TEMPLATES:
        if values.get(theirs) and values[theirs] == draft.value(theirs):
            del values[theirs]
    system = values.pop("field_system", None)
    if values.pop("drop_system_message", None):
        keys["roles"] = {**keys["roles"], "system": None}
    elif system:
        keys["system_column"] = system
    else:
        # The column may be missing in all rows, which this import does not read.
        draft.alter(f"{key}.type", node.find(("type",)) or node, _SYSTEM)
    thoughts = values.get("field_thinking")
    if thoughts and values.get("template_thinking_key", "reasoning_content") == thoughts:
        for theirs in ("field_thinking", "template_thinking_key"):
            if values.pop(theirs, None):
                draft.needless(
                    f"{key}.{theirs}",
                    node.find((theirs,)) or node,
                    "a message's other keys are given to the chat template by their names",
                )
    return {"messages_column": values.pop("field_messages", None) or _CHATS[kind], **keys}


def _end_marks(draft: Draft, node: Tree, key: str, values: dict[str, Any]) -> dict[str, object]:
    """Convert the two keys that decide whether the end mark of an answer counts.

    `train_on_eot` is about `eot_tokens`. Without these both keys are about the tokenizer's end
    mark, which counts if one of them says so.
    """
    end = values.get("train_on_eos") or "turn"
    turn = values.get("train_on_eot") or end
    counts = {turn} if draft.value("eot_tokens") else {turn, end}
    everything = bool(draft.value("train_on_inputs"))
    on = everything or counts != {"none"}
    why = "all of a chat counts" if everything else f"train_on_end: {str(on).lower()}"
    for theirs in ("train_on_eos", "train_on_eot"):
        if values.get(theirs) in ("none", "turn"):
            report = draft.needless if (values.pop(theirs) == "turn") is on else draft.alter
            report(f"{key}.{theirs}", node.find((theirs,)) or node, why)
    return {} if on else {"train_on_end": False}


def _prompt(draft: Draft, here: Tree, key: str, given: dict[str, Any]) -> dict[str, object]:
    """Convert a custom prompt: a format, and the names of its columns."""
    # Axolotl's own defaults, the second also beside a `format`.
    usual = {"format": "{instruction} {input} ", "no_input_format": "{instruction} "}
    # In Python's formats a brace is doubled; in the recipe's templates it is written once.
    form, without = (
        (given.pop(name, None) or text).replace("{{", "{").replace("}}", "}")
        for name, text in usual.items()
    )
    source: dict[str, object] = {
        "prompt": {"template": form, "without_input": without},
        "prompt_column": given.pop("field_instruction", None) or "instruction",
        "response_column": given.pop("field_output", None) or "output",
    }
    column = given.pop("field_input", None)
    if column and "{input}" in form:
        source["input_column"] = column
    if given.get("system_format") == "{system}":
        del given["system_format"]
    for name, value in given.items():
        if value not in (None, ""):
            draft.drop(
                f"{key}.{name}",
                here.find((name,)) or here,
                "write it into the template of data.train.prompt (with {system}: system_column)",
            )
    return source


def _tokens(draft: Draft) -> None:
    """Convert special tokens, and further tokens of the vocabulary."""
    # An older form of `tokens` is a mapping, as `special_tokens`.
    for key in ("special_tokens", "tokens"):
        tokens = draft.pop(key)
        if tokens is None:
            continue
        if tokens.kind != "mapping":
            draft.put("data.added_tokens", tokens, key)
            continue
        known = {}
        for name, node in tokens.children.items():
            if name in get_args(SpecialToken) and node.scalar:
                known[str(name)] = node.scalar
            elif node.kind == "list":
                draft.put("data.added_tokens", node, f"{key}.{name}")
            elif not is_empty(node):
                draft.drop(f"{key}.{name}", node, "no counterpart")
        if known:
            draft.put("data.special_tokens", tokens, key, known)
    draft.leave_out(
        "eot_tokens",
        "the end mark that the chat template writes after an answer counts with the answer",
    )


def _template(draft: Draft) -> None:
    """Convert the chat template."""
    named = draft.pop("chat_template")
    own = draft.pop("chat_template_jinja")
    train = str(draft.expected("data.train"))
    if named is not None and "messages_column" not in train:
        draft.needless("chat_template", named, "of no effect there: no data set has chats")
        return
    draft.put("data.chat_template", own, "chat_template_jinja")
    family = re.match("[a-z]*", str(named.scalar).lower()) if named is not None else None
    if named is not None and (own is not None or str(named.scalar).startswith("tokenizer_default")):
        draft.needless(
            "chat_template", named, "data.chat_template, or the tokenizer's own if there is none"
        )
    elif named is not None and named.scalar in CHAT_TEMPLATES:
        # Axolotl's Phi-3 begins with the begin mark, as the first version of the model's own did.
        begun = "{{ bos_token }}" + CHAT_TEMPLATES["phi_3"] if named.scalar == "phi_3" else None
        draft.put("data.chat_template", named, "chat_template", begun)
    elif named is not None:
        why = (
            "the tokenizer's own is taken; Axolotl's of that name can be given as "
            "data.chat_template"
        )
        # Axolotl's template of a family is a copy of the family's own.
        same = family is not None and family[0] in str(draft.expected("data.tokenizer")).lower()
        (draft.alter if same else draft.drop)("chat_template", named, why)


def _schedule(draft: Draft) -> None:
    """Convert the schedule; Axolotl's defaults are a cosine and a warm-up of 3 % of the steps."""
    least = draft.left.get("cosine_min_lr_ratio")
    if least is not None and number(least) == 1:
        key = "cosine_min_lr_ratio"
        draft.put("schedule.name", draft.left.pop(key), key, "constant")
        draft.leave_out("lr_scheduler", "a cosine down to the same rate is constant")
    flat = draft.left.get("cosine_constant_lr_ratio")
    if flat is not None and not number(flat):
        draft.needless("cosine_constant_lr_ratio", draft.left.pop("cosine_constant_lr_ratio"),
                       "0 stands for none")  # fmt: skip
    draft.move("schedule.warmup_power", "lr_quadratic_warmup", 2.0)
    named = draft.value("lr_scheduler")
    if (
        named != "constant"
        and draft.value("warmup_steps") is None
        and draft.value("warmup_ratio") is None
    ):
        draft.assume(
            "schedule.warmup_ratio", 0.03, "Axolotl's default, there with at most 100 steps"
        )
    draft.assume("schedule.name", "cosine", "Axolotl's default")
    trainer.schedule(draft, "lr_scheduler")


def _has_chats(draft: Draft) -> bool:
    # By text, because data.train may be one source or a list of them. A corpus that the command
    # names replaces the config's.
    text = str(draft.expected("data.train"))
    return any(mark in text for mark in ("messages_column", "prompt", "python-chats"))


def _packing(draft: Draft) -> None:
    """Convert packing and the loss on prompts. Here plain text is always packed."""
    # Not `pop`, here and below: false has a meaning, too.
    inputs = draft.left.pop("train_on_inputs", None)
    if inputs is not None and inputs.scalar:
        draft.alter("train_on_inputs", inputs, "train_on: all; of a chat its role marks count, too")
    else:
        draft.needless("train_on_inputs", inputs, "answers alone count in the loss of chats")
    key = "excess_length_strategy"
    report = draft.needless if draft.value(key) == "truncate" else draft.drop
    report(key, draft.pop(key), "chats are cut off at data.sequence_length")
    chats = _has_chats(draft)
    packs = chats and bool(draft.value("sample_packing"))
    why = "a chat is a sample of its own" if chats else "text is always packed"
    for key in ("sample_packing", "eval_sample_packing"):
        if draft.value(key) is None:
            continue
        node = draft.left.pop(key)
        if packs and key == "sample_packing":
            draft.put("data.packing", node, key)
        elif not chats or bool(node.scalar) == packs:
            draft.needless(key, node, "data.packing has it" if packs else why)
        else:
            draft.alter(key, node, "data.packing is for training and evaluation")
    if packs and "text_column" in str(draft.expected("data.train")):
        draft.assume(
            "data.attend_across_documents",
            False,
            "with data.packing no document attends to another",
        )


def _trackers(draft: Draft) -> None:
    project = draft.pop("wandb_project")
    if project is not None:
        draft.put("log.project", project, "wandb_project")
        draft.assume("log.trackers", ["wandb"], "wandb_project requires it")
    board = draft.pop("use_tensorboard")
    if board is not None:
        names = ["wandb", "tensorboard"] if project is not None else ["tensorboard"]
        draft.put("log.trackers", board, "use_tensorboard", names)
