"""Convert the arguments of Hugging Face's Trainer and its examples (run_mlm, run_clm, run_glue, run_ner,
run_qa, run_summarization, run_translation).

LLaMA-Factory and Axolotl share most of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ortlaunch.importers import deepspeed, intervals, sharding, trl
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.renamed_keys import convert_config_by_rules
from ortlaunch.importers.rules import (
    OTHER_OPTIMIZER,
    OTHER_SCHEDULE,
    ConfigKey,
    Rule,
    Rules,
    assume,
    assume_defaults,
    drop,
    first_of,
    needless,
    put,
)
from ortlaunch.tables.model_tasks import MODEL_TASKS, ModelTask

# Trainer's name -> the recipe's, and how the meaning differs.
_SCHEDULES = {
    "linear": ("linear", ""),
    "cosine": ("cosine", ""),
    "constant": ("constant", ""),
    "constant_with_warmup": ("constant", ""),
    "polynomial": ("polynomial", "it ends at 0, not at Trainer's lr_end"),
    "cosine_with_restarts": ("cosine", "one cosine to the end, without restarts"),
    "cosine_with_min_lr": ("cosine", ""),
    "warmup_stable_decay": ("wsd", "the decay's length is schedule.decay_ratio"),
}
_NO_WARMUP = needless("of no effect there: Trainer's `constant` has no warm-up, whatever is given")
_MUON_SCALE_REMARK = "torch's Muon with AdamW's scale of the rate; the tool has its own"
_OPTIMIZERS = {
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
    "muon": ("muon", _MUON_SCALE_REMARK),
}
# Trainer's defaults. Intervals of logs and checkpoints keep the recipe's defaults.
DEFAULTS = {
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
# Tasks of run_glue and run_ner; all others classify sequences.
_TASKS = {
    "stsb": "sequence-regression",
    **dict.fromkeys(("ner", "pos", "chunk"), "token-classification"),
}


def convert_trainer_config(draft: Draft) -> None:
    """Convert arguments of Trainer, with those of an example script or of TRL's SFTTrainer."""
    # First, because TRL's defaults must precede Trainer's.
    sft_rules = trl.sft_rules_with_assumed_defaults(draft)
    _assume_task_by_script_keys(draft)
    data_rules = {name: rule for name, rule in _DATA_RULES.items() if name not in sft_rules}
    convert_with_shared_arguments(
        draft, {**sft_rules, **MODEL_RULES, **data_rules}, DEFAULTS, "Trainer's default", 3
    )


def convert_with_shared_arguments(
    draft: Draft, rules: Rules, defaults: Mapping[str, object], reason: str, default_epochs: float
) -> None:
    """Convert a config by a tool's own rules, and those of all tools on top of Trainer.

    Args:
        draft: the conversion.
        rules: the rules of the tool's own keys.
        defaults: the tool's defaults, by key of the recipe.
        reason: the reason for these defaults.
        default_epochs: the length of a training without a number of steps.
    """
    if (number_or_none(draft.config_value("max_steps")) or 0) <= 0:
        draft.assume_default("train.epochs", default_epochs, "the tool's default")
    assume_defaults(draft, defaults, reason)
    convert_config_by_rules(draft, {**rules, **_SHARED_RULES})


def _assume_task_by_script_keys(draft: Draft) -> None:
    task_name = _TASKS.get(str(draft.config_value("task_name")).lower(), "sequence-classification")
    task_by_key = {
        "mlm_probability": "masked-lm",
        "block_size": "causal-lm",
        "task_name": task_name,
        "doc_stride": "question-answering",
        "max_target_length": "seq2seq",
        "source_prefix": "seq2seq",
    }
    for key, task in task_by_key.items():
        if draft.config_value(key) is not None:
            draft.assume_default("model.task", task, f"{key} is of that task's script")


def _pretrained_model_and_tokenizer(key: ConfigKey) -> Rule:
    revision = key.sibling("model_revision") or "main"
    source = key.text if revision == "main" else f"{key.text}@{revision}"
    model_rule = put("model.pretrained", source)
    return (
        model_rule if key.sibling("tokenizer_name") else (model_rule, put("data.tokenizer", source))
    )


def _config_overrides(key: ConfigKey) -> Rule:
    """Convert run_clm's `config_overrides`, such as `n_embd=10,resid_pdrop=0.2`."""
    pairs = (pair.partition("=") for pair in str(key.value).split(","))
    return [put(f"model.config.{name.strip()}", _config_value(text)) for name, _, text in pairs]


def _config_value(value_text: str) -> object:
    try:
        # Python's True and False in lower case are JSON's.
        return json.loads(value_text.lower())
    except ValueError:
        return value_text


def _data_file(recipe_part: str, key: ConfigKey) -> Rule:
    """Convert a data file, whose suffix determines the format."""
    file_format = FORMATS.get(Path(key.text).suffix)
    if file_format is None:
        formats_text = "its format is none of text, jsonl, csv and parquet"
        return drop(f"{formats_text}; give data.{recipe_part}")
    array_remark = "a file of one JSON array must become one of a row a line"
    return put(
        f"data.{recipe_part}",
        {"format": file_format, "path": key.value},
        array_remark if key.text.endswith(".json") else "",
    )


def _column_of_both_parts(field: str, key: ConfigKey) -> Rule:
    """Convert a setting of the rows, which those of the evaluation share."""
    parts = ("train", "evaluation") if key.sibling("validation_file") else ("train",)
    return [put(f"data.{part}.{field}") for part in parts]


def _constant_of_evaluation(value: int, key: ConfigKey) -> Rule:
    """Convert a setting of run_qa that has one value here."""
    if key.numeric_value == value:
        return needless("it is the same here")
    return drop(f"it is {value} here")


def _longest_written_text(key: ConfigKey) -> Rule:
    lengths = (key.sibling(f"{prefix}max_target_length") for prefix in ("val_", ""))
    # The scripts' default.
    return put("train.generate.max_new_tokens", next(filter(None, lengths), 128))


def held_out_data(key: ConfigKey, whole_data_value: int = 1) -> Rule:
    """Convert held out training data; below `whole_data_value` it is a share."""
    if not key.numeric_value:
        return needless("nothing is held out by itself")
    is_share = key.numeric_value < whole_data_value
    share = {"share": key.numeric_value / whole_data_value}
    return put("data.evaluation", share if is_share else {"samples": round(key.numeric_value)})


def optimizer_name(key: ConfigKey) -> Rule:
    """Convert an optimizer's name."""
    name = key.text.replace("OptimizerNames.", "").lower()
    # bitsandbytes' optimizers: the same algorithm with a quantized state.
    is_quantized = re.search("8bit|4bit|paged", name)
    other_optimizer = ("adamw", "with its state in 32 bits" if is_quantized else OTHER_OPTIMIZER)
    return put("optimizer.name", *_OPTIMIZERS.get(name, other_optimizer))


def schedule_name(key: ConfigKey) -> Rule:
    """Convert the name of a schedule of the learning rate."""
    return put("schedule.name", *_SCHEDULES.get(key.text, ("linear", OTHER_SCHEDULE)))


def _learning_rate(key: ConfigKey) -> float | None:
    rate = number_or_none(key.sibling("learning_rate"))
    return rate or number_or_none(key.recipe_value("optimizer.learning_rate"))


def _lora_plus_groups(key: ConfigKey) -> Rule | None:
    """Convert LoRA+: the second matrix of each adapter learns faster."""
    rate = _learning_rate(key)
    if not rate:
        return None
    group = {"match": "*lora_B*", "learning_rate": rate * (key.numeric_value or 1)}
    return put("optimizer.groups", [group])


def _adam_betas(key: ConfigKey) -> Rule:
    beta1, beta2 = key.sibling("adam_beta1"), key.sibling("adam_beta2")
    betas = [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2]
    return put("optimizer.betas", betas)


def _has_constant_schedule(key: ConfigKey) -> bool:
    return "constant" in (key.sibling("lr_scheduler"), key.sibling("lr_scheduler_type"))


def _has_equal_lengths(key: ConfigKey) -> bool:
    """Return whether the samples are windows of text, not chats or texts with labels."""
    source_text = str(key.recipe_value("data.train"))
    traits = MODEL_TASKS.get(str(key.recipe_value("model.task")), ModelTask())
    has_chats = "messages_column" in source_text or "prompt_column" in source_text
    return not traits.label and not has_chats


def _minimum_learning_rate(key: ConfigKey) -> Rule:
    """Convert the minimum of a cosine, which Trainer gives as a rate or as a share of the rate."""
    minimum_rate = number_or_none(key.child("min_lr"))
    minimum_ratio = number_or_none(key.child("min_lr_rate"))
    if minimum_ratio is None and minimum_rate is not None:
        minimum_ratio = minimum_rate / (_learning_rate(key) or DEFAULTS["optimizer.learning_rate"])
    other_names = {*key.child_keys()}
    if minimum_ratio is not None:
        other_names -= {"min_lr", "min_lr_rate"}
    other_rules = [drop(f"of these, not {', '.join(sorted(other_names))}")] if other_names else []
    # Rounded, so that 5e-6 / 5e-5 is written as 0.1.
    return (
        other_rules
        if minimum_ratio is None
        else [put("schedule.minimum_ratio", round(minimum_ratio, 9)), *other_rules]
    )


def _precision_rule(key: ConfigKey) -> Rule:
    # In the other tool `auto` uses bf16 if the hardware has it.
    return put(
        "precision",
        key.name,
        "with auto, that tool would detect it" if key.value == "auto" else "",
    )


def offload_activations(key: ConfigKey) -> Rule:
    """Return the rule of activations in host memory, which engine eager alone has."""
    # Another name chooses a way to copy, or a disk.
    remark = "" if key.value is True else "in host memory, by copies that the step waits for"
    return (
        put("model.offload_activations", True, remark),
        assume("engine.name", "eager", f"{key.path} requires it"),
    )


def _run_name(key: ConfigKey) -> Rule:
    """Convert the run's name; the command determines its folder."""
    valid_name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(key.value)).name).strip("-._")[:100]
    if not valid_name or key.draft.recipe_tree.find_subtree(("name",)) is not None:
        return needless("the run has a name, and --run-dir says its folder")
    is_folder = key.path == "output_dir"
    return put("name", valid_name, "the run's folder is given by --run-dir" if is_folder else "")


def _trackers_rule(key: ConfigKey) -> Rule:
    known_names = [name for name in key.items if name in ("tensorboard", "wandb", "mlflow")]
    other_names = [str(name) for name in key.items if name not in (*known_names, "none")]
    if known_names:
        remark = f"without {', '.join(other_names)}" if other_names else ""
        return put("log.trackers", known_names, remark)
    if other_names:
        return drop("log.trackers has tensorboard, wandb, mlflow")
    return needless("there are none by themselves")


def _is_length_in_steps(key: ConfigKey) -> bool:
    # Trainer's default is -1: no limit by steps.
    return (number_or_none(key.sibling("max_steps")) or 0) > 0


MODEL_RULES: Rules = {
    "model_name_or_path": _pretrained_model_and_tokenizer,
    "tokenizer_name": put("data.tokenizer"),
    "model_revision": needless("model.pretrained has it"),
    "model_type": lambda key: (
        needless("the pretrained model's config says it")
        if key.sibling("model_name_or_path")
        else put("model.config.model_type")
    ),
    "config_overrides": _config_overrides,
}
_DATA_RULES: Rules = {
    "train_file": partial(_data_file, "train"),
    "validation_file": partial(_data_file, "evaluation"),
    "validation_split_percentage": partial(held_out_data, whole_data_value=100),
    "dataset_name": lambda key: put("data.train", {"format": "hub", "name": key.value}),
    "dataset_config_name": put("data.train.subset"),
    "doc_stride": put("data.stride"),
    "version_2_with_negative": needless("rows without answers show it"),
    "n_best_size": partial(_constant_of_evaluation, 20),
    "max_answer_length": partial(_constant_of_evaluation, 30),
    "null_score_diff_threshold": partial(_constant_of_evaluation, 0),
    "text_column": partial(_column_of_both_parts, "text_column"),
    "summary_column": partial(_column_of_both_parts, "target_column"),
    "source_prefix": partial(_column_of_both_parts, "source_prefix"),
    "max_source_length": put("data.sequence_length"),
    "max_target_length": lambda key: (
        put("data.target_length"),
        assume("data.cut_long", True, "the scripts cut longer texts"),
    ),
    "val_max_target_length": needless("train.generate has it, where the model writes"),
    "predict_with_generate": _longest_written_text,
    "num_beams": first_of(
        (lambda key: key.sibling("predict_with_generate"), put("train.generate.beams")),
        otherwise=needless("of no effect there without predict_with_generate"),
    ),
    "line_by_line": drop("text is cut into windows of data.sequence_length, not a sample a line"),
}
# The first key that gives a valid name wins.
RUN_NAME_RULES: Rules = dict.fromkeys(("run_name", "wandb_name", "output_dir"), _run_name)
_SHARED_RULES: Rules = {
    "optim": optimizer_name,
    "use_muon": put("optimizer.name", "muon", _MUON_SCALE_REMARK),
    "loraplus_lr_ratio": _lora_plus_groups,
    "adam_beta1": _adam_betas,
    "adam_beta2": first_of(
        (
            lambda key: key.sibling("adam_beta1") is not None,
            needless("optimizer.betas has it"),
        ),
        otherwise=_adam_betas,
    ),
    # As in Trainer, steps take precedence over a ratio, and steps below 1 are a ratio.
    "warmup_steps": first_of(
        (lambda key: key.numeric_value == 0, needless("there is none by itself")),
        (_has_constant_schedule, _NO_WARMUP),
        (lambda key: (key.numeric_value or 1) < 1, put("schedule.warmup_ratio")),
        (lambda key: key.numeric_value, lambda key: put("schedule.warmup_steps", key.whole_number)),
        otherwise=put("schedule.warmup_steps"),
    ),
    "warmup_ratio": first_of(
        (_has_constant_schedule, _NO_WARMUP),
        (
            lambda key: key.sibling("warmup_steps"),
            needless("of no effect there: warmup_steps comes first"),
        ),
        otherwise=put("schedule.warmup_ratio"),
    ),
    "lr_scheduler_type": schedule_name,
    "lr_scheduler_kwargs": _minimum_learning_rate,
    "bf16": _precision_rule,
    "fp16": _precision_rule,
    # It affects only float32 matmuls, so not a training in bf16 or fp16.
    "tf32": first_of(
        (
            lambda key: key.is_set("precision"),
            needless("products are in the precision of the passes"),
        ),
        otherwise=put("engine.matmul_precision", "high"),
    ),
    # 0 turns clipping off.
    "max_grad_norm": lambda key: (
        put("train.max_grad_norm", None) if key.numeric_value == 0 else None
    ),
    # With a name, such as Axolotl's `unsloth` and `offload`.
    "gradient_checkpointing": first_of(
        (
            lambda key: isinstance(key.value, str),
            put(
                "model.gradient_checkpointing",
                True,
                "layers are computed again, and nothing is offloaded",
            ),
        ),
        otherwise=None,
    ),
    "torch_compile": first_of(
        (
            lambda key: key.is_set("model.offload_activations"),
            drop("engine eager alone has model.offload_activations"),
        ),
        otherwise=put("engine.name", "inductor"),
    ),
    "group_by_length": first_of(
        (_has_equal_lengths, needless("samples are windows of text, without padding")),
        (
            lambda key: key.recipe_value("engine.name") == "inductor",
            drop("inductor compiles each length: give data.bucket_lengths, up to three"),
        ),
        otherwise=put(
            "data.padding",
            "longest",
            "the samples of a step are grouped by length, not those of many steps",
        ),
    ),
    "use_cpu": put("launch.device", "cpu"),
    "no_cuda": put("launch.device", "cpu"),
    **RUN_NAME_RULES,
    "report_to": _trackers_rule,
    **intervals.RULES,
    "log_level": needless("it is of Trainer's own lines; engine.log_level is of ONNX Runtime's"),
    "deepspeed": deepspeed.deepspeed_file_or_mapping,
    **sharding.FSDP_RULES,
    "max_steps": first_of(
        (_is_length_in_steps, put("train.max_steps")), otherwise=needless("it stands for none")
    ),
    **dict.fromkeys(
        ("num_epochs", "num_train_epochs"),
        first_of(
            (_is_length_in_steps, needless("of no effect there: max_steps comes first")),
            otherwise=put("train.epochs"),
        ),
    ),
}
