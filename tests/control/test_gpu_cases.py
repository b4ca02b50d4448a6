"""The cases of tests/gpu are valid without a GPU, and its verdicts fail wrong results."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base import machine
from ortlaunch.base.errors import RecipeError
from ortlaunch.bench.measure import resolve_variants_or_refuse_if_none_can_run
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from tests.gpu import functions, smoke, verdicts
from tests.gpu.cases import cases, form
from tests.gpu.test_gpu import in_process, refusal
from tests.gpu.verdicts import Ended
from tests.ort import needs_ort

PLAIN = [4.0, 2.0]


# ------------------------------------------------------------------------ commands for a GPU


def _words(command: tuple[str, ...]) -> tuple[str, Path, list[str], dict[str, str]]:
    """Return the verb, recipe, overrides and options of an `ortlaunch` command."""
    _, _, _, verb, recipe, *rest = command
    options = dict(word[2:].split("=", 1) for word in rest if word.startswith("--") and "=" in word)
    return verb, Path(recipe), [word for word in rest if not word.startswith("--")], options


@pytest.mark.parametrize("part", ["eager", "inductor", "ort", "deepspeed", "memory"])
def test_the_trainings_on_a_gpu_can_be_planned(part: str) -> None:
    """Every training of tests/gpu can be planned for CUDA, except ZeRO 3 with engine ort."""
    trainings = [case for case in cases(part, form("cuda", 1)) if "train" in case.command]
    assert len(trainings) >= 4
    for case in trainings:
        _, recipe, overrides, _ = _words(case.command)
        refused = _refusal(recipe, overrides)
        known = part == "ort" and "ZeRO 3" in case.name
        assert ("engine ort" in refused) if known else not refused, (case.name, refused)


def test_the_smoke_runs_on_a_gpu_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All smoke runs can be planned on one GPU, except settings that engine ort refuses."""
    smoke.write_inputs(tmp_path)
    monkeypatch.setattr(machine, "visible_gpu_count", lambda environ: 1)
    refused = {}
    cells = list(smoke.commands("cuda"))
    assert len(cells) == 27 + 4
    for name, commands, _ in cells:
        ranks, (verb, recipe, *words) = commands[0]
        overrides = [word for word in words if not word.startswith("--")]
        try:
            options = LaunchOptions(None, ranks, planned_only=True)
            plan = load_and_resolve_recipe(
                tmp_path / recipe, overrides, options, {"ORTLAUNCH_SHARE_GPUS": "1"}
            ).plan
            assert plan.nodes[0].devices == (0,) * ranks
        except RecipeError as error:
            refused[name] = str(error)
        assert verb == "train"
    assert {"ort, fp32, ZeRO 3", "ort, fp16, ZeRO 3"} <= set(refused)
    assert not [name for name in refused if "bf16" not in name and "ZeRO 3" not in name]
    assert all("engine ort" in why for why in refused.values())


def test_the_runs_of_single_functions_on_a_gpu_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with long sequences, offload, worker processes and dropout have valid settings."""
    smoke.write_inputs(tmp_path)
    monkeypatch.setattr(machine, "visible_gpu_count", lambda environ: 1)
    trainings = [
        words
        for _, runs, _ in functions.commands("cuda")
        for _, words in runs
        if words[0] == "train"
    ]
    assert len(trainings) > 12
    for _, recipe, *words in trainings:
        overrides = [
            word for word in words if not word.startswith("--") and word != "batch.micro_size=auto"
        ]
        load_and_resolve_recipe(tmp_path / recipe, overrides, LaunchOptions(planned_only=True), {})


def test_a_resumed_run_must_be_the_same_bit_for_bit(tmp_path: Path) -> None:
    """One byte of a tensor, or a loss, that differs after the resume fails a smoke case."""
    losses = [4.0, 3.9, 3.8, 3.7, 3.6, 3.5]
    for name, tail in (("run", losses), ("again", losses[3:])):
        run = tmp_path / name
        for file in ("checkpoints/step_00000006/model.safetensors", "export/model.safetensors"):
            (run / file).parent.mkdir(parents=True)
            (run / file).write_bytes(b"weights")
        records = [
            {"step": step, "loss": loss, "skipped_steps": 0} for step, loss in enumerate(tail)
        ]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        (run / "engine.json").write_text(
            json.dumps({"engine": {"used": "eager"}, "device": "cpu", "onnxruntime": {}})
        )
    ended = Ended(0, "", "", tmp_path, losses, None)
    assert smoke.trained("eager", "fp32", False, ended).why == ()
    (tmp_path / "again/export/model.safetensors").write_bytes(b"Weights")
    assert smoke.trained("eager", "fp32", False, ended).why == (
        "after the resume: export/model.safetensors differ; losses by at most 0.0e+00",
    )


@needs_ort
@pytest.mark.parametrize(
    "part", ["deepspeed", "bert", "lora", "llama", "precision", "chunked_loss", "recompute"]
)
def test_the_benches_on_a_gpu_can_be_planned(part: str) -> None:
    """Benches of full-size models can be planned, except settings that engine ort refuses."""
    for case in (case for case in cases(part, form("cuda", 1)) if "bench" in case.command):
        _, recipe, overrides, options = _words(case.command)
        resolved = load_and_resolve_recipe(
            recipe, overrides, LaunchOptions(None, 1, planned_only=True), {}
        )
        assert resolved.plan.memory is not None
        for variant in resolve_variants_or_refuse_if_none_can_run(
            resolved, options["engines"].split(","), [v for v in [options.get("vary")] if v]
        ):
            assert not variant.refusal or "engine ort" in variant.refusal, (
                case.name,
                variant.refusal,
            )


def _refusal(recipe: Path, overrides: list[str]) -> str:
    try:
        load_and_resolve_recipe(recipe, overrides, LaunchOptions(None, 1, planned_only=True), {})
    except RecipeError as error:
        return str(error)
    return ""


def test_llama_is_the_whole_model_and_too_large_for_a_small_card() -> None:
    """Llama with 6.7 billion weights is skipped with a reason on a GPU of 80 GiB."""
    case = next(c for c in cases("llama", form("cuda", 1)) if "eager" in c.name)
    shape = form("cuda", 1)
    assert "of a card, and this one has 80.0 GiB" in refusal(case, shape, 80 * 2**30)
    assert refusal(case, shape, 139 * 2**30) == ""


# ------------------------------------------------------------------------------- verdicts


def ended(folder: Path, status: int = 0, stderr: str = "", capability: float | None = 9.0) -> Any:
    """Return the result of a finished command."""
    return Ended(status, "", stderr, folder, PLAIN, capability)


def _trained(folder: Path, losses: list[float], used: str = "eager", skipped: int = 0) -> None:
    run = folder / "run"
    run.mkdir()
    lines = [
        json.dumps({"step": i, "loss": loss, "skipped_steps": skipped})
        for i, loss in enumerate(losses)
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (run / "engine.json").write_text(json.dumps({"engine": {"used": used}}))


@pytest.mark.parametrize(
    ("run", "status", "why"),
    [
        ({"losses": [4.001, 2.001]}, "passed", ""),
        ({"losses": [4.0, 2.03]}, "failed", "a loss differs by 1.5e-02; 0.005 is allowed"),
        ({"losses": [4.0, float("nan")]}, "failed", "a loss differs by inf"),
        ({"losses": [4.0]}, "failed", "a loss differs by inf"),
        ({"losses": [4.0, 2.0], "used": "ort"}, "failed", "ran on ort"),
        ({"losses": [4.0, 2.0], "skipped": 2}, "failed", "2 steps were skipped"),
        (
            {"losses": [4.0, 2.1], "skipped": 1, "precision": "fp16"},
            "passed",
            "1 losses were compared coarsely",
        ),
        (
            {"losses": [4.0, 2.3], "skipped": 1, "precision": "fp16"},
            "failed",
            "after a skipped step differs by 1.5e-01",
        ),
        (
            {"losses": [4.0, 2.0], "skipped": 4, "precision": "fp16"},
            "failed",
            "4 steps were skipped",
        ),
    ],
)
def test_a_curve_is_held_to_plain_pytorchs(
    run: dict[str, Any], status: str, why: str, tmp_path: Path
) -> None:
    """A curve passes with equal losses, the right engine, and skipped steps only in fp16."""
    precision = run.pop("precision", "bf16")
    _trained(tmp_path, **run)
    verdict = verdicts.curve("eager", precision, ended(tmp_path))
    assert verdict.status == status
    assert why in " ".join(verdict.why)


@pytest.mark.parametrize(
    ("engine", "code", "status"),
    [("ort", 2, "skipped"), ("eager", 2, "failed"), ("ort", 1, "failed")],
)
def test_only_ort_may_be_refused(engine: str, code: int, status: str, tmp_path: Path) -> None:
    """A refused run (status 2) is skipped for engine ort only, and a failed run never.

    Engine ort needs old Python versions and does not support bf16.
    """
    verdict = verdicts.curve(engine, "bf16", ended(tmp_path, code, "got bf16 with engine ort"))
    assert verdict.status == status
    assert "got bf16 with engine ort" in verdict.why[0]


def variant(name: str, **changes: Any) -> dict[str, Any]:
    """Return a row of bench.json for an engine and a varied setting."""
    engine, _, varied = name.partition(" ")
    truth = {
        "engine": {"used": engine}, "matmul_precision": {"in_force": varied.rpartition("=")[2] or "highest"},
        "gradient_checkpointing": "torch" if varied.endswith("true") else None,
        "sharding": "DeepSpeed ZeRO 2", "fp16_optimizer": {"applied": varied.endswith("true")},
        "chunked_loss": {"rows": 256 if varied.endswith("auto") else None},
    }  # fmt: skip
    row = {
        "name": name, "engine": engine, "varied": [varied], "state": "measured", "precision": "fp32",
        "seconds": {"median": 1.0}, "samples_per_second": 1.0, "tokens_per_second": 1.0, "mfu": 0.4,
        "mfu_of_vendor_peak": None, "memory": [100],
        "peak_flops": 4e14 if varied.endswith("high") else 5e13, "first_step": {"since_launch": 1.0}, "truth": truth,
        "parity": {"verdict": "passes", "largest": 1e-6}, "folder": "bench/one",
    }  # fmt: skip
    return {**row, **changes}


def judged(
    folder: Path, check: str, *variants: dict[str, Any], capability: float | None = 9.0
) -> Any:
    """Return the verdict of a check on a bench with these variants."""
    (folder / "bench" / "one").mkdir(parents=True)
    (folder / "bench" / "one" / "plan.json").write_text('{"memory": null}')
    found = [{**v, "folder": str(folder / v["folder"])} for v in variants]
    (folder / "bench" / "bench.json").write_text(json.dumps({"variants": found}))
    return verdicts.bench(getattr(verdicts, check), ended(folder, capability=capability))


FUSED = "fused_gradient_norm"
OFF = "chunked_loss=off"
AUTO = "chunked_loss=auto"
STOCK = {"truth": {**variant("eager")["truth"]}}
DIFFERS = {"parity": {"verdict": "differs", "largest": 0.5, "why": "loss 3 against 2"}}
NO_ROOM = {"parity": {"verdict": "not compared", "why": "OutOfMemoryError: CUDA out of memory"}}
REFUSED = {"state": "refused", "reason": "engine ort: is not installed"}


@pytest.mark.parametrize(
    ("check", "variants", "status", "why"),
    [
        (
            "nothing_more",
            [variant("eager"), variant("ort", **REFUSED)],
            "passed",
            "ort: refused: engine ort: is not",
        ),
        ("nothing_more", [variant("eager", **REFUSED)], "failed", "eager: refused"),
        ("nothing_more", [variant("ort", **REFUSED)], "skipped", "is not installed"),
        (
            "nothing_more",
            [variant("eager", state="failed", reason="Traceback\nBoom: 1")],
            "failed",
            "Boom: 1",
        ),
        ("nothing_more", [variant("ort", **DIFFERS)], "failed", "ort: parity: loss 3 against 2"),
        (
            "nothing_more",
            [variant("eager", **NO_ROOM)],
            "passed",
            "eager: not compared: OutOfMemoryError",
        ),
        (
            "precision_in_force",
            [variant("eager p=highest"), variant("eager p=high")],
            "failed",
            "highest is in force",
        ),
        (
            "loss_in_chunks",
            [variant(f"eager {OFF}"), variant(f"eager {AUTO}", memory=[50])],
            "passed",
            "",
        ),
        (
            "loss_in_chunks",
            [variant(f"eager {OFF}"), variant(f"eager {AUTO}")],
            "failed",
            "takes no less memory",
        ),
        ("loss_in_chunks", [variant("eager chunked_loss=64")], "failed", "chunks of None rows"),
        (
            "recomputed",
            [variant("eager g=false"), variant("eager g=true", memory=[50])],
            "passed",
            "",
        ),
        ("recomputed", [variant("eager g=true", memory=[50])], "passed", ""),
        (
            "modifier_as_asked",
            [variant(f"eager {FUSED}=true"), variant(f"eager {FUSED}=false")],
            "passed",
            "",
        ),
        (
            "modifier_as_asked",
            [variant(f"eager {FUSED}=true", **STOCK)],
            "failed",
            "the gradient norm is by DeepSpeed",
        ),
    ],
)
def test_a_bench_is_judged(
    check: str, variants: Any, status: str, why: str, tmp_path: Path
) -> None:
    """Variants that failed or differ, and each part's own question."""
    verdict = judged(tmp_path, check, *variants)
    assert (verdict.status, why in " ".join(verdict.why)) == (status, True), verdict.why


def test_tf32_must_be_faster(tmp_path: Path) -> None:
    """On a card that has it, a product at `high` is faster by half at least."""
    slow = variant("eager matmul_precision=high", peak_flops=5e13)
    fast = variant("eager matmul_precision=highest")
    verdict = judged(tmp_path / "new", "precision_in_force", fast, slow)
    assert verdict.why == ("a matrix product at high runs at 50 TFLOP/s, 50 without",)
    assert (
        judged(tmp_path / "old", "precision_in_force", fast, slow, capability=7.5).status
        == "passed"
    )


@pytest.mark.parametrize(("bytes_", "status"), [(105, "passed"), (120, "failed"), (80, "failed")])
def test_memory_is_within_a_tenth_of_the_plan(bytes_: int, status: str, tmp_path: Path) -> None:
    """Memory of weights, gradients and optimizer state may differ by a tenth from the plan."""
    (tmp_path / "run").mkdir()
    record = {"planned": {"model": 100, "peak": 200}, "measured": {"model": bytes_, "peak": 300}}
    (tmp_path / "run" / "memory.json").write_text(json.dumps(record))
    assert verdicts.memory(ended(tmp_path)).status == status


def test_a_stopped_proof_leaves_no_case_behind(tmp_path: Path) -> None:
    """A signal during a case ends the process of the case first."""
    ready = tmp_path / "pid"
    script = (
        f"import os, pathlib, time; pathlib.Path({str(ready)!r}).write_text(str(os.getpid())); "
        "time.sleep(60)"
    )

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def terminate() -> None:
        # The file exists for a moment before its text is written.
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, stop)
    try:
        threading.Thread(target=terminate, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            in_process([sys.executable, "-c", script], tmp_path, 60)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not Path("/proc", ready.read_text()).exists()
