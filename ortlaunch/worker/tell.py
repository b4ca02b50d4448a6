"""engine.json in a few lines for a person: before step 1 what will run, at the end what ran."""

from __future__ import annotations

from typing import Any


def plan_lines(truth: dict[str, Any]) -> list[str]:
    """What will run, with everything that stands in for something else."""
    engine, optimizer, fp16 = truth["engine"], truth["optimizer"], truth["fp16_optimizer"]
    lines = [
        f"engine {engine['used']} on {truth['device']}, {truth['precision']}, "
        f"{truth['trained_parameters']:,} trained of {truth['parameters']:,} parameters, "
        f"{truth['ranks']} ranks x {truth['threads_per_rank']} threads, sharding: {truth['sharding']}"
    ]
    if engine["fallback_reason"]:
        lines.append(
            f"FALLBACK: engine {engine['asked']} was asked, {engine['used']} runs: {engine['fallback_reason']}"
        )
    if optimizer["why"]:
        lines.append(f"optimizer: {optimizer['asked']} was asked, {optimizer['used']} runs: {optimizer['why']}")
    if fp16["applied"]:
        why = f" ({fp16['why']})" if fp16["why"] else ""
        lines.append(f"FP16_Optimizer: {fp16['by']}'s, overflow check and gradient norm in one pass{why}")
    elif engine["used"] == "ort" or truth["sharding"].startswith("DeepSpeed"):
        lines.append(f"FP16_Optimizer: not applied: {fp16['why']}")
    return lines


def outcome_lines(truth: dict[str, Any]) -> list[str]:
    """What ran."""
    engine, ort = truth["engine"], truth["onnxruntime"]
    if engine["used"] == "inductor":
        graphs, breaks = truth["inductor"]["graphs"], truth["inductor"]["graph_breaks"]
        return [f"ran on engine inductor: {graphs} graphs compiled, {breaks} graph breaks on rank 0"]
    if not ort:
        return [f"ran on engine {engine['used']}"]
    passes = f"{ort['forward_passes']} forward and {ort['backward_passes']} backward passes by ONNX Runtime"
    used, optimizer = engine["used"], truth["optimizer"]["used"]
    return [f"ran on engine {used}: {passes} on rank 0, {ort['fallbacks']} fallbacks; optimizer {optimizer}"]
