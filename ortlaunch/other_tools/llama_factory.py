"""Convert LLaMA-Factory's YAML: Trainer's arguments, and its own for model, method and data.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.other_tools import llama_data, llama_v1, trainer
from ortlaunch.other_tools.draft import Draft, in_one_line, null, number, refused

# Pre-training and supervised fine-tuning; the others train with preferences or rewards.
_STAGES = ("pt", "sft")


def convert(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it trains in a way that ortlaunch does not have, or not at all.
    """
    second = any(key in draft.left for key in llama_v1.MARKS)
    if second:
        llama_v1.rename(draft)
    for key in ("export_dir", "infer_backend", "do_predict"):
        node = draft.pop(key)
        if node is not None and not draft.value("do_train"):
            raise refused(key, node, "the config describes no training")
    stage = draft.pop("stage")
    kind = draft.pop("finetuning_type")
    if stage is not None and stage.scalar not in _STAGES:
        raise refused("stage", stage, f"only {' and '.join(_STAGES)} can be trained here")
    if kind is not None and kind.scalar not in ("lora", "full"):
        raise refused("finetuning_type", kind, "only lora and full can be trained here")
    draft.put("model.task", stage, "stage", "causal-lm")
    draft.assume("model.task", "causal-lm", "LLaMA-Factory's default, sft")
    trainer.model(draft)
    if kind is not None and kind.scalar == "full":
        draft.put("model.lora", kind, "finetuning_type", null(kind))
        draft.without_adapters("finetuning_type is full")
    # Without finetuning_type LLaMA-Factory trains adapters.
    else:
        _adapters(draft)
        draft.needless("finetuning_type", kind, "model.lora says it")
    _data(draft, stage is None or stage.scalar == "sft")
    trainer.held_out(draft, "val_size")
    _memory(draft)
    trainer.training(draft)
    if second:
        draft.assume("schedule.name", "constant", "LLaMA-Factory's default")
        draft.assume("precision", "bf16", "LLaMA-Factory's default")
        draft.assume("optimizer.learning_rate", 1e-4, "LLaMA-Factory's default")
    _defaults(draft)


def _adapters(draft: Draft) -> None:
    target = draft.pop("lora_target")
    rank = number(draft.left.get("lora_rank")) or 8
    if target is not None:
        names = (
            [each.strip() for each in in_one_line(target).split(",")]
            if target.kind == "scalar"
            else target.plain()
        )
        draft.put(
            "model.lora.target_modules",
            target,
            "lora_target",
            ["all-linear"] if names == ["all"] else names,
        )
    for key, ours in (("lora_rank", "r"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        draft.move(f"model.lora.{ours}", key)
    # LLaMA-Factory's default of lora_alpha is twice the rank.
    values = {"r": 8, "alpha": 2 * rank, "dropout": 0.0, "target_modules": ["all-linear"]}
    for key, value in values.items():
        draft.assume(f"model.lora.{key}", value, "LLaMA-Factory's default")


def _data(draft: Draft, chats: bool) -> None:
    # Not `take`: `packing: false` has a meaning, too.
    packed = draft.left.pop("packing", None)
    neat = draft.pop("neat_packing")
    llama_data.convert(draft, chats, _learned(draft) if chats else {})
    template = draft.pop("template")
    if not chats:
        draft.needless("template", template, "of no effect there: pre-training is on plain text")
    else:
        draft.alter(
            "template",
            template,
            "the tokenizer's own chat template, or data.chat_template; LLaMA-Factory's may differ "
            "in its system message",
        )
    if chats and packed is not None and packed.scalar:
        why = "" if neat is not None else "packed chats do not attend to each other here"
        draft.put("data.packing", packed, "packing", why=why)
    else:
        why = "a chat is a sample of its own" if chats else "text is always packed"
        draft.needless("packing", packed, why)
    # There it implies packing.
    if chats:
        draft.put("data.packing", neat, "neat_packing")
    else:
        draft.put("data.attend_across_documents", neat, "neat_packing", value=False)


def _memory(draft: Draft) -> None:
    """Convert attention, precision and recomputation."""
    attention = draft.pop("flash_attn")
    if attention is not None and attention.scalar in ("disabled", "sdpa"):
        ours = "eager" if attention.scalar == "disabled" else "sdpa"
        draft.put("model.attention", attention, "flash_attn", ours)
    else:
        draft.needless("flash_attn", attention, "model.attention chooses the fastest that works")
    draft.move("precision", "pure_bf16", "bf16", "weights and optimizer state are in 32 bits")
    draft.move("model.gradient_checkpointing", "disable_gradient_checkpointing", value=False)
    draft.assume("model.gradient_checkpointing", True, "LLaMA-Factory's default")


def _learned(draft: Draft) -> dict[str, str]:
    """Convert the choice of what counts in the loss of chats."""
    for key, part in (("train_on_prompt", "all"), ("mask_history", "last")):
        node = draft.pop(key)
        if node is not None:
            draft.needless(key, node, f"train_on: {part} of each source has it")
            return {"train_on": part}
    return {}


def _defaults(draft: Draft) -> None:
    draft.move("data.sequence_length", "cutoff_len")
    draft.assume("data.sequence_length", 2048, "LLaMA-Factory's default")
    trainer.defaults(draft, "LLaMA-Factory's")
