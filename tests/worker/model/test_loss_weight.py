"""The weight of each micro batch in a step's loss: labels, samples, or a key of the batch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data import Batches, UserSamples, collate
from ortlaunch.worker.model.loss_weight import LossWeight
from ortlaunch.worker.model.model import LossModule
from tests.makers import recipe
from tests.training import train_here

# Labels that count, by sample.
COUNTS = [5, 1, 0, 3, 2, 6, 1, 4]


def sample(index: int) -> dict[str, torch.Tensor]:
    """Return a sample with six labels, of which the first ones do not count."""
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(3, (6,), generator=generator)
    labels[: 6 - COUNTS[index]] = -100
    x = torch.randn(6, 4, generator=generator)
    return {
        "x": x,
        "labels": labels,
        "weight": torch.tensor(COUNTS[index]),
        "counted": labels != -100,
    }


SAMPLES = [sample(index) for index in range(len(COUNTS))]


class Classes(nn.Module):
    """A classifier of three classes, with the mean over labels that count as loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.layer(x).flatten(0, 1), labels.flatten())


class OwnMean(Classes):
    """A model whose labels have another name, so that only the data can give weights."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, target)


def settings(micro: int, weight: str | None = "labels", **sections: Any) -> dict[str, Any]:
    train = {"max_steps": 2, "loss_weight": weight}
    return {
        "train": train,
        "batch": {"global_size": 8, "micro_size": micro},
        "log": {"every_steps": 1},
        **sections,
    }


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_accumulation_changes_no_loss_and_no_gradient(micro: int, tmp_path: Path) -> None:
    """Loss and gradient of eight samples with unequal labels do not depend on the micro size."""
    model = Classes()
    whole = Classes()
    loss = whole(
        **{name: value for name, value in collate(SAMPLES).items() if name in ("x", "labels")}
    )
    loss.backward()
    norm = math.hypot(*(float(p.grad.norm()) for p in whole.parameters()))
    rows = [{name: row[name] for name in ("x", "labels")} for row in SAMPLES]
    trained = train_here(tmp_path, model, rows, evaluation=rows, **settings(micro, optimizer=SGD))
    assert trained.values("loss")[0] == (1, pytest.approx(loss.item(), rel=1e-6))
    assert trained.values("gradient_norm")[0] == (1, pytest.approx(norm, rel=1e-6))
    held_out = float(model(**collate(rows)).detach())
    assert trained.values("evaluation_loss") == [(2, pytest.approx(held_out, rel=1e-6))]


SGD = {"name": "sgd", "learning_rate": 0.1}


@pytest.mark.parametrize("key", ["weight", "counted"])
def test_a_key_of_the_batch_counts(key: str, tmp_path: Path) -> None:
    """A key with a number per sample, or a boolean per label, gives the weights."""
    # The model's forward has no such parameter, so that it must not get the key.
    # Without the sample that has no label, whose mean is nan.
    rows = [
        {"x": row["x"], "target": row["labels"], key: row[key]} for row in SAMPLES if row["weight"]
    ]
    found = [
        train_here(tmp_path / str(micro), OwnMean(), rows, **settings(micro, key, batch=batch))
        for micro, batch in (
            (7, {"global_size": 7, "micro_size": 7}),
            (1, {"global_size": 7, "micro_size": 1}),
        )
    ]
    for name in ("loss", "gradient_norm"):
        whole, cut = ([value for _, value in each.values(name)] for each in found)
        assert cut == pytest.approx(whole, rel=1e-6), name


def weight_of(model: nn.Module | None = None, task: str = "custom", **train: Any) -> LossWeight:
    made = recipe(train={"max_steps": 2, **train})
    made = made.model_copy(update={"model": made.model.model_copy(update={"task": task})})
    return LossWeight(made, LossModule(model or Classes()))


def group(*others: list[float]) -> Any:
    """Return a group whose rank 0 gets these weights of other ranks."""
    return SimpleNamespace(
        rank=0, size=1 + len(others), gather_numbers=lambda mine: [mine, *others]
    )


def factors(
    weight: LossWeight, rows: list[dict[str, torch.Tensor]], *others: list[float]
) -> list[float]:
    """Return the factors of two passes with one sample each."""
    batches = Batches(
        UserSamples(rows), BatchPlan(2 * (1 + len(others)), 1, 2, 1 + len(others), None), 42
    )
    return [
        factor for _, factor in weight.micro_batches_with_loss_factors(batches, 0, group(*others))
    ]


def rows_with(*weights: float) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(2), "weight": torch.tensor(weight)} for weight in weights]


# 0.1 and 1/3 are not exact in binary.
@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.0])
def test_equal_weights_change_no_bit(value: float) -> None:
    """If all weights of all ranks are equal, the factor is exactly 1."""
    rows = [{"x": torch.ones(2), "weight": torch.tensor(value, dtype=torch.float64)}] * 4
    assert factors(weight_of(loss_weight="weight"), rows, [value] * 2, [value] * 2) == [1.0, 1.0]


def test_equal_labels_train_as_before(tmp_path: Path) -> None:
    """Passes with equal labels give the same results as without weights, bit for bit."""
    # Without -100 all labels count.
    rows = [{"x": row["x"], "labels": row["labels"].clamp(min=0)} for row in SAMPLES]
    models = {"labels": Classes(), "samples": Classes()}
    found = [
        train_here(tmp_path / by, model, rows, **settings(2, by)) for by, model in models.items()
    ]
    for name in ("loss", "gradient_norm"):
        assert found[0].values(name) == found[1].values(name)
    assert torch.equal(models["labels"].layer.weight, models["samples"].layer.weight)


def test_factors_are_of_all_ranks() -> None:
    """The factor is the weight of a pass relative to the mean weight of all ranks."""
    # The mean weight is 2.
    assert factors(weight_of(loss_weight="weight"), rows_with(1, 1), [3.0, 3.0]) == [0.5, 0.5]


class TinyForCausalLM(Classes):
    """A model whose name is like that of transformers' models that shift labels."""


@pytest.mark.parametrize(("model", "counted"), [(Classes(), 3), (TinyForCausalLM(), 2)])
def test_labels_are_counted_as_the_model_takes_them(model: nn.Module, counted: int) -> None:
    """The first label of a model that predicts the next word does not count."""
    labels = torch.tensor([[5, -100, 1], [-100, -100, 2]])
    assert (
        weight_of(model, loss_weight="labels").weight_of_micro_batch({"labels": labels}, [0, 1])
        == counted
    )


def test_labels_of_a_regression_all_count() -> None:
    """All labels of a regression count, also -100.0."""
    labels = torch.tensor([[-100.0], [2.0]])
    assert weight_of(loss_weight="labels").weight_of_micro_batch({"labels": labels}, [0, 1]) == 2


def test_defaults() -> None:
    """By default tasks of transformers count labels, and custom models count samples."""
    batch = {"labels": torch.tensor([[1, -100, -100]])}
    assert weight_of().weight_of_micro_batch(batch, [0]) == 1
    assert (
        weight_of(task="masked-lm").weight_of_micro_batch(
            {"labels": torch.tensor([[1, 2, -100]])}, [0]
        )
        == 2
    )


def test_a_key_that_forward_names_stays() -> None:
    """The model gets the key if its forward has a parameter of that name."""

    class Takes(Classes):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return (self.layer(x).sum(-1) * weight).mean()

    batch = {"x": torch.ones(1), "weight": torch.ones(1)}
    assert set(
        weight_of(loss_weight="weight").batch_without_weight_key_with_counted_label(batch)
    ) == {"x"}
    assert set(
        weight_of(Takes(), loss_weight="weight").batch_without_weight_key_with_counted_label(batch)
    ) == {"x", "weight"}


@pytest.mark.parametrize(("by", "rows", "message"), [
    ("tokens", rows_with(1, 1), r"got tokens, and a batch has no 'tokens'; it has x, weight"),
    ("labels", rows_with(1, 1), r"got labels, and a batch has no 'labels'; it has x, weight"),
    # The samples are shuffled: either may be first.
    ("weight", rows_with(-1, -1), r"'weight' of sample [01] is -1; a weight is 0 or more"),
    ("weight", rows_with(math.nan, math.nan), r"'weight' of sample [01] is nan"),
    ("weight", rows_with(0, 0), r"step 1: no sample counts: the sum of 'weight' is 0 in samples [01], [01]$"),
])  # fmt: skip
def test_weights_that_cannot_be(by: str, rows: list[dict[str, torch.Tensor]], message: str) -> None:
    """Invalid weights are an error with the key, the sample and the valid range."""
    with pytest.raises(InputError, match=message):
        factors(weight_of(loss_weight=by), rows)


def test_two_means_of_pretraining_are_not_weighted_in_silence() -> None:
    """Task pretraining with unequal labels is refused unless the recipe sets the weight."""
    # Masked words and sentence pairs have a mean each.
    rows = [{"labels": torch.tensor([1, label]), "x": torch.ones(2)} for label in (1, -100)]
    with pytest.raises(InputError, match="loss_weight=labels or"):
        factors(weight_of(task="pretraining"), rows)
    assert sum(factors(weight_of(task="pretraining", loss_weight="labels"), rows)) == 2
