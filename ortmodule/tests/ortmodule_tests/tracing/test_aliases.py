"""An in-place change reaches every tensor that shares the memory, as in eager PyTorch."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from ortmodule._internal.native import extensions
from ortmodule_tests.modules import Reverse, same, training_graph, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]

Forward = Callable[["Two", torch.Tensor], torch.Tensor]
View = Callable[[torch.Tensor], torch.Tensor]


class Two(nn.Module):
    """Two layers, a weight, and the function that a test applies to them."""

    def __init__(self, called: Forward) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 3)
        self.called = called
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.called(self, x)


def equal(called: Forward) -> Any:
    """Train on batches of two sizes and evaluate, both as eager; return the module."""
    torch.manual_seed(0)
    model = Two(called)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    # Evaluation has a graph of its own.
    for training in (True, False):
        module.train(training)
        eager.train(training)
        # A second size, for which indices computed from the first one would be wrong.
        for size in (4, 6):
            x = torch.randn(size, 6)
            with torch.set_grad_enabled(training):
                losses = [each(x.clone()) for each in (module, eager)]
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
            if training:
                for loss in losses:
                    loss.backward()
                same(model, eager)
    return module


VIEWS: dict[str, View] = {
    "slice": lambda h: h[:, 1:4],
    "slice of a slice": lambda h: h[1:][:, ::2],
    "row": lambda h: h[1],
    "narrow": lambda h: h.narrow(1, 2, 2),
    "view": lambda h: h.view(-1),
    "part of a view": lambda h: h.view(-1, 3)[:, 1],
    "flatten": lambda h: h.flatten(),
    "transposed": lambda h: h.T,
    "part of a transposed": lambda h: h.transpose(0, 1)[:2],
    "permuted": lambda h: h.permute(1, 0),
    "one more dimension": lambda h: h[:, None],
    "diagonal": lambda h: h.diagonal(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_change_through_a_view_or_under_it(view: View) -> None:
    """Changes through a view reach the tensor, and changes of the tensor reach the view."""

    # View and change are on separate lines, because the exporter handles those of one line itself.
    def called(model: Two, x: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x) + 0
        other = model.first(x) + 0
        part = view(hidden)
        part += 2
        beside = view(other)
        other.add_(3)
        part[0] = 5
        return (
            model.second(hidden).square().mean()
            + model.second(other).mean()
            + (part.sum() + beside * 2).mean()
        )

    equal(called)


# Each change goes through another view, and is read through the others in between.
def through_several(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) + 0
    turned = hidden.t()
    flat = hidden.view(-1)
    rows = hidden[1:]
    turned[0].add_(2.0)
    flat[1] = 7.0
    hidden[:, 3] += 1
    rows += turned[:, 1:].t()
    # Changes all elements: every other view is out of date from here on.
    flat.add_(hidden.sum())
    return model.second(hidden).square().mean() + (turned * 2).sum() + flat.square().sum()


# The view that made the change is gone when the tensor is read.
def in_a_function(model: Two, x: torch.Tensor) -> torch.Tensor:
    def change(hidden: torch.Tensor) -> None:
        part = hidden[:, 1:3]
        part.mul_(3)

    hidden = model.first(x) + 0
    change(hidden)
    first = hidden[:2]
    second = hidden.view(-1)
    # The memory must survive without the tensor that the views were made of.
    del hidden
    first.add_(1)
    return first.sum() + second.square().sum()


# Changes of a boolean tensor that needs no gradient.
def a_mask(model: Two, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[0], 6, dtype=torch.bool)
    inner = mask[:, 1:]
    inner.logical_and_(x[:, 1:] > 0)
    first = mask.view(-1)
    first[0] = True
    return model.first(x)[mask].square().mean()


# The input of the graph itself is changed.
def the_batch(model: Two, x: torch.Tensor) -> torch.Tensor:
    part = x[:, :3]
    part.zero_()
    return model.first(x).square().mean()


# An empty tensor is filled part by part, as models do to join tensors.
def in_parts(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    whole = hidden.new_empty(*hidden.shape[:-1], 9)
    whole[..., :6].copy_(hidden)
    whole[..., 6:].copy_(hidden[:, :1].expand(-1, 3))
    return model.second(whole[..., 3:]).square().mean() + whole.sum()


# torch's exporter has no form of a scatter of a Python bool.
def a_scattered_mask(model: Two, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[0], 6, dtype=torch.bool).scatter(
        -1, x.argmax(-1, keepdim=True) % 6, False
    )
    return model.first(x).masked_fill(mask, 2.0).square().mean()


# The change happens under no_grad, in a tensor without a gradient, so it is allowed.
def without_gradients(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    target = torch.zeros(x.shape[0], 6)
    with torch.no_grad():
        flat = target.view(-1)
        flat.copy_((hidden * 2).view(-1))
    return (model.second(target) * model.second(hidden)).mean()


# The input of a custom function must have the change.
def into_a_custom_function(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) + 0
    part = hidden[:2]
    part.mul_(3.0)
    return model.second(hidden * Reverse.apply(hidden)).mean()  # type: ignore[no-untyped-call]


# A trace would record .data as a constant.
def detached_data(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) * model.weight.data
    return (hidden * hidden.data).mean() + (model.weight.detach() * model.weight).sum()


# The result depends on requires_grad, which is False everywhere in a plain export.
def asked_for_gradients(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    asked = (
        hidden.requires_grad,
        hidden.detach().requires_grad,
        x.requires_grad,
        model.weight.requires_grad,
    )
    return model.second(hidden).square().mean() * (
        1 + sum(2**place for place, yes in enumerate(asked) if yes)
    )


# As Fourier operators write the modes that they keep; each change has a spectrum of its own.
def complex_numbers(model: Two, x: torch.Tensor) -> torch.Tensor:
    changes: list[Callable[[torch.Tensor], object]] = [
        lambda f: f.__setitem__((..., slice(0, 2)), f[..., 1:3] * 2),
        lambda f: f.__setitem__(0, f[1] * 2),
        lambda f: f.__setitem__((slice(None), 0), 0),
        lambda f: f[1].mul_(1j),
        lambda f: f.narrow(1, 1, 2).zero_(),
        lambda f: f[:, 2:].fill_(3.0),
        lambda f: f.copy_(f * 3),
        lambda f: f.masked_fill_(f.real > 0, 1),
    ]
    changed = []
    for change in changes:
        spectrum = torch.fft.rfft(model.first(x)) * model.weight[:4]
        change(spectrum)
        changed.append(spectrum)
    modes = torch.zeros(len(x), 4, dtype=torch.cfloat)
    modes[:, :2] = changed[0][:, :2] * 2
    spectra = torch.stack([*changed, modes])
    return torch.fft.irfft(spectra, n=6).square().mean() + spectra.imag.sin().mean()


# The exporter would use the whole tensor for a part that is written at computed places.
def places_of_a_part(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) * 1
    places = torch.arange(3)
    hidden[:4][places, places] = 0
    hidden[1:][places[:2]] = hidden[0, 0]
    hidden.t()[2:].index_put_((places[:2],), torch.ones(1))
    return model.second(hidden).square().mean()


CASES = [
    complex_numbers,
    places_of_a_part,
    through_several,
    in_a_function,
    a_mask,
    the_batch,
    without_gradients,
    into_a_custom_function,
]
CASES += [in_parts, a_scattered_mask, detached_data, asked_for_gradients]


@pytest.mark.parametrize("called", CASES)
def test_a_model_is_eagers(called: Forward) -> None:
    """Models that change views, masks and the batch, or read gradient flags, equal eager."""
    if (
        called in (into_a_custom_function, complex_numbers)
        and extensions.reason_interop_is_unbuildable_or_empty()
    ):
        pytest.skip(extensions.reason_interop_is_unbuildable_or_empty())
    equal(called)


def test_a_change_of_an_argument_is_noted() -> None:
    """The caller's tensor is not changed, unlike in eager PyTorch, and a note names the line."""
    tally.notes.clear()
    x = torch.ones(2, 6)
    wrapped(Two(the_batch))(x)
    assert x.sum() == 12
    (note,) = tally.notes
    assert re.match(rf"the forward pass changes an argument in place at {__file__}:\d+: ", note)


def test_a_changed_tensor_is_the_models_result() -> None:
    """A changed tensor that is returned has its changes, although no call of torch uses it."""

    def changed(model: Two, x: torch.Tensor) -> Any:
        hidden = model.first(x) + 0
        part = hidden[:, :3]
        part.mul_(2)
        return model.second(hidden).mean(), hidden

    torch.manual_seed(0)
    model = Two(changed)
    x = torch.randn(4, 6)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(wrapped(model)(x), eager(x))


def test_a_change_in_one_line_takes_nothing_more() -> None:
    """A change of a slice in one line stays the exporter's; most models' graphs are unchanged."""

    def sliced(model: Two, x: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x) + 0
        hidden[:, 1] = 0.0
        flat = torch.relu_(hidden.view(-1))
        return flat.sum()

    assert "ScatterElements" not in {node.op_type for node in training_graph(equal(sliced)).node}


def test_an_export_keeps_nothing_that_the_model_lets_go() -> None:
    """An export frees the tensors that the model frees, as activations need much memory."""
    alive = []

    def letting_go(model: Two, x: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x) + 0
        flat = hidden.view(-1)
        total = flat.view(-1, 3).sum()
        # Checked in the trace itself: afterwards even kept tensors would be gone.
        kept = weakref.ref(hidden)
        del hidden, flat
        alive.append(kept() is not None)
        return total

    equal(letting_go)
    assert not any(alive)


# The gradient of the change must not reach the tensor, which one whole cannot express.
def through_a_detached(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) + 0
    hidden.detach().mul_(3)
    return hidden.sum()


# as_strided reads the memory in another form than a chain of views.
def in_another_form(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) + 0
    hidden.as_strided((2, 3), (6, 1)).mul_(3)
    return hidden.sum()


# The change of a tensor with a gradient would have one in an exported graph.
def under_no_grad(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x) + 0
    with torch.no_grad():
        hidden.view(-1).add_(1)
    return hidden.sum()


def a_weight(model: Two, x: torch.Tensor) -> torch.Tensor:
    model.first.weight.data.clamp_(-1, 1)
    return model.first(x).sum()


# ORT's backward pass calls no hooks of tensors.
def a_hook(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 2)
    return hidden.sum()


# The exporter would write the real parts alone, and give another loss.
def complex_numbers_by_a_mask(model: Two, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(model.first(x))
    spectrum[spectrum.real > 0] = 0
    return spectrum.abs().mean()


class Marked(torch.autograd.Function):
    """A function that changes its second argument in place, or multiplies both."""

    @staticmethod
    def forward(ctx: Any, given: list[torch.Tensor] | None, x: torch.Tensor) -> torch.Tensor:
        if given is None:
            ctx.mark_dirty(x)
            return x.mul_(3)
        return given[0] * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient * 3


# The graph would hold the list of the first batch.
def a_list(model: Two, x: torch.Tensor) -> torch.Tensor:
    return Marked.apply([model.first(x)], x).sum()


def an_argument(model: Two, x: torch.Tensor) -> torch.Tensor:
    return Marked.apply(None, model.first(x) * 2).sum()


REFUSED: dict[Forward, str] = {
    a_list: "function Marked is given tensors in a list.*torch_modules",
    an_argument: "function Marked changes an argument in place.*torch_modules",
    complex_numbers_by_a_mask: "into a complex tensor at places that a tensor gives",
    through_a_detached: "share memory are changed in place, and one of them is detached",
    in_another_form: "share memory are changed in place, and one of them reads it in another form",
    under_no_grad: "changed in place under torch.no_grad",
    a_weight: "the forward pass changes the weight first",
    a_hook: "gives a tensor a hook",
}


@pytest.mark.parametrize("called", REFUSED, ids=lambda called: called.__name__)
def test_what_no_graph_can_follow_is_refused(called: Forward) -> None:
    """Changes that no graph can express are refused; without an error another model would train."""
    with pytest.raises(Exception, match=REFUSED[called]):
        wrapped(Two(called))(torch.ones(3, 6))
