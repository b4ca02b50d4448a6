"""Products by a vector, and picks from a product or from a broadcast."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# A product and the shape of its first factor.
PRODUCTS: dict[str, tuple[Product, tuple[int, ...]]] = {
    "matrix, vector": (lambda x, v: x @ v, (8, 4)),
    "mv": (torch.mv, (8, 4)),
    "vector, matrix": (lambda x, v: v @ x.t(), (8, 4)),
    "vector, vector": (lambda x, v: x[0] @ v, (8, 4)),
    "dot": (lambda x, v: torch.dot(v, x[1]), (8, 4)),
    "matrices, vector": (lambda x, v: x @ v, (8, 3, 4)),
    "vector, matrices": (lambda x, v: v @ x.transpose(1, 2), (8, 3, 4)),
    "linear": (functional.linear, (8, 4)),
    "sum of products": (lambda x, v: torch.einsum("ij,j->i", x, v), (8, 4)),
}


class ByVector(nn.Module):
    """The square of a product with a trained vector."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.layer = nn.Linear(4, 4)
        # Random, so that no two values are equal and a wrong order shows.
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.product(self.layer(x), self.weight) - 1).square().sum()


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_a_vectors_gradient_is_eagers(name: str) -> None:
    """Gradients of the vector and of the other factor are eager's, also in a batch of another size."""
    product, shape = PRODUCTS[name]
    model = ByVector(product)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for rows in (shape[0], 5):
        x = torch.randn(rows, *shape[1:])
        model.zero_grad()
        eager.zero_grad()
        loss = module(x)
        expected = eager(x)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        same(model, eager)


class Picking(nn.Module):
    """A part of a product without a bias, compared with labels of the part's shape."""

    def __init__(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.pick = pick
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.pick(self.head(self.layer(x))) - y).square().mean()


@pytest.mark.parametrize(("pick", "shape"), [
    (lambda x: x[:, 0], (8, 4)),
    (lambda x: x[:, -1], (8, 4)),
    (lambda x: x[:, 0], (8, 2, 4)),
    (lambda x: x[..., 0], (8, 2, 4)),
    (lambda x: x[:, 1, 0], (8, 2, 4)),
    (lambda x: x[0], (8, 4)),
    (lambda x: x.relu()[:, 0], (8, 4)),
    (lambda x: (x + 0)[..., 0], (8, 2, 4)),
    (lambda x: x.softmax(-1)[:, 0], (8, 2, 4)),
    (lambda x: (x * 2)[:, 0], (8, 4)),
    (lambda x: x.unsqueeze(0)[0][:, 0], (8, 4)),
    (lambda x: x.reshape(-1, 3)[:, 0], (8, 2, 4)),
    (lambda x: x.t()[0], (8, 4)),
], ids=["column", "last column", "first token", "column of three", "token and column", "row", "of relu", "of a sum",
        "of softmax", "of a multiple", "twice", "reshaped", "transposed"])  # fmt: skip
def test_what_is_picked_from_a_product_is_eagers(
    pick: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    """Loss and gradients of a part of a product are eager's."""
    model = Picking(pick)
    x = torch.randn(*shape)
    # A pick that kept a size of 1 would broadcast with these labels to a matrix.
    y = torch.randn_like(pick(torch.randn(*shape[:-1], 3)))
    eager = copy.deepcopy(model)
    module = wrapped(model)
    loss = module(x, y)
    expected = eager(x, y)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    same(model, eager)


# Reductions over a list of all dimensions.
SCALARS = {
    "sum": lambda h: h.square().sum((0, 1)).sqrt(),
    "mean": lambda h: h.square().mean((0, 1)).sqrt(),
    "norm": torch.linalg.matrix_norm,
    "standard deviation": lambda h: h.std((0, 1)).sqrt(),
}
# Picks from a transpose.
PICKED = {
    "last of a sequence": lambda h: torch.where(
        h.transpose(0, 1)[-1] > 0, h.transpose(0, 1)[-1], 0
    ),
    "masked": lambda h: functional.hinge_embedding_loss(h.t()[:, -1], h.t()[:, -1].detach().sign()),
}


@pytest.mark.parametrize("name", [*SCALARS, *PICKED])
def test_sizes_that_vanish_otherwise(name: str) -> None:
    """Roots of sums over listed dimensions, and picks from a transpose, are eager's."""
    part = {**SCALARS, **PICKED}[name]

    class Part(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return part(super().forward(x)).square().sum()

    model = Part(4, 4)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    # Batches of two sizes.
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        for each in (model, eager):
            each.zero_grad()
        loss = module(x)
        expected = eager(x)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        same(model, eager)


class Broadcasting(nn.Module):
    """A part of a value that is broadcast; a trained table has a row for each of five tokens."""

    def __init__(self, part: Product) -> None:
        super().__init__()
        self.part = part
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.layer(x), self.table)


def centered(h: torch.Tensor) -> torch.Tensor:
    return h.tanh() + h.mean(1, keepdim=True)


@pytest.mark.parametrize("part", [
    lambda h, table: functional.normalize(centered(h)[:, 0], dim=-1),
    lambda h, table: centered(h)[:, -1].square(),
    lambda h, table: (h + h[..., :1])[..., 2].square(),
    lambda h, table: (h + table)[:, 0],
    lambda h, table: (table + h)[:, -1:],
    lambda h, table: (h / table.exp())[:, [0, 2]],
    lambda h, table: (h + h.tanh().mean(0))[:, 2:3],
    lambda h, table: (h.unflatten(2, (2, 2)) + table.view(5, 2, 2))[:, :, 1],
], ids=["first token, twice", "last token, twice", "column, twice", "first row of a table", "last rows of a table",
        "divided by a table", "a mean of the samples", "a table of three"])  # fmt: skip
def test_what_is_picked_from_a_broadcast_is_eagers(part: Product) -> None:
    """Shape, values and gradients of a part are eager's, also in a batch of another size."""
    model = Broadcasting(part)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for rows in (4, 3):
        x = torch.randn(rows, 5, 4)
        for each in (model, eager):
            each.zero_grad()
        found = module(x)
        expected = eager(x)
        found.sin().sum().backward()
        expected.sin().sum().backward()
        torch.testing.assert_close(found, expected)
        same(model, eager)
