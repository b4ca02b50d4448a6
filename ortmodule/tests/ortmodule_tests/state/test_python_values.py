"""Tensor values that a model reads in Python are refused before step 1; sizes cause another export."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Called(nn.Module):
    """A layer, and a function of the test that uses it."""

    def __init__(self, called: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.called = called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(self.layer, x)


@pytest.fixture(autouse=True)
def _notes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tally is one for the process, so each test gets its own notes.
    monkeypatch.setattr(tally, "notes", [])


def a_branch(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).sum() * (2 if x.sum() > 0 else 1)


def a_number(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).sum() * x.max().item()


def a_list(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    lengths = (x.sum(1) > 0).long().tolist()
    return layer(x).sum() * lengths[0]


def a_loop(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # The number of iterations would stay that of the first batch.
    for _ in range(int(x.max())):
        x = layer(x)
    return x.sum()


def a_filled_constant(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    largest = torch.zeros(())
    # A constant until a value is written to it.
    largest.copy_(x.max())
    return layer(x).sum() * float(largest)


def a_lot(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).sum() * (2 if torch.rand(()) > 0.5 else 1)


VALUES = [a_branch, a_number, a_list, a_loop, a_filled_constant, a_lot]


@pytest.mark.parametrize("called", VALUES)
def test_a_decision_by_values_is_refused_with_its_line(called: Forward) -> None:
    """A decision by values is refused with its line, because the graph would keep the first
    batch's.
    """
    with pytest.raises(Exception, match="takes values of tensors into Python") as refused:
        wrapped(Called(called))(torch.ones(3, 4))
    lines, first = inspect.getsourcelines(called)
    places = [f"{__file__}:{first + number}" for number in range(len(lines))]
    # Any line of the function: which one depends on the statement.
    assert any(place in str(refused.value) for place in places)


def test_it_is_allowed_where_the_recipe_says_so() -> None:
    """A decision by values is allowed by a setting, with a note."""
    wrapped(Called(a_branch), allow_traced_values=True)(torch.ones(3, 4)).backward()
    assert any("they stay those of the first batch" in note for note in tally.notes)


class Masked(nn.Module):
    """An encoder with a mask from outside, with or without `is_causal`."""

    def __init__(self, told: dict[str, bool]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)
        self.told = told

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layers(x, mask, **self.told).square().mean()


def test_a_refused_mask_names_what_makes_it_known() -> None:
    """The refusal of a mask names `is_causal=`, with which the same model has eager's loss."""
    given = torch.randn(2, 3, 8), nn.Transformer.generate_square_subsequent_mask(3)
    with pytest.raises(
        Exception, match=rf"is_causal=True or False .* at {re.escape(__file__)}:\d+"
    ) as refused:
        wrapped(Masked({}))(*given)
    # The general remedy does not help here: torch itself compares the mask with a causal one.
    assert "torch.where" not in str(refused.value)
    model = Masked({"is_causal": False})
    assert wrapped(model)(*given).item() == pytest.approx(model(*given).item(), rel=1e-5)


def checked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert x.min() > -5
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return layer(x).sum()


def test_checks_are_told_and_not_refused() -> None:
    """Checks that only raise an error are noted, not refused; later batches are not checked."""
    wrapped(Called(checked))(torch.ones(3, 4)).backward()
    (note,) = tally.notes
    assert "checked in the first batch only" in note
    # The assert and the `if`.
    assert note.count(__file__) == 2


def by_square_root(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).sum() / math.sqrt(x.shape[0])


def by_length(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).sum() / float(len(x))


def by_a_branch(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # Computed from the size, and then compared with a number other than 0 and 1.
    return layer(x).sum() * (2 if x.shape[0] * 2 > 7 else 1)


def losses_of_sizes(called: Forward, *sizes: int, **settings: Any) -> tuple[Any, list[int]]:
    """Train on batches of these sizes and compare with eager.

    Returns:
        The module, and the number of exports after each batch.
    """
    model = Called(called)
    exports = []
    eager = copy.deepcopy(model)
    module = wrapped(model, **settings)
    before = tally.exports
    for size in sizes:
        x = torch.randn(size, 4)
        losses = [each(x) for each in (module, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        exports.append(tally.exports - before)
    same(model, eager)
    return module, exports


@pytest.mark.parametrize("called", [by_square_root, by_length, by_a_branch])
def test_another_size_is_exported_again_where_python_has_it(called: Forward) -> None:
    """A batch of another size is exported again where Python reads the size, with eager's results."""
    _, exports = losses_of_sizes(called, 3, 3, 5, 5)
    assert exports == [1, 1, 2, 2]
    assert any(
        "exported again for other sizes" in note and __file__ in note for note in tally.notes
    )


def test_sizes_that_stay_tensors_are_exported_once() -> None:
    """Sizes that stay tensors, as in arithmetic, need one export."""
    _, exports = losses_of_sizes(lambda layer, x: layer(x).sum() / x.shape[0], 3, 5)
    assert exports == [1, 1]
    assert tally.notes == []


def test_a_size_that_is_compared_with_one_is_one_or_more() -> None:
    """A size that is compared with 1 only needs two graphs: one for 1, one for all other sizes."""
    _, exports = losses_of_sizes(
        # transformers checks in this way whether attention is of one token.
        lambda layer, x: layer(x).sum() * (3 if x.shape[0] > 1 else 2),
        3,
        5,
        1,
        1,
    )
    assert exports == [1, 1, 2, 2]


def by_length_of_embedded_tokens(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # As the masks of transformers' decoders, and GPT-2's view of its tokens.
    tokens = (x * 0).long().view(-1, x.size()[-1])
    embedded = nn.functional.embedding(tokens, layer.weight) + 1
    return layer(x).sum() * (3 if embedded.shape[1] == x.shape[-1] else 2)


def by_number_of_elements(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).sum() * (3 if layer(x).view(-1).shape[0] > 12 else 2)


@pytest.mark.parametrize(
    ("called", "counts"), [(by_length_of_embedded_tokens, [1, 1]), (by_number_of_elements, [1, 2])]
)
def test_a_batch_of_more_rows_takes_the_graph_of_a_model_that_reads_lengths(
    called: Forward, counts: list[int]
) -> None:
    """Only a size that depends on the rows needs a graph for each number of rows."""
    _, exports = losses_of_sizes(called, 3, 5)
    assert exports == counts


def test_the_reason_for_another_export_is_known_before_a_pass() -> None:
    """It is empty for a call that one of the graphs serves, and nothing is run to find it."""
    module, _ = losses_of_sizes(by_a_branch, 3)
    passes = tally.exports, module.report()["forward_passes"]
    assert module.reason_for_another_export(torch.randn(3, 4)) == ""
    assert module.reason_for_another_export(torch.randn(9, 4)) == "a size or buffer"
    assert module.reason_for_another_export(torch.randn(3, 4, 1)) == "the call"
    assert (tally.exports, module.report()["forward_passes"]) == passes


def test_positions_are_compared_with_each_other() -> None:
    """A causal mask, which is computed from sizes, needs one export."""

    def causal(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # A size that becomes a tensor, with values that depend on nothing else.
        place = torch.arange(x.shape[0])
        return ((layer(x) @ x.T) * (place[:, None] >= place)).sum()

    _, exports = losses_of_sizes(causal, 3, 5)
    assert exports == [1, 1]


class Scaled(nn.Module):
    """A model with a buffer that Python reads, and one that changes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        # Its buffers change in every step, and must not cause exports.
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).square().sum() * self.scale.max().item()


def test_a_buffer_that_python_reads_is_read_again_when_it_changes() -> None:
    """A changed buffer that Python reads causes another export."""
    model = Scaled()
    module = wrapped(model)
    before = tally.exports
    losses = []
    for value in (3.0, 3.0, 5.0):
        # The second value is not written, so the second step needs no export.
        if model.scale[0] != value:
            # In place, as load_state_dict changes a buffer.
            model.scale[0] = value
        losses.append(module(torch.ones(3, 4) + torch.arange(3.0)[:, None]).item() / value)
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert tally.exports - before == 2
    assert any(
        "exported again for other sizes or buffers" in note and __file__ in note
        for note in tally.notes
    )


def drawn(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noise = torch.distributions.Normal(torch.zeros(4), torch.ones(4)).sample()
    # The noise has no effect: only torch's check of the parameters matters here.
    return (layer(x) + 0 * noise).sum()


def test_torchs_own_checks_are_no_decisions() -> None:
    """A distribution's check of its parameters is no decision."""
    wrapped(Called(drawn))(torch.ones(3, 4)).backward()
    assert tally.notes == []
