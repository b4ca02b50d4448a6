"""metrics.jsonl, trackers, the printed line, and the count of floating point operations."""

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

from ortlaunch.base.units import clock_duration
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import PROGRESS_VARIABLE, RunDir
from ortlaunch.worker.data.batches import TokenCount
from ortlaunch.worker.engine import flops
from ortlaunch.worker.engine.flops import (
    measure_peak_flops_per_second,
    training_flops_per_token_or_none,
)
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.training import meter as meter_module
from ortlaunch.worker.training import metrics_writer as metrics_module
from ortlaunch.worker.training import trackers
from ortlaunch.worker.training.metrics_writer import MetricsWriter

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
    """The current time, as the list's only item."""
    now = [100.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now[0])
    return now


def test_a_record_is_there_at_once(tmp_path: Path, clock: list[float]) -> None:
    """Each logged step is one JSON object, on disk before the next one."""
    run = RunDir(tmp_path)
    metrics = MetricsWriter(recipe(), run, 0)
    clock[0] += 1.5
    metrics.write_and_print_step(10, VALUES)
    assert records(run) == [{"step": 10, **VALUES, "elapsed_seconds": 1.5}]
    clock[0] += 1
    metrics.write_and_print_step(10, {"evaluation_loss": 2.0})
    assert records(run)[1:] == [{"step": 10, "evaluation_loss": 2.0, "elapsed_seconds": 2.5}]
    metrics.close_file_and_trackers()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A full disk's error names metrics.jsonl."""
    metrics = MetricsWriter(recipe(), RunDir(tmp_path), 0)
    metrics.file.close()

    def write(text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # A failed write has no file name, by which the run's own errors differ from the user's.
    full: Any = SimpleNamespace(name="metrics.jsonl", write=write)
    metrics.file = full
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.write_and_print_step(1, {"loss": 1.0})
    assert caught.value.filename == "metrics.jsonl"


def test_a_failed_write_is_raised_once(tmp_path: Path) -> None:
    """After a failed write, the end of a failed training raises no second error in its place."""
    metrics = MetricsWriter(recipe(), RunDir(tmp_path), 0)
    metrics.file.close()
    metrics.file = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        metrics.write_and_print_step(1, {"loss": 1.0})
    metrics.close_file_and_trackers(training_failed=True)


def test_a_record_is_json(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that is not finite is printed as such, and is a string in metrics.jsonl."""
    metrics = MetricsWriter(recipe(), RunDir(tmp_path), 0)
    metrics.write_and_print_step(10, {"evaluation_loss": float("nan")})
    metrics.close_file_and_trackers()
    assert records(RunDir(tmp_path)) == [
        {"step": 10, "evaluation_loss": "nan", "elapsed_seconds": 0.0}
    ]
    assert "evaluation loss nan" in capsys.readouterr().out


def test_the_line_for_a_person(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed line has units, leaves out missing values, and estimates the time left."""
    metrics = MetricsWriter(recipe(steps=40), RunDir(tmp_path), 10)
    clock[0] += 5.0
    metrics.write_and_print_step(20, VALUES)
    metrics.write_and_print_step(20, {"loss": 3.0, "gradient_norm": None})
    metrics.write_and_print_step(40, {"evaluation_loss": 2.0})
    metrics.close_file_and_trackers()
    assert (
        capsys.readouterr().out.splitlines()
        == [
            "step 20/40  epoch 0.25  loss 1.2500  lr 0.002  grad norm 0.988  98,765 tokens/s  MFU 5.2%  ETA 0:10",
            "step 20/40  loss 3.0000  ETA 0:10",
            "step 40/40  evaluation loss 2.0000  ETA 0:00",
        ]
        or "samples/s" in capsys.readouterr().out
    )


def test_the_line_fits_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A narrow terminal shows fewer values; metrics.jsonl has all."""
    shown = {}
    for columns in (100, 80, 60):
        monkeypatch.setenv(PROGRESS_VARIABLE, str(columns))
        metrics = MetricsWriter(recipe(), RunDir(tmp_path), 0)
        metrics.write_and_print_step(10, VALUES)
        metrics.close_file_and_trackers()
        shown[columns] = capsys.readouterr().out.rstrip()
    assert [len(line) <= columns for columns, line in shown.items()] == [True, True, True]
    assert "epoch 0.25" in shown[100]
    assert "epoch" not in shown[80]
    assert "lr 0.002" in shown[80]
    assert shown[60] == "step 10/20  loss 1.2500  98,765 tokens/s  MFU 5.2%  ETA 0:00"
    assert records(RunDir(tmp_path))[0]["epoch"] == 0.25


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(
    tmp_path: Path, clock: list[float]
) -> None:
    """A resumed run removes later steps and a half-written line, and continues the record."""
    run = RunDir(tmp_path)
    lines = [
        {"step": step, "loss": 1.0 / step, "elapsed_seconds": step + 0.5}
        for step in (2, 4, 4, 6, 8)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1, "lo')
    metrics = MetricsWriter(recipe(), run, 4)
    clock[0] += 2
    metrics.write_and_print_step(6, {"loss": 0.0})
    metrics.close_file_and_trackers()
    # Over all starts.
    assert records(run)[-1]["elapsed_seconds"] == 6.5
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
    MetricsWriter(recipe(), run, 0).close_file_and_trackers()
    assert run.metrics.read_text() == ""


def scalars(run: RunDir, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def test_tensorboard(tmp_path: Path) -> None:
    """TensorBoard has every value by name; a resumed run hides steps after its checkpoint."""
    run = RunDir(tmp_path)
    metrics = MetricsWriter(recipe(trackers=("tensorboard",)), run, 0)
    for step in (2, 4, 6):
        metrics.write_and_print_step(
            step, {"loss": float(step), "gradient_norm": None, "skipped_steps": step}
        )
    metrics.close_file_and_trackers()
    assert scalars(run, "train/loss") == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert scalars(run, "train/skipped_steps")[-1] == (6, 6.0)
    with pytest.raises(KeyError):
        scalars(run, "train/gradient_norm")
    resumed = MetricsWriter(recipe(trackers=("tensorboard",)), run, 4)
    resumed.write_and_print_step(5, {"loss": 0.5})
    resumed.close_file_and_trackers()
    assert scalars(run, "train/loss") == [(2, 2.0), (4, 4.0), (5, 0.5)]


def run_in(folder: Path) -> RunDir:
    (folder / "run").mkdir()
    return RunDir(folder / "run")


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a short file of W&B.

    The format is LevelDB's log after seven bytes: checksum, length and type come before each
    record.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    at = 7
    while at + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "a record in parts: the file is longer than a block"
        yield Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size


def wandb_losses(run: RunDir) -> list[tuple[str, str]]:
    """Return (step, loss) pairs as W&B stores them."""
    files = sorted(run.trackers.glob("wandb/offline-run-*/*.wandb"))
    items = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for file in files for record in wandb_records(file)
    ]  # fmt: skip
    return [(one["step"], one["loss"]) for one in items if "loss" in one]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's files have every step of both starts, as one run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_in(tmp_path)
    # The second start returned to the checkpoint of step 2.
    for first, steps in ((0, (2, 4)), (2, (3,))):
        metrics = MetricsWriter(recipe(trackers=("wandb",)), run, first)
        for step in steps:
            metrics.write_and_print_step(step, {"loss": step / 2, "gradient_norm": None})
        metrics.close_file_and_trackers()
    # A process of W&B's own writes, a moment later.
    deadline = time.monotonic() + 20
    while len(found := wandb_losses(run)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == [("2", "1"), ("4", "2"), ("3", "1.5")]
    assert len({file.name for file in run.trackers.glob("wandb/offline-run-*/*.wandb")}) == 1


def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own client finds one run for both starts, with recipe and the second's failure."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    run = run_in(tmp_path)
    for first, failed in ((0, False), (2, True)):
        metrics = MetricsWriter(recipe(trackers=("mlflow",)), run, first)
        metrics.write_and_print_step(first + 2, {"loss": 1.0 + first})
        metrics.close_file_and_trackers(failed)
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
    """A failing tracker is reported once, and metrics.jsonl has all steps."""
    # None in sys.modules makes the import fail.
    for module in ("torch.utils.tensorboard", "wandb", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, module, None)
    run = RunDir(tmp_path)
    metrics = MetricsWriter(recipe(trackers=(name,)), run, 0)
    for step in (1, 2):
        metrics.write_and_print_step(step, {"loss": 1.0})
    metrics.close_file_and_trackers()
    assert capsys.readouterr().out.count(f"log.trackers: {name} FAILED, ModuleNotFoundError: ") == 1
    assert [one["step"] for one in records(run)] == [1, 2]


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker that hangs at the end is left behind after a limited time."""
    ever = threading.Event()

    class Hanging:
        def __init__(self, *_: object) -> None:
            ever.wait(20)

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Hanging)
    monkeypatch.setattr(trackers, "_LEAVE_SECONDS", 0.1)
    metrics = MetricsWriter(recipe(trackers=("wandb",)), RunDir(tmp_path), 0)
    metrics.write_and_print_step(1, {"loss": 1.0})
    metrics.close_file_and_trackers()
    ever.set()
    assert "log.trackers: wandb did not accept all values within" in capsys.readouterr().out


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
    """A duration has hours only if there are any."""
    assert clock_duration(seconds) == text


# ---------------------------------------------------------------- floating point operations

# Hidden size, intermediate size, layers, vocabulary size and tokens.
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
    """BERT: 6 operations for each weight that multiplies, tied or not, and those of attention."""
    # transformers stores the head's bias twice then.
    second_bias = 0 if tied else V
    assert (
        training_flops_per_token_or_none(bert(tied), T)
        == 6 * (2 * H + L * BERT_LAYER + BERT_HEAD + second_bias) + ATTENTION
    )


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_llama(tied: bool) -> None:
    """Llama: the embedding costs nothing, and the head costs the same, tied or not."""
    assert (
        training_flops_per_token_or_none(llama(tied), T)
        == 6 * (L * LLAMA_LAYER + H + V * H) + ATTENTION
    )


def test_frozen_weights_cost_two_thirds() -> None:
    """A frozen weight costs 4 operations in place of 6, as it has no gradient to compute."""
    import peft

    adapted = peft.get_peft_model(
        llama(False), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    adapters = L * 2 * 2 * 4 * H
    assert (
        training_flops_per_token_or_none(adapted, T)
        == 4 * (L * LLAMA_LAYER + H + V * H) + 6 * adapters + ATTENTION
    )


def test_flops_of_a_classifier() -> None:
    """A model without an output vocabulary has no head to tie."""
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
    assert (
        training_flops_per_token_or_none(model, T)
        == 6 * (2 * H + L * BERT_LAYER + pooler + labels) + ATTENTION
    )


@pytest.mark.parametrize(("model", "length"), [(nn.Linear(2, 2), 32), (bert(True), None)])
def test_flops_that_nobody_knows(model: nn.Module, length: int | None) -> None:
    """A user's own model, or samples without text, have no count."""
    assert training_flops_per_token_or_none(model, length) is None


@pytest.mark.parametrize(("device", "expected"), [("cuda", 0.5), ("cpu", None)])
def test_a_rate_above_the_measured_one_has_it_measured_again(
    device: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate above the measured peak shows a disturbed measurement, which is repeated."""
    # A second measurement is the last one: a reading below the peak takes none.
    peaks = iter([100.0, 400.0])
    tokens = 32
    monkeypatch.setattr(
        meter_module, "measure_peak_flops_per_second", lambda device, dtype: next(peaks)
    )
    # One second a reading.
    monkeypatch.setattr(meter_module.time, "perf_counter", itertools.count().__next__)
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device(device))
    batches: Any = SimpleNamespace(tokens=TokenCount(0, 0), batch=SimpleNamespace(global_samples=1))
    meter = meter_module.TrainingMeter(group, batches, None, torch.float32, 200.0 / tokens)
    mask = (torch.arange(tokens) < tokens // 4).long()
    batch = {"input_ids": torch.ones(1, tokens), "attention_mask": mask[None]}
    for _ in range(2):
        meter.count_step(torch.tensor(1.0))
        batches.tokens = batches.tokens.plus_batch_tokens_and_padding(batch)
        read = meter.read_loss_and_speed_and_restart()
        # A CPU has no MFU.
        assert read.get("mfu") == expected
        # Three quarters of the places are padding.
        assert (read["tokens_per_second"], read["padding_share"]) == (8, 0.75)


def test_peak_is_the_best_of_several_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of the fastest matmul: 2 n^3 operations in its time."""
    times = itertools.accumulate(itertools.chain([0.0], itertools.cycle([3.0, 1.0, 0.5, 1.0])))
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: next(times))
    assert measure_peak_flops_per_second(torch.device("cpu"), torch.float32) == 2 * 1024**3 / 0.5


@pytest.mark.parametrize(
    ("bfloat16", "peak", "tried"), [(1.0, 160.0, 2), (90.0, 160.0, 3), (600.0, 600.0, 3)]
)
def test_peak_is_float32s_where_another_type_is_slower(
    bfloat16: float, peak: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If float32 is faster than another type, its peak counts, and no large matmul is tried."""
    asked: list[tuple[Any, int]] = []

    def rate(device: Any, dtype: torch.dtype, size: int) -> float:
        asked.append((dtype, size))
        return 160.0 if dtype == torch.float32 else bfloat16

    monkeypatch.setattr(flops, "_best_matmul_flops_per_second", rate)
    # With bfloat16 in software, a run once had an MFU of 1,061 %.
    assert measure_peak_flops_per_second(torch.device("cpu"), torch.bfloat16) == peak
    assert len(asked) == tried
