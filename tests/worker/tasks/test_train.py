"""The training loop in this process: its logs, and the errors that end it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ortlaunch.base.errors import CheckpointError, EngineError, InputError, NonFiniteError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.checkpoint import saver as savings
from ortlaunch.worker.data import Batches, UserSamples, collate
from ortlaunch.worker.engine.memory_use import RankMemoryMeter
from ortlaunch.worker.process_group.agreement import accept_save_and_stop_requests
from ortlaunch.worker.supervision.requests import RankRequest
from ortlaunch.worker.tasks import train as training
from ortlaunch.worker.tasks.train import run as run_task
from ortlaunch.worker.training.checkpoint_exports import CheckpointExports
from tests.makers import recipe
from tests.ort import needs_ort
from tests.training import SHARDINGS, records, session_here, train_here

STEPS = {"max_steps": 6}
ROWS = [
    {"x": row, "y": row.sum()}
    for row in torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
]


class Line(nn.Module):
    """A weighted sum with its mean squared error as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight - y) ** 2).mean()


@pytest.mark.parametrize("sections", [
    {"checkpoint": {"every_steps": 4}},
    {"train": {**STEPS, "evaluate_every_steps": 4}},
], ids=["checkpoints", "evaluation"])  # fmt: skip
def test_the_logged_loss_is_of_all_steps_since_the_last_line(
    sections: dict, tmp_path: Path
) -> None:
    """A checkpoint or an evaluation between two log lines does not change the logged loss."""
    log = {"train": STEPS, "log": {"every_steps": 6}}
    plain = train_here(tmp_path / "plain", Line(), ROWS, evaluation=ROWS[:4], **log)
    other = train_here(tmp_path / "other", Line(), ROWS, evaluation=ROWS[:4], **{**log, **sections})
    assert other.values("loss") == plain.values("loss")


@pytest.mark.parametrize("zero", SHARDINGS, ids=str)
def test_the_gradient_norm_is_logged_without_clipping(
    zero: dict | None, tmp_path: Path, world: None
) -> None:
    """The logged norm is that of the gradient of the batch's mean loss, for each sharding."""
    model = Line()
    samples = collate(
        [
            ROWS[i]
            for i in Batches(
                UserSamples(ROWS), BatchPlan(4, 2, 2, 1, None), 42
            ).sample_indices_of_micro_batch(0, 0, 0)
        ]
    )
    model(**samples).backward()
    expected = float(model.weight.grad.norm())
    settings = {"train": {"max_steps": 1}, "batch": {"micro_size": 2, "accumulation_steps": 1}}
    trained = train_here(tmp_path, Line(), ROWS, zero=zero, **settings)
    assert trained.values("gradient_norm") == [(1, pytest.approx(expected, rel=1e-6))]


class Shapes(Line):
    """Parameters without a dimension, without elements, and that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.zeros(0))
        self.turned = nn.Parameter(torch.arange(8.0).reshape(2, 4).t())
        self.every_other = nn.Parameter(torch.ones(8)[::2])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        more = (x @ self.turned).mean(1) + x @ self.every_other + self.none.sum()
        return super().forward(x, y) * self.scale.exp() + (more**2).mean()


@pytest.mark.parametrize("zero", SHARDINGS[1:], ids=str)
def test_parameters_of_any_shape(zero: dict | None, tmp_path: Path, world: None) -> None:
    """ZeRO trains them as plain PyTorch does, and another sharding continues its checkpoint."""
    settings: Any = {
        "log": {"every_steps": 1},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "schedule": {"name": "constant"},
    }
    # Two steps with ZeRO, and two without, are four in plain PyTorch.
    plain = train_here(tmp_path / "plain", Shapes(), ROWS, train={"max_steps": 4}, **settings)
    folder = tmp_path / "run"
    train_here(folder, Shapes(), ROWS, zero=zero, train={"max_steps": 2}, **settings)
    resumed = train_here(folder, Shapes(), ROWS, train={"max_steps": 4}, **settings)
    expected = [(step, pytest.approx(loss, rel=1e-6)) for step, loss in plain.values("loss")]
    assert resumed.values("loss") == expected


class Spoiled(Line):
    """A model whose loss, or only one gradient, is not finite for marked samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.other = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        if self.how == "loss":
            return loss + torch.where(bad.any(), torch.nan, 0.0) * self.weight.sum()
        if self.how == "constant":
            return loss + torch.where(bad.any(), torch.inf, 0.0)
        # The slope of the root at 0 is infinite.
        return loss + torch.where(bad.any(), self.other, 1.0).sqrt().sum()


def spoil(at: int) -> list[dict]:
    """Return samples of which one is marked as bad."""
    return [{**row, "bad": torch.tensor(i == at)} for i, row in enumerate(ROWS)]


BAD = {
    "loss": (
        "step 2: the loss is nan on rank 0, samples {} of data.train",
        "is not finite: weight\n",
    ),
    "gradient": (
        "step 2: every loss is finite, and a gradient is not; samples {} of data.train",
        "finite: other\n",
    ),
    "constant": (
        "step 2: the loss is inf on rank 0, samples {} of data.train",
        "its gradients were finite",
    ),
}


@pytest.mark.parametrize("zero", SHARDINGS, ids=str)
@pytest.mark.parametrize("how", BAD)
def test_what_is_not_finite_ends_the_training(
    how: str, zero: dict | None, tmp_path: Path, world: None
) -> None:
    """The error names step, samples and parameter; the step changes no weight and saves nothing."""
    order = Batches(UserSamples(ROWS), BatchPlan(4, 2, 2, 1, None), 42)
    samples = order.sample_indices_of_micro_batch(1, 1, 0)
    model = Spoiled(how)
    batch = {"micro_size": 2, "accumulation_steps": 2}
    # The weights before each pass.
    known: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda *_: known.append(model.weight.detach().clone()))
    settings = {
        "train": STEPS,
        "checkpoint": {"every_steps": 1},
        "log": {"every_steps": 1},
        "batch": batch,
    }
    with pytest.raises(NonFiniteError) as caught:
        train_here(tmp_path, model, spoil(samples[0]), zero=zero, **settings)
    line, parameter = BAD[how]
    all_of_step = [*order.sample_indices_of_micro_batch(1, 0, 0), *samples]
    assert line.format(", ".join(map(str, samples if how == "loss" else all_of_step))) in str(
        caught.value
    )
    assert parameter in str(caught.value)
    assert [record["step"] for record in records(RunDir(tmp_path))] == [1]
    assert [step for step, _ in RunDir(tmp_path).complete_checkpoints()] == [1]
    # ZeRO 3 has only pieces of the weights.
    if how != "constant" and (zero or {}).get("stage") != 3:
        assert torch.equal(model.weight, known[-1])
        assert torch.isfinite(model.weight).all()


def test_evaluations_and_saves_by_epochs(tmp_path: Path) -> None:
    """Each follows the step that completes its part of the data, and the last step."""
    sections = {
        # 64 samples, two in a step.
        "train": {"max_steps": 40, "evaluate_every_epochs": 0.3},
        "checkpoint": {"every_epochs": 0.5, "keep": None},
    }
    trained = train_here(tmp_path, Line(), ROWS, evaluation=ROWS[:4], **sections)
    assert [step for step, _ in trained.values("evaluation_loss")] == [10, 20, 29, 39, 40]
    assert [step for step, _ in trained.run.complete_checkpoints()] == [16, 32, 40]


def test_a_longer_schedule_tells_its_jump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run with more steps reports the jump of its learning rate; others do not."""
    # More steps stretch the schedule.
    # Train and lose the last checkpoint, resume, and resume with more steps.
    for steps, lost in ((4, 4), (4, None), (8, None)):
        sections = {"checkpoint": {"every_steps": 2}, "log": {"every_steps": 1}}
        trained = train_here(tmp_path, Line(), ROWS, train={"max_steps": steps}, **sections)
        if lost:
            shutil.rmtree(trained.run.checkpoint_folder(lost))
    rates = dict(trained.values("learning_rate"))
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]
    assert [rates[step] for step in (4, 5)] == pytest.approx([0.025, 0.05])
    assert said == [
        f"resumed after step 2 from {trained.run.checkpoint_folder(2)}",
        f"resumed after step 4 from {trained.run.checkpoint_folder(4)}",
        "learning rate: 0.025 at step 4, 0.05 at step 5: optimizer.learning_rate, or the length or "
        "type of the schedule, has changed",
    ]


class Noting(Line):
    """A model that records the samples of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        self.taken += number.tolist()
        return super().forward(x, y)


def test_steps_of_another_size_take_the_samples_that_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumes with other batch sizes uses each sample exactly once."""
    rows = [{**row, "number": torch.tensor(i)} for i, row in enumerate(ROWS)]
    taken = []
    for steps, size in ((4, 6), (6, 4), (9, 2)):
        sections = {
            "train": {"max_steps": steps},
            "batch": {"micro_size": size, "accumulation_steps": 1},
        }
        trained = train_here(tmp_path, Noting(), rows, **sections)
        taken += trained.model.taken
    # One batch of all samples, in their order.
    alone = Batches(UserSamples(rows), BatchPlan(38, 38, 1, 1, None), 42)
    assert taken == alone.sample_indices_of_micro_batch(0, 0, 0)
    assert trained.state.samples == 38
    said = (
        "a step now has 4 samples; the 4 steps so far used 24 samples, and the next continues "
        "after them"
    )
    assert said in capsys.readouterr().out


class Steep(nn.Module):
    """A linear model whose gradient overflows in float16 under a loss scale."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.slope = slope

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).float() * self.slope + 0 * y).mean()


HALF = {"precision": "fp16", "train": {"max_steps": 30}, "log": {"every_steps": 1}}


def test_steps_that_fp16_skips_are_no_failure(tmp_path: Path) -> None:
    """Steps that overflow until the loss scale fits have no norm, and the run continues."""
    trained = train_here(tmp_path, Steep(100.0), ROWS, **HALF)
    skipped = trained.state.skipped
    assert 0 < skipped < 20
    norms = [norm for _, norm in trained.values("gradient_norm")]
    # A skipped step has no norm.
    assert norms.count(None) == skipped
    assert norms[-1] is not None


@pytest.mark.parametrize(("slope", "message"), [
    (float("nan"), "step 1: the loss is nan on rank 0"),
    # At step 17 the loss scale of 2 ** 16 has been halved to below 1.
    (1e9, "step 17: every loss is finite, and a gradient is not"),
])  # fmt: skip
def test_fp16_hides_no_failure(slope: float, message: str, tmp_path: Path) -> None:
    """A loss that is not finite, or an overflow without scaling, ends an fp16 run, too."""
    with pytest.raises(NonFiniteError, match=message):
        train_here(tmp_path, Steep(slope), ROWS, **HALF)


@pytest.mark.parametrize(
    ("number", "saved"), [(signal.SIGUSR1, [2]), (signal.SIGUSR2, [2, 3, 4, 6])]
)
def test_what_is_asked_for_while_one_is_written_beside(
    number: signal.Signals, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop waits for the checkpoint that is being written; a save is made at the next step."""
    snapshot = savings.take_snapshot_on_all_ranks
    write = savings.write_snapshot_as_checkpoint
    asked = []

    def with_request(*args: Any, **how: Any) -> Any:
        # The request comes during the first save only.
        if not asked:
            asked.append(signal.raise_signal(number))
            RunDir(tmp_path).save_request.parent.mkdir(exist_ok=True)
            RunDir(tmp_path).save_request.touch()
        return snapshot(*args, **how)

    # The next step must end before the checkpoint is written.
    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(savings, "take_snapshot_on_all_ranks", with_request)
    monkeypatch.setattr(savings, "write_snapshot_as_checkpoint", slow)
    policy = {"every_steps": 2, "keep": None, "async": True}
    done = train_here(tmp_path, Line(), ROWS, train=STEPS, checkpoint=policy)
    assert [step for step, _ in done.run.complete_checkpoints()] == saved
    assert done.run.stopped.exists() is (number == signal.SIGUSR1)
    assert done.state.step == saved[-1]
    assert not done.run.save_request.exists()


def test_a_stop_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to stop during the end of the last checkpoint is a stop."""
    finish = savings.CheckpointSaver.wait_for_save_and_remove_old

    def asked_meanwhile(saving: savings.CheckpointSaver) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        finish(saving)

    monkeypatch.setattr(savings.CheckpointSaver, "wait_for_save_and_remove_old", asked_meanwhile)
    stopped = train_here(tmp_path, Line(), ROWS, train=STEPS)
    assert json.loads(stopped.run.stopped.read_text())["step"] == STEPS["max_steps"]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_the_export_after_a_last_save_that_failed(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose last save failed ends with an error; only with `continue` it has an export."""

    def full(*_: Any) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(savings, "write_checkpoint_of_step", full)
    model = Line()
    session = session_here(tmp_path, model, ROWS, train=STEPS, checkpoint={"on_failure": policy})
    said = (
        "without its export"
        if policy == "stop"
        else f"The export of the last step is whole: {session.run.export}"
    )
    with pytest.raises(CheckpointError, match=f"No space left on device\n.*{said}"):
        run_task(session)
    if policy == "continue":
        assert torch.equal(
            load_file(session.run.export / "model.safetensors")["weight"], model.weight
        )
    else:
        assert not session.run.export.exists()


class Changing(Line):
    """A model whose parameters change between the third pass and the first checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.passes = 0
        self.trunk = nn.Parameter(torch.ones(4), requires_grad=how != "unfrozen")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        # The checkpoint comes later, after the sixth step.
        if self.passes == 4:
            if self.how == "replaced":
                self.trunk = nn.Parameter(torch.ones(4))
            self.trunk.requires_grad_(self.how != "frozen")
        return super().forward(x * self.trunk, y)


@pytest.mark.parametrize("zero", [None, {"stage": 1}], ids=str)
@pytest.mark.parametrize("how", ["unfrozen", "frozen", "replaced"])
def test_parameters_that_change_while_training(
    how: str, zero: dict | None, tmp_path: Path, world: None
) -> None:
    """A parameter that the optimizer has not, or no longer, is named at the first checkpoint."""
    model = Changing(how)
    settings = {"train": {"max_steps": 8}, "checkpoint": {"every_steps": 6}}
    with pytest.raises(
        InputError, match=f"model: trunk was {how} while training, and the optimizer"
    ):
        train_here(tmp_path, model, ROWS, zero=zero, **settings)
    assert not RunDir(tmp_path).complete_checkpoints()


@pytest.mark.parametrize("how", ["complex parameter", "complex buffer", "state"])
def test_what_a_checkpoint_cannot_hold(how: str, tmp_path: Path) -> None:
    """A value that no checkpoint can store is refused before the first step, by its name."""
    model = Line()
    # torch trains each of them.
    if how == "complex parameter":
        model.odd = nn.Parameter(torch.ones(2, dtype=torch.cfloat))  # type: ignore[assignment]
    elif how == "complex buffer":
        model.register_buffer("odd", torch.ones(2, dtype=torch.cfloat))
    else:
        model = type("Keeping", (Line,), {"get_extra_state": lambda own: {"odd": 1}})()
    name, kind = ("_extra_state", "dict") if how == "state" else ("odd", "torch.complex64")
    with pytest.raises(InputError, match=f"{name} is {kind}, which a checkpoint cannot store"):
        train_here(tmp_path, model, ROWS, train={"max_steps": 2})
    assert not RunDir(tmp_path).metrics.exists()


NAN_ROWS = [{**row, "y": torch.tensor(torch.nan)} for row in ROWS[:4]]
KEEP_BEST = {"keep_best": {"metric": "loss"}, "every_minutes": None}


@pytest.mark.parametrize(
    ("checkpoint", "rows", "message"),
    [
        ({}, NAN_ROWS, "the last evaluation's loss is nan"),
        (
            KEEP_BEST,
            NAN_ROWS,
            "checkpoint.keep_best: no evaluation had a finite loss, so none is the best",
        ),
    ],
)
def test_a_training_that_nan_judges(
    checkpoint: Any,
    rows: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights that no finite evaluation has judged are exported, and the run is no success."""
    monkeypatch.setattr(
        "ortlaunch.worker.tasks.train.print_plan_and_copy_user_modules", lambda session: None
    )
    train = {"max_steps": 4, "evaluate_every_steps": 2}
    for _ in range(2):
        session = session_here(
            tmp_path, Line(), ROWS, evaluation=rows, train=train, checkpoint=checkpoint
        )
        memory_use = RankMemoryMeter(session.group.device, session.model)
        session = replace(session, engine=replace(session.engine, memory_use=memory_use))
        with pytest.raises(NonFiniteError) as caught:
            run_task(session)
        assert str(caught.value) == f"{message}; {session.run.export} has the weights after step 4"
        assert session.run.export.exists()
        # The next start must not take the run for a complete one.
        assert not session.run.summary.exists()
    assert (
        capsys.readouterr().out.count("this evaluation's loss is nan: this one is not the best")
        == 2
    )


def test_nan_ends_a_training_early(tmp_path: Path) -> None:
    """Evaluations that are nan from the first one on do not improve, either."""
    early = {"metric": "loss", "evaluations": 2}
    train = {"max_steps": 9, "evaluate_every_steps": 2, "stop_after": early}
    found = train_here(tmp_path, Line(), ROWS, evaluation=NAN_ROWS, train=train)
    assert found.state.step == 4
    assert training.best.early_stop_reason_or_none(recipe(train=train), 4, found.state.best) == (
        "stopped early after step 4 of 9 (train.stop_after): loss was not finite in 2 evaluations"
    )


class Statistics(Line):
    """A model with a buffer that has nan from the begin on, and one that gets it in step 3."""

    def __init__(self, spoils: bool) -> None:
        super().__init__()
        self.register_buffer("unset", torch.full((2,), torch.nan))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("seen", torch.zeros(()))
        self.spoils = spoils

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.spoils and self.seen == 3:
            self.seen.fill_(torch.nan)
        return super().forward(x, y)


def test_a_buffer_that_gets_nan_is_not_shipped(tmp_path: Path) -> None:
    """No checkpoint is written of a buffer that gets nan; a mask, or a mark of nan, is fine."""
    # The gradients stay finite, because the loss does not use the buffer.
    sections: Any = {"train": {"max_steps": 4}, "checkpoint": {"every_steps": 2}}
    train_here(tmp_path / "good", Statistics(False), ROWS, **sections)
    with pytest.raises(NonFiniteError, match="step 4: the buffer seen has nan after this step\n"):
        train_here(tmp_path / "bad", Statistics(True), ROWS, **sections)
    assert [step for step, _ in RunDir(tmp_path / "bad").complete_checkpoints()] == [2]


@pytest.mark.parametrize("engine", ["eager", pytest.param("ort", marks=needs_ort)])
@pytest.mark.parametrize("how", ["detached", "whole numbers", "no_grad"])
def test_a_loss_without_a_gradient(how: str, engine: str, tmp_path: Path) -> None:
    """A loss without a gradient is an error of the user's model, with the remedy."""

    class Model(Line):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(how != "no_grad"):
                loss = super().forward(x, y)
            return loss.detach() if how == "detached" else loss.long() if how[0] == "w" else loss

    with pytest.raises(InputError, match="the loss that the model returns has no gradient: it is"):
        train_here(tmp_path, Model(), ROWS, train=STEPS, engine={"name": engine})


class Branching(nn.Module):
    """A model that ONNX Runtime's graph cannot hold, with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        return loss * 2 if loss > 1 else loss


@needs_ort
@pytest.mark.parametrize(
    ("named", "advice"),
    [
        ([], r"or engine\.torch_modules=\[PATH\] for a layer that it cannot run$"),
        (["layer"], r"or name another layer, too, or the one around, in engine\.torch_modules$"),
    ],
)
def test_the_advice_on_layers_that_run_as_torch(
    named: list[str], advice: str, tmp_path: Path
) -> None:
    """The error of a model that cannot run advises engine.torch_modules=[PATH] if that is unset."""
    samples = [{"x": torch.ones(4), "y": torch.ones(())}] * 8
    with pytest.raises(EngineError, match=advice):
        train_here(tmp_path, Branching(), samples, engine={"name": "ort", "torch_modules": named})


class Evaluations:
    """A hook that records the evaluations."""

    seen: ClassVar[list[int]] = []

    def on_evaluation(self, step: int, values: dict[str, float]) -> None:
        self.seen.append(step)


@pytest.mark.parametrize("at", ["the step", "its evaluation", "the last step"])
@pytest.mark.parametrize("ends", [None, 1])
def test_the_evaluation_of_a_stopped_step(
    at: str, ends: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop leaves out the evaluation of its step; the next start begins with it.

    The best model, the calls of the hook and the early end are those of an unstopped run.
    """
    monkeypatch.setitem(sys.modules, "hook_of_a_test", sys.modules[__name__])
    best_loss = {"metric": "loss", "mode": "max"}
    train = {
        "max_steps": 9, "evaluate_every_steps": 3, "hook": "hook_of_a_test:Evaluations",
        "stop_after": ends and {**best_loss, "evaluations": ends},
    }  # fmt: skip
    keep = {"every_steps": 3, "keep_best": best_loss, "keep": 1}
    sections = {"evaluation": ROWS, "train": train, "checkpoint": keep}
    # A rising loss is the wish here, so that the first evaluation is the best one.
    Evaluations.seen.clear()
    expected = train_here(tmp_path / "unstopped", Line(), ROWS, **sections)
    called = list(Evaluations.seen)
    assert called == ([3, 6] if ends else [3, 6, 9])

    Evaluations.seen.clear()
    session = session_here(tmp_path / "stopped", Line(), ROWS, **sections)
    step = expected.state.step if at == "the last step" else 3
    # The first forward pass of the training step, or the second one of the evaluation.
    moment = (False, 2) if at == "its evaluation" else (True, step)
    passes = Counter[bool]()
    with accept_save_and_stop_requests(session.group) as agreed:

        def stop_here(*_: object) -> None:
            passes[session.model.training] += 1
            if (session.model.training, passes[session.model.training]) == moment:
                agreed.add_request(RankRequest.STOP)

        session.model.register_forward_pre_hook(stop_here)
        state = training.train_until_end_or_agreed_stop(session, agreed, CheckpointExports(session))
    assert (state.step, agreed.agreed_stop) == (step, RankRequest.STOP)
    found = train_here(tmp_path / "stopped", Line(), ROWS, **sections)
    assert (found.state.best, found.state.step) == (expected.state.best, expected.state.step)
    assert Evaluations.seen == called
    assert found.values("evaluation_loss") == expected.values("evaluation_loss")
    kept = [[each for each, _ in one.run.complete_checkpoints()] for one in (found, expected)]
    assert kept[0] == kept[1]
