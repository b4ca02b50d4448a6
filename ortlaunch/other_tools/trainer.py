"""Convert the arguments of Hugging Face's Trainer and its examples (run_mlm, run_clm, run_glue).

LLaMA-Factory and Axolotl share most of them.
A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ortlaunch.model_tasks import MODEL_TASKS, ModelTask
from ortlaunch.other_tools import deepspeed, intervals, sharding, trl
from ortlaunch.other_tools.draft import Draft, in_one_line, null, number, tree_of
from ortlaunch.recipe.text.tree import Tree

# Trainer's name -> the recipe's, and how the meaning differs.
SCHEDULES = {
    "linear": ("linear", ""),
    "cosine": ("cosine", ""),
    "constant_with_warmup": ("constant", ""),
    "polynomial": ("polynomial", "it ends at 0, not at Trainer's lr_end"),
    "cosine_with_restarts": ("cosine", "one cosine to the end, without restarts"),
    "cosine_with_min_lr": ("cosine", ""),
    "warmup_stable_decay": ("wsd", "the decay's length is schedule.decay_ratio"),
}
_OTHER_SCALE = "torch's Muon with AdamW's scale of the rate; the tool has its own"
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_hf", "adamw"), ("adamw", "")),
    **dict.fromkeys(
        ("adamw_torch_fused", "adamw_ort_fused", "adamw_apex_fused"), ("fused_adam", "")
    ),
    "sgd": ("sgd", ""),
    "adafactor": ("adafactor", ""),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), ("adamw_8bit", "")),
    **dict.fromkeys(
        ("paged_adamw_8bit", "paged_adamw_bnb_8bit"), ("adamw_8bit", "with its state not paged")
    ),
    "muon": ("muon", _OTHER_SCALE),
}
# Trainer's defaults. Intervals of logs and checkpoints keep the recipe's defaults.
_DEFAULTS = {
    "optimizer.learning_rate": 5e-5,
    "batch.micro_size": 8,
    "batch.accumulation_steps": 1,
    "train.max_grad_norm": 1.0,
}
# Suffix of a data file -> format of the recipe.
FORMATS = {
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
}


def convert(draft: Draft) -> None:
    """Convert arguments of Trainer, with those of an example script or of TRL's SFTTrainer."""
    # First, because TRL's defaults must precede Trainer's.
    if trl.is_sft(draft):
        trl.convert(draft)
    _task(draft)
    model(draft)
    _data(draft)
    training(draft)
    defaults(draft, "Trainer's")


def training(draft: Draft) -> None:
    """Convert the arguments that all tools on top of Trainer share."""
    optimizer(draft, "optim")
    schedule(draft, "lr_scheduler_type")
    precision(draft)
    _clipping(draft)
    _recomputation(draft)
    compiled = draft.pop("torch_compile")
    if draft.recipe.find(("model", "offload_activations")) is not None:
        draft.drop("torch_compile", compiled, "engine eager alone has model.offload_activations")
    else:
        draft.put("engine.name", compiled, "torch_compile", "inductor")
    _grouping(draft)
    for key in ("use_cpu", "no_cuda"):
        draft.move("launch.device", key, "cpu")
    name(draft)
    trackers(draft)
    intervals.convert(draft)
    draft.leave_out(
        "log_level", "it is of Trainer's own lines; engine.log_level is of ONNX Runtime's"
    )
    config = draft.pop("deepspeed")
    if config is not None:
        deepspeed.beside(draft, config)
    sharding.fsdp(draft)
    _whole_states(draft)


def _whole_states(draft: Draft) -> None:
    """Replace an optimizer that updates whole tensors, or ZeRO, which splits them."""
    node = draft.recipe.find(("optimizer", "name"))
    if node is not None and node.scalar == "muon" and draft.expected("zero.stage"):
        draft.put(
            "zero.stage",
            node,
            "optimizer",
            0,
            "Muon updates whole tensors, so they are not sharded",
        )
    if node is not None and node.scalar == "adamw_8bit" and draft.expected("zero.stage"):
        draft.recipe = draft.recipe.put(("optimizer", "name"), tree_of("adamw", node))
        draft.alter("optimizer", node, "optimizer.name: adamw; ZeRO splits the tensors of 8 bits")


def _task(draft: Draft) -> None:
    # Tasks of run_glue and run_ner; all others classify sequences.
    of_glue = {
        "stsb": "sequence-regression",
        **dict.fromkeys(("ner", "pos", "chunk"), "token-classification"),
    }
    named = of_glue.get(str(draft.value("task_name")).lower(), "sequence-classification")
    for key, task in {
        "mlm_probability": "masked-lm",
        "block_size": "causal-lm",
        "task_name": named,
    }.items():
        if draft.value(key) is not None:
            return draft.assume("model.task", task, f"{key} is of that task's script")
    return None


def model(draft: Draft) -> None:
    """Convert the model, its tokenizer and its config."""
    source = draft.pop("model_name_or_path")
    tokenizer = draft.pop("tokenizer_name")
    kind, changes, revision = (
        draft.pop(key) for key in ("model_type", "config_overrides", "model_revision")
    )
    given = in_one_line(revision) if revision is not None else "main"
    pinned = f"{in_one_line(source)}@{given}" if source is not None and given != "main" else None
    draft.put("model.pretrained", source, "model_name_or_path", pinned)
    if tokenizer is not None:
        draft.put("data.tokenizer", tokenizer, "tokenizer_name")
    else:
        draft.put("data.tokenizer", source, "model_name_or_path", pinned)
    draft.needless("model_revision", revision, "model.pretrained has it")
    if source is None:
        draft.put("model.config.model_type", kind, "model_type")
    else:
        draft.needless("model_type", kind, "the pretrained model's config says it")
    if changes is not None:
        _config(draft, changes)


def _config(draft: Draft, node: Tree) -> None:
    """Convert run_clm's `config_overrides`, such as `n_embd=10,resid_pdrop=0.2`."""
    for pair in str(node.scalar).split(","):
        field, _, text = pair.partition("=")
        try:
            # Python's True and False in lower case are JSON's.
            value = json.loads(text.lower())
        except ValueError:
            value = text
        draft.put(f"model.config.{field.strip()}", node, f"config_overrides {field.strip()}", value)


def _data(draft: Draft) -> None:
    for key, part in (("train_file", "train"), ("validation_file", "evaluation")):
        node = draft.pop(key)
        if node is not None:
            files(draft, key, node, part)
    held_out(draft, "validation_split_percentage", 100)
    hub = draft.pop("dataset_name")
    subset = draft.pop("dataset_config_name")
    if hub is not None:
        draft.put("data.train", hub, "dataset_name", {"format": "hub", "name": hub.scalar})
    draft.put("data.train.subset", subset, "dataset_config_name")
    draft.drop(
        "line_by_line",
        draft.pop("line_by_line"),
        "text is cut into windows of data.sequence_length, not a sample a line",
    )


def files(draft: Draft, key: str, node: Tree, part: str) -> None:
    """Convert a data file, whose suffix determines the format."""
    form = FORMATS.get(Path(str(node.scalar)).suffix)
    if form is None:
        return draft.drop(
            key, node, f"its format is none of text, jsonl, csv and parquet; give data.{part}"
        )
    why = (
        "a file of one JSON array must become one of a row a line"
        if str(node.scalar).endswith(".json")
        else ""
    )
    return draft.put(f"data.{part}", node, key, {"format": form, "path": node.scalar}, why)


def held_out(draft: Draft, key: str, whole: int = 1) -> None:
    """Convert a part of the training data that is held out; below `whole` it is a share."""
    node = draft.pop(key)
    size = number(node)
    if not size:
        draft.needless(key, node, "nothing is held out by itself")
    else:
        part = {"share": size / whole} if size < whole else {"samples": round(size)}
        draft.put("data.evaluation", node, key, part)


def optimizer(draft: Draft, key: str) -> None:
    """Convert the optimizer's name, and Adam's betas."""
    node = draft.pop(key)
    if node is not None:
        ours, why = OPTIMIZERS.get(
            str(node.scalar).replace("OptimizerNames.", "").lower(), ("adamw", "")
        )
        if str(node.scalar).lower() not in OPTIMIZERS:
            # bitsandbytes' optimizers: the same algorithm with a quantized state.
            eight = re.search("8bit|4bit|paged", str(node.scalar))
            why = (
                "with its state in 32 bits"
                if eight
                else "another optimizer: there is none of that name here"
            )
        draft.put("optimizer.name", node, key, ours, why)
    draft.move("optimizer.name", "use_muon", "muon", _OTHER_SCALE)
    ratio = draft.pop("loraplus_lr_ratio")
    rate = number(draft.left.get("learning_rate")) or draft.expected("optimizer.learning_rate")
    if ratio is not None and rate:
        # LoRA+: the second matrix of each adapter learns faster.
        faster = [{"match": "*lora_B*", "learning_rate": rate * (number(ratio) or 1)}]
        draft.put("optimizer.groups", ratio, "loraplus_lr_ratio", faster)
    first = draft.pop("adam_beta1")
    second = draft.pop("adam_beta2")
    given = first or second
    if given is not None:
        betas = [usual if node is None else node for node, usual in ((first, 0.9), (second, 0.999))]
        draft.put("optimizer.betas", given, "adam_beta1, adam_beta2", betas)


def schedule(draft: Draft, key: str) -> None:
    """Convert decay and warm-up of the learning rate."""
    node = draft.pop(key)
    extra = draft.pop("lr_scheduler_kwargs")
    kind = str(node.scalar) if node is not None else "linear"
    ratio = draft.pop("warmup_ratio")
    steps = draft.pop("warmup_steps")
    _warmup(draft, kind, ratio, steps)
    if kind == "constant":
        draft.put("schedule.name", node, key)
    elif kind in SCHEDULES:
        ours, why = SCHEDULES[kind]
        draft.put("schedule.name", node, key, ours, why)
    else:
        draft.put(
            "schedule.name",
            node,
            key,
            "linear",
            "another schedule: there is none of that name here",
        )
    if extra is not None:
        _least(draft, extra)


def _warmup(draft: Draft, kind: str, ratio: Tree | None, steps: Tree | None) -> None:
    """Convert the warm-up; as in Trainer, steps take precedence over a ratio."""
    # In Trainer, steps below 1 are a ratio.
    value = number(steps)
    if steps is not None and value == 0:
        draft.needless("warmup_steps", steps, "there is none by itself")
        steps = None
    for key, node in (("warmup_steps", steps), ("warmup_ratio", ratio)):
        if kind == "constant":
            draft.needless(
                key,
                node,
                "of no effect there: Trainer's `constant` has no warm-up, whatever is given",
            )
        elif key == "warmup_ratio" and steps is not None:
            draft.needless(key, node, "of no effect there: warmup_steps comes first")
        elif key == "warmup_steps" and (value is None or value >= 1):
            draft.put(
                "schedule.warmup_steps",
                node,
                key,
                int(value) if value and float(value).is_integer() else None,
            )
        else:
            draft.put("schedule.warmup_ratio", node, key)


def _least(draft: Draft, extra: Tree) -> None:
    """Convert the minimum of a cosine, which Trainer gives as a rate or as a share of the rate."""
    least = number(extra.find(("min_lr",)))
    rate = number(draft.left.get("learning_rate"))
    rate = rate or draft.expected("optimizer.learning_rate") or _DEFAULTS["optimizer.learning_rate"]
    ratio = number(extra.find(("min_lr_rate",)))
    if ratio is None and least is not None:
        ratio = least / rate
    others = [
        str(name)
        for name in extra.children
        if ratio is None or name not in ("min_lr", "min_lr_rate")
    ]
    if ratio is not None:
        # Rounded, so that 5e-6 / 5e-5 is written as 0.1.
        draft.put("schedule.minimum_ratio", extra, "lr_scheduler_kwargs", round(ratio, 9))
    if others:
        draft.drop("lr_scheduler_kwargs", extra, f"of these, not {', '.join(others)}")


def precision(draft: Draft) -> None:
    """Convert bf16 or fp16, and the precision of float32 matmuls.

    In the other tool `auto` uses bf16 if the hardware has it.
    """
    for kind in ("bf16", "fp16"):
        why = "with auto, that tool would detect it" if draft.value(kind) == "auto" else ""
        draft.move("precision", kind, kind, why)
    exact = draft.pop("tf32")
    # tf32 affects only float32 matmuls, so not a training in bf16 or fp16.
    if draft.recipe.find(("precision",)) is None:
        draft.put("engine.matmul_precision", exact, "tf32", "high")
    else:
        draft.needless("tf32", exact, "products are in the precision of the passes")


def _clipping(draft: Draft) -> None:
    """Convert a maximal gradient norm of 0, which turns clipping off in Trainer."""
    if number(draft.left.get("max_grad_norm")) == 0:
        node = draft.left.pop("max_grad_norm")
        draft.put("train.max_grad_norm", node, "max_grad_norm", null(node))


def _recomputation(draft: Draft) -> None:
    """Convert gradient checkpointing with a name, such as Axolotl's `unsloth` and `offload`."""
    node = draft.left.get("gradient_checkpointing")
    if node is not None and isinstance(node.scalar, str) and node.scalar:
        draft.left.pop("gradient_checkpointing")
        draft.put(
            "model.gradient_checkpointing",
            node,
            "gradient_checkpointing",
            True,
            "layers are computed again, and nothing is offloaded",
        )


def offloading(draft: Draft, key: str) -> None:
    """Convert activations in host memory, which engine eager alone has."""
    node = draft.pop(key)
    if node is not None:
        # Another name chooses a way to copy, or a disk.
        why = "" if node.scalar is True else "in host memory, by copies that the step waits for"
        draft.put("model.offload_activations", node, key, True, why)
        draft.assume("engine.name", "eager", f"{key} requires it")


def _grouping(draft: Draft) -> None:
    """Convert batches of samples with similar length."""
    node = draft.pop("group_by_length")
    train = str(draft.expected("data.train"))
    traits = MODEL_TASKS.get(str(draft.expected("model.task")), ModelTask())
    chats = "messages_column" in train or "prompt_column" in train
    if not traits.label and not chats:
        # All windows have the same length.
        draft.needless("group_by_length", node, "samples are windows of text, without padding")
    elif draft.expected("engine.name") == "inductor":
        draft.drop(
            "group_by_length",
            node,
            "inductor compiles each length: give data.bucket_lengths, up to three",
        )
    else:
        draft.put(
            "data.padding",
            node,
            "group_by_length",
            "longest",
            "the samples of a step are grouped by length, not those of many steps",
        )


def name(draft: Draft) -> None:
    """Convert the run's name; the command determines its folder."""
    # The first key that gives a valid name wins.
    for key in ("run_name", "wandb_name", "output_dir"):
        node = draft.pop(key)
        fit = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(node.scalar)).name).strip("-._")[:100]
            if node is not None
            else ""
        )
        if node is not None and fit and draft.recipe.find(("name",)) is None:
            draft.put(
                "name",
                node,
                key,
                fit,
                "the run's folder is given by --run-dir" if key == "output_dir" else "",
            )
        else:
            draft.needless(key, node, "the run has a name, and --run-dir says its folder")


def trackers(draft: Draft) -> None:
    """Convert the trackers that ortlaunch has."""
    node = draft.pop("report_to")
    if node is None:
        return
    # `report_to` is one name or a list.
    asked = node.plain() if node.kind == "list" else [node.scalar]
    ours = [each for each in asked if each in ("tensorboard", "wandb", "mlflow")]
    others = [str(each) for each in asked if each not in (*ours, "none")]
    if ours:
        draft.put(
            "log.trackers",
            node,
            "report_to",
            ours,
            f"without {', '.join(others)}" if others else "",
        )
    elif others:
        draft.drop("report_to", node, "log.trackers has tensorboard, wandb, mlflow")
    else:
        draft.needless("report_to", node, "there are none by themselves")


def length(draft: Draft, epochs: float) -> None:
    """Convert the length of the training; as in Trainer, steps take precedence over epochs."""
    key = "num_epochs" if "num_epochs" in draft.left else "num_train_epochs"
    steps = draft.pop("max_steps")
    given = draft.pop(key)
    # Trainer's default is -1: no limit by steps.
    if steps is not None and (number(steps) or 0) > 0:
        draft.put("train.max_steps", steps, "max_steps")
        draft.needless(key, given, "of no effect there: max_steps comes first")
        return
    draft.needless("max_steps", steps, "it stands for none")
    if given is not None:
        draft.put("train.epochs", given, key)
    else:
        draft.assume("train.epochs", epochs, "the tool's default")


def defaults(draft: Draft, whose: str) -> None:
    """Set the tool's defaults for keys that the config lacks."""
    for path, value in _DEFAULTS.items():
        draft.assume(path, value, f"{whose} default")
    length(draft, 3)
