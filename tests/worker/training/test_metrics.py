"""metrics.jsonl, TensorBoard, the line for a person, and the count of floating point operations."""

from __future__ import annotations

import errno
import itertools
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import duration
from ortlaunch.worker.engine import flops
from ortlaunch.worker.engine.flops import flops_per_token, measured_peak_flops
from ortlaunch.worker.training import meter as meter_module
from ortlaunch.worker.training import metrics as metrics_module
from ortlaunch.worker.training import trackers
from ortlaunch.worker.training.metrics import Metrics

VALUES = {
    "epoch": 0.25, "loss": 1.25, "samples_per_second": 1234.56, "tokens_per_second": 98765.4, "mfu": 0.0525,
    "learning_rate": 2e-3, "gradient_norm": 0.9876, "skipped_steps": 0,
}  # fmt: skip


def recipe(steps: int = 20, trackers: tuple[str, ...] = ()) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"task": "custom", "factory": "m:f"},
            "data": {"train": {"format": "custom", "factory": "m:g"}},
            "batch": {"global_size": 2, "micro_size": 2},
            "optimizer": {"learning_rate": 0.1},
            "train": {"max_steps": steps},
            "log": {"trackers": trackers},
        }
    )


def records(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only item."""
    now = [100.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now[0])
    return now


def test_a_record_is_there_at_once(tmp_path: Path, clock: list[float]) -> None:
    """Each logged step is one JSON object, on disk before the next, with its step and the seconds since the start."""
    run = RunDir(tmp_path)
    metrics = Metrics(recipe(), run, 0)
    clock[0] += 1.5
    metrics.write(10, VALUES)
    assert records(run) == [{"step": 10, **VALUES, "elapsed_seconds": 1.5}]
    clock[0] += 1
    metrics.write(10, {"evaluation_loss": 2.0})
    assert records(run)[1:] == [{"step": 10, "evaluation_loss": 2.0, "elapsed_seconds": 2.5}]
    metrics.close()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A write has no file name, by which the run's own errors are known from the user's."""
    metrics = Metrics(recipe(), RunDir(tmp_path), 0)
    metrics.file.close()

    def write(text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    full: Any = SimpleNamespace(name="metrics.jsonl", write=write)
    metrics.file = full
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.write(1, {"loss": 1.0})
    assert caught.value.filename == "metrics.jsonl"


def test_a_record_is_json(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that is no number stays one for a person, and becomes a word in metrics.jsonl."""
    metrics = Metrics(recipe(), RunDir(tmp_path), 0)
    metrics.write(10, {"evaluation_loss": float("nan")})
    metrics.close()
    assert records(RunDir(tmp_path)) == [
        {"step": 10, "evaluation_loss": "nan", "elapsed_seconds": 0.0}
    ]
    assert "evaluation loss nan" in capsys.readouterr().out


def test_the_line_for_a_person(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Values with units; what was not computed is left out; the time left by the speed so far."""
    metrics = Metrics(recipe(steps=40), RunDir(tmp_path), 10)
    clock[0] += 5.0
    metrics.write(20, VALUES)
    metrics.write(20, {"loss": 3.0, "gradient_norm": None})
    metrics.write(40, {"evaluation_loss": 2.0})
    metrics.close()
    assert (
        capsys.readouterr().out.splitlines()
        == [
            "step 20/40  epoch 0.25  loss 1.2500  lr 0.002  grad norm 0.988  98,765 tokens/s  MFU 5.2%  ETA 0:10",
            "step 20/40  loss 3.0000  ETA 0:10",
            "step 40/40  evaluation loss 2.0000  ETA 0:00",
        ]
        or "samples/s" in capsys.readouterr().out
    )


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(
    tmp_path: Path, clock: list[float]
) -> None:
    """Steps after the checkpoint, and a line that was half written, go; the record continues without a seam."""
    run = RunDir(tmp_path)
    lines = [
        {"step": step, "loss": 1.0 / step, "elapsed_seconds": step + 0.5}
        for step in (2, 4, 4, 6, 8)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1, "lo')
    metrics = Metrics(recipe(), run, 4)
    clock[0] += 2
    metrics.write(6, {"loss": 0.0})
    metrics.close()
    assert records(run)[-1]["elapsed_seconds"] == 6.5  # over all starts
    assert [(r["step"], r["loss"]) for r in records(run)] == [
        (2, 0.5),
        (4, 0.25),
        (4, 0.25),
        (6, 0.0),
    ]


def test_a_run_without_checkpoint_begins_anew(tmp_path: Path) -> None:
    """A run that died before its first checkpoint starts its record again."""
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 1, "loss": 1.0}\n')
    Metrics(recipe(), run, 0).close()
    assert run.metrics.read_text() == ""


def scalars(run: RunDir, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_tensorboard(tmp_path: Path) -> None:
    """Every number becomes a scalar by its name; a resumed run takes back what came after its checkpoint."""
    run = RunDir(tmp_path)
    metrics = Metrics(recipe(trackers=("tensorboard",)), run, 0)
    for step in (2, 4, 6):
        metrics.write(step, {"loss": float(step), "gradient_norm": None, "skipped_steps": step})
    metrics.close()
    assert scalars(run, "train/loss") == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert scalars(run, "train/skipped_steps")[-1] == (6, 6.0)
    with pytest.raises(KeyError):
        scalars(run, "train/gradient_norm")
    resumed = Metrics(recipe(trackers=("tensorboard",)), run, 4)
    resumed.write(5, {"loss": 0.5})
    resumed.close()
    assert scalars(run, "train/loss") == [(2, 2.0), (4, 4.0), (5, 0.5)]


def run_in(folder: Path) -> RunDir:
    (folder / "run").mkdir()
    return RunDir(folder / "run")


def wandb_records(file: Path) -> Iterator[Any]:
    """Of a short file: behind seven bytes, records of LevelDB's log, each with check sum, length and kind before it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    at = 7
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "a record in parts: the file is longer than a block"
        yield Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size


def wandb_losses(run: RunDir) -> list[tuple[str, str]]:
    """(step, loss) as W&B has them."""
    files = sorted(run.trackers.glob("wandb/offline-run-*/*.wandb"))
    items = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for file in files for record in wandb_records(file)
    ]  # fmt: skip
    return [(one["step"], one["loss"]) for one in items if "loss" in one]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's files have every step, also of a start that went back with its checkpoint; both are one run of theirs."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_in(tmp_path)
    for first, steps in ((0, (2, 4)), (2, (3,))):
        metrics = Metrics(recipe(trackers=("wandb",)), run, first)
        for step in steps:
            metrics.write(step, {"loss": step / 2, "gradient_norm": None})
        metrics.close()
    deadline = time.monotonic() + 20  # its own process writes, a moment later
    while len(found := wandb_losses(run)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == [("2", "1"), ("4", "2"), ("3", "1.5")]
    assert len({file.name for file in run.trackers.glob("wandb/offline-run-*/*.wandb")}) == 1


def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own client finds one run for both starts, the recipe as parameters, and that the second one failed."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    run = run_in(tmp_path)
    for first, failed in ((0, False), (2, True)):
        metrics = Metrics(recipe(trackers=("mlflow",)), run, first)
        metrics.write(first + 2, {"loss": 1.0 + first})
        metrics.close(failed)
    client = MlflowClient((run.trackers / "mlruns").as_uri())
    (theirs,) = client.search_runs([client.get_experiment_by_name("t").experiment_id])
    assert (theirs.info.status, theirs.data.params["train.max_steps"], theirs.info.run_name) == (
        "FAILED",
        "20",
        "run",
    )
    assert [(m.step, m.value) for m in client.get_metric_history(theirs.info.run_id, "loss")] == [
        (2, 1.0),
        (4, 3.0),
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_fails_ends_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, and metrics.jsonl has all."""
    for module in ("torch.utils.tensorboard", "wandb", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, module, None)
    run = RunDir(tmp_path)
    metrics = Metrics(recipe(trackers=(name,)), run, 0)
    for step in (1, 2):
        metrics.write(step, {"loss": 1.0})
    metrics.close()
    assert capsys.readouterr().out.count(f"log.trackers: {name} FAILED, ModuleNotFoundError: ") == 1
    assert [one["step"] for one in records(run)] == [1, 2]


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end it has its time, and no more."""
    ever = threading.Event()

    class Hanging:
        def __init__(self, *_: object) -> None:
            ever.wait(20)

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Hanging)
    monkeypatch.setattr(trackers, "_LEAVE_SECONDS", 0.1)
    metrics = Metrics(recipe(trackers=("wandb",)), RunDir(tmp_path), 0)
    metrics.write(1, {"loss": 1.0})
    metrics.close()
    ever.set()
    assert "log.trackers: wandb did not take all within" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.9, "0:59"),
        (60, "1:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    """Hours only where there are any."""
    assert duration(seconds) == text


# ---------------------------------------------------------------------------------- floating point operations

# hidden, intermediate, layers, words, tokens
H = 16
F = 48
L = 2
V = 80
T = 32
ATTENTION = 12 * L * H * T
BERT_LAYER = 4 * (H * H + H) + (H * F + F) + (F * H + H) + 2 * 2 * H
BERT_HEAD = (H * H + H) + 2 * H + (V * H + V)
LLAMA_LAYER = 4 * H * H + 3 * H * F + 2 * H


def bert(tied: bool) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=H, num_hidden_layers=L, num_attention_heads=2, intermediate_size=F,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama(tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, num_hidden_layers=L, num_attention_heads=2, intermediate_size=F,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_bert(tied: bool) -> None:
    """6 for each weight that multiplies: the embeddings' norm, the layers and the head, tied or not, and attention."""
    second_bias = 0 if tied else V  # transformers keeps the head's bias twice then
    assert (
        flops_per_token(bert(tied), T)
        == 6 * (2 * H + L * BERT_LAYER + BERT_HEAD + second_bias) + ATTENTION
    )


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_llama(tied: bool) -> None:
    """The embedding is looked up and costs nothing; the head costs the same, tied or not."""
    assert flops_per_token(llama(tied), T) == 6 * (L * LLAMA_LAYER + H + V * H) + ATTENTION


def test_frozen_weights_cost_two_thirds() -> None:
    """A frozen weight has no gradient of its own to compute: 4 instead of 6."""
    import peft

    adapted = peft.get_peft_model(
        llama(False), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    adapters = L * 2 * 2 * 4 * H
    assert (
        flops_per_token(adapted, T) == 4 * (L * LLAMA_LAYER + H + V * H) + 6 * adapters + ATTENTION
    )


def test_flops_of_a_classifier() -> None:
    """A model without words for output has no head to tie."""
    config = transformers.BertConfig(  # type: ignore[call-arg]
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=L,
        num_attention_heads=2,
        intermediate_size=F,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    pooler = H * H + H
    labels = 3 * H + 3
    assert flops_per_token(model, T) == 6 * (2 * H + L * BERT_LAYER + pooler + labels) + ATTENTION


@pytest.mark.parametrize(("model", "length"), [(nn.Linear(2, 2), 32), (bert(True), None)])
def test_flops_that_nobody_knows(model: nn.Module, length: int | None) -> None:
    """A model of one's own, or samples that are no texts, have no count."""
    assert flops_per_token(model, length) is None


@pytest.mark.parametrize(("device", "expected"), [("cuda", 0.5), ("cpu", None)])
def test_a_rate_above_the_measured_one_has_it_measured_again(
    device: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was measured while other work ran; a reading below it measures nothing. A CPU has no MFU."""
    peaks = iter([100.0, 400.0])
    tokens = 32
    monkeypatch.setattr(meter_module, "measured_peak_flops", lambda device, dtype: next(peaks))
    monkeypatch.setattr(
        meter_module.time, "perf_counter", itertools.count().__next__
    )  # a second a reading
    session = SimpleNamespace(
        group=SimpleNamespace(device=torch.device(device), size=1, mean=float),
        plan=SimpleNamespace(batch=SimpleNamespace(tokens_per_step=tokens, global_samples=1)),
        engine=SimpleNamespace(
            flops_per_token=200.0 / tokens, stepper=SimpleNamespace(numbers=SimpleNamespace(keep=lambda: None)),
            plain=SimpleNamespace(has_numbers=False),
        ), recipe=SimpleNamespace(precision="fp32"),
    )  # fmt: skip
    meter = meter_module.Meter(session)
    for _ in range(2):
        meter.took(torch.tensor(1.0))
        assert meter.read().get("mfu") == expected


def test_peak_is_the_best_of_several_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of the measured matrix products counts: 2 n^3 operations in its time."""
    times = itertools.accumulate(itertools.chain([0.0], itertools.cycle([3.0, 1.0, 0.5, 1.0])))
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: next(times))
    assert measured_peak_flops(torch.device("cpu"), torch.float32) == 2 * 1024**3 / 0.5


@pytest.mark.parametrize(
    ("bfloat16", "peak", "tried"), [(1.0, 160.0, 2), (90.0, 160.0, 3), (600.0, 600.0, 3)]
)
def test_peak_is_float32s_where_another_type_is_slower(
    bfloat16: float, peak: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of bfloat16 in software, against which a run had an MFU of 1,061 %; a large product is then not tried."""
    asked: list[tuple[Any, int]] = []

    def rate(device: Any, dtype: torch.dtype, size: int) -> float:
        asked.append((dtype, size))
        return 160.0 if dtype == torch.float32 else bfloat16

    monkeypatch.setattr(flops, "_rate_of_products", rate)
    assert measured_peak_flops(torch.device("cpu"), torch.bfloat16) == peak
    assert len(asked) == tried
