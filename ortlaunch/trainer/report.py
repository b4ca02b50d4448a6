"""The report of a training: what really ran, printed and in `ort_report.json` of the output folder.

It reads the trainer and changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Trainer

from ortlaunch.json_types import Json
from ortlaunch.ortmodule.deepspeed.gradient_norm import Applied

FILE = "ort_report.json"


def report_of(trainer: Trainer, counts: Json, fp16: Applied | None, substituted: str) -> Json:
    """Return the report of a training.

    Args:
        trainer: the trainer, after `train`.
        counts: ORTModule's report.
        fp16: the measurement of the gradients of DeepSpeed's optimizer; None without DeepSpeed.
        substituted: why another optimizer than the requested one ran; empty if it ran.
    """
    used = _innermost(trainer.optimizer)
    return {
        "engine": "eager" if counts["fallbacks"] and not counts["forward_passes"] else "ort",
        "evaluation": "PyTorch",
        "device": trainer.args.device.type,
        "ranks": trainer.args.world_size,
        "sharding": _sharding(trainer),
        "optimizer": {
            "requested": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
            "used": f"{type(used).__module__}.{type(used).__qualname__}",
            "why": substituted or None,
        },
        "fp16_optimizer": fp16 and fp16._asdict(),
        "onnxruntime": counts,
    }


def write(report: Json, folder: str) -> None:
    """Print a summary of the report, and write it into the folder."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in summary(report):
        print(f"ORTTrainer: {line}", flush=True)
    print(f"ORTTrainer: details in {path}", flush=True)


def summary(report: Json) -> list[str]:
    """Return the report in a few lines."""
    ort = report["onnxruntime"]
    optimizer = report["optimizer"]
    fp16 = report["fp16_optimizer"]
    lines = [
        f"engine {report['engine']} on {ort['provider'] or 'no provider'}, "
        f"{report['ranks']} process(es), sharding {report['sharding']}: "
        f"{ort['forward_passes']} forward and {ort['backward_passes']} backward passes, "
        f"{ort['exports']} exports, {ort['graphs_built']} graphs, {len(ort['repairs'])} repairs, "
        f"{ort['fallbacks']} fallbacks; evaluation by {report['evaluation']}",
        f"optimizer {optimizer['used']}"
        + (f", not {optimizer['requested']}: {optimizer['why']}" if optimizer["why"] else ""),
    ]
    if fp16:
        why = f": {fp16['why']}" if fp16["why"] else ""
        lines.append(f"FP16_Optimizer by {fp16['by'] or 'nobody'}{why}")
    lines += [f"fallback: {why}" for why in ort["fallback_reasons"]]
    lines += [f"not repaired: {name}: {why}" for name, why in ort["repairs_not_applied"].items()]
    return [*lines, *(f"note: {note}" for note in ort["notes"])]


def _sharding(trainer: Trainer) -> str:
    if trainer.is_deepspeed_enabled:
        engine: Any = trainer.model_wrapped
        return f"DeepSpeed ZeRO {engine.zero_optimization_stage()}"
    return "DistributedDataParallel" if trainer.args.world_size > 1 else "none"


def _innermost(optimizer: object) -> object:
    """Return the optimizer inside those of accelerate and DeepSpeed."""
    inside = getattr(optimizer, "optimizer", None)
    return optimizer if inside is None else _innermost(inside)
