"""Convert torchtune's YAML: a component for each part, with its arguments.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from ortlaunch.errors import InputError
from ortlaunch.other_tools import sharding, trainer
from ortlaunch.other_tools.draft import Draft, in_one_line, is_empty, number, refused
from ortlaunch.recipe.text.tree import Tree

_COMPONENT = "_component_"
# Parts of a training that ortlaunch does not have.
_REFUSED = {
    "teacher_model": "there is no distillation here",
    "ref_checkpointer": "there is no preference training here",
    "reward_functions": "there is no reinforcement learning here",
    "reward_and_value_model": "there is no reinforcement learning here",
}
_NO_TRAINING = "the config has no data set and no optimizer: it describes no training"
_IMAGES = "images beside text cannot be trained here"
# torchtune's names of layers -> transformers'.
_LAYERS = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
# A component of a data set -> its name on the hub, and fields of the source. torchtune learns the
# prompts of the first two, too.
_ALPACA: dict[str, object] = {"prompt": "alpaca", "train_on": "all"}
_DATASETS: dict[str, tuple[str | None, dict[str, object]]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", _ALPACA),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", _ALPACA),
    "chat_dataset": (None, {"messages_column": "messages"}),
    "text_completion_dataset": (None, {"text_column": "text"}),
}
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "adamw",
}
_SETTINGS = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "epsilon", "betas": "betas"}  # fmt: skip


def convert(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it is no supervised training of text.
    """
    draft.refuse(_REFUSED)
    data = draft.pop("dataset")
    if data is None or "optimizer" not in draft.left:
        raise InputError(f"{draft.recipe.place.source}: {_NO_TRAINING}")
    draft.assume("model.task", "causal-lm", "torchtune trains no other")
    _model(draft)
    for key, node in (("dataset", data), ("dataset_val", draft.pop("dataset_val"))):
        if node is not None:
            _dataset(draft, key, node)
    _tokenizer(draft)
    _optimizer(draft)
    _schedule(draft)
    _engine(draft)
    _sharding(draft)
    trainer.name(draft)
    _length(draft)
    loss = draft.left.get("loss")
    if loss is not None and "rlhf" in in_one_line(loss):
        raise refused("loss", loss, _REFUSED["ref_checkpointer"])
    draft.assume("batch.accumulation_steps", 1, "torchtune's default")


def _length(draft: Draft) -> None:
    size = draft.pop("batch_size")
    epochs = draft.pop("epochs")
    most = draft.pop("max_steps_per_epoch")
    draft.put("batch.micro_size", size, "batch_size")
    if most is not None:
        steps = int((number(most) or 1) * (number(epochs) or 1))
        draft.put("train.max_steps", most, "max_steps_per_epoch", steps)
        draft.needless("epochs", epochs, "train.max_steps has it")
    else:
        draft.put("train.epochs", epochs, "epochs")
    draft.move("model.lora.merge", "save_adapter_weights_only", value=False)


def _parts(draft: Draft, key: str) -> tuple[str, dict[str, Tree]]:
    """Remove a section; return its component's name, and its other settings that are not empty."""
    node = draft.pop(key)
    children = dict(node.children) if node is not None else {}
    component = children.pop(_COMPONENT, None)
    given = {str(name): child for name, child in children.items() if not is_empty(child)}
    return "" if component is None else in_one_line(component), given


def _drop(draft: Draft, key: str, left: dict[str, Tree]) -> None:
    for name, node in left.items():
        draft.drop(f"{key}.{name}", node, "no counterpart")


def _model(draft: Draft) -> None:
    """Convert the weights' folder, and the adapters among the model's arguments."""
    _, files = _parts(draft, "checkpointer")
    component, given = _parts(draft, "model")
    folder = files.get("checkpoint_dir")
    if "vision" in component:
        raise InputError(f"{draft.recipe.place}: model: {component}: {_IMAGES}")
    draft.put("model.pretrained", folder, "checkpointer.checkpoint_dir")
    draft.put("data.tokenizer", folder, "checkpointer.checkpoint_dir")
    kept = files.get("keep_last_n_checkpoints")
    draft.put("checkpoint.keep", kept, "checkpointer.keep_last_n_checkpoints")
    layers = given.pop("lora_attn_modules", None)
    if layers is not None:
        names = [_LAYERS.get(each, each) for each in layers.plain()]
        names += _MLP if given.pop("apply_lora_to_mlp", None) else ()
        names += ["lm_head"] if given.pop("apply_lora_to_output", None) else []
        draft.put("model.lora.target_modules", layers, "model.lora_attn_modules", names)
        for key, ours in (("rank", "r"), ("alpha", "alpha"), ("dropout", "dropout")):
            draft.put(f"model.lora.{ours}", given.pop(f"lora_{key}", None), f"model.lora_{key}")
        if ".qlora_" in component:
            draft.drop(f"model.{_COMPONENT}", layers, "the base weights are not quantized")
    _drop(draft, "model", given)


def _dataset(draft: Draft, key: str, node: Tree) -> None:
    """Convert a data set: a component of torchtune, with its arguments."""
    given = {str(name): child for name, child in node.children.items() if not is_empty(child)}
    component = in_one_line(given.pop(_COMPONENT, node)).rpartition(".")[2]
    hub, fields = _DATASETS.get(component, (None, {}))
    name = in_one_line(given.pop("source")) if "source" in given else hub
    if component not in _DATASETS or name is None:
        raise refused(key, node, "its component is none of " + ", ".join(_DATASETS))
    packed = given.pop("packed", None)
    split = given.pop("split", None)
    files = given.pop("data_files", None)
    source: dict[str, object] = {"format": "hub", "name": name, **fields}
    source |= {"split": in_one_line(split)} if split is not None else {}
    source |= {"files": [in_one_line(files)]} if files is not None else {}
    why = (
        "" if "text_column" in fields else "torchtune writes the model's marks of a chat around it"
    )
    draft.put("data.train" if key == "dataset" else "data.evaluation", node, key, source, why)
    if packed is not None and "text_column" in fields:
        draft.needless(f"{key}.packed", packed, "text is always packed")
    elif packed is not None and key == "dataset":
        draft.put("data.packing", packed, "dataset.packed")
    _drop(draft, key, given)


def _tokenizer(draft: Draft) -> None:
    _, given = _parts(draft, "tokenizer")
    draft.put("data.sequence_length", given.pop("max_seq_len", None), "tokenizer.max_seq_len")
    draft.assume(
        "data.sequence_length", 2048, "torchtune cuts nothing by itself; longer samples are cut"
    )
    # Files of the folder of weights, which has the same tokenizer in transformers' form.
    for name, node in given.items():
        if re.search("path|file", name) and Path(in_one_line(node)).name:
            draft.needless(f"tokenizer.{name}", node, "data.tokenizer is the folder of the weights")
        else:
            draft.drop(f"tokenizer.{name}", node, "no counterpart")


def _optimizer(draft: Draft) -> None:
    node = draft.left["optimizer"]
    component, given = _parts(draft, "optimizer")
    ours = _OPTIMIZERS.get(component)
    fused = given.pop("fused", None)
    why = "" if ours else "another optimizer: there is none of that name here"
    why = "with its state not paged" if "Paged" in component else why
    chosen = "fused_adam" if fused is not None and ours == "adamw" else ours or "adamw"
    draft.put("optimizer.name", node, f"optimizer.{_COMPONENT}", chosen, why)
    for theirs, field in _SETTINGS.items():
        draft.put(f"optimizer.{field}", given.pop(theirs, None), f"optimizer.{theirs}")
    _drop(draft, "optimizer", given)


def _schedule(draft: Draft) -> None:
    node = draft.left.get("lr_scheduler")
    component, given = _parts(draft, "lr_scheduler")
    if node is None or not component:
        return draft.assume("schedule.name", "constant", "torchtune's default")
    ours = "cosine" if "cosine" in component else "linear"
    why = "" if ours == "cosine" else "another schedule: there is none of that name here"
    draft.put("schedule.name", node, f"lr_scheduler.{_COMPONENT}", ours, why)
    draft.put(
        "schedule.warmup_steps",
        given.pop("num_warmup_steps", None),
        "lr_scheduler.num_warmup_steps",
    )
    return _drop(draft, "lr_scheduler", given)


def _engine(draft: Draft) -> None:
    """Convert precision, compiler, memory and logs."""
    draft.move("precision", "dtype")
    trainer.offloading(draft, "enable_activation_offloading")
    draft.move("engine.name", "compile", "inductor")
    where, given = _parts(draft, "metric_logger")
    tracker = next((each for each in ("wandb", "tensorboard") if each in where.lower()), None)
    if tracker is not None:
        draft.assume("log.trackers", [tracker], where)
    draft.put("log.project", given.pop("project", None), "metric_logger.project")
    profiler = draft.pop("profiler")
    if profiler is not None:
        enabled = profiler.find(("enabled",))
        on = enabled is not None and not is_empty(enabled)
        (draft.drop if on else draft.needless)("profiler", profiler, "log.profile_steps profiles")
    draft.drop("quantizer", draft.pop("quantizer"), "there is no quantized training")


def _sharding(draft: Draft) -> None:
    moved = draft.pop("fsdp_cpu_offload")
    layers = draft.pop("custom_sharded_layers")
    if moved is not None or layers is not None:
        sharding.shard(draft, 3, "torchtune's FSDP")
    if moved is not None:
        offload = {"optimizer": "cpu", "parameters": "cpu"}
        draft.put("zero.offload", moved, "fsdp_cpu_offload", offload)
    draft.needless("custom_sharded_layers", layers, "zero.stage 3 shards all layers")
    plan = draft.pop("tensor_parallel_plan")
    if draft.value("tensor_parallel_dim") in (None, 1):
        draft.needless("tensor_parallel_plan", plan, "tensor_parallel_dim is 1: no parallelism")
    else:
        draft.drop("tensor_parallel_plan", plan, "there is no tensor parallelism")
    fsdp = draft.pop("fsdp")
    if fsdp is not None and fsdp.plain() == {"cpu_offload": False}:
        draft.needless("fsdp", fsdp, "nothing is offloaded by itself")
    else:
        draft.drop("fsdp", fsdp, "give zero.offload")
