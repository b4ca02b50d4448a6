"""The types of the public API, as a user's program sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ortlaunch
from ortlaunch import (
    CheckpointHook,
    Collate,
    DataFactory,
    Dataset,
    Diagnosis,
    EvaluationHook,
    Hook,
    LaunchOptions,
    Metric,
    ModelFactory,
    Plan,
    Recipe,
    ResumeOptions,
    Run,
    Status,
    StepHook,
    StopResult,
    Validation,
)
from ortlaunch.base.errors import InputError, RecipeError, RunError
from ortmodule import FP16_Optimizer, FusedAdam, ORTModule


def a_run(path: Path) -> None:
    """Every function with its result."""
    recipe = ortlaunch.load(path, "seed=3", train={"max_steps": 4}, zero=None)
    assert_type(recipe, Recipe)
    assert_type(recipe.train.max_steps, int | None)
    assert_type(ortlaunch.validate({"name": "x"}, elsewhere=True), Validation)
    assert_type(ortlaunch.validate("bert-large/tiny").notes, tuple[str, ...])
    options = LaunchOptions(launcher="torchrun", processes_per_node=2)
    assert_type(ortlaunch.plan(recipe, options=options), Plan)
    assert_type(ortlaunch.plan(recipe).world_size, int)
    run = ortlaunch.train(recipe, run_dir=path, wait=False, resume=ResumeOptions("never"))
    assert_type(run, Run)
    assert_type(ortlaunch.submit(recipe, scheduler="slurm", run_dir="x"), Run)
    assert_type(ortlaunch.runs(newest=None), list[Run])
    assert_type(ortlaunch.__version__, str)


def a_loop(net: nn.Module) -> None:
    """ONNX Runtime's parts in a loop of one's own."""
    module = ORTModule(net)
    optimizer: torch.optim.Optimizer = FusedAdam(net.parameters(), lr=1e-3)
    assert_type(FP16_Optimizer(optimizer), torch.optim.Optimizer)
    assert_type(module.report(), dict[str, Any])


def a_folder() -> None:
    """Every method of Run with its result."""
    run = Run()
    assert_type(run.path, Path)
    assert_type(run.status(), Status)
    assert_type(run.status().step, int | None)
    assert_type(run.status().job.exit_status, int | None)
    assert_type(run.metrics(), list[dict[str, Any]])
    assert_type(run.logs(rank=1, follow=True), Iterator[str])
    assert_type(run.wait(progress=True, check=False), Status)
    assert_type(run.stop(wait=False), StopResult)
    assert_type(run.stop().exit_status, int)
    assert_type(run.checkpoint(), Path)
    assert_type(run.restart(), str)
    assert_type(run.cancel(), str)
    assert_type(run.evaluate("engine.name=eager", step=3), dict[str, Any])
    assert_type(run.export("onnx", to="there"), Path)
    assert_type(run.generate("The", tokens=3), str)
    assert_type(run.diagnose(), Diagnosis)
    assert_type(run.diagnose().advice, tuple[str, ...])
    run.frame()


def errors() -> None:
    """Attributes of the errors."""
    try:
        ortlaunch.train("bert-large/tiny")
    except RecipeError as error:
        assert_type(error.problems, tuple[str, ...])
    except InputError as error:
        assert_type(error.detail, str)
    except RunError as error:
        assert_type(error.exit_status, int)


def mistakes() -> None:
    """Mistakes that the checker reports; an ignore of no error is an error of its own."""
    ortlaunch.tarin("bert-large/tiny")  # type: ignore[attr-defined]
    ortlaunch.load(3)  # type: ignore[arg-type]
    ortlaunch.train("bert-large/tiny", wait="no")  # type: ignore[arg-type]
    Run().status = 3  # type: ignore[assignment, method-assign]


def make_model(hidden: int = 32) -> nn.Module:
    """Return a model."""
    return nn.Linear(hidden, hidden)


def make_data(**arguments: object) -> list[dict[str, Tensor]]:
    """Return samples."""
    return [{"x": torch.zeros(3)}]


def make_batch(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch."""
    return {"x": torch.stack([sample["x"] for sample in samples])}


def measure(
    outputs: Mapping[str, NDArray[np.float32]], batch: Mapping[str, NDArray[np.float32]]
) -> dict[str, float]:
    """Return a number."""
    return {"largest": float(outputs["logits"].max())}


class Stops:
    """A hook with two of the methods."""

    def on_step(self, step: int, values: dict[str, object]) -> Literal["stop"] | None:
        """Stop the run at step 10."""
        return "stop" if step >= 10 else None

    def on_checkpoint(self, step: int, folder: str) -> None:
        """Do nothing."""


model: ModelFactory = make_model
data: DataFactory = make_data
samples: Dataset = make_data()
collate: Collate = make_batch
metric: Metric = measure
hook: Hook = Stops()
step_hook: StepHook = Stops()
checkpoint_hook: CheckpointHook = Stops()
not_a_metric: Metric = make_batch  # type: ignore[assignment]
not_a_hook: EvaluationHook = Stops()  # type: ignore[assignment]
