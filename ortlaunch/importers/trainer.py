"""Convert the arguments of Hugging Face's Trainer and its examples (run_mlm, run_clm, run_glue).

LLaMA-Factory and Axolotl share most of them.
A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ortlaunch.importers import deepspeed, intervals, sharding, trl
from ortlaunch.importers.draft import (
    Draft,
    null_at_node,
    number_of_node,
    one_line_text,
    recipe_value_tree_located_at_node,
)
from ortlaunch.importers.rules import (
    ConfigKey,
    Rule,
    Rules,
    assume,
    convert_keys_by_rules,
    needless,
    put,
)
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.tables.model_tasks import MODEL_TASKS, ModelTask

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
_MUON_SCALE_REMARK = "torch's Muon with AdamW's scale of the rate; the tool has its own"
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
    "muon": ("muon", _MUON_SCALE_REMARK),
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


def convert_trainer_config(draft: Draft) -> None:
    """Convert arguments of Trainer, with those of an example script or of TRL's SFTTrainer."""
    # First, because TRL's defaults must precede Trainer's.
    if trl.is_sft_config_refusing_other_trl_trainers(draft):
        trl.convert_sft_keys(draft)
    _assume_task_by_script_keys(draft)
    convert_model_tokenizer_and_config(draft)
    _convert_data_files_or_hub_set(draft)
    convert_shared_trainer_arguments(draft)
    assume_defaults(draft, "Trainer's")


def convert_shared_trainer_arguments(draft: Draft) -> None:
    """Convert the arguments that all tools on top of Trainer share."""
    convert_optimizer_name_betas_and_lora_plus_ratio(draft, "optim")
    convert_schedule_and_warmup(draft, "lr_scheduler_type")
    convert_precision_and_tf32(draft)
    _convert_zero_gradient_norm_to_null(draft)
    _convert_named_gradient_checkpointing(draft)
    compile_node = draft.take_key("torch_compile")
    if draft.recipe_tree.find_subtree(("model", "offload_activations")) is not None:
        draft.report_dropped(
            "torch_compile", compile_node, "engine eager alone has model.offload_activations"
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            "engine.name", compile_node, "torch_compile", "inductor"
        )
    _convert_grouping_by_length_to_longest_padding(draft)
    for key in ("use_cpu", "no_cuda"):
        draft.set_recipe_key_from_config_key_if_present("launch.device", key, "cpu")
    convert_keys_by_rules(draft, RUN_NAME_RULES)
    convert_known_trackers(draft)
    intervals.convert_evaluation_save_and_log_intervals(draft)
    draft.report_if_needless(
        "log_level", "it is of Trainer's own lines; engine.log_level is of ONNX Runtime's"
    )
    convert_keys_by_rules(
        draft, {"deepspeed": deepspeed.deepspeed_file_or_mapping, **sharding.FSDP_RULES}
    )
    _disable_zero_for_muon_and_8bit_state_for_zero(draft)


def _disable_zero_for_muon_and_8bit_state_for_zero(draft: Draft) -> None:
    """Replace an optimizer that updates whole tensors, or ZeRO, which splits them."""
    node = draft.recipe_tree.find_subtree(("optimizer", "name"))
    if (
        node is not None
        and node.scalar == "muon"
        and draft.expected_recipe_value_or_none("zero.stage")
    ):
        draft.set_recipe_key_unless_set_and_report(
            "zero.stage",
            node,
            "optimizer",
            0,
            "Muon updates whole tensors, so they are not sharded",
        )
    if (
        node is not None
        and node.scalar == "adamw_8bit"
        and draft.expected_recipe_value_or_none("zero.stage")
    ):
        draft.recipe_tree = draft.recipe_tree.copy_with_subtree(
            ("optimizer", "name"), recipe_value_tree_located_at_node("adamw", node)
        )
        draft.report_altered(
            "optimizer", node, "optimizer.name: adamw; ZeRO splits the tensors of 8 bits"
        )


def _assume_task_by_script_keys(draft: Draft) -> None:
    # Tasks of run_glue and run_ner; all others classify sequences.
    task_by_dataset = {
        "stsb": "sequence-regression",
        **dict.fromkeys(("ner", "pos", "chunk"), "token-classification"),
    }
    named_task = task_by_dataset.get(
        str(draft.config_value("task_name")).lower(), "sequence-classification"
    )
    for key, task_name in {
        "mlm_probability": "masked-lm",
        "block_size": "causal-lm",
        "task_name": named_task,
    }.items():
        if draft.config_value(key) is not None:
            return draft.assume_default("model.task", task_name, f"{key} is of that task's script")
    return None


def convert_model_tokenizer_and_config(draft: Draft) -> None:
    """Convert the model, its tokenizer and its config."""
    model_node = draft.take_key("model_name_or_path")
    tokenizer_node = draft.take_key("tokenizer_name")
    type_node, overrides_node, revision_node = (
        draft.take_key(key) for key in ("model_type", "config_overrides", "model_revision")
    )
    revision_name = one_line_text(revision_node) if revision_node is not None else "main"
    pinned_source = (
        f"{one_line_text(model_node)}@{revision_name}"
        if model_node is not None and revision_name != "main"
        else None
    )
    draft.set_recipe_key_unless_set_and_report(
        "model.pretrained", model_node, "model_name_or_path", pinned_source
    )
    if tokenizer_node is not None:
        draft.set_recipe_key_unless_set_and_report(
            "data.tokenizer", tokenizer_node, "tokenizer_name"
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            "data.tokenizer", model_node, "model_name_or_path", pinned_source
        )
    draft.report_needless("model_revision", revision_node, "model.pretrained has it")
    if model_node is None:
        draft.set_recipe_key_unless_set_and_report(
            "model.config.model_type", type_node, "model_type"
        )
    else:
        draft.report_needless("model_type", type_node, "the pretrained model's config says it")
    if overrides_node is not None:
        _convert_config_overrides(draft, overrides_node)


def _convert_config_overrides(draft: Draft, overrides_node: Tree) -> None:
    """Convert run_clm's `config_overrides`, such as `n_embd=10,resid_pdrop=0.2`."""
    for pair in str(overrides_node.scalar).split(","):
        field_name, _, value_text = pair.partition("=")
        try:
            # Python's True and False in lower case are JSON's.
            value = json.loads(value_text.lower())
        except ValueError:
            value = value_text
        draft.set_recipe_key_unless_set_and_report(
            f"model.config.{field_name.strip()}",
            overrides_node,
            f"config_overrides {field_name.strip()}",
            value,
        )


def _convert_data_files_or_hub_set(draft: Draft) -> None:
    for key, recipe_part in (("train_file", "train"), ("validation_file", "evaluation")):
        node = draft.take_key(key)
        if node is not None:
            set_data_file_by_suffix_or_report_dropped(draft, key, node, recipe_part)
    convert_held_out_share_or_samples(draft, "validation_split_percentage", 100)
    hub_node = draft.take_key("dataset_name")
    subset_node = draft.take_key("dataset_config_name")
    if hub_node is not None:
        draft.set_recipe_key_unless_set_and_report(
            "data.train", hub_node, "dataset_name", {"format": "hub", "name": hub_node.scalar}
        )
    draft.set_recipe_key_unless_set_and_report(
        "data.train.subset", subset_node, "dataset_config_name"
    )
    draft.report_dropped(
        "line_by_line",
        draft.take_key("line_by_line"),
        "text is cut into windows of data.sequence_length, not a sample a line",
    )


def set_data_file_by_suffix_or_report_dropped(
    draft: Draft, config_key: str, file_name_node: Tree, recipe_part: str
) -> None:
    """Convert a data file, whose suffix determines the format."""
    file_format = FORMATS.get(Path(str(file_name_node.scalar)).suffix)
    if file_format is None:
        return draft.report_dropped(
            config_key,
            file_name_node,
            f"its format is none of text, jsonl, csv and parquet; give data.{recipe_part}",
        )
    remark = (
        "a file of one JSON array must become one of a row a line"
        if str(file_name_node.scalar).endswith(".json")
        else ""
    )
    return draft.set_recipe_key_unless_set_and_report(
        f"data.{recipe_part}",
        file_name_node,
        config_key,
        {"format": file_format, "path": file_name_node.scalar},
        remark,
    )


def convert_held_out_share_or_samples(
    draft: Draft, config_key: str, whole_data_value: int = 1
) -> None:
    """Convert a part of the training data that is held out; below `whole_data_value` it is a share."""
    node = draft.take_key(config_key)
    held_out_size = number_of_node(node)
    if not held_out_size:
        draft.report_needless(config_key, node, "nothing is held out by itself")
    else:
        evaluation_part = (
            {"share": held_out_size / whole_data_value}
            if held_out_size < whole_data_value
            else {"samples": round(held_out_size)}
        )
        draft.set_recipe_key_unless_set_and_report(
            "data.evaluation", node, config_key, evaluation_part
        )


def convert_optimizer_name_betas_and_lora_plus_ratio(draft: Draft, config_key: str) -> None:
    """Convert the optimizer's name, and Adam's betas."""
    node = draft.take_key(config_key)
    if node is not None:
        recipe_optimizer, remark = OPTIMIZERS.get(
            str(node.scalar).replace("OptimizerNames.", "").lower(), ("adamw", "")
        )
        if str(node.scalar).lower() not in OPTIMIZERS:
            # bitsandbytes' optimizers: the same algorithm with a quantized state.
            has_quantized_state = re.search("8bit|4bit|paged", str(node.scalar))
            remark = (
                "with its state in 32 bits"
                if has_quantized_state
                else "another optimizer: there is none of that name here"
            )
        draft.set_recipe_key_unless_set_and_report(
            "optimizer.name", node, config_key, recipe_optimizer, remark
        )
    draft.set_recipe_key_from_config_key_if_present(
        "optimizer.name", "use_muon", "muon", _MUON_SCALE_REMARK
    )
    ratio_node = draft.take_key("loraplus_lr_ratio")
    learning_rate = number_of_node(
        draft.unconverted.get("learning_rate")
    ) or draft.expected_recipe_value_or_none("optimizer.learning_rate")
    if ratio_node is not None and learning_rate:
        # LoRA+: the second matrix of each adapter learns faster.
        optimizer_groups = [
            {
                "match": "*lora_B*",
                "learning_rate": learning_rate * (number_of_node(ratio_node) or 1),
            }
        ]
        draft.set_recipe_key_unless_set_and_report(
            "optimizer.groups", ratio_node, "loraplus_lr_ratio", optimizer_groups
        )
    beta1_node = draft.take_key("adam_beta1")
    beta2_node = draft.take_key("adam_beta2")
    beta_node = beta1_node or beta2_node
    if beta_node is not None:
        betas = [
            default_beta if node is None else node
            for node, default_beta in ((beta1_node, 0.9), (beta2_node, 0.999))
        ]
        draft.set_recipe_key_unless_set_and_report(
            "optimizer.betas", beta_node, "adam_beta1, adam_beta2", betas
        )


def convert_schedule_and_warmup(draft: Draft, config_key: str) -> None:
    """Convert decay and warm-up of the learning rate."""
    node = draft.take_key(config_key)
    kwargs_node = draft.take_key("lr_scheduler_kwargs")
    schedule_type = str(node.scalar) if node is not None else "linear"
    ratio_node = draft.take_key("warmup_ratio")
    steps_node = draft.take_key("warmup_steps")
    _convert_warmup_steps_or_ratio(draft, schedule_type, ratio_node, steps_node)
    if schedule_type == "constant":
        draft.set_recipe_key_unless_set_and_report("schedule.name", node, config_key)
    elif schedule_type in SCHEDULES:
        recipe_schedule, remark = SCHEDULES[schedule_type]
        draft.set_recipe_key_unless_set_and_report(
            "schedule.name", node, config_key, recipe_schedule, remark
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            "schedule.name",
            node,
            config_key,
            "linear",
            "another schedule: there is none of that name here",
        )
    if kwargs_node is not None:
        _convert_minimum_learning_rate(draft, kwargs_node)


def _convert_warmup_steps_or_ratio(
    draft: Draft, schedule_type: str, ratio_node: Tree | None, steps_node: Tree | None
) -> None:
    """Convert the warm-up; as in Trainer, steps take precedence over a ratio."""
    # In Trainer, steps below 1 are a ratio.
    step_count = number_of_node(steps_node)
    if steps_node is not None and step_count == 0:
        draft.report_needless("warmup_steps", steps_node, "there is none by itself")
        steps_node = None
    for config_key, node in (("warmup_steps", steps_node), ("warmup_ratio", ratio_node)):
        if schedule_type == "constant":
            draft.report_needless(
                config_key,
                node,
                "of no effect there: Trainer's `constant` has no warm-up, whatever is given",
            )
        elif config_key == "warmup_ratio" and steps_node is not None:
            draft.report_needless(config_key, node, "of no effect there: warmup_steps comes first")
        elif config_key == "warmup_steps" and (step_count is None or step_count >= 1):
            draft.set_recipe_key_unless_set_and_report(
                "schedule.warmup_steps",
                node,
                config_key,
                int(step_count) if step_count and float(step_count).is_integer() else None,
            )
        else:
            draft.set_recipe_key_unless_set_and_report("schedule.warmup_ratio", node, config_key)


def _convert_minimum_learning_rate(draft: Draft, kwargs_node: Tree) -> None:
    """Convert the minimum of a cosine, which Trainer gives as a rate or as a share of the rate."""
    minimum_rate = number_of_node(kwargs_node.find_subtree(("min_lr",)))
    learning_rate = number_of_node(draft.unconverted.get("learning_rate"))
    learning_rate = (
        learning_rate
        or draft.expected_recipe_value_or_none("optimizer.learning_rate")
        or _DEFAULTS["optimizer.learning_rate"]
    )
    minimum_ratio = number_of_node(kwargs_node.find_subtree(("min_lr_rate",)))
    if minimum_ratio is None and minimum_rate is not None:
        minimum_ratio = minimum_rate / learning_rate
    other_settings = [
        str(name)
        for name in kwargs_node.children
        if minimum_ratio is None or name not in ("min_lr", "min_lr_rate")
    ]
    if minimum_ratio is not None:
        # Rounded, so that 5e-6 / 5e-5 is written as 0.1.
        draft.set_recipe_key_unless_set_and_report(
            "schedule.minimum_ratio", kwargs_node, "lr_scheduler_kwargs", round(minimum_ratio, 9)
        )
    if other_settings:
        draft.report_dropped(
            "lr_scheduler_kwargs", kwargs_node, f"of these, not {', '.join(other_settings)}"
        )


def convert_precision_and_tf32(draft: Draft) -> None:
    """Convert bf16 or fp16, and the precision of float32 matmuls.

    In the other tool `auto` uses bf16 if the hardware has it.
    """
    for precision_name in ("bf16", "fp16"):
        remark = (
            "with auto, that tool would detect it"
            if draft.config_value(precision_name) == "auto"
            else ""
        )
        draft.set_recipe_key_from_config_key_if_present(
            "precision", precision_name, precision_name, remark
        )
    tf32_node = draft.take_key("tf32")
    # tf32 affects only float32 matmuls, so not a training in bf16 or fp16.
    if draft.recipe_tree.find_subtree(("precision",)) is None:
        draft.set_recipe_key_unless_set_and_report(
            "engine.matmul_precision", tf32_node, "tf32", "high"
        )
    else:
        draft.report_needless("tf32", tf32_node, "products are in the precision of the passes")


def _convert_zero_gradient_norm_to_null(draft: Draft) -> None:
    """Convert a maximal gradient norm of 0, which turns clipping off in Trainer."""
    if number_of_node(draft.unconverted.get("max_grad_norm")) == 0:
        node = draft.unconverted.pop("max_grad_norm")
        draft.set_recipe_key_unless_set_and_report(
            "train.max_grad_norm", node, "max_grad_norm", null_at_node(node)
        )


def _convert_named_gradient_checkpointing(draft: Draft) -> None:
    """Convert gradient checkpointing with a name, such as Axolotl's `unsloth` and `offload`."""
    node = draft.unconverted.get("gradient_checkpointing")
    if node is not None and isinstance(node.scalar, str) and node.scalar:
        draft.unconverted.pop("gradient_checkpointing")
        draft.set_recipe_key_unless_set_and_report(
            "model.gradient_checkpointing",
            node,
            "gradient_checkpointing",
            True,
            "layers are computed again, and nothing is offloaded",
        )


def offload_activations(key: ConfigKey) -> Rule:
    """Return the rule of activations in host memory, which engine eager alone has."""
    # Another name chooses a way to copy, or a disk.
    remark = "" if key.value is True else "in host memory, by copies that the step waits for"
    return (
        put("model.offload_activations", True, remark),
        assume("engine.name", "eager", f"{key.path} requires it"),
    )


def _convert_grouping_by_length_to_longest_padding(draft: Draft) -> None:
    """Convert batches of samples with similar length."""
    node = draft.take_key("group_by_length")
    train_source_text = str(draft.expected_recipe_value_or_none("data.train"))
    traits = MODEL_TASKS.get(str(draft.expected_recipe_value_or_none("model.task")), ModelTask())
    has_chats = "messages_column" in train_source_text or "prompt_column" in train_source_text
    if not traits.label and not has_chats:
        # All windows have the same length.
        draft.report_needless(
            "group_by_length", node, "samples are windows of text, without padding"
        )
    elif draft.expected_recipe_value_or_none("engine.name") == "inductor":
        draft.report_dropped(
            "group_by_length",
            node,
            "inductor compiles each length: give data.bucket_lengths, up to three",
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            "data.padding",
            node,
            "group_by_length",
            "longest",
            "the samples of a step are grouped by length, not those of many steps",
        )


def _run_name(key: ConfigKey) -> Rule:
    """Convert the run's name; the command determines its folder."""
    valid_name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(key.value)).name).strip("-._")[:100]
    if not valid_name or key.draft.recipe_tree.find_subtree(("name",)) is not None:
        return needless("the run has a name, and --run-dir says its folder")
    is_folder = key.path == "output_dir"
    return put("name", valid_name, "the run's folder is given by --run-dir" if is_folder else "")


# The first key that gives a valid name wins.
RUN_NAME_RULES: Rules = dict.fromkeys(("run_name", "wandb_name", "output_dir"), _run_name)


def convert_known_trackers(draft: Draft) -> None:
    """Convert the trackers that ortlaunch has."""
    node = draft.take_key("report_to")
    if node is None:
        return
    # `report_to` is one name or a list.
    requested_trackers = (
        node.value_without_locations() if node.node_type == "list" else [node.scalar]
    )
    known_trackers = [
        tracker for tracker in requested_trackers if tracker in ("tensorboard", "wandb", "mlflow")
    ]
    other_trackers = [
        str(tracker) for tracker in requested_trackers if tracker not in (*known_trackers, "none")
    ]
    if known_trackers:
        draft.set_recipe_key_unless_set_and_report(
            "log.trackers",
            node,
            "report_to",
            known_trackers,
            f"without {', '.join(other_trackers)}" if other_trackers else "",
        )
    elif other_trackers:
        draft.report_dropped("report_to", node, "log.trackers has tensorboard, wandb, mlflow")
    else:
        draft.report_needless("report_to", node, "there are none by themselves")


def convert_max_steps_or_epochs(draft: Draft, default_epochs: float) -> None:
    """Convert the length of the training; as in Trainer, steps take precedence over epochs."""
    epochs_key = "num_epochs" if "num_epochs" in draft.unconverted else "num_train_epochs"
    steps_node = draft.take_key("max_steps")
    epochs_node = draft.take_key(epochs_key)
    # Trainer's default is -1: no limit by steps.
    if steps_node is not None and (number_of_node(steps_node) or 0) > 0:
        draft.set_recipe_key_unless_set_and_report("train.max_steps", steps_node, "max_steps")
        draft.report_needless(epochs_key, epochs_node, "of no effect there: max_steps comes first")
        return
    draft.report_needless("max_steps", steps_node, "it stands for none")
    if epochs_node is not None:
        draft.set_recipe_key_unless_set_and_report("train.epochs", epochs_node, epochs_key)
    else:
        draft.assume_default("train.epochs", default_epochs, "the tool's default")


def assume_defaults(draft: Draft, tool_name_possessive: str) -> None:
    """Set the tool's defaults for keys that the config lacks."""
    for recipe_key, value in _DEFAULTS.items():
        draft.assume_default(recipe_key, value, f"{tool_name_possessive} default")
    convert_max_steps_or_epochs(draft, 3)
