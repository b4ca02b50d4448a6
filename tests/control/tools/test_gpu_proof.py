"""tools/gpu_proof.py: its commands for a GPU are valid today, and its judges fail what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch import machine
from ortlaunch.bench.measure import prepared
from ortlaunch.errors import RecipeError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.resolve import resolve

TOOLS = Path(__file__).resolve().parents[3] / "tools"
PLAIN = {"plain": {"rows": [{"losses": [4.0, 2.0]}]}}


@pytest.fixture(scope="module", autouse=True)
def _tools() -> Iterator[None]:
    """The scripts find each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield


# --------------------------------------------------------------------------------------- what a GPU would be asked


def _words(command: tuple[str, ...]) -> tuple[str, Path, list[str], dict[str, str]]:
    """Verb, recipe, overrides and options of an `ortlaunch` command."""
    _, _, _, verb, recipe, *rest = command
    options = dict(word[2:].split("=", 1) for word in rest if word.startswith("--") and "=" in word)
    return verb, Path(recipe), [word for word in rest if not word.startswith("--")], options


@pytest.mark.parametrize("part", ["eager", "inductor", "ort", "deepspeed", "memory"])
def test_the_trainings_on_a_gpu_can_be_planned(part: str) -> None:
    """Every setting is one that the recipe knows and CUDA allows; ort refuses ZeRO 3 by its name."""
    from gpu_cases import cases, form

    trainings = [case for case in cases(part, form("cuda", 1)) if "train" in case.command]
    assert len(trainings) >= 4
    for case in trainings:
        _, recipe, overrides, _ = _words(case.command)
        refused = _refusal(recipe, overrides)
        known = part == "ort" and "ZeRO 3" in case.name
        assert ("engine ort" in refused) if known else not refused, (case.name, refused)


def test_the_smoke_runs_on_a_gpu_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """27 cells and two ranks on one GPU; ort refuses by its name what it does not know."""
    import gpu_smoke

    gpu_smoke.write_inputs(tmp_path)
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: 1)
    refused, cells = {}, list(gpu_smoke.commands("cuda"))
    assert len(cells) == 1 + 27 + 4 + 1
    for name, commands, _ in (cell for cell in cells if cell[0] != "torch extensions"):
        ranks, (verb, recipe, *words) = commands[0]
        overrides = [word for word in words if not word.startswith("--")]
        try:
            options = LaunchOptions(None, ranks, planned_only=True)
            plan = resolve(tmp_path / recipe, overrides, options, {"ORTLAUNCH_SHARE_GPUS": "1"}).plan
            assert plan.nodes[0].devices == (0,) * ranks
        except RecipeError as error:
            refused[name] = str(error)
        assert verb == "train"
    assert {"ort, fp32, ZeRO 3", "ort, fp16, ZeRO 3"} <= set(refused)
    assert not [name for name in refused if "bf16" not in name and "ZeRO 3" not in name]
    assert all("engine ort" in why for why in refused.values())


def test_the_runs_of_single_functions_on_a_gpu_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences, offload, worker processes, dropout: every setting is one that the recipe knows."""
    import gpu_functions
    import gpu_smoke

    gpu_smoke.write_inputs(tmp_path)
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: 1)
    trainings = [words for _, runs, _ in gpu_functions.commands("cuda") for _, words in runs if words[0] == "train"]
    assert len(trainings) > 12
    for _, recipe, *words in trainings:
        overrides = [word for word in words if not word.startswith("--") and word != "batch.micro_size=auto"]
        resolve(tmp_path / recipe, overrides, LaunchOptions(planned_only=True), {})


def test_forked_cases_wait_for_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at a time; the reference before what is compared with it, the extensions before engine ort."""
    import gpu_proof
    import gpu_smoke
    from gpu_cases import Case
    from gpu_verdicts import Verdict

    begun, active = [], set()

    def run(sequence: Any, folder: Path, seconds: float, cold: bool) -> Iterator[None]:
        name = sequence[0][1][0]
        begun.append((name, frozenset(active)))
        active.add(name)
        yield from (None,) * 5
        active.remove(name)

    monkeypatch.setattr(gpu_smoke, "run", run)
    monkeypatch.setattr(gpu_smoke, "ended", lambda folder: (0, "", ""))
    monkeypatch.setattr(gpu_proof, "_loaded", lambda device: False)
    names = ("reference", "torch extensions", "eager, fp32", "ort, fp32", "eager, bf16", "eager, fp16")
    made = [Case("smoke", name, (), lambda ended: Verdict("passed"), forked=((1, (name,)),)) for name in names]
    results: dict[str, Any] = {"cases": {}, "machine": {"capability": None, "packages": {}, "name": "", "commit": None,
                               "device": "cpu", "date": "", "python": ""}}  # fmt: skip
    options = argparse.Namespace(device="cpu", at_once=2, out=tmp_path)
    gpu_proof._run_forked(made, results, options, tmp_path, time.monotonic() + 60, [])
    assert len(results["cases"]) == len(names)
    assert begun[0] == ("reference", frozenset())
    assert all("reference" not in others for _, others in begun)
    assert "torch extensions" not in next(others for name, others in begun if name == "ort, fp32")
    assert max(len(others) for _, others in begun) == 1


def test_a_resumed_run_must_be_the_same_bit_for_bit(tmp_path: Path) -> None:
    """One byte of a tensor, or a loss, that differs after the resume fails a smoke case."""
    from gpu_smoke import REFERENCE, trained
    from gpu_verdicts import Ended

    losses = [4.0, 3.9, 3.8, 3.7, 3.6, 3.5]
    for name, tail in (("run", losses), ("again", losses[3:])):
        run = tmp_path / name
        for file in ("checkpoints/step_00000006/model.safetensors", "export/model.safetensors"):
            (run / file).parent.mkdir(parents=True)
            (run / file).write_bytes(b"weights")
        records = [{"step": step, "loss": loss, "skipped_steps": 0} for step, loss in enumerate(tail)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        (run / "engine.json").write_text(json.dumps({"engine": {"used": "eager"}, "device": "cpu", "onnxruntime": {}}))
    known = {REFERENCE: {"rows": [{"losses": losses}]}}
    ended = Ended(0, "", "", tmp_path, known, None)
    assert trained("eager", "fp32", False, ended).why == ()
    (tmp_path / "again/export/model.safetensors").write_bytes(b"Weights")
    assert trained("eager", "fp32", False, ended).why == (
        "after the resume: export/model.safetensors differ; losses by at most 0.0e+00",
    )


@pytest.mark.parametrize("part", ["deepspeed", "bert", "lora", "llama", "precision", "chunked_loss", "recompute"])
def test_the_benches_on_a_gpu_can_be_planned(part: str) -> None:
    """Full-size models with every engine and every varied value; nothing is refused but what ort cannot do."""
    from gpu_cases import cases, form

    for case in (case for case in cases(part, form("cuda", 1)) if "bench" in case.command):
        _, recipe, overrides, options = _words(case.command)
        resolved = resolve(recipe, overrides, LaunchOptions(None, 1, planned_only=True), {})
        assert resolved.plan.memory is not None
        for variant in prepared(resolved, options["engines"].split(","), [v for v in [options.get("vary")] if v]):
            assert not variant.refused or "engine ort" in variant.refused, (case.name, variant.refused)


def _refusal(recipe: Path, overrides: list[str]) -> str:
    try:
        resolve(recipe, overrides, LaunchOptions(None, 1, planned_only=True), {})
    except RecipeError as error:
        return str(error)
    return ""


def test_llama_is_the_whole_model_and_too_large_for_a_small_card() -> None:
    """6.7 billion weights, planned above 100 GiB: a card of 80 skips them and says so."""
    import gpu_proof
    from gpu_cases import cases, form

    case, shape = next(c for c in cases("llama", form("cuda", 1)) if "eager" in c.name), form("cuda", 1)
    assert "of a card, and this one has 80.0 GiB" in gpu_proof._refused_before(case, shape, 80 * 2**30)
    assert gpu_proof._refused_before(case, shape, 139 * 2**30) == ""


# ------------------------------------------------------------------------------------------------------ verdicts


def ended(folder: Path, status: int = 0, stderr: str = "", capability: float | None = 9.0) -> Any:
    """A command that came to its end."""
    from gpu_verdicts import Ended

    return Ended(status, "", stderr, folder, PLAIN, capability)


def _trained(folder: Path, losses: list[float], used: str = "eager", skipped: int = 0) -> None:
    run = folder / "run"
    run.mkdir()
    lines = [json.dumps({"step": i, "loss": loss, "skipped_steps": skipped}) for i, loss in enumerate(losses)]
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
        ({"losses": [4.0, 2.1], "skipped": 1, "precision": "fp16"}, "passed", "1 losses were compared coarsely"),
        (
            {"losses": [4.0, 2.3], "skipped": 1, "precision": "fp16"},
            "failed",
            "after a skipped step differs by 1.5e-01",
        ),
        ({"losses": [4.0, 2.0], "skipped": 4, "precision": "fp16"}, "failed", "4 steps were skipped"),
    ],
)
def test_a_curve_is_held_to_plain_pytorchs(run: dict[str, Any], status: str, why: str, tmp_path: Path) -> None:
    """Each loss, the engine, and that no step was skipped but by fp16's first loss scale."""
    from gpu_verdicts import curve

    precision = run.pop("precision", "bf16")
    _trained(tmp_path, **run)
    verdict = curve("plain", "eager", precision, ended(tmp_path))
    assert verdict.status == status
    assert why in " ".join(verdict.why)


@pytest.mark.parametrize(
    ("engine", "code", "status"), [("ort", 2, "skipped"), ("eager", 2, "failed"), ("ort", 1, "failed")]
)
def test_only_ort_may_be_refused(engine: str, code: int, status: str, tmp_path: Path) -> None:
    """It is bound to old Pythons and fp16; a run that began and ended badly has failed, and so has any other engine."""
    from gpu_verdicts import curve

    verdict = curve("plain", engine, "bf16", ended(tmp_path, code, "got bf16 with engine ort"))
    assert verdict.status == status
    assert "got bf16 with engine ort" in verdict.why[0]


def variant(name: str, **changes: Any) -> dict[str, Any]:
    """A row of bench.json."""
    engine, _, varied = name.partition(" ")
    truth = {
        "engine": {"used": engine}, "matmul_precision": {"in_force": varied.rpartition("=")[2] or "highest"},
        "gradient_checkpointing": "torch" if varied.endswith("true") else None,
        "sharding": "DeepSpeed ZeRO 2", "fp16_optimizer": {"by": "ortlaunch" if varied.endswith("true") else None},
        "chunked_loss": {"rows": 256 if varied.endswith("auto") else None},
    }  # fmt: skip
    row = {
        "name": name, "engine": engine, "varied": [varied], "state": "measured", "precision": "fp32",
        "seconds": {"median": 1.0}, "samples_per_second": 1.0, "tokens_per_second": 1.0, "mfu": 0.4, "memory": [100],
        "peak_flops": 4e14 if varied.endswith("high") else 5e13, "first_step": {"since_launch": 1.0}, "truth": truth,
        "parity": {"verdict": "passes", "largest": 1e-6}, "folder": "bench/one",
    }  # fmt: skip
    return {**row, **changes}


def judged(folder: Path, check: str, *variants: dict[str, Any], capability: float | None = 9.0) -> Any:
    """The verdict on a bench of these variants."""
    import gpu_verdicts

    (folder / "bench" / "one").mkdir(parents=True)
    (folder / "bench" / "one" / "plan.json").write_text('{"memory": null}')
    found = [{**v, "folder": str(folder / v["folder"])} for v in variants]
    (folder / "bench" / "bench.json").write_text(json.dumps({"variants": found}))
    return gpu_verdicts.bench(getattr(gpu_verdicts, check), ended(folder, capability=capability))


FUSED, OFF, AUTO = "fused_gradient_norm", "chunked_loss=off", "chunked_loss=auto"
STOCK = {"truth": {**variant("eager")["truth"]}}
DIFFERS = {"parity": {"verdict": "differs", "largest": 0.5, "why": "loss 3 against 2"}}
NO_ROOM = {"parity": {"verdict": "not compared", "why": "OutOfMemoryError: CUDA out of memory"}}
REFUSED = {"state": "refused", "reason": "engine ort: is not installed"}


@pytest.mark.parametrize(
    ("check", "variants", "status", "why"),
    [
        ("nothing_more", [variant("eager"), variant("ort", **REFUSED)], "passed", "ort: refused: engine ort: is not"),
        ("nothing_more", [variant("eager", **REFUSED)], "failed", "eager: refused"),
        ("nothing_more", [variant("ort", **REFUSED)], "skipped", "is not installed"),
        ("nothing_more", [variant("eager", state="failed", reason="Traceback\nBoom: 1")], "failed", "Boom: 1"),
        ("nothing_more", [variant("ort", **DIFFERS)], "failed", "ort: parity: loss 3 against 2"),
        ("nothing_more", [variant("eager", **NO_ROOM)], "passed", "eager: not compared: OutOfMemoryError"),
        ("precision_in_force", [variant("eager p=highest"), variant("eager p=high")], "failed", "highest is in force"),
        ("loss_in_chunks", [variant(f"eager {OFF}"), variant(f"eager {AUTO}", memory=[50])], "passed", ""),
        ("loss_in_chunks", [variant(f"eager {OFF}"), variant(f"eager {AUTO}")], "failed", "takes no less memory"),
        ("loss_in_chunks", [variant("eager chunked_loss=64")], "failed", "chunks of None rows"),
        ("recomputed", [variant("eager g=false"), variant("eager g=true", memory=[50])], "passed", ""),
        ("recomputed", [variant("eager g=true", memory=[50])], "passed", ""),
        ("modifier_as_asked", [variant(f"eager {FUSED}=true"), variant(f"eager {FUSED}=false")], "passed", ""),
        ("modifier_as_asked", [variant(f"eager {FUSED}=true", **STOCK)], "failed", "the gradient norm is by DeepSpeed"),
    ],
)
def test_a_bench_is_judged(check: str, variants: Any, status: str, why: str, tmp_path: Path) -> None:
    """Variants that failed or differ, and each part's own question."""
    verdict = judged(tmp_path, check, *variants)
    assert (verdict.status, why in " ".join(verdict.why)) == (status, True), verdict.why


def test_tf32_must_be_faster(tmp_path: Path) -> None:
    """On a card that has it, a product at `high` is faster by half at least."""
    slow = variant("eager matmul_precision=high", peak_flops=5e13)
    fast = variant("eager matmul_precision=highest")
    verdict = judged(tmp_path / "new", "precision_in_force", fast, slow)
    assert verdict.why == ("a matrix product at high runs at 50 TFLOP/s, 50 without",)
    assert judged(tmp_path / "old", "precision_in_force", fast, slow, capability=7.5).status == "passed"


@pytest.mark.parametrize(("bytes_", "status"), [(105, "passed"), (120, "failed"), (80, "failed")])
def test_memory_is_within_a_tenth_of_the_plan(bytes_: int, status: str, tmp_path: Path) -> None:
    """Weights, gradients and optimizer state."""
    from gpu_verdicts import memory

    (tmp_path / "run").mkdir()
    record = {"planned": {"model": 100, "peak": 200}, "measured": {"model": bytes_, "peak": 300}}
    (tmp_path / "run" / "memory.json").write_text(json.dumps(record))
    assert memory(ended(tmp_path)).status == status


# ---------------------------------------------------------------------------------------------- the whole command


def proof(out: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], **changes: Any) -> int:
    """The command's exit status over these scripts as its only cases, which pass with status 0."""
    import gpu_proof
    from gpu_cases import Case
    from gpu_verdicts import Verdict

    def judge(ended: Any) -> Verdict:
        return Verdict({0: "passed", 2: "skipped"}.get(ended.status, "failed"), (ended.last_words,))

    made = [Case("part", name, (sys.executable, "-c", code), judge) for name, code in scripts.items()]
    options = {
        "out": out,
        "part": ["part"],
        "only": [""],
        "device": "cpu",
        "ranks": 1,
        "minutes": 1.0,
        "again": False,
        **changes,
    }
    found = {"device": "cpu", "name": "CPU", "memory": None, "capability": None, "python": "3.11",
               "packages": {"torch": "2.13"}, "commit": None, "date": "today"}  # fmt: skip
    monkeypatch.setattr(gpu_proof, "cases", lambda part, form: made)
    monkeypatch.setattr(gpu_proof, "_options", lambda: argparse.Namespace(**options))
    monkeypatch.setattr(gpu_proof, "_machine", lambda device: {**found, **changes.get("machine", {})})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return int(gpu_proof.main())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_failure_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed case among others: status 1, its reason on the page, and again 1 when nothing is left to run."""
    scripts = {"good": "print(1)", "bad": "raise SystemExit('planted')", "absent": "raise SystemExit(2)"}
    for _ in range(2):
        assert proof(tmp_path, monkeypatch, scripts) == 1
    assert "- bad: failed: planted" in (tmp_path / "page.md").read_text()
    assert "| part | 1 | 1 | 1 |" in (tmp_path / "page.md").read_text()


def test_a_proof_of_nothing_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is skipped, the status is 1."""
    assert proof(tmp_path, monkeypatch, {"absent": "raise SystemExit(2)"}) == 1


def test_what_time_is_too_short_for_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that would take too long is ended, status 3, and the next call goes on with it, not before."""
    scripts = {"quick": "import pathlib; pathlib.Path('/dev/null')", "long": "import time; time.sleep(2)"}
    assert proof(tmp_path, monkeypatch, scripts, minutes=1 / 60) == 3
    first = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert list(first) == ["part: quick"]
    assert proof(tmp_path, monkeypatch, scripts) == 0
    second = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert list(second) == ["part: quick", "part: long"]
    assert first["part: quick"] == second["part: quick"]


def test_a_stopped_proof_leaves_no_case_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the middle of a case ends that first; the status is the signal's."""
    ready = tmp_path / "pid"
    script = f"import os, pathlib, time; pathlib.Path({str(ready)!r}).write_text(str(os.getpid())); time.sleep(60)"

    def terminate() -> None:
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(SystemExit) as end:
        proof(tmp_path / "out", monkeypatch, {"long": script})
    assert end.value.code == 128 + signal.SIGTERM
    assert not Path("/proc", ready.read_text()).exists()


def test_results_of_another_machine_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of a rehearsal, or of another torch, is refused with both."""
    assert proof(tmp_path, monkeypatch, {"good": ""}) == 0
    with pytest.raises(SystemExit) as end:
        proof(tmp_path, monkeypatch, {"good": ""}, machine={"packages": {"torch": "2.6"}})
    assert end.value.code == 2
    assert "packages: {'torch': '2.13'}, here {'torch': '2.6'}); give another --out" in capsys.readouterr().err
