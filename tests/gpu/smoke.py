"""Part `smoke`: short complete runs, forked from one process that has loaded the libraries.

Each case trains a small Llama for six steps and compares its losses with a CPU's. It then repeats
the last three steps from a checkpoint and compares every byte. Two ranks share one device over gloo
(ORTLAUNCH_SHARE_GPUS).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.e2e import forked
from tests.gpu.verdicts import FAILED, SKIPPED, TOLERANCE, Ended, Verdict, difference, judged, near

STEPS = 6
SAVED = 3
_LAST = f"checkpoints/step_{STEPS:08}"
_MIDDLE = f"checkpoints/step_{SAVED:08}"
# An untrained model's loss times DeepSpeed's first scale of 65536 is inf in fp16: steps would be
# skipped.
LOW_SCALE = "zero.deepspeed={fp16: {initial_scale_power: 10}}"
# Relative difference of losses that another number of ranks sums in another order.
_OTHER_WORLD = 1e-4
RECIPE: dict[str, Any] = {
    "name": "smoke",
    "seed": 42,
    "model": {
        "task": "causal-lm",
        "config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "intermediate_size": 172,
                   "max_position_embeddings": 64, "tie_word_embeddings": False},
    },
    "data": {
        "train": {"format": "text", "path": ["train.txt"]},
        "evaluation": {"format": "text", "path": ["held-out.txt"]},
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "sequence_length": 64,
    },
    "batch": {"global_size": 8, "micro_size": 4},
    "optimizer": {"name": "fused_adam", "learning_rate": 3e-3},
    "schedule": {"name": "constant"},
    "train": {"max_steps": STEPS, "max_grad_norm": 1.0, "stall_seconds": None},
    "checkpoint": {"every_steps": SAVED, "every_minutes": None, "keep": None},
    "log": {"every_steps": 1},
}  # fmt: skip

# Ranks (0: the command starts them itself) and the arguments of one `ortlaunch`.
Command = tuple[int, tuple[str, ...]]


# ----------------------------------------------------------------------------------------- commands


def commands(device: str) -> Iterator[tuple[str, tuple[Command, ...], Any]]:
    """Yield name, commands and judge of each case."""
    yield from _cells(device, "eager")
    for stage in (None, 1, 2, 3):
        yield _two_ranks(device, stage)
    for engine in ("ort", "inductor"):
        yield from _cells(device, engine)


def reference() -> tuple[Command, ...]:
    """Return the reference run of all cases: plain PyTorch in float32 on a CPU."""
    return (_train("cpu", "eager", "fp32", None),)


def _cells(device: str, engine: str) -> Iterator[tuple[str, tuple[Command, ...], Any]]:
    for precision in _precisions(device, engine):
        for stage in _stages(device, engine):
            yield _one_rank(
                device, engine, precision, stage, first=(precision, stage) == ("fp32", None)
            )


def _precisions(device: str, engine: str) -> tuple[str, ...]:
    """Return the precisions that an engine supports on a device."""
    # On a CPU, DeepSpeed refuses fp16, and only eager is tested in bf16 here.
    if device == "cuda":
        return ("fp32", "fp16", "bf16")
    return ("fp32", "bf16") if engine == "eager" else ("fp32",)


def _stages(device: str, engine: str) -> tuple[int | None, ...]:
    """Return the ZeRO stages to test; None is without DeepSpeed."""
    # A CPU compiles inductor's graph for half a minute, and engine ort does not support ZeRO 3.
    if engine == "eager" or device == "cuda":
        return (None, 2, 3)
    return (None,) if engine == "inductor" else (None, 2)


def _one_rank(
    device: str, engine: str, precision: str, stage: int | None, first: bool
) -> tuple[str, tuple[Command, ...], Any]:
    settings = device, engine, precision, stage
    found = [_train(*settings), _again(*settings)]
    if first:
        found += [
            (1, ("evaluate", "run", f"launch.device={device}")),
            (1, ("export", "run", "--to=exported")),
            (1, ("generate", "run", "The value of", "--max-new-tokens=5")),
        ]
        # The export to ONNX compares with PyTorch by packages that come with engine ort.
        if engine == "ort":
            found.append((1, ("export", "run", "--to=onnx", "--format=onnx")))
    name = f"{engine}, {precision}, {_sharding(stage, 1)}"
    return name, tuple(found), partial(trained, engine, precision, first)


def _two_ranks(device: str, stage: int | None) -> tuple[str, tuple[Command, ...], Any]:
    """Return a case of two ranks on one device; ZeRO 2 also resumes on one rank."""
    settings = device, "eager", "fp32", stage
    found = [_train(*settings, ranks=2), _again(*settings, ranks=2)]
    if stage == 2:
        found.append(_again(*settings, name="one"))
    return (
        f"two ranks on one device, {_sharding(stage, 2)}",
        tuple(found),
        partial(trained, "eager", "fp32", False),
    )


def _sharding(stage: int | None, ranks: int) -> str:
    return f"ZeRO {stage}" if stage else "DDP" if ranks > 1 else "no DeepSpeed"


def _train(
    device: str, engine: str, precision: str, stage: int | None, *more: str, ranks: int = 1
) -> Command:
    zero = "zero=null" if stage is None else f"zero={{stage: {stage}}}"
    scale = (LOW_SCALE,) if stage is not None and precision == "fp16" else ()
    settings = (
        f"launch.device={device}",
        f"engine.name={engine}",
        f"precision={precision}",
        zero,
        *scale,
        *more,
    )
    return ranks, ("train", "smoke.yaml", *settings, *(() if more else ("--run-dir=run",)))


def _again(*settings: Any, name: str = "again", ranks: int = 1) -> Command:
    """Return the command that repeats the last steps from the checkpoint of `run`."""
    return _train(*settings, f"--run-dir={name}", f"--resume=run/{_MIDDLE}", ranks=ranks)


# --------------------------------------------------------------------------------------------- runs


def run(
    sequence: tuple[Command, ...], folder: Path, seconds: float, cold: bool
) -> tuple[int, str, str]:
    """Run commands one after another in a new folder.

    Returns:
        Status of the first command that fails (else 0), stdout and stderr. After a failure stderr
        has the output of all commands, else stdout has it.

    Raises:
        TimeoutExpired: the commands took more than `seconds` together.
    """
    deadline = time.monotonic() + seconds
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # Two ranks share one GPU also on a machine with several.
    one = {"ORTLAUNCH_SHARE_GPUS": "1", "CUDA_VISIBLE_DEVICES": gpu}
    folder.mkdir()
    write_inputs(folder)
    log = ""
    for ranks, words in sequence:
        started = forked.start(folder, folder / "part", ranks, list(words), cold=cold, **one)
        try:
            started.join(max(0.0, deadline - time.monotonic()))
            status = started.exitcode
        finally:
            _end(started)
        log += f"$ ortlaunch {' '.join(words)}\n{(folder / 'part').read_text()}"
        if status is None:
            raise subprocess.TimeoutExpired("ortlaunch", seconds)
        if status:
            return status, "", log
    return 0, log, ""


def _end(started: Any) -> None:
    """End the remaining processes of a command."""
    # SIGTERM first, so that the supervisors can end their ranks.
    for number in (signal.SIGTERM, signal.SIGKILL):
        if started.exitcode is None:
            os.killpg(started.pid, number)
            started.join(20)


def write_inputs(folder: Path) -> None:
    """Write the recipe, and training text from the language reference inside CPython."""
    from pydoc_data.topics import topics

    (folder / "smoke.yaml").write_text(yaml.safe_dump(RECIPE))
    names = ("assignment", "class", "if", "import", "lambda", "try", "while", "with")
    (folder / "train.txt").write_text("\n".join(topics[name] for name in names))
    (folder / "held-out.txt").write_text(topics["yield"])


# ------------------------------------------------------------------------------------------- judges


def trained(engine: str, precision: str, first: bool, ended: Ended) -> Verdict:
    """Check losses, engine, device, the resumed run and, for the first case, the other commands."""
    if ended.status == 2 and engine == "ort" and "engine ort" in ended.stderr:
        return Verdict(SKIPPED, (ended.last_words,))
    if ended.status:
        return failed(ended)
    run = ended.folder / "run"
    again = ended.folder / "again"
    report = json.loads((run / "engine.json").read_text())
    complaints, row, notes = near(_records(run), precision, ended)
    losses = losses_of(run)
    complaints += [
        *([f"ran on {report['engine']['used']}"] if report["engine"]["used"] != engine else []),
        *_wrong_device(report, ended.capability is not None),
        *(
            []
            if losses[-1] < losses[0]
            else [f"the loss rose from {losses[0]:.4f} to {losses[-1]:.4f}"]
        ),
        *(
            f"after the resume: {what}"
            for what in differences(run, again, _rounding(engine, precision, ended))
        ),
        *_other_world(run, ended.folder / "one"),
        *(_wrong_outputs(ended) if first else []),
    ]
    graph = (report["onnxruntime"] or {}).get("training_graph") or {}
    nodes = ", ".join(
        f"{count} {provider}" for provider, count in graph.get("nodes_by_provider", {}).items()
    )
    return judged(complaints, [{**row, "nodes": nodes or None}], notes)


def failed(ended: Ended) -> Verdict:
    """Return a failure with the last lines of the command's output."""
    return Verdict(FAILED, (f"exit status {ended.status}: {ended.last_words}",))


def _records(run: Path) -> list[dict[str, Any]]:
    return [record for record in _lines(run / "metrics.jsonl") if "loss" in record]


def losses_of(run: Path) -> list[float]:
    """Return the losses in the order of the steps."""
    return [record["loss"] for record in _records(run)]


def _wrong_device(report: dict[str, Any], cuda: bool) -> Iterator[str]:
    """Yield complaints if the run or ONNX Runtime's nodes were on another device."""
    if report["device"] != ("cuda" if cuda else "cpu"):
        yield f"ran on {report['device']}"
    graph = (report["onnxruntime"] or {}).get("training_graph")
    if graph and cuda and graph.get("provider") != "CUDAExecutionProvider":
        yield f"ONNX Runtime ran on {graph.get('provider')}"


def _rounding(engine: str, precision: str, ended: Ended) -> float:
    """Return the relative difference that losses may have after a resume; 0: equal bit for bit."""
    # Triton's kernels add an embedding's gradients in any order.
    return TOLERANCE[precision] if engine == "inductor" and ended.capability is not None else 0.0


def differences(run: Path, again: Path, rounding: float = 0.0) -> list[str]:
    """Return the differences between a run and its resumed copy.

    Without `rounding` losses and tensors must be equal bit for bit; else only losses are compared.
    """
    largest = difference(losses_of(again)[-SAVED:], losses_of(run)[SAVED:])
    if rounding:
        return [f"a loss differs by {largest:.1e}"] if largest > rounding else []
    names = [path.relative_to(run) for path in (run / _LAST).glob("*.safetensors")]
    if not names:
        return [f"no tensors in {_LAST}"]
    names.append(Path("export/model.safetensors"))
    found = [
        str(name) for name in names if (run / name).read_bytes() != (again / name).read_bytes()
    ]
    return (
        [f"{', '.join(found)} differ; losses by at most {largest:.1e}"] if found or largest else []
    )


def _other_world(run: Path, one: Path) -> Iterator[str]:
    if one.exists():
        largest = difference(losses_of(one)[-SAVED:], losses_of(run)[SAVED:])
        if largest > _OTHER_WORLD:
            yield f"on one rank a loss after the resume differs by {largest:.1e}"


def _wrong_outputs(ended: Ended) -> Iterator[str]:
    """Yield complaints about the outputs of evaluate, export and generate."""
    run = ended.folder / "run"
    (at_end,) = (
        line["evaluation_loss"]
        for line in _lines(run / "metrics.jsonl")
        if "evaluation_loss" in line
    )
    again = json.loads((run / f"evaluations/step_{STEPS:08}/evaluation.json").read_text())["loss"]
    if difference([again], [at_end]) > _OTHER_WORLD:
        yield f"evaluate measured a loss of {again:.5f}, and the run's end {at_end:.5f}"
    if (ended.folder / "exported/model.safetensors").read_bytes() != (
        run / "export/model.safetensors"
    ).read_bytes():
        yield "export differs from the one that the run wrote"
    generated = ended.stdout.rpartition("$ ortlaunch generate")[2].partition("$ ortlaunch")[0]
    if not generated.rpartition("The value of")[2].strip():
        yield "generate wrote nothing after its prompt"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
