"""torch's attention modules on ORT: eager's losses and gradients for every mask, and dropout."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import python, same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort
LENGTH = 5
MASKS = ("none", "float", "bool", "causal", "padding", "float and padding")


@pytest.fixture(scope="module", autouse=True)
def _unfused(built: None) -> Iterator[None]:
    """Turn off eager's fused attention, whose outputs at padded places are zero."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Attention(nn.Module):
    """nn.MultiheadAttention over one input, with one of the masks."""

    def __init__(self, mask: str, weights: bool, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, dropout, batch_first=batch_first)
        self.mask = mask
        self.weights = weights
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.weights, **self.masks(padding))
        return y.square().sum() + (weights.square().sum() if self.weights else 0)

    def masks(self, padding: torch.Tensor) -> dict[str, Any]:
        ahead = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        unseen = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
        masks: dict[str, dict[str, Any]] = {
            "none": {},
            "float": {"attn_mask": ahead},
            "bool": {"attn_mask": ahead < 0},
            "causal": {"attn_mask": ahead, "is_causal": True},
            "padding": {"key_padding_mask": padding},
            "float and padding": {"attn_mask": ahead, "key_padding_mask": unseen},
        }
        return masks[self.mask]


class Encoder(nn.Module):
    """Two of torch's encoder layers, with padding."""

    batch_first = True

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.layers(x, src_key_padding_mask=padding).square().mean()


class Decoder(nn.Module):
    """A decoder layer with causal self-attention and attention to a padded memory."""

    batch_first = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return (
            self.layer(x, x * 0.5, tgt_mask=ahead, memory_key_padding_mask=padding).square().mean()
        )


def compare(model: Any) -> None:
    """Compare losses in training and evaluation, and all gradients, for two batch sizes."""
    ours = wrapped(copy.deepcopy(model))
    for rows in (2, 3):
        x = torch.randn((rows, LENGTH, 8) if model.batch_first else (LENGTH, rows, 8))
        padding = torch.zeros(rows, LENGTH, dtype=torch.bool)
        padding[0, 3:] = True
        for module in (model, ours):
            module.zero_grad()
            module.train()(x, padding).backward()
        # Relative to the largest gradient of all: some gradients are zero up to rounding.
        largest = max(parameter.grad.abs().max() for parameter in model.parameters())
        for (name, theirs), mine in zip(model.named_parameters(), ours.parameters()):
            assert ((mine.grad - theirs.grad).abs().max() / largest).item() < 1e-5, name
        with torch.no_grad():
            expected = model.eval()(x, padding).item()
            assert ours.train()(x, padding).item() == pytest.approx(expected, rel=1e-5)
            assert ours.eval()(x, padding).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_attention_equals_eagers(mask: str) -> None:
    """Losses and gradients equal eager's for every kind of mask."""
    compare(Attention(mask, weights=False, batch_first=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "weights", "batch_first"),
    [
        case
        for case in itertools.product(MASKS, (False, True), (False, True))
        if case[1:] != (False, True)
    ],
)
def test_attention_in_its_other_forms(mask: str, weights: bool, batch_first: bool) -> None:
    """Attention that returns its weights, or has the sequence dimension first, equals eager."""
    compare(Attention(mask, weights, batch_first))


@pytest.mark.parametrize(
    "model", [Encoder(True), Encoder(False), Decoder()], ids=["norm first", "norm last", "decoder"]
)
def test_transformer_layers_equal_eagers(model: nn.Module) -> None:
    """torch's encoder and decoder layers equal eager."""
    compare(model)


class Scores(nn.Module):
    """scaled_dot_product_attention over values of one.

    Its sum shows how much of the attention was kept.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        kept = nn.functional.scaled_dot_product_attention(
            x, x, torch.ones_like(x) * self.scale, dropout_p=dropout
        )
        return kept.mean()


class Pooled(nn.Module):
    """torch's encoder with padding; the loss is of all places, padding among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8))
        nn.init.ones_(self.encoder.norm.bias)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.fixture
def fused() -> Iterator[None]:
    """Turn eager's fused attention on again."""
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(False)


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_evaluation_has_zeros_at_padding() -> None:
    """Evaluation equals eager's nested tensors: zeros at padding, where all of it is at the end."""
    eager = Pooled().eval()
    ours = wrapped(copy.deepcopy(eager))
    at_end = torch.arange(6) >= torch.tensor([6, 4, 0])[:, None]
    x = torch.randn(3, 6, 8)
    with torch.no_grad():
        for padding in (at_end, at_end[[0, 1, 1]].flip(1), torch.zeros_like(at_end)):
            torch.testing.assert_close(ours(x, padding), eager(x, padding), rtol=1e-4, atol=1e-5)
    # With gradients torch takes no nested tensors.
    torch.testing.assert_close(ours(x[:2], at_end[:2]), eager(x[:2], at_end[:2]))


def test_attention_dropout_drops_and_keeps_the_scale() -> None:
    """In training, mean and variance over many passes are right; evaluation is exact."""
    torch.manual_seed(0)
    # ORT's generator starts each mask with nearly the same number.
    model = Scores(0.3)
    x = torch.randn(2, 4, 16, 8)
    ours = wrapped(copy.deepcopy(model))
    theirs, mine = (
        torch.tensor([module(x).item() for _ in range(300)]) for module in (model, ours)
    )
    assert mine.mean().item() == pytest.approx(1.0, abs=0.005 + 5 * mine.std().item() / 300**0.5)
    assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.3)
    ours(x).backward()
    assert ours.eval()(x).item() == pytest.approx(1.0, rel=1e-6)


class Probabilities(nn.Module):
    """scaled_dot_product_attention over the identity, which returns the dropped-out probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = torch.eye(x.shape[-2]).expand(*x.shape[:-1], -1)
        dropout = 0.3 if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(
            x, x, values * self.scale, dropout_p=dropout
        )


def test_attention_dropout_drops_its_share_of_the_probabilities() -> None:
    """Each pass drops another 30 % of the probabilities and divides the others by 0.7."""
    # A large seed: ORT's generator on the CPU returns multiples of its seed, so that the masks of
    # the seeds 0, 1 and 2 are similar.
    torch.manual_seed(1_000_003)
    model = Probabilities()
    x = torch.randn(4, 4, 64, 8)
    ours = wrapped(copy.deepcopy(model))
    whole, first, second = (call(x).detach() for call in (model.eval(), ours, ours))
    for found in (first, second):
        dropped = found == 0
        # The tolerance is 11 standard deviations of 65,536 elements.
        assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.02)
        assert torch.allclose(found[~dropped], whole[~dropped] / 0.7, rtol=1e-5)
    both = ((first == 0) & (second == 0)).float().mean().item()
    # 0.3 squared: the two masks are independent.
    assert both == pytest.approx(0.09, abs=0.02)


UNKNOWN_TORCH = """
from ortmodule._internal import import_ortmodule, pipeline
from ortmodule._internal.base import repair_registry
attention = repair_registry.REPAIR_BY_NAME["export_sdpa_dropout"]
attention.sources = dict.fromkeys(attention.sources, ("what no torch has",))
import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
import torch
from ortmodule import ORTModule, Settings
from ortmodule_tests.tracing.test_attention import Scores
x = torch.randn(2, 4, 16, 8)
ORTModule(Scores(0.0), Settings(threads=1))(x).backward()
assert abs(ORTModule(Scores(0.3), Settings(threads=1)).eval()(x).item() - 1) < 1e-5
assert "export_sdpa_dropout" in repair_registry.reason_by_unapplied_repair()
ORTModule(Scores(0.3), Settings(threads=1, torch_operators="off"))(x)
"""


@pytest.mark.slow
@pytest.mark.ci
def test_attention_dropout_of_an_unknown_torch_is_refused() -> None:
    """With an unknown source of torch, dropout in attention is refused, and nothing else is."""
    done = python(UNKNOWN_TORCH)
    assert done.returncode == 1
    assert "and it may drop nothing; use attention without dropout, or" in done.stderr


def test_the_gradient_is_of_what_was_kept() -> None:
    """Forward and backward pass drop the same scores."""
    ours = wrapped(Scores(0.5))
    for _ in range(3):
        ours.zero_grad()
        loss = ours(torch.randn(1, 2, 4, 8))
        loss.backward()
        (gradient,) = (parameter.grad for parameter in ours.parameters())
        # The loss is linear in the scale, which is 1, so gradient and loss are equal.
        assert gradient.item() == pytest.approx(loss.item(), rel=1e-5)


class Unflattened(nn.Module):
    """The operator alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (2, 4))


@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based:DeprecationWarning")
def test_torchs_own_export_is_untouched() -> None:
    """After an export by ORT, torch's form of unflatten and its fused attention are restored."""
    torch.backends.mha.set_fastpath_enabled(True)
    model = Attention("none", False, True).eval()
    x = torch.randn(2, LENGTH, 8)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    # Under no_grad torch uses its fused attention, which cannot be exported.
    with torch.no_grad():
        assert wrapped(copy.deepcopy(model))(x, padding).item() == pytest.approx(
            model(x, padding).item(), rel=1e-5
        )
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torchscript = (
        {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    )
    written = io.BytesIO()
    torch.onnx.export(
        Unflattened(), (torch.randn(2, 8),), written, do_constant_folding=False, **torchscript
    )
    # Torch's own form computes the dimension with a Mod.
    assert b"Mod" in written.getvalue()


def test_a_row_without_anything_to_attend_to() -> None:
    """A row that a boolean mask excludes completely is zero, with zero gradients, and not nan."""

    class Masked(torch.nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            states = super().forward(x)
            return (
                torch.nn.functional.scaled_dot_product_attention(states, x, states, mask)
                .square()
                .mean()
            )

    torch.manual_seed(0)
    model = Masked(4, 4)
    x = torch.randn(2, 2, 3, 4)
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    mask[1, :, 1] = False
    eager = copy.deepcopy(model)
    module = wrapped(model)
    ours = module(x, mask)
    theirs = eager(x, mask)
    if theirs.isnan():
        pytest.skip(f"PyTorch's own is nan in torch {torch.__version__}")
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    same(model, eager)
