"""Whole runs of `ortlaunch train`: the run folder, a second start, and the engine in use."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import EvaluationLine, MetricsLine
from ortlaunch.tables.metrics import METRICS
from ortlaunch.worker.allocator import KEPT_MEMORY_TEXT
from tests.e2e.runs import (
    BERT,
    COMMAND,
    EAGER,
    FULL,
    ROOT,
    TOY,
    TOYS,
    Run,
    Train,
    ended_well,
    environment,
    exported_again,
    exported_evaluation,
    interrupted,
    merged,
)
from tests.ort import needs_ort

SHARD = "rank_00000.safetensors"

# ------------------------------------------------------------ one run, looked at from all sides


@pytest.fixture(scope="module")
def full(train: Train) -> Run:
    """A run of ten steps with dropout, evaluation, clipping, checkpoints and TensorBoard."""
    return ended_well(train("full", FULL))


def test_the_run_folder(full: Run) -> None:
    """A run folder has exactly these files."""
    board = {name for name in full.files() if name.startswith("tensorboard/")}
    # TensorBoard's event file has time and host in its name.
    assert len(board) == 1
    assert full.files() - board == {
        "recipe.yaml", "plan.json", "environment.json", "request.sh", "metrics.jsonl", "engine.json", "memory.json",
        "summary.json", "saves.jsonl", "resume.json", "vocabulary.json", "lock", "job.json", "commands.jsonl",
        "modules/toys.py", "logs/rank_00000.out", "logs/rank_00000.err", "export/model.safetensors",
        *(f"checkpoints/step_00000010/{name}"
          for name in ("index.json", SHARD, "training.json", "manifest.json", "COMPLETE")),
    }  # fmt: skip
    assert full.out.splitlines()[-2].startswith("done: full, in 0:")
    shown = [line for line in full.out.splitlines() if line.startswith("step ")]
    assert shown == [
        line
        for line in (full.folder / "logs/rank_00000.out").read_text().splitlines()
        if line in shown
    ]
    # Ten steps and three evaluations.
    assert len(shown) == 13


def test_where_the_run_came_from(full: Run, home: Path) -> None:
    """The run folder records the command, its folder and the user's module."""
    (line,) = [
        json.loads(text) for text in (full.folder / "commands.jsonl").read_text().splitlines()
    ]
    assert line["argv"][1:] == ["train", "full.yaml", "--run-dir=full"]
    # Outside git no commit is recorded.
    assert (line["cwd"], line["recipe"], line["git"]) == (str(home), str(home / "full.yaml"), None)
    assert (full.folder / "modules/toys.py").read_text() == TOYS


def test_only_the_newest_checkpoints_are_kept(full: Run) -> None:
    """With keep: 1 only the last checkpoint stays; its manifest has sizes and checksums."""
    folder = full.folder / "checkpoints/step_00000010"
    manifest = json.loads((folder / "manifest.json").read_text())
    contents = {
        name: (folder / name).read_bytes() for name in ("index.json", SHARD, "training.json")
    }
    files = {
        name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in contents.items()
    }
    assert manifest == {"step": 10, "samples": 160, "ranks": 1, "files": files}


def test_metrics_are_of_their_declared_forms(full: Run) -> None:
    """Every line is one of a step or of an evaluation, as in docs/reference/run-folder.md."""
    # Names of other metrics depend on the task, and are not fields of the record.
    metrics = {f"evaluation_{name}" for name in METRICS if name != "loss"}
    for record in full.records():
        if "evaluation_loss" in record:
            EvaluationLine(**{name: value for name, value in record.items() if name not in metrics})
        else:
            MetricsLine(**record)


def test_metrics_of_every_step(full: Run) -> None:
    """Every logged step has loss, rate, norm before clipping, samples, skipped steps and time."""
    records = [record for record in full.records() if "loss" in record]
    # The default schedule is linear, without warmup.
    assert [record["learning_rate"] for record in records] == pytest.approx(
        [1e-2 * (1 - i / 10) for i in range(10)]
    )
    assert [record["samples"] for record in records] == list(range(16, 161, 16))
    assert [record["skipped_steps"] for record in records] == [0] * 10
    # Clipped to 0.5; the record is the norm before that.
    assert all(record["gradient_norm"] > 0.5 for record in records)
    times = [record["elapsed_seconds"] for record in full.records()]
    assert times == sorted(times)
    assert all(record["samples_per_second"] > 0 for record in records)


def test_evaluation_is_of_the_model_without_dropout(full: Run, home: Path) -> None:
    """Evaluations run every 4 steps and at the end; the last one fits the exported weights."""
    assert [step for step, _ in full.values("evaluation_loss")] == [4, 8, 10]
    expected = exported_evaluation(full, home)
    assert full.values("evaluation_loss")[-1][1] == pytest.approx(expected, rel=1e-5)


def test_tensorboard_has_the_same_numbers(full: Run) -> None:
    """TensorBoard's values are those of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(full.folder / "tensorboard"))
    board.Reload()
    tags = {
        "loss": "train/loss",
        "evaluation_loss": "eval/loss",
        "learning_rate": "train/learning_rate",
    }
    for name, tag in {**tags, "gradient_norm": "train/gradient_norm"}.items():
        # TensorBoard stores values in 32 bits.
        written = [(event.step, event.value) for event in board.Scalars(tag)]
        assert written == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in full.values(name)
        ]


def test_a_finished_run_started_again_trains_nothing(full: Run, train: Train, home: Path) -> None:
    """A finished run that is started again trains nothing, and changes no file but the lock."""
    shutil.copytree(full.folder, home / "again")
    # 6 is less than the 10 finished steps.
    for asked in (10, 6):
        again = ended_well(train("again", FULL, f"train.max_steps={asked}"))
        assert f"nothing to train: 10 of {asked} steps are done" in again.out
        assert again.files() == full.files()
        changed = {
            n
            for n in full.files()
            if (again.folder / n).read_bytes() != (full.folder / n).read_bytes()
        }
        assert changed <= {"lock"}
    job = RunDir(again.folder).job
    write_json_atomically(
        job,
        {
            **read_json_or_raise_damaged(job),
            "state": "running",
            "ended": None,
            "exit_status": None,
            "verdict": None,
        },
    )
    # The record is now that of a command that was killed just before its ranks ended.
    ended_well(train("again", FULL))
    assert (
        read_json_or_raise_damaged(job)["state"],
        read_json_or_raise_damaged(job)["exit_status"],
    ) == ("succeeded", 0)


def test_a_checkpoint_is_evaluated(full: Run, home: Path) -> None:
    """`ortlaunch evaluate` gives the training's last evaluation, and changes no file of the run."""
    shutil.copytree(full.folder, home / "evaluated")
    before = {name: (home / "evaluated" / name).read_bytes() for name in full.files()}
    command = [str(COMMAND), "evaluate", "evaluated"]
    subprocess.run(
        command, cwd=home, env=environment(home), check=True, capture_output=True, timeout=120
    )
    found = json.loads((home / "evaluated/evaluations/step_00000010/evaluation.json").read_text())
    assert found == {
        "step": 10,
        "samples": 17,
        "loss": pytest.approx(full.values("evaluation_loss")[-1][1], rel=1e-6),
    }
    assert {name: (home / "evaluated" / name).read_bytes() for name in full.files()} == before


@pytest.mark.slow
@pytest.mark.ci
def test_an_export_that_was_taken_away_is_written_again(
    full: Run, train: Train, home: Path
) -> None:
    """A finished run without its export writes it from the last checkpoint; its records stay."""
    shutil.copytree(full.folder, home / "exported-again")
    shutil.rmtree(home / "exported-again/export")
    again = ended_well(train("exported-again", FULL))
    assert "nothing to train: 10 of 10 steps are done" in again.out
    for name in ("export/model.safetensors", "memory.json", "metrics.jsonl"):
        assert (again.folder / name).read_bytes() == (full.folder / name).read_bytes()
    before, after = (json.loads((run.folder / "summary.json").read_text()) for run in (full, again))
    # Seconds are those of each start, and the second one trained no step.
    timed = {"seconds": None, "step_seconds": None}
    assert {**after, **timed} == {**before, **timed}


def test_the_end_says_what_came_out(full: Run) -> None:
    """A run's last lines have its totals, losses and export, and the next commands."""
    summary = json.loads((full.folder / "summary.json").read_text())
    loss = full.values("loss")[-1][1]
    evaluation = full.values("evaluation_loss")[-1][1]
    seconds = full.records()[-1]["elapsed_seconds"]
    parts = summary.pop("seconds")
    # The median of a step; predicted only where that was asked for.
    assert 0 < summary.pop("step_seconds") < seconds
    assert summary == {"steps": 10, "samples": 160, "epochs": 0.625, "loss": loss, "evaluation_loss": evaluation,
                       "training_seconds": seconds, "failed_saves": 0, "failed_exports": 0,
                       "bad_steps": {}}  # fmt: skip
    assert [*parts] == [("loading "
                        "libraries"), "reading checkpoints", "reading data", "building the model",
                        "building the engine", "training", "evaluating", "saving a checkpoint",
                        "writing the export"]  # fmt: skip
    assert parts["loading libraries"] > 0
    assert parts["training"] > 0
    lines = full.out.splitlines()
    assert lines[-7].startswith("trained 10 steps: 160 samples, 0.625 epochs, in 0:")
    assert re.fullmatch(r"a step: [\d.e-]+ s", lines[-6])
    assert lines[-5] == f"final loss {loss:.4f}, evaluation loss {evaluation:.4f}"
    assert lines[-4] == "export: full/export"
    assert (
        lines[-3] == '  safetensors.torch.load_model(your_model, "full/export/model.safetensors")'
    )
    assert lines[-1] == "to continue: ortlaunch train full.yaml --run-dir=full train.max_steps=20"


# ------------------------------------------------------------ resuming


def test_a_resumed_run_is_the_same_run(full: Run, train: Train, home: Path) -> None:
    """A run that failed at step 7 and resumed from step 5 equals an undisturbed run."""
    resumed = interrupted(train, home, "resumed", FULL)
    assert "resumed after step 5 from" in resumed.out
    assert resumed.losses() == full.losses()
    assert resumed.values("evaluation_loss") == full.values("evaluation_loss")
    name = "export/model.safetensors"
    assert (resumed.folder / name).read_bytes() == (full.folder / name).read_bytes()
    # `keep: 1` removed it after the save of step 10.
    assert not (resumed.folder / "checkpoints/step_00000005").exists()
    assert not list((resumed.folder / "errors").glob("*"))


def test_a_checkpoint_as_a_model(full: Run, home: Path) -> None:
    """`ortlaunch export` of a checkpoint equals the run's own export."""
    assert exported_again(full, home)


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_a_run_on_onnx_runtime_goes_on(train: Train) -> None:
    """A resumed run with dropout in ONNX Runtime's graph is the same; each start exports once."""
    recipe = merged(
        TOY,
        {
            "model": {"arguments": {"dropout": 0.3}},
            "engine": {"parity_steps": 0},
            "checkpoint": {"every_steps": 5},
        },
    )
    run = ended_well(train("ten", recipe))
    losses = run.losses()
    first = run.truth()["onnxruntime"]
    # Without its mark, the last checkpoint is incomplete, and the one of step 5 is used.
    (run.folder / "checkpoints/step_00000010/COMPLETE").unlink()
    resumed = ended_well(train("ten", recipe))
    assert "resumed after step 5 from" in resumed.out
    assert resumed.losses() == losses
    second = resumed.truth()["onnxruntime"]
    # Four passes a step: 10 steps, then 5.
    assert [first["forward_passes"], second["forward_passes"]] == [40, 20]
    for counts in (first, second):
        assert [counts[name] for name in ("exports", "re_exports")] == [1, 0]


@needs_ort
@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, {"stage": 1}], ids=["plain", "zero 1"])
def test_names_are_the_users_models(zero: dict[str, Any] | None, train: Train) -> None:
    """Checkpoint and export have the names of the user's model, without those of its wrappers."""
    saved = {}
    for engine in ("ort", "eager"):
        held_out = {
            "evaluation": {
                "format": "custom",
                "factory": "toys:data",
                "arguments": {"samples": 17, "seed": 1},
            }
        }
        recipe = merged(
            TOY,
            {"engine": {"name": engine}, "zero": zero, "train": {"max_steps": 2}, "data": held_out},
        )
        run = ended_well(train(f"names-{engine}-{bool(zero)}", recipe))
        last = run.folder / "checkpoints/step_00000002"
        state = json.loads((last / "index.json").read_text())
        exported = load_file(run.folder / "export/model.safetensors")
        saved[engine] = [*state["weights"], *state["buffers"]], sorted(exported)
        assert run.truth()["engine"]["used"] == engine
        ort = run.truth()["onnxruntime"]
        # A re-export would mean that the graph did not fit a later batch.
        assert engine == "eager" or ort["re_exports"] == 0
    assert saved["ort"] == saved["eager"]
    assert all(name.startswith("model.") for name in saved["ort"][0])


@pytest.mark.slow
@pytest.mark.ci
def test_epochs_in_place_of_steps(train: Train) -> None:
    """Half an epoch of 256 samples in steps of 16 is 8 steps, and the learning rate falls to 0."""
    recipe = merged(
        TOY, {**EAGER, "train": {"max_steps": None, "epochs": 0.5}, "batch": {"micro_size": None}}
    )
    run = ended_well(train("epochs", recipe))
    assert [step for step, _ in run.values("loss")] == list(range(1, 9))
    assert [rate for _, rate in run.values("learning_rate")] == pytest.approx(
        [1e-2 * (1 - i / 8) for i in range(8)]
    )
    assert run.values("epoch") == [(step, round(step / 16, 4)) for step in range(1, 9)]
    assert "data: 256 samples; 8 steps of 16 are 128 samples, 0.5 epochs" in run.out
    assert json.loads((run.folder / "steps.json").read_text())["max_steps"] == 8


# ------------------------------------------------------------ transformers


@pytest.fixture(scope="module")
def bert(train: Train) -> Run:
    """A run of BERT with dropout on ONNX Runtime, evaluated in the middle and at the end."""
    return ended_well(train("bert", BERT))


@needs_ort
def test_bert_learns_on_onnx_runtime(bert: Run) -> None:
    """BERT's loss falls, and ONNX Runtime runs every pass, without a fallback."""
    losses = bert.losses()
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.0
    truth = bert.truth()
    assert truth["engine"] == {"asked": "ort", "used": "ort", "fallback_reason": None}
    ort = truth["onnxruntime"]
    # Two passes a step, 12 steps.
    assert (ort["forward_passes"], ort["backward_passes"], ort["fallbacks"]) == (24, 24, 0)
    # The evaluations are shorter than an export, so that plain PyTorch runs them.
    assert (ort["evaluation_passes"], truth["plain_evaluations"]) == (0, 2)
    # The engine's trial pass uses the same graph.
    assert (ort["exports"], ort["re_exports"]) == (1, 0)
    assert ort["repairs_not_applied"] == {}
    assert truth["optimizer"]["used"] == "torch.optim.AdamW(fused=True)"
    assert truth["attention"] == "sdpa"  # with the model's attention dropout
    # Only glibc has settings for freed memory.
    assert truth["freed_memory"].startswith(KEPT_MEMORY_TEXT) or platform.libc_ver()[0] != "glibc"


@needs_ort
def test_the_export_is_the_trained_model(
    bert: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers loads the export, and computes the run's last evaluation loss with it."""
    import transformers

    from ortlaunch.recipe import parse_resolved_recipe
    from ortlaunch.worker.data import collate, samples_of_source_for_task

    monkeypatch.setenv("ORTLAUNCH_CACHE", str(home / "cache"))
    monkeypatch.chdir(home)
    model = transformers.AutoModelForMaskedLM.from_pretrained(bert.folder / "export").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert.folder / "export")
    assert tokenizer.decode(tokenizer("the cats")["input_ids"]) == "[CLS] the cats [SEP]"
    recipe = parse_resolved_recipe((bert.folder / "recipe.yaml").read_text())
    assert recipe.data.evaluation is not None
    samples = samples_of_source_for_task(recipe, recipe.data.evaluation, tokenizer)
    assert len(samples) % 8  # the last micro batch is smaller, and counts for less
    with torch.no_grad():
        expected = float(model(**collate([samples.sample(i, 0) for i in range(len(samples))])).loss)
    assert bert.values("evaluation_loss")[-1] == (12, pytest.approx(expected, rel=1e-4))


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_classes_on_onnx_runtime(train: Train) -> None:
    """A classifier of three classes learns from labelled JSON lines, with masked sdpa attention."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    recipe = merged(
        BERT,
        {
            "model": {
                "task": "sequence-classification",
                "config": {**no_dropout, "initializer_range": 0.2},
            },
            "data": {"train": {"format": "jsonl", "path": ["labels.jsonl"]}, "sequence_length": 8},
            "train": {"max_steps": 20, "evaluate_every_steps": None},
        },
    )
    recipe["data"] = {**recipe["data"], "evaluation": {"format": "jsonl", "path": ["labels.jsonl"]}}
    run = ended_well(train("classes", recipe))
    assert run.losses()[0] == pytest.approx(1.1, abs=0.4)  # ln 3
    assert run.values("evaluation_loss")[-1][1] < 0.5
    assert run.truth()["attention"] == "sdpa"
    assert json.loads((run.folder / "export/config.json").read_text())["id2label"].keys() == {
        "0",
        "1",
        "2",
    }
    assert run.truth()["engine"]["used"] == "ort"


# ------------------------------------------------------------ docs/start/own-model.md

COMPARED = re.compile(r"^parity: step 1 in plain PyTorch: loss within \S+, gradients within \S+; "
                      r"took \d+\.\d s, once$", re.MULTILINE)  # fmt: skip


@needs_ort
def test_a_model_of_your_own(home: Path, tmp_path: Path) -> None:
    """The page's example trains with its command in an empty folder, and step 1 is compared."""
    section = (ROOT / "docs/start/own-model.md").read_text().split("\n## ")[0]
    files = dict(re.findall(r"`(\w+\.\w+)`:\n\n```\w+\n(.*?)```", section, re.DOTALL))
    assert files.keys() == {"my_model.py", "my_recipe.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (command,) = re.findall(r"```sh\n(ortlaunch train .*?)\n```", section)
    # The page's command is `ortlaunch`, which must be the tested one.
    search = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command.split(), cwd=tmp_path, env={**environment(home), "PATH": search}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    (folder,) = (tmp_path / "runs").iterdir()
    run = Run(folder, 0, ended.stdout, ended.stderr)
    losses = [loss for _, loss in run.values("loss")]
    assert [step for step, _ in run.values("loss")] == [20, 40, 60, 80, 100]
    assert losses[0] > 1.0
    assert losses[-1] < 0.1
    assert run.truth()["engine"]["used"] == "ort"
    (line,) = COMPARED.findall(run.out)
    assert len(line) <= 100
    assert "parity: step 1 is compared with plain PyTorch once (your own model)\n" in run.out
    assert [
        json.loads(text)["step"] for text in (folder / "parity.jsonl").read_text().splitlines()
    ] == [1]
    assert "export/model.safetensors" in run.files()
