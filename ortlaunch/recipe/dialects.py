"""What other tools call things, and what the user most likely meant.

A table of foreign keys -> our key (or a sentence), and did-you-mean over both. Pure; no recipe, no YAML.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional


class Foreign(NamedTuple):
    """A key of another tool: whose it is, and our key or what to do instead."""

    tools: str
    ours: str


_HF, _LF, _AX, _TT, _DS, _FO = (
    "Hugging Face",
    "LLaMA-Factory",
    "Axolotl",
    "torchtune",
    "DeepSpeed",
    "llm-foundry",
)

_TABLE: dict[str, dict[str, str]] = {
    _HF: {
        "output_dir": "the command line option --run-dir",
        "per_device_train_batch_size": "batch.micro_size",
        "per_device_eval_batch_size": "batch.micro_size (evaluation uses it too)",
        "gradient_accumulation_steps": "batch.accumulation_steps",
        "num_train_epochs": "train.max_steps (steps, not epochs)",
        "lr_scheduler_type": "schedule.name",
        "lr_scheduler_kwargs": "schedule.power",
        "adam_beta1": "optimizer.betas (a pair)",
        "adam_beta2": "optimizer.betas (a pair)",
        "adam_epsilon": "optimizer.epsilon",
        "optim": "optimizer.name",
        "fp16": "precision: fp16",
        "bf16": "precision: bf16",
        "logging_steps": "log.every_steps",
        "logging_dir": "nothing: TensorBoard files lie in the run folder",
        "save_steps": "checkpoint.every_steps",
        "save_strategy": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint": "the command line option --run-dir of the run to continue",
        "data_seed": "seed",
        "deepspeed": "zero.stage, and zero.deepspeed for raw settings",
        "report_to": "log.trackers",
        "run_name": "name",
        "gradient_checkpointing": "engine.memory_optimization (engine ort)",
        "eval_strategy": "train.evaluate_every_steps",
        "evaluation_strategy": "train.evaluate_every_steps",
        "eval_steps": "train.evaluate_every_steps",
        "attn_implementation": "model.attention",
        "torch_dtype": "precision",
        "model_type": "model.config.model_type",
        "torch_compile": "engine.name: inductor",
        "do_train": "nothing: `ortlaunch train` always trains",
        "max_seq_length": "data.sequence_length",
        "mlm_probability": "data.masked_lm.probability",
        "overwrite_output_dir": "nothing: a run folder is never overwritten",
        "ddp_backend": "launch.device (cuda uses NCCL, cpu gloo)",
    },
    _LF: {
        "model_name_or_path": "model.pretrained",
        "tokenizer_name": "data.tokenizer",
        "dataset": "data.train",
        "eval_dataset": "data.evaluation",
        "cutoff_len": "data.sequence_length",
        "packing": "nothing: causal-lm samples are always packed",
        "stage": "model.task",
        "finetuning_type": "model.lora (or leave it out to train all weights)",
        "lora_rank": "model.lora.r",
        "lora_alpha": "model.lora.alpha",
        "lora_target": "model.lora.target_modules",
    },
    _AX: {
        "base_model": "model.pretrained",
        "datasets": "data.train",
        "micro_batch_size": "batch.micro_size",
        "num_epochs": "train.max_steps (steps, not epochs)",
        "sequence_len": "data.sequence_length",
        "sample_packing": "nothing: causal-lm samples are always packed",
        "lr_scheduler": "schedule.name",
        "adapter": "model.lora",
        "lora_r": "model.lora.r",
        "lora_dropout": "model.lora.dropout",
        "lora_target_modules": "model.lora.target_modules",
        "flash_attention": "model.attention",
        "wandb_project": "log.trackers",
    },
    _TT: {
        "batch_size": "batch.micro_size (samples of one pass) or batch.global_size (samples of a step)",
        "epochs": "train.max_steps (steps, not epochs)",
        "_component_": "nothing: components are chosen by name, as optimizer.name",
        "max_steps_per_epoch": "train.max_steps",
        "checkpointer": "checkpoint",
        "dtype": "precision",
        "loss": "nothing: the model's task sets the loss",
        "lr": "optimizer.learning_rate",
        "metric_logger": "log.trackers",
        "log_every_n_steps": "log.every_steps",
        "clip_grad_norm": "train.max_grad_norm",
        "compile": "engine.name: inductor",
    },
    _DS: {
        "train_batch_size": "batch.global_size",
        "train_micro_batch_size_per_gpu": "batch.micro_size",
        "gradient_clipping": "train.max_grad_norm",
        "zero_optimization": "zero.stage, and zero.deepspeed for raw settings",
        "steps_per_print": "log.every_steps",
        "scheduler": "schedule",
        "zero_stage": "zero.stage",
        "offload_optimizer": "zero.deepspeed.zero_optimization.offload_optimizer",
        "overlap_comm": "zero.deepspeed.zero_optimization.overlap_comm",
        "num_gpus": "launch.processes_per_node",
        "num_nodes": "launch.nodes",
        "hostfile": "the command line option --hostfile",
    },
    _FO: {
        "global_train_batch_size": "batch.global_size",
        "device_train_microbatch_size": "batch.micro_size",
        "max_duration": "train.max_steps",
        "max_seq_len": "data.sequence_length",
        "train_loader": "data.train",
        "save_interval": "checkpoint.every_steps",
        "save_num_checkpoints_to_keep": "checkpoint.keep",
        "eval_interval": "train.evaluate_every_steps",
        "t_warmup": "schedule.warmup_steps",
    },
    "torchrun": {
        "nproc_per_node": "launch.processes_per_node",
        "nnodes": "launch.nodes",
    },
}

FOREIGN: dict[str, Foreign] = {key: Foreign(tool, ours) for tool, keys in _TABLE.items() for key, ours in keys.items()}


def _normal(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def closest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, or None; case and dashes do not count."""
    by_normal = {_normal(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(_normal(word), by_normal, n=1, cutoff=cutoff)
    return by_normal[found[0]] if found else None


def advise(key: str, here: Iterable[str], section: str, elsewhere: Mapping[str, str]) -> str:
    """What to say of an unknown key.

    Args:
        key: as the user wrote it.
        here: names that are valid in this section.
        section: dotted path of the section, "" at the top.
        elsewhere: name -> full dotted path, of fields of other sections.
    """
    here = tuple(here)
    foreign = FOREIGN.get(_normal(key))
    if foreign:
        return f"{foreign.tools} says {_normal(key)}; here it is {foreign.ours}"
    if _normal(key) in elsewhere:
        return f"it belongs at {elsewhere[_normal(key)]}"
    return _nearest(key, here, section, elsewhere) or "valid here: " + ", ".join(sorted(here))


def _nearest(key: str, here: tuple[str, ...], section: str, elsewhere: Mapping[str, str]) -> str | None:
    def score(candidate: str) -> float:
        return difflib.SequenceMatcher(None, _normal(key), _normal(candidate)).ratio()

    prefix = f"{section}." if section else ""
    options: list[tuple[float, str]] = [(score(name) + 0.1, f"did you mean {prefix}{name}?") for name in here]
    options += [(score(name), f"did you mean {path}?") for name, path in elsewhere.items()]
    options += [
        (score(name) - 0.05, f"did you mean {entry.tools}'s {name}? Here it is {entry.ours}")
        for name, entry in FOREIGN.items()
    ]
    best, text = max(options)
    return text if best >= 0.65 else None
