"""Convert torchtune's YAML: a component for each part, with its arguments.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from ortlaunch.base.errors import InputError
from ortlaunch.importers import sharding, trainer
from ortlaunch.importers.draft import (
    Draft,
    is_empty,
    number_of_node,
    one_line_text,
    refusal_error,
)
from ortlaunch.recipe.text.tree import Tree

_COMPONENT = "_component_"
# Parts of a training that ortlaunch does not have.
_REFUSED_KEYS = {
    "teacher_model": "there is no distillation here",
    "ref_checkpointer": "there is no preference training here",
    "reward_functions": "there is no reinforcement learning here",
    "reward_and_value_model": "there is no reinforcement learning here",
}
_NO_TRAINING_MESSAGE = "the config has no data set and no optimizer: it describes no training"
_IMAGES_MESSAGE = "images beside text cannot be trained here"
# torchtune's names of layers -> transformers'.
_LAYER_NAMES = {"output_proj": "o_proj"}
_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
# A component of a data set -> its name on the hub, and fields of the source. torchtune learns the
# prompts of the first two, too.
_ALPACA_FIELDS: dict[str, object] = {"prompt": "alpaca", "train_on": "all"}
_DATASETS: dict[str, tuple[str | None, dict[str, object]]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", _ALPACA_FIELDS),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", _ALPACA_FIELDS),
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
_OPTIMIZER_SETTINGS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "eps": "epsilon",
    "betas": "betas",
}


def convert_torchtune_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it is no supervised training of text.
    """
    draft.refuse_config_with_keys(_REFUSED_KEYS)
    dataset_node = draft.take_key("dataset")
    if dataset_node is None or "optimizer" not in draft.unconverted:
        raise InputError(f"{draft.recipe_tree.location.source}: {_NO_TRAINING_MESSAGE}")
    draft.assume_default("model.task", "causal-lm", "torchtune trains no other")
    _convert_weights_folder_keep_count_and_lora(draft)
    for key, node in (("dataset", dataset_node), ("dataset_val", draft.take_key("dataset_val"))):
        if node is not None:
            _convert_dataset_component_or_refuse(draft, key, node)
    _convert_tokenizer_length_or_assume_2048(draft)
    _convert_optimizer_component_or_use_adamw(draft)
    _convert_schedule_to_cosine_or_linear_or_constant(draft)
    _convert_precision_compile_logger_and_profiler(draft)
    _convert_fsdp_and_report_tensor_parallelism(draft)
    trainer.convert_first_valid_run_name(draft)
    _convert_batch_size_and_steps_or_epochs(draft)
    loss_node = draft.unconverted.get("loss")
    if loss_node is not None and "rlhf" in one_line_text(loss_node):
        raise refusal_error("loss", loss_node, _REFUSED_KEYS["ref_checkpointer"])
    draft.assume_default("batch.accumulation_steps", 1, "torchtune's default")


def _convert_batch_size_and_steps_or_epochs(draft: Draft) -> None:
    batch_size_node = draft.take_key("batch_size")
    epochs_node = draft.take_key("epochs")
    max_steps_node = draft.take_key("max_steps_per_epoch")
    draft.set_recipe_key_unless_set_and_report("batch.micro_size", batch_size_node, "batch_size")
    if max_steps_node is not None:
        max_steps = int((number_of_node(max_steps_node) or 1) * (number_of_node(epochs_node) or 1))
        draft.set_recipe_key_unless_set_and_report(
            "train.max_steps", max_steps_node, "max_steps_per_epoch", max_steps
        )
        draft.report_needless("epochs", epochs_node, "train.max_steps has it")
    else:
        draft.set_recipe_key_unless_set_and_report("train.epochs", epochs_node, "epochs")
    draft.set_recipe_key_from_config_key_if_present(
        "model.lora.merge", "save_adapter_weights_only", recipe_value=False
    )


def _take_component_name_and_settings(
    draft: Draft, section_key: str
) -> tuple[str, dict[str, Tree]]:
    """Remove a section; return its component's name, and its other settings that are not empty."""
    node = draft.take_key(section_key)
    children = dict(node.children) if node is not None else {}
    component = children.pop(_COMPONENT, None)
    settings = {str(name): child for name, child in children.items() if not is_empty(child)}
    return "" if component is None else one_line_text(component), settings


def _drop_settings(draft: Draft, section_key: str, unused_settings: dict[str, Tree]) -> None:
    for name, node in unused_settings.items():
        draft.report_dropped(f"{section_key}.{name}", node, "no counterpart")


def _convert_weights_folder_keep_count_and_lora(draft: Draft) -> None:
    """Convert the weights' folder, and the adapters among the model's arguments."""
    _, checkpointer_settings = _take_component_name_and_settings(draft, "checkpointer")
    component, model_settings = _take_component_name_and_settings(draft, "model")
    folder_node = checkpointer_settings.get("checkpoint_dir")
    if "vision" in component:
        raise InputError(f"{draft.recipe_tree.location}: model: {component}: {_IMAGES_MESSAGE}")
    draft.set_recipe_key_unless_set_and_report(
        "model.pretrained", folder_node, "checkpointer.checkpoint_dir"
    )
    draft.set_recipe_key_unless_set_and_report(
        "data.tokenizer", folder_node, "checkpointer.checkpoint_dir"
    )
    keep_node = checkpointer_settings.get("keep_last_n_checkpoints")
    draft.set_recipe_key_unless_set_and_report(
        "checkpoint.keep", keep_node, "checkpointer.keep_last_n_checkpoints"
    )
    attention_layers_node = model_settings.pop("lora_attn_modules", None)
    if attention_layers_node is not None:
        module_names = [
            _LAYER_NAMES.get(layer_name, layer_name)
            for layer_name in attention_layers_node.value_without_locations()
        ]
        module_names += _MLP_LAYERS if model_settings.pop("apply_lora_to_mlp", None) else ()
        module_names += ["lm_head"] if model_settings.pop("apply_lora_to_output", None) else []
        draft.set_recipe_key_unless_set_and_report(
            "model.lora.target_modules",
            attention_layers_node,
            "model.lora_attn_modules",
            module_names,
        )
        for key, lora_field in (("rank", "r"), ("alpha", "alpha"), ("dropout", "dropout")):
            draft.set_recipe_key_unless_set_and_report(
                f"model.lora.{lora_field}",
                model_settings.pop(f"lora_{key}", None),
                f"model.lora_{key}",
            )
        if ".qlora_" in component:
            draft.report_dropped(
                f"model.{_COMPONENT}", attention_layers_node, "the base weights are not quantized"
            )
    _drop_settings(draft, "model", model_settings)


def _convert_dataset_component_or_refuse(
    draft: Draft, section_key: str, dataset_node: Tree
) -> None:
    """Convert a data set: a component of torchtune, with its arguments."""
    settings = {
        str(hub_name): child
        for hub_name, child in dataset_node.children.items()
        if not is_empty(child)
    }
    component = one_line_text(settings.pop(_COMPONENT, dataset_node)).rpartition(".")[2]
    default_hub_name, fields = _DATASETS.get(component, (None, {}))
    hub_name = one_line_text(settings.pop("source")) if "source" in settings else default_hub_name
    if component not in _DATASETS or hub_name is None:
        raise refusal_error(
            section_key, dataset_node, "its component is none of " + ", ".join(_DATASETS)
        )
    packed_node = settings.pop("packed", None)
    split_node = settings.pop("split", None)
    files_node = settings.pop("data_files", None)
    source: dict[str, object] = {"format": "hub", "name": hub_name, **fields}
    source |= {"split": one_line_text(split_node)} if split_node is not None else {}
    source |= {"files": [one_line_text(files_node)]} if files_node is not None else {}
    remark = (
        "" if "text_column" in fields else "torchtune writes the model's marks of a chat around it"
    )
    draft.set_recipe_key_unless_set_and_report(
        "data.train" if section_key == "dataset" else "data.evaluation",
        dataset_node,
        section_key,
        source,
        remark,
    )
    if packed_node is not None and "text_column" in fields:
        draft.report_needless(f"{section_key}.packed", packed_node, "text is always packed")
    elif packed_node is not None and section_key == "dataset":
        draft.set_recipe_key_unless_set_and_report("data.packing", packed_node, "dataset.packed")
    _drop_settings(draft, section_key, settings)


def _convert_tokenizer_length_or_assume_2048(draft: Draft) -> None:
    _, settings = _take_component_name_and_settings(draft, "tokenizer")
    draft.set_recipe_key_unless_set_and_report(
        "data.sequence_length", settings.pop("max_seq_len", None), "tokenizer.max_seq_len"
    )
    draft.assume_default(
        "data.sequence_length", 2048, "torchtune cuts nothing by itself; longer samples are cut"
    )
    # Files of the folder of weights, which has the same tokenizer in transformers' form.
    for setting_name, node in settings.items():
        if re.search("path|file", setting_name) and Path(one_line_text(node)).name:
            draft.report_needless(
                f"tokenizer.{setting_name}", node, "data.tokenizer is the folder of the weights"
            )
        else:
            draft.report_dropped(f"tokenizer.{setting_name}", node, "no counterpart")


def _convert_optimizer_component_or_use_adamw(draft: Draft) -> None:
    node = draft.unconverted["optimizer"]
    component, settings = _take_component_name_and_settings(draft, "optimizer")
    recipe_optimizer = _OPTIMIZERS.get(component)
    fused_node = settings.pop("fused", None)
    remark = "" if recipe_optimizer else "another optimizer: there is none of that name here"
    remark = "with its state not paged" if "Paged" in component else remark
    optimizer_name = (
        "fused_adam"
        if fused_node is not None and recipe_optimizer == "adamw"
        else recipe_optimizer or "adamw"
    )
    draft.set_recipe_key_unless_set_and_report(
        "optimizer.name", node, f"optimizer.{_COMPONENT}", optimizer_name, remark
    )
    for config_field, recipe_field in _OPTIMIZER_SETTINGS.items():
        draft.set_recipe_key_unless_set_and_report(
            f"optimizer.{recipe_field}",
            settings.pop(config_field, None),
            f"optimizer.{config_field}",
        )
    _drop_settings(draft, "optimizer", settings)


def _convert_schedule_to_cosine_or_linear_or_constant(draft: Draft) -> None:
    node = draft.unconverted.get("lr_scheduler")
    component, settings = _take_component_name_and_settings(draft, "lr_scheduler")
    if node is None or not component:
        return draft.assume_default("schedule.name", "constant", "torchtune's default")
    schedule_name = "cosine" if "cosine" in component else "linear"
    remark = (
        "" if schedule_name == "cosine" else "another schedule: there is none of that name here"
    )
    draft.set_recipe_key_unless_set_and_report(
        "schedule.name", node, f"lr_scheduler.{_COMPONENT}", schedule_name, remark
    )
    draft.set_recipe_key_unless_set_and_report(
        "schedule.warmup_steps",
        settings.pop("num_warmup_steps", None),
        "lr_scheduler.num_warmup_steps",
    )
    return _drop_settings(draft, "lr_scheduler", settings)


def _convert_precision_compile_logger_and_profiler(draft: Draft) -> None:
    """Convert precision, compiler, memory and logs."""
    draft.set_recipe_key_from_config_key_if_present("precision", "dtype")
    trainer.convert_activation_offload_and_assume_eager(draft, "enable_activation_offloading")
    draft.set_recipe_key_from_config_key_if_present("engine.name", "compile", "inductor")
    logger_component, settings = _take_component_name_and_settings(draft, "metric_logger")
    logged_tracker = next(
        (
            tracker_name
            for tracker_name in ("wandb", "tensorboard")
            if tracker_name in logger_component.lower()
        ),
        None,
    )
    if logged_tracker is not None:
        draft.assume_default("log.trackers", [logged_tracker], logger_component)
    draft.set_recipe_key_unless_set_and_report(
        "log.project", settings.pop("project", None), "metric_logger.project"
    )
    profiler_node = draft.take_key("profiler")
    if profiler_node is not None:
        enabled = profiler_node.find_subtree(("enabled",))
        is_enabled = enabled is not None and not is_empty(enabled)
        (draft.report_dropped if is_enabled else draft.report_needless)(
            "profiler", profiler_node, "log.profile_steps profiles"
        )
    draft.report_dropped("quantizer", draft.take_key("quantizer"), "there is no quantized training")


def _convert_fsdp_and_report_tensor_parallelism(draft: Draft) -> None:
    offload_node = draft.take_key("fsdp_cpu_offload")
    layers_node = draft.take_key("custom_sharded_layers")
    if offload_node is not None or layers_node is not None:
        sharding.assume_zero_stage_and_eager_for_stage_3(draft, 3, "torchtune's FSDP")
    if offload_node is not None:
        offload = {"optimizer": "cpu", "parameters": "cpu"}
        draft.set_recipe_key_unless_set_and_report(
            "zero.offload", offload_node, "fsdp_cpu_offload", offload
        )
    draft.report_needless("custom_sharded_layers", layers_node, "zero.stage 3 shards all layers")
    parallel_plan_node = draft.take_key("tensor_parallel_plan")
    if draft.config_value("tensor_parallel_dim") in (None, 1):
        draft.report_needless(
            "tensor_parallel_plan", parallel_plan_node, "tensor_parallel_dim is 1: no parallelism"
        )
    else:
        draft.report_dropped(
            "tensor_parallel_plan", parallel_plan_node, "there is no tensor parallelism"
        )
    fsdp_node = draft.take_key("fsdp")
    if fsdp_node is not None and fsdp_node.value_without_locations() == {"cpu_offload": False}:
        draft.report_needless("fsdp", fsdp_node, "nothing is offloaded by itself")
    else:
        draft.report_dropped("fsdp", fsdp_node, "give zero.offload")
