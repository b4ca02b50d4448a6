"""Bad steps: weights, optimizer and buffers are those of plain PyTorch without that batch."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import LossSpikeError, NonFiniteError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.rank import Rank
from ortlaunch.recipe.fields.train import Spike
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.checkpoint import saver as savings
from ortlaunch.worker.data import Batches, UserSamples, collate
from ortlaunch.worker.data.skipped_positions import SkippedPositions
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.training.bad_steps import SpikeDetector, read_bad_step_records
from ortlaunch.worker.training.finite_checks import require_finite_mean_loss
from tests.training import SHARDINGS, Trained, records, train_here

ROWS = [
    {"x": row, "y": row.sum()}
    for row in torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
]
# A step has two passes of two samples.
STEPS = 6
BAD_STEP = 3
SIZE = 4
ORDER = Batches(UserSamples(ROWS), BatchPlan(SIZE, 2, 2, 1, None), 42)
BAD = ORDER.sample_indices_of_micro_batch(BAD_STEP, 1, 0)[0]
SETTINGS: dict[str, Any] = {
    "optimizer": {"name": "adamw", "learning_rate": 0.05}, "schedule": {"name": "linear"},
    "batch": {"micro_size": 2, "accumulation_steps": 2}, "log": {"every_steps": 1}, "checkpoint": {"every_steps": 2},
}  # fmt: skip


class Line(nn.Module):
    """A weighted sum with a running mean, and its squared error.

    `how` selects the value of a bad sample that is not finite.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.zeros(4))
        self.other = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        loss = ((x @ self.weight - y) ** 2).mean()
        if self.how == "loss":
            loss = loss + torch.where(bad.any(), torch.nan, 0.0) * self.weight.sum()
        elif self.how == "constant":
            loss = loss + torch.where(bad.any(), torch.inf, 0.0)
        elif self.how == "spike":
            loss = loss * torch.where(bad.any(), 1000.0, 1.0)
        else:
            slope = torch.where(bad.any(), self.other * 0, self.other.abs() + 1)
            # The slope of the square root at 0 is infinite.
            loss = loss + slope.sqrt().sum()
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * loss.detach())
        return loss


def rows(*bad: int) -> list[dict[str, Any]]:
    return [{**row, "bad": torch.tensor(i in bad)} for i, row in enumerate(ROWS)]


def reference(how: str, steps: Sequence[int | None], rate: Any) -> nn.Module:
    """Train in plain PyTorch: step i uses the batch `steps[i]`, or is skipped if that is None."""
    model = Line(how)
    samples = rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    for step, batch in enumerate(steps):
        if batch is None:
            continue
        optimizer.param_groups[0]["lr"] = rate(step)
        for number in range(2):
            micro = collate(
                [samples[i] for i in ORDER.sample_indices_of_micro_batch(batch, number, 0)]
            )
            (model(**micro) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def rate(step: int) -> float:
    return 0.05 * (1 - step / STEPS)


def trained(
    folder: Path, how: str, zero: dict[str, Any] | None, *bad: int, **train: Any
) -> Trained:
    settings = {**SETTINGS, "train": {"max_steps": STEPS, **train}, "zero": zero}
    return train_here(folder, Line(how), rows(*(bad or (BAD,))), **settings)


def close(found: nn.Module, expected: nn.Module, buffers: bool = True) -> None:
    for name, value in expected.state_dict().items():
        # Sharded weights have another size, and are not compared.
        if value.numel() == found.state_dict()[name].numel() and (buffers or name != "mean"):
            torch.testing.assert_close(
                found.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("zero", SHARDINGS, ids=str)
@pytest.mark.parametrize("how", ["loss", "gradient", "constant"])
def test_a_skipped_step_changes_nothing(
    how: str, zero: dict | None, tmp_path: Path, world: None
) -> None:
    """A skipped step 4 leaves weights and running means as if it had no batch; it is recorded."""
    done = trained(tmp_path, how, zero, on_nonfinite="skip")
    # In stage 3 each rank has only pieces of the weights.
    if (zero or {}).get("stage") != 3:
        close(done.model, reference(how, [0, 1, 2, None, 4, 5], rate))
    (line,) = read_bad_step_records(done.run)
    assert (line.step, line.action, done.state.left_out) == (BAD_STEP + 1, "skip", 1)
    assert BAD in line.samples
    assert line.parameter == {"loss": "weight", "gradient": "other", "constant": None}[how]
    assert [value for _, value in done.values("left_out_steps")] == [0, 0, 0, 1, 1, 1]
    assert done.values("loss")[BAD_STEP] == (BAD_STEP + 1, None)


@pytest.mark.parametrize("zero", SHARDINGS, ids=str)
@pytest.mark.parametrize("how", ["loss", "gradient", "constant"])
def test_a_rollback_takes_the_samples_that_follow(
    how: str, zero: dict | None, tmp_path: Path, world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a rollback to step 2, the steps are plain PyTorch's without the bad batch."""
    done = trained(tmp_path, how, zero, on_nonfinite="rollback")
    if (zero or {}).get("stage") != 3:
        close(done.model, reference(how, [0, 1, 2, 4, 5, 6], rate))
    (line,) = read_bad_step_records(done.run)
    assert (line.action, line.checkpoint, line.places) == ("rollback", 2, [12, 16])
    # The batch that was left out counts, too.
    assert done.state.samples == (STEPS + 1) * SIZE
    assert [record["step"] for record in records(done.run)] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().out
    assert "train.on_nonfinite is rollback: back to the checkpoint after step 2" in said
    # The batch size is unchanged.
    assert "a step now has" not in said


def test_later_losses_are_counted() -> None:
    """Of several losses that are not finite, the first is described, and the others are counted."""
    losses = [torch.tensor(math.nan)] * 9
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    with pytest.raises(NonFiniteError) as error:
        require_finite_mean_loss(math.nan, group, ORDER, 3, losses)
    lines = str(error.value).splitlines()
    assert len([line for line in lines if "samples" in line]) == 1
    assert lines[0].startswith("step 4: the loss is nan on rank 0, samples ")
    assert lines[1] == "8 later losses are not finite either, up to step 12"


def test_no_checkpoint_follows_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """A loss that is not finite ends the run before a checkpoint, though no log line is due."""
    settings = {**SETTINGS, "checkpoint": {"every_steps": 2}, "log": {"every_steps": 50}}
    with pytest.raises(NonFiniteError, match=f"step {BAD_STEP + 1}: the loss is inf"):
        train_here(tmp_path, Line("constant"), rows(BAD), train={"max_steps": STEPS}, **settings)
    newest = sorted(path.name for path in RunDir(tmp_path).checkpoints.glob("step_*"))[-1]
    assert newest == "step_00000002"


def test_a_rollback_before_the_first_checkpoint(tmp_path: Path) -> None:
    """A rollback before the first save returns to step 0; later starts leave out the same."""
    # Two bad batches in a row.
    bad = (
        ORDER.sample_indices_of_micro_batch(0, 0, 0)[0],
        ORDER.sample_indices_of_micro_batch(1, 1, 0)[1],
    )
    done = trained(tmp_path, "loss", None, *bad, on_nonfinite="rollback")
    close(done.model, reference("loss", [2, 3, 4, 5, 6, 7], rate))
    assert [(line.checkpoint, line.places) for line in read_bad_step_records(done.run)] == [
        (0, [0, 4]),
        (0, [4, 8]),
    ]
    longer = trained(tmp_path, "loss", None, *bad, on_nonfinite="rollback", max_steps=STEPS + 1)
    assert longer.state.samples == (STEPS + 3) * SIZE


def test_what_was_left_out_is_not_another_orders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another seed, the positions that were left out hold other samples, which are used."""
    done = trained(tmp_path, "loss", None, on_nonfinite="rollback")
    for step in (4, 6):
        shutil.rmtree(done.run.checkpoint_folder(step))
    # The message is printed once, and not by the next start.
    for said in (1, 0):
        capsys.readouterr()
        other = train_here(
            tmp_path, Line("loss"), rows(-1), seed=7, **SETTINGS, train={"max_steps": STEPS}
        )
        assert other.state.samples == STEPS * SIZE
        assert (
            capsys.readouterr().out.count(
                "the samples that step 4 was rolled back for are no longer left out"
            )
            == said
        )
    (line,) = read_bad_step_records(done.run)
    assert (line.action, line.places) == ("rollback", None)


@pytest.mark.parametrize("zero", [None, {"stage": 1}], ids=str)
def test_a_rollback_to_the_start_forgets_the_optimizer(
    zero: dict | None, tmp_path: Path, world: None
) -> None:
    """A rollback to step 0, whose checkpoint has no optimizer state, resets the optimizer."""
    # No checkpoint but that of step 0.
    settings = {**SETTINGS, "checkpoint": {"every_steps": 100}, "zero": zero}
    train = {"max_steps": STEPS, "on_nonfinite": "rollback"}
    done = train_here(tmp_path, Line("loss"), rows(BAD), train=train, **settings)
    close(done.model, reference("loss", [0, 1, 2, 4, 5, 6], rate))


@pytest.mark.parametrize("on_failure", ["stop", "rollback"])
def test_a_save_beside_training_is_whole_first(
    on_failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run neither ends nor rolls back before a checkpoint in progress is complete."""
    write = savings.write_snapshot_as_checkpoint
    # A slow write, still in progress when the bad step comes.
    monkeypatch.setattr(
        savings, "write_snapshot_as_checkpoint", lambda *args: (time.sleep(0.5), write(*args))
    )
    settings = {**SETTINGS, "checkpoint": {"every_steps": 3, "async": True}}
    train = {"max_steps": STEPS, "on_nonfinite": on_failure}
    with pytest.raises(NonFiniteError) if on_failure == "stop" else contextlib.nullcontext():
        train_here(tmp_path, Line("loss"), rows(BAD), train=train, **settings)
    (line,) = read_bad_step_records(RunDir(tmp_path))
    assert 3 in dict(RunDir(tmp_path).complete_checkpoints())
    assert line.checkpoint == (3 if on_failure == "rollback" else None)


@pytest.mark.parametrize(("train", "said"), [
    ({"on_nonfinite": "skip", "max_skips": 1}, "train.max_skips (1) steps have been skipped"),
    ({"on_nonfinite": "rollback", "max_rollbacks": 1},
     "train.max_rollbacks (1) rollbacks have been made"),
])  # fmt: skip
def test_one_too_many_ends_the_run(train: dict[str, Any], said: str, tmp_path: Path) -> None:
    """One bad step more than the limit ends the run, and the error names the limit."""
    with pytest.raises(NonFiniteError) as caught:
        trained(
            tmp_path,
            "loss",
            None,
            BAD,
            ORDER.sample_indices_of_micro_batch(BAD_STEP + 1, 0, 0)[0],
            **train,
        )
    assert said in str(caught.value)
    assert [line.action for line in read_bad_step_records(RunDir(tmp_path))] == [
        train["on_nonfinite"],
        "stop",
    ]


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_a_loss_that_jumps(action: str, tmp_path: Path) -> None:
    """A loss that jumps is handled before its update, and its samples are named."""
    bad = ORDER.sample_indices_of_micro_batch(9, 0, 0)[0]
    settings = {**SETTINGS, "schedule": {"name": "constant"}}
    train = {"max_steps": 12, "on_spike": {"action": action, "window": 8, "deviations": 100.0}}
    if action == "stop":
        with pytest.raises(LossSpikeError, match="step 10: the loss jumped to"):
            train_here(tmp_path, Line("spike"), rows(bad), train=train, **settings)
    else:
        done = train_here(tmp_path, Line("spike"), rows(bad), train=train, **settings)
        # A skip loses one update; a rollback replaces the batch by the next one.
        taken = [*range(9), None, 10, 11] if action == "skip" else [*range(9), 10, 11, 12]
        close(done.model, reference("spike", taken, lambda step: 0.05))
    (line,) = read_bad_step_records(RunDir(tmp_path))
    assert (line.step, line.kind, line.action, bad in line.samples) == (10, "spike", action, True)
    # The file has no NaN or Infinity, which are no JSON.
    json.loads(RunDir(tmp_path).bad_steps.read_text(), parse_constant=pytest.fail)


def test_what_a_spike_is() -> None:
    """Noise, a falling loss, and losses before the window is full are no spikes."""
    falling = SpikeDetector(Spike(deviations=6.0, window=8))
    assert [
        falling.count_loss_and_get_spike_reason_or_none(10.0 / (1 + i) + 0.01 * (i % 3))
        for i in range(50)
    ] == [None] * 50
    fresh = SpikeDetector(Spike(deviations=6.0, window=8))
    assert [fresh.count_loss_and_get_spike_reason_or_none(loss) for loss in (1.0, 100.0, 1.0)] == [
        None
    ] * 3
    flat = SpikeDetector(Spike(deviations=6.0, window=8))
    assert [flat.count_loss_and_get_spike_reason_or_none(2.0) for _ in range(8)] == [None] * 8
    # The deviation is at least 1 % of the median.
    assert flat.count_loss_and_get_spike_reason_or_none(2.1) is None
    limited = SpikeDetector(Spike(deviations=None, limit=5.0, patience=2))
    assert [limited.count_loss_and_get_spike_reason_or_none(loss) for loss in (6.0, 4.0, 6.0)] == [
        None
    ] * 3
    assert limited.count_loss_and_get_spike_reason_or_none(7.0) == (
        "the loss is 7, and was above 5 for 2 steps (train.on_spike.limit)"
    )
    assert flat.count_loss_and_get_spike_reason_or_none(2.2) == (
        "the loss jumped to 2.2: the last 8 have median 2 and deviation 0.02, so that 2.12 is "
        "the most (train.on_spike)"
    )


def test_stretches_that_are_left_out() -> None:
    """Neighbouring and overlapping ranges are merged; a position inside one moves to its end."""
    left = SkippedPositions()
    for first, after in ((8, 12), (20, 24), (12, 16), (14, 18)):
        left.skip_position_range(first, after)
    taken = [place for place in range(32) if not (8 <= place < 18 or 20 <= place < 24)]
    for begin in range(32):
        assert [left.position_of_unskipped_sample(begin, number) for number in range(6)] == [
            *[place for place in [*taken, *range(32, 40)] if place >= begin][:6]
        ]
