"""The record of DeepSpeed's fused gradient norm, and its printed line."""

from __future__ import annotations

import types
from dataclasses import asdict
from typing import Any

import pytest

from ortlaunch.worker.engine import engine
from ortlaunch.worker.engine.stepping import DeepSpeedStepper
from ortlaunch.worker.training.summary import engine_plan_lines
from ortmodule_tests.deepspeed.test_gradient_norm import gradients, zero
from tests.makers import engine_report, recipe

pytest.importorskip("deepspeed")


def told(made: Any, used: str, optimizer: Any) -> tuple[dict[str, Any], list[str]]:
    """Return engine.json's fp16_optimizer and its printed line; optimizer None: no DeepSpeed."""
    stepper: Any = None
    if optimizer is not None:
        stepper = object.__new__(DeepSpeedStepper)
        stepper.engine = types.SimpleNamespace(optimizer=optimizer)
    fp16 = engine._install_fused_gradient_norm_and_describe(made, stepper)
    sharding = f"DeepSpeed ZeRO {made.zero.stage}" if made.zero else "none"
    report = engine_report(used, fp16_optimizer=fp16, sharding=sharding)
    return asdict(fp16), engine_plan_lines(report)[1:]


# Lines and reasons as they are printed.
FUSED = "FP16_Optimizer: overflow check and norm in one pass"
LEFT = "FP16_Optimizer: not applied"
WITHOUT = "it modifies DeepSpeed's ZeRO optimizer, which this run does not use"
OFF = "zero.fused_gradient_norm is false"
OFFLOAD = "with CPU offload DeepSpeed measures gradients as it copies them"


@pytest.mark.parametrize(
    ("used", "made", "fields", "reason", "lines"),
    [
        ("eager", {}, None, WITHOUT, []),
        ("ort", {}, None, WITHOUT, []),
        ("eager", {"zero": {}}, {}, "", [FUSED]),
        ("ort", {"zero": {"stage": 2}}, {}, "", [FUSED]),
        ("inductor", {"zero": {"fused_gradient_norm": False}}, {}, OFF, [f"{LEFT}: {OFF}"]),
        ("eager", {"zero": {}}, {"cpu_offload": True}, OFFLOAD, [f"{LEFT}: {OFFLOAD}"]),
    ],
)
def test_it_is_recorded_and_said(
    used: str, made: Any, fields: Any, reason: str, lines: list[str]
) -> None:
    """engine.json and the printed plan name the fused pass, or the reason for none."""
    optimizer = None if fields is None else zero(gradients(3), **fields)
    found, said = told(recipe(**made), used, optimizer)
    assert (found, said) == ({"applied": not reason, "why": reason}, lines)
    # The record agrees with the optimizer's methods.
    assert optimizer is None or ("get_grad_norm_direct" in vars(optimizer)) == (not reason)
