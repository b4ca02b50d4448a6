"""The user's own data: random generators are seeded alike, and ranks and starts are compared."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.run_folder.origin import may_fingerprints_be_of_same_data
from ortlaunch.worker.data import Mixture, UserSamples, seed_and_call_user_function
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.session import require_same_samples_on_all_ranks
from tests.makers import recipe
from tests.training import train_here

DRAWING = """
import random, numpy, torch
def draw(): return [random.random(), numpy.random.rand(), torch.rand(()).item()]
AT_IMPORT = draw()
def made(): return [AT_IMPORT, draw()]
"""


def test_a_factory_draws_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers of a factory and of its module depend on the seed alone."""
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(tmp_path)

    def drawn(seed: int) -> Any:
        # As in another process, whose generators are elsewhere and which imports the module anew.
        sys.modules.pop("drawing", None)
        random.random(), np.random.rand(), torch.rand(3)
        return seed_and_call_user_function("data.factory", "drawing:made", {}, seed)

    assert drawn(7) == drawn(7) != drawn(8)
    del sys.modules["drawing"]


class Sometimes:
    """Samples that a generator of their own changes with some probability."""

    def __init__(self, probability: float, seed: int = 0) -> None:
        self.probability = probability
        self.own = random.Random(seed)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        changed = self.own.random() < self.probability
        return {"x": np.arange(9.0) + index + (100 if changed else 0), "y": index}


def fingerprint(items: Any) -> Any:
    return data_identity_record(UserSamples(items, is_mapping=False))["fingerprint"]


# Python, NumPy and torch each have forms that no common function hashes.
KINDS: list[Any] = [
    torch.arange(4), torch.rand(4, 2).bfloat16(), torch.tensor(2 + 3j), np.float64(3), 2.5, 7, True, "text", b"bytes",
    None, [1, (2.5, {"a": "b"})], {"x": np.array(["a"])}, np.array([object()], object), np.zeros(0), object(),
]  # fmt: skip


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
def test_any_value_has_a_fingerprint(value: Any) -> None:
    """A sample of any form has a fingerprint, the same for an equal value."""
    assert fingerprint([value]) == fingerprint([value])
    assert fingerprint([value]) != fingerprint([(value, 1)])


def test_data_in_another_order_or_of_another_seed_differ() -> None:
    """A shuffle, other values and another number of samples are seen; the last digits are not."""
    rows = [{"x": torch.tensor([0.1 + row, 1e-9 * row]), "y": row} for row in range(10)]
    assert not may_fingerprints_be_of_same_data(fingerprint(rows), fingerprint(rows[::-1]))
    assert not may_fingerprints_be_of_same_data(
        fingerprint(rows), fingerprint([{**row, "y": 0} for row in rows])
    )
    # The sign alone is another value.
    turned = [{**row, "x": -row["x"]} for row in rows]  # type: ignore[operator]
    assert not may_fingerprints_be_of_same_data(fingerprint(rows), fingerprint(turned))
    other_cpu = [{**row, "x": row["x"] * (1 + 1e-6) + 1e-8} for row in rows]
    assert may_fingerprints_be_of_same_data(fingerprint(rows), fingerprint(other_cpu))
    parts = [UserSamples(rows), UserSamples(rows[:3])]
    mixed, turned = (Mixture(each, [1, 1]) for each in (parts, parts[::-1]))
    one, other = (data_identity_record(each)["fingerprint"] for each in (mixed, turned))
    assert may_fingerprints_be_of_same_data(one, one)  # type: ignore[arg-type]
    assert not may_fingerprints_be_of_same_data(one, other)  # type: ignore[arg-type]


def test_random_samples_are_not_taken_for_others() -> None:
    """Samples that generators of their own change always, or now and then, are the same data."""
    assert fingerprint(Sometimes(0.9)) is None
    for seed in range(20):
        now, later = (fingerprint(Sometimes(0.1, 2 * seed + n)) for n in (0, 1))
        assert may_fingerprints_be_of_same_data(now, later)


def test_the_training_draws_as_if_nothing_was_read() -> None:
    """A fingerprint leaves the random generators alone, and an error of a sample to the training."""

    class Bad(Sometimes):
        def __getitem__(self, index: int) -> dict[str, Any]:
            torch.rand(1), np.random.rand(), random.random()
            raise RuntimeError(index)

    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    assert fingerprint(Bad(0))
    after = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    assert after == states


class Ranks:
    """A process group in which the other rank has this identity."""

    def __init__(self, other: object) -> None:
        self.other = other

    def gather(self, value: object) -> list[object]:
        return [value, self.other]


def test_ranks_with_other_data_do_not_train() -> None:
    """Ranks whose factories return other samples, or other counts, are refused on all ranks."""
    mine = data_identity_record(UserSamples([{"x": row} for row in range(10)]))
    moved = data_identity_record(UserSamples([{"x": 9 - row} for row in range(10)]))
    fewer = data_identity_record(UserSamples([{"x": row} for row in range(9)]))
    require_same_samples_on_all_ranks("data.train", mine, recipe(), Ranks(mine))  # type: ignore[arg-type]
    require_same_samples_on_all_ranks(
        "data.train", mine, recipe(), Ranks({**mine, "fingerprint": None})
    )  # type: ignore[arg-type]
    # Another order, and a shard of its own.
    for other, count in (moved, 10), (fewer, 9):
        message = rf"other samples on rank 1 \({count}\) than on rank 0 \(10\). It must"
        with pytest.raises(InputError, match=message):
            require_same_samples_on_all_ranks("data.train", mine, recipe(), Ranks(other))  # type: ignore[arg-type]


class Drawing(nn.Module):
    """A model and samples that draw by Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.line(x) * (np.random.rand() + random.random())).square().mean()
        return loss

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([np.random.rand() + random.random() + torch.rand(()).item()])}


def test_two_trainings_draw_alike(tmp_path: Path) -> None:
    """Two trainings, and their evaluations, have equal losses, whatever was drawn before them."""
    found = []
    for number in range(2):
        torch.manual_seed(0)
        model = Drawing()
        random.random(), np.random.rand(), torch.rand(3)
        items: Any = model
        train = {"max_steps": 3, "evaluate_every_steps": 2}
        trained = train_here(tmp_path / str(number), model, items, evaluation=items, train=train)
        found.append([trained.values("loss"), trained.values("evaluation_loss")])
        np.random.seed(number)
    assert found[0][1]
    assert found[0] == found[1]
