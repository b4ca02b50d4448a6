"""Values that the user's own model returns beside its loss: types, means, ranks and engines."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.returned_values import (
    ValueMeans,
    loss_of_engine_output,
    scalars_beside_loss_by_name,
)
from ortmodule_tests.modules import wrapped
from tests.ort import needs_ort
from tests.training import train_here
from tests.worker.tasks.test_train import ROWS, Line


class Told(Line):
    """A model that returns means, a count, and values that depend on no weight, with its loss."""

    def found(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = self.found(x)
        right = (found > 1e-6) == (y > 0)
        return {
            "loss": ((found - y) ** 2).mean(),
            "size": (found**2).mean(),
            "right": right.float().mean(),
            "counted": right.sum(),
            "largest": y.max().detach(),
            "three": 3.0,
            "logits": found,
        }


class ByLayer(Told):
    """The same model with a layer instead of a single weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = None
        self.layer = nn.Linear(4, 3)

    def found(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum(-1)


def test_which_are_numbers() -> None:
    """Only scalars of a mapping or an object are values; tensors, strings and booleans are not."""
    one = torch.tensor(2.0)
    output = {
        "loss": one,
        "a": one,
        "b": 3,
        "logits": torch.ones(3),
        "name": "x",
        "flag": True,
        "none": None,
    }
    for form in (output, types.SimpleNamespace(**output)):
        assert {
            name: float(value) for name, value in scalars_beside_loss_by_name(form).items()
        } == {
            "a": 2.0,
            "b": 3.0,
        }
    assert scalars_beside_loss_by_name((one, one)) == scalars_beside_loss_by_name(one) == {}


def test_they_are_logged_as_means_over_passes_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logged values are means over passes and steps; an evaluation has them, too."""
    # With a learning rate of almost 0 the means are those of the rows.
    still = {
        "optimizer": {"name": "sgd", "learning_rate": 1e-30},
        "log": {"every_steps": 4},
        "train": {"max_steps": 4},
    }
    batch = {"micro_size": 4, "accumulation_steps": 4}
    found = train_here(tmp_path, Told(), ROWS, evaluation=ROWS[:8], batch=batch, **still)
    # Weights of 0 predict no value above 0.
    signs = torch.tensor([float(row["y"] <= 0) for row in ROWS])
    (step,) = found.values("right")
    assert step == (4, pytest.approx(float(signs.mean())))
    assert found.values("counted") == [(4, pytest.approx(4 * float(signs.mean())))]
    assert found.values("evaluation_right") == [(4, pytest.approx(float(signs[:8].mean())))]
    assert found.values("three") == [(4, 3.0)]
    assert not found.values("logits")
    said = capsys.readouterr().out
    assert f"right {step[1]:.4g}" in said
    assert "evaluation right" in said


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    """A value with a name of metrics.jsonl is refused."""

    class Takes(Line):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"loss": super().forward(x, y), "epoch": x.mean()}

    with pytest.raises(
        InputError,
        match=r"returns 'epoch' beside its loss, a name that metrics.jsonl already uses",
    ):
        train_here(tmp_path, Takes(), ROWS)


class Two:
    """A group of two ranks with these values of the other rank."""

    def __init__(self, other: dict[str, Any]) -> None:
        self.other = other

    def gather(self, mine: object) -> list[object]:
        return [mine, self.other]


def test_ranks_count_by_their_weights() -> None:
    """Means are weighted over ranks, for ranks that have the name, without skipped steps."""
    numbers = ValueMeans()
    # For each name the sum of value x weight, and the sum of weights.
    group = Two({"a": [40.0, 4.0], "b": [5.0, 1.0]})
    for value, weight in ((1.0, 1.5), (2.0, 0.5)):
        numbers.add_values_and_return_loss(
            {"loss": torch.tensor(0.0), "a": torch.tensor(value)}, weight
        )
    numbers.keep_step()
    # This pass belongs to a step that is skipped.
    numbers.add_values_and_return_loss({"loss": torch.tensor(0.0), "a": torch.tensor(1e9)}, 1.0)
    numbers.begin_step()
    numbers.keep_step()
    assert numbers.means_over_ranks_and_reset(group) == {"a": (1.5 + 1.0 + 40.0) / 6.0, "b": 5.0}  # type: ignore[arg-type]
    assert numbers.means_over_ranks_and_reset(Two({})) == {}  # type: ignore[arg-type]


@needs_ort
@pytest.mark.usefixtures("built")
def test_on_onnx_runtime_they_are_outputs_of_the_graph() -> None:
    """On engine ort values and gradients equal eager's, for different batches."""
    model = LossModule(ByLayer().train())
    model.has_numbers = True
    module = wrapped(model)
    for start in (0, 8):
        batch = {
            name: torch.stack([row[name] for row in ROWS[start : start + 8]]) for name in ("x", "y")
        }
        ours = module(**batch)
        theirs = model(**batch)
        assert list(ours) == list(theirs)
        torch.testing.assert_close(
            {k: v.float() for k, v in ours.items()}, {k: v.float() for k, v in theirs.items()}
        )
        gradients = [
            torch.autograd.grad(loss_of_engine_output(each), list(model.parameters()))
            for each in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients)
