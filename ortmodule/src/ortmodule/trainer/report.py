"""The report of a training: what really ran, printed and in `ort_report.json` of the output folder.

It reads the trainer and changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Trainer

from ortmodule._internal.base.json_types import Json

REPORT_FILE = "ort_report.json"


def engine_and_optimizer_report(
    trainer: Trainer,
    ort_report: dict[str, object],
    unfused_norm_reason: str | None,
    substitution_reason: str,
) -> dict[str, object]:
    """Return the report of a training.

    Args:
        trainer: the trainer, after `train`.
        ort_report: ORTModule's report.
        unfused_norm_reason: why FP16_Optimizer changed nothing; empty if it did, None without DeepSpeed.
        substitution_reason: why another optimizer than the requested one ran; empty if it ran.
    """
    used_optimizer = _innermost_optimizer(trainer.optimizer)
    return {
        "engine": "eager"
        if ort_report["fallbacks"] and not ort_report["forward_passes"]
        else "ort",
        "evaluation": "PyTorch",
        "device": trainer.args.device.type,
        "ranks": trainer.args.world_size,
        "sharding": _sharding_name(trainer),
        "optimizer": {
            "requested": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
            "used": f"{type(used_optimizer).__module__}.{type(used_optimizer).__qualname__}",
            "why": substitution_reason or None,
        },
        "fp16_optimizer": None
        if unfused_norm_reason is None
        else {"applied": not unfused_norm_reason, "why": unfused_norm_reason},
        "onnxruntime": ort_report,
    }


def write_and_print_report(report: dict[str, object], output_folder: str) -> None:
    """Print a summary of the report, and write it into the folder."""
    path = Path(output_folder) / REPORT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in report_summary_lines(report):
        print(f"ORTTrainer: {line}", flush=True)
    print(f"ORTTrainer: details in {path}", flush=True)


def report_summary_lines(training_report_record: Json) -> list[str]:
    """Return the report in a few lines."""
    ort_record = training_report_record["onnxruntime"]
    optimizer = training_report_record["optimizer"]
    norm_record = training_report_record["fp16_optimizer"]
    lines = [
        f"engine {training_report_record['engine']} on {ort_record['provider'] or 'no provider'}, "
        f"{training_report_record['ranks']} process(es), sharding {training_report_record['sharding']}: "
        f"{ort_record['forward_passes']} forward and {ort_record['backward_passes']} backward passes, "
        f"{ort_record['exports']} exports, {ort_record['graphs_built']} graphs, {len(ort_record['repairs'])} repairs, "
        f"{ort_record['fallbacks']} fallbacks; evaluation by {training_report_record['evaluation']}",
        f"optimizer {optimizer['used']}"
        + (f", not {optimizer['requested']}: {optimizer['why']}" if optimizer["why"] else ""),
    ]
    if norm_record:
        reason = f" not applied: {norm_record['why']}" if norm_record["why"] else " applied"
        lines.append(f"FP16_Optimizer{reason}")
    return [
        *lines,
        *(f"fallback: {reason}" for reason in ort_record["fallback_reasons"]),
        *(
            f"not repaired: {name}: {reason}"
            for name, reason in ort_record["repairs_not_applied"].items()
        ),
        *(f"note: {note}" for note in ort_record["notes"]),
    ]


def _sharding_name(trainer: Trainer) -> str:
    if trainer.is_deepspeed_enabled:
        engine: Any = trainer.model_wrapped
        return f"DeepSpeed ZeRO {engine.zero_optimization_stage()}"
    return "DistributedDataParallel" if trainer.args.world_size > 1 else "none"


def _innermost_optimizer(optimizer: object) -> object:
    """Return the optimizer inside those of accelerate and DeepSpeed."""
    inner_optimizer = getattr(optimizer, "optimizer", None)
    return optimizer if inner_optimizer is None else _innermost_optimizer(inner_optimizer)
