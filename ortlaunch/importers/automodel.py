"""Convert NeMo AutoModel's YAML: a class for each part (`_target_`), with its arguments."""

from __future__ import annotations

from functools import partial

from ortlaunch.base.errors import InputError
from ortlaunch.importers import adapters, sharding, trainer
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.renamed_keys import convert_config_by_rules
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    OTHER_OPTIMIZER,
    ConfigKey,
    EvenIfEmpty,
    Rule,
    Rules,
    assume,
    assume_defaults,
    by_text,
    drop,
    first_of,
    needless,
    put,
    refuse,
    section_values_by_rules,
)

_CLASS = "_target_"
# The last part of a class's name -> the recipe's optimizer, and how the meaning differs.
_OPTIMIZERS = {
    "AdamW": ("adamw", ""),
    "FusedAdam": ("fused_adam", ""),
    "SGD": ("sgd", ""),
    "FlashAdamW": ("adamw", "with its state in 32 bits"),
}
_NAME_OF_ONE_AXIS = {"tp_size": "tensor", "dp_replicate_size": "replicate"}
_NO_SUCH_AXIS = drop("no axes of contexts, pipeline stages or experts")
_UNKNOWN_ROWS = drop("its rows are not known here: give data.train, or --base")
_OF_ITS_OWN = needless("it is of AutoModel's own files and tests")


def convert_automodel_config(draft: Draft) -> None:
    """Convert a config.

    Raises:
        InputError: it is no supervised training of text.
    """
    if not (draft.config_value("optimizer") and draft.config_value("dataset")):
        raise InputError(
            f"{draft.recipe_tree.location.source}: the config has no dataset and no optimizer: it "
            "describes no training of text"
        )
    convert_config_by_rules(draft, _RULES)
    assume_defaults(draft, {"model.task": "causal-lm"}, "AutoModel's recipe trains no other")
    # Without the section there is no schedule.
    schedule = "cosine" if draft.config_value("lr_scheduler") else "constant"
    assume_defaults(draft, {"schedule.name": schedule}, "AutoModel's default")
    assume_defaults(draft, {"train.max_grad_norm": 1.0}, "AutoModel's default")
    if not draft.set_value_or_none("train.max_steps"):
        draft.assume_default("train.epochs", 10, "AutoModel's default")
    cut_reason = "AutoModel cuts no row; longer ones are cut here"
    assume_defaults(draft, {"data.sequence_length": 2048}, cut_reason)


def _class_name(key: ConfigKey) -> str:
    return str(key.child(_CLASS)).rpartition(".")[2]


def _model(key: ConfigKey) -> Rule:
    if "CausalLM" not in str(key.child(_CLASS)):
        return refuse("text alone is imported: model._target_ is no NeMoAutoModelForCausalLM")
    return _MODEL_RULES


def _data_set(recipe_key: str, key: ConfigKey) -> Rule:
    """Convert a data set whose rows have columns that its arguments name, or messages."""
    name = _class_name(key)
    if name not in ("ChatDataset", "ColumnMappedTextInstructionDataset"):
        key.convert_child("seq_length", put("data.sequence_length"))
        return _UNKNOWN_ROWS
    path = key.child("path_or_dataset_id")
    is_file = str(path).endswith((".json", ".jsonl"))
    source: dict[str, object] = (
        {"format": "jsonl", "path": path} if is_file else {"format": "hub", "name": path}
    )
    if name == "ChatDataset":
        source["messages_column"] = "messages"
    source.update(section_values_by_rules(key, _SOURCE_RULES))
    # The columns of a file have no split.
    if is_file:
        source.pop("split", None)
    key.convert_child("seq_length", put("data.sequence_length"))
    key.convert_child("chat_template", put("data.chat_template"))
    return put(recipe_key, source)


def _optimizer_name(key: ConfigKey) -> Rule:
    name = key.text.rpartition(".")[2]
    if name == "Adam":
        decay = number_or_none(key.sibling("weight_decay")) or 0
        remark = "with decay apart from the gradient, as in AdamW" if decay else ""
        return put("optimizer.name", "adamw", remark)
    return put("optimizer.name", *_OPTIMIZERS.get(name, ("adamw", OTHER_OPTIMIZER)))


def _minimum_rate(key: ConfigKey) -> Rule:
    rate = key.draft.set_value_or_none("optimizer.learning_rate")
    ratio = (key.numeric_value or 0) / float(rate or 1)
    return put("schedule.minimum_ratio", round(ratio, 9))


def _target_modules(key: ConfigKey) -> Rule:
    """Convert names of layers, in which * stands for any text."""
    if "*" in key.items:
        return put("model.lora.target_modules", "all-linear")
    names = [str(item).replace("*.", "").replace("*", "") for item in key.items]
    if any(name.startswith("_") for name in names):
        # As `*_proj`: peft takes a regular expression in the place of a list.
        patterns = "|".join(str(item).replace("*", ".*") for item in key.items)
        return put("model.lora.target_modules", f".*({patterns})")
    return put("model.lora.target_modules", names)


def _strategy(key: ConfigKey) -> Rule:
    """Convert the name of a strategy, or its class."""
    if "fsdp" in key.text.lower():
        return sharding.ALL_RANKS_SHARE_ONE_COPY
    return needless("DistributedDataParallel is the default")


def _axis_size(key: ConfigKey) -> Rule:
    axis = _NAME_OF_ONE_AXIS.get(key.name)
    if str(key.value).lower() in ("none", "1", "0"):
        return needless("1 stands for none")
    return put(f"parallel.{axis}") if axis else _NO_SUCH_AXIS


_SOURCE_RULES: Rules = {
    **dict.fromkeys((_CLASS, "path_or_dataset_id", "seq_length", "chat_template"), ()),
    "tokenizer": needless("data.tokenizer is the model's"),
    "split": put("split"),
    "limit_dataset_samples": put("most_rows"),
    "column_mapping": {
        "question": put("prompt_column"),
        "context": put("input_column"),
        "answer": put("response_column"),
    },
    "answer_only_loss_mask": EvenIfEmpty(lambda key: () if key.value else put("train_on", "all")),
    **dict.fromkeys(("padding", "truncation", "pad_to_max_length"), needless("rows are cut")),
}
_MODEL_RULES: Rules = {
    _CLASS: (),
    "pretrained_model_name_or_path": (put("model.pretrained"), put("data.tokenizer")),
    "config": drop("give model.config, or --base"),
    "torch_dtype": by_text(
        {
            **dict.fromkeys(("bf16", "bfloat16"), put("precision", "bf16", "with float32 weights")),
            **dict.fromkeys(("fp16", "float16"), put("precision", "fp16", "with float32 weights")),
        },
        needless("weights are in float32"),
    ),
    "attn_implementation": by_text(
        dict.fromkeys(("eager", "sdpa"), put("model.attention")),
        needless("model.attention: auto is torch's sdpa, with its flash kernels"),
    ),
    **dict.fromkeys(
        ("use_liger_kernel", "output_hidden_states", "use_cache"),
        needless("engine.chunked_loss computes the loss in chunks"),
    ),
    "trust_remote_code": drop("models of transformers alone"),
}
_RULES: Rules = {
    "recipe": first_of(
        (
            lambda key: "NextTokenPrediction" in str(key.child(_CLASS) or key.text),
            needless("supervised training of text"),
        ),
        otherwise=refuse("text alone is imported"),
    ),
    "dataset": partial(_data_set, "data.train"),
    "validation_dataset": partial(_data_set, "data.evaluation"),
    "step_scheduler": {
        "global_batch_size": put("batch.global_size"),
        "local_batch_size": put("batch.micro_size"),
        "ckpt_every_steps": put("checkpoint.every_steps"),
        "val_every_steps": lambda key: (
            put("train.evaluate_every_steps")
            if key.recipe_value("data.evaluation")
            else needless("there is no data.evaluation")
        ),
        "max_steps": put("train.max_steps"),
        "num_epochs": first_of(
            (
                lambda key: key.sibling("max_steps"),
                needless("of no effect there: max_steps comes first"),
            ),
            otherwise=put("train.epochs"),
        ),
        "gc_every_steps": needless("garbage is collected between steps"),
    },
    "seed": put("seed"),
    "rng": {"seed": put("seed"), ANY_KEY: needless("each rank has a state of its own")},
    "model": _model,
    "peft": {
        _CLASS: (),
        "target_modules": _target_modules,
        "match_all_linear": put("model.lora.target_modules", "all-linear"),
        "exclude_modules": drop("name the layers in model.lora.target_modules"),
        "dim": put("model.lora.r"),
        "alpha": put("model.lora.alpha"),
        "dropout": put("model.lora.dropout"),
        "use_dora": put("model.lora.dora"),
        ANY_KEY: needless("peft has its own"),
    },
    "quantization": {
        "load_in_4bit": lambda key: adapters.quantized_base_rule(
            "nf4", has_double_scales=bool(key.sibling("bnb_4bit_use_double_quant"))
        ),
        "load_in_8bit": adapters.quantized_base_rule("int8"),
        "bnb_4bit_quant_type": by_text({"nf4": adapters.IN_QUANTIZE}, adapters.OTHER_FORM),
        ANY_KEY: adapters.IN_QUANTIZE,
    },
    "optimizer": {
        _CLASS: _optimizer_name,
        "lr": put("optimizer.learning_rate"),
        "betas": put("optimizer.betas"),
        "eps": put("optimizer.epsilon"),
        "weight_decay": put("optimizer.weight_decay"),
        **dict.fromkeys(("foreach", "fused"), needless("the kernels are chosen by themselves")),
    },
    "lr_scheduler": {
        "lr_decay_style": trainer.schedule_name,
        "lr_warmup_steps": lambda key: (
            put("schedule.warmup_steps") if key.numeric_value else needless("there is none")
        ),
        "min_lr": _minimum_rate,
    },
    "packed_sequence": {
        "packed_sequence_size": first_of(
            (lambda key: not key.numeric_value, needless("0 packs nothing")),
            otherwise=(put("data.sequence_length"), put("data.packing", True)),
        ),
        ANY_KEY: needless("chats are packed whole"),
    },
    "distributed": {
        **dict.fromkeys((_CLASS, "strategy"), _strategy),
        **dict.fromkeys(
            ("tp_size", "dp_replicate_size", "cp_size", "pp_size", "ep_size"), _axis_size
        ),
        "activation_checkpointing": put("model.gradient_checkpointing"),
        "dp_size": needless("all ranks that are left"),
        ANY_KEY: NO_COUNTERPART,
    },
    "clip_grad_norm": {"max_norm": put("train.max_grad_norm")},
    "compile": first_of(
        (lambda key: key.child("enabled"), put("engine.name", "inductor")),
        otherwise=needless("enabled is false"),
    ),
    "fp8": first_of(
        (lambda key: key.child("enabled"), drop("precision has bf16, fp16 and fp32")),
        otherwise=needless("enabled is false"),
    ),
    "wandb": assume("log.trackers", ["wandb"], "the config has a section wandb"),
    "loss_fn": needless("engine.chunked_loss computes the loss in chunks"),
    **dict.fromkeys(("ci", "checkpoint", "nvtx", "benchmark"), _OF_ITS_OWN),
    "dist_env": needless("the launcher and the device decide it"),
    **dict.fromkeys(
        ("dataloader", "validation_dataloader"), needless("samples are shuffled by seed")
    ),
}
