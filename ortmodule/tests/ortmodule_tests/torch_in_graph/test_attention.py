"""Attention as torch's fused kernel in ONNX Runtime's graph equals eager for each kind of mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule._internal.base import torch_calls
from ortmodule._internal.base.counters import tally
from ortmodule._internal.native import extensions
from ortmodule._internal.torch_in_graph import attention_choice, attention_operator
from ortmodule_tests.modules import same, training_graph, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [
    needs_ort,
    pytest.mark.usefixtures("built", "seeded"),
    pytest.mark.skipif(
        bool(extensions.reason_interop_is_unbuildable_or_empty()),
        reason="ONNX Runtime's torch_interop_utils is not built",
    ),
]
# The name of the kernel's calls in the counters.
CALL = "aten.scaled_dot_product_attention"
LENGTH = 12
Mask = Callable[[torch.Tensor], dict[str, Any]]


class Attention(nn.Module):
    """Self-attention over an input of shape (samples, LENGTH, width).

    `mask` makes the arguments of sdpa from the samples' lengths.
    """

    def __init__(self, mask: Mask, heads: int = 4, size: int = 32, groups: int = 1) -> None:
        super().__init__()
        self.mask = mask
        self.heads = heads
        self.size = size
        self.groups = groups
        self.queries = nn.Linear(16, heads * size)
        self.keys, self.values = (nn.Linear(16, heads // groups * size) for _ in range(2))
        self.last = nn.Linear(heads * size, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = (layer(x) for layer in (self.queries, self.keys, self.values))
        heads = (part.view(*part.shape[:2], -1, self.size).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(*heads, **self.mask(lengths))
        return self.last(attended.transpose(1, 2).flatten(2)).square().mean()


def padding(lengths: torch.Tensor) -> torch.Tensor:
    """Return a mask with True for keys that are not padding."""
    return (torch.arange(LENGTH) < lengths[:, None])[:, None, None]


def window(lengths: torch.Tensor) -> torch.Tensor:
    """Return a mask of the last four keys that are not padding; a row of padding may have none."""
    places = torch.arange(LENGTH)
    far = places[:, None] - places
    return (far >= 0) & (far < 4) & padding(lengths)


def documents(lengths: torch.Tensor) -> torch.Tensor:
    """Return a causal mask of two documents a sample; the second one starts at `lengths`."""
    places = torch.arange(LENGTH)
    second = places >= lengths[:, None]
    return ((second[:, :, None] == second[:, None, :]) & (places[:, None] >= places))[:, None]


def added(lengths: torch.Tensor) -> torch.Tensor:
    """Return an additive mask: padding, and a slope by distance."""
    places = torch.arange(LENGTH)
    return torch.where(padding(lengths), 0.0, -1e9) - (places[:, None] - places).abs() * 0.1


MASKS: dict[str, Mask] = {
    "none": lambda lengths: {},
    "causal": lambda lengths: {"is_causal": True},
    "scaled": lambda lengths: {"is_causal": True, "scale": 0.3},
    "padding": lambda lengths: {"attn_mask": padding(lengths)},
    "sliding window": lambda lengths: {"attn_mask": window(lengths)},
    "packed documents": lambda lengths: {"attn_mask": documents(lengths)},
    "all keys": lambda lengths: {"attn_mask": padding(lengths * 0 + LENGTH)},
    "earlier keys": lambda lengths: {"attn_mask": documents(lengths * 0)},
    "numbers": lambda lengths: {"attn_mask": added(lengths)},
}
# Three batch sizes with lengths of their own, for one graph.
BATCHES = [(torch.randn(rows, LENGTH, 16), torch.randint(3, LENGTH, (rows,))) for rows in (2, 3, 1)]


@pytest.fixture(autouse=True)
def _every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention of any length use torch's kernel."""
    # The tests' sequences are shorter than those for which the kernel is faster.
    monkeypatch.setattr(attention_choice, "FUSED_ATTENTION_SCORES", 1)
    torch_calls.reset_call_and_pass_counts()


def compare(model: nn.Module, batches: Any = BATCHES, **settings: Any) -> int:
    """Compare losses and gradients with eager's; return the number of calls of torch's kernel."""
    eager = copy.deepcopy(model)
    module = wrapped(model, **settings)
    for batch in batches:
        losses = []
        for one in (module, eager):
            loss = one(*batch)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        same(model, eager, atol=1e-5)
    made = torch_calls.call_counts_by_called_name()
    return made[CALL].backward if CALL in made else 0


@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str) -> None:
    """Losses and gradients equal eager's."""
    assert compare(Attention(MASKS[kind])) == len(BATCHES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("length", [3, 5, 128, 300])
def test_a_mask_that_the_kernel_does_not_need(length: int, dtype: torch.dtype) -> None:
    """Only a mask that excludes nothing, or exactly all later keys, is recognized as such."""
    attention_operator.define_cpu_attention_operators_once()
    masked = torch.ops.ortmodule.masked
    nothing = torch.zeros(2, 1, length, length, dtype=dtype)
    assert masked(nothing) == masked(nothing[:, :, :1]) == attention_operator.NOTHING
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for low in (-torch.inf, torch.finfo(dtype).min):
        causal = nothing.masked_fill(later, low)
        assert masked(causal) == attention_operator.LATER_KEYS
        # One element of one sample differs: below the diagonal, on it, above it.
        for row, key, value in ((-1, 0, low), (-1, -1, low), (0, -1, 0.0), (length // 2, 0, -1.0)):
            other = causal.clone()
            other[-1, 0, row, key] = value
            assert masked(other) == attention_operator.SOME
    assert masked(causal[..., :-1]) == masked(causal / 4 * 0.9) == attention_operator.SOME
    assert masked(nothing * torch.nan) == masked(later) == attention_operator.SOME


def test_a_mask_of_unknown_type() -> None:
    """ORT passes a boolean mask as uint8; keys of one sample may serve all, with their gradients."""
    attention_operator.define_cpu_attention_operators_once()
    torch.manual_seed(0)
    # Batch, length, heads, size; one sample of keys, and half as many heads of them.
    query, key, value = (torch.randn(n, 5, heads, 8) for n, heads in ((3, 4), (1, 2), (1, 2)))
    mask = torch.rand(3, 1, 5, 5) < 0.7
    mask |= torch.eye(5, dtype=torch.bool)
    # 7: each of them has shape (batch, length, heads, size).
    given = (query, key, value, mask.to(torch.uint8), attention_operator.SOME, None, 7)
    attended, sums = torch.ops.ortmodule.attention(*given)
    exact = [one.clone().requires_grad_() for one in (query, key, value)]
    swapped = [one.transpose(1, 2).expand(3, -1, -1, -1) for one in exact]
    wanted = functional.scaled_dot_product_attention(
        swapped[0], swapped[1], swapped[2], mask, enable_gqa=True
    )
    torch.testing.assert_close(attended, wanted.transpose(1, 2))
    gradient = torch.randn_like(attended)
    found = torch.ops.ortmodule.attention_backward(gradient, *given, attended, sums)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, exact, gradient.transpose(1, 2)))


def test_inputs_that_are_not_contiguous() -> None:
    """The kernel requires that the elements of one head are neighbours; the operator copies them."""
    attention_operator.define_cpu_attention_operators_once()
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 8, 5).transpose(2, 3) for _ in range(3))
    given = (query, key, value, None, attention_operator.NOTHING, None, 0)
    attended, sums = torch.ops.ortmodule.attention(*given)
    exact = [one.contiguous().requires_grad_() for one in (query, key, value)]
    wanted = functional.scaled_dot_product_attention(*exact)
    torch.testing.assert_close(attended, wanted.transpose(1, 2))
    gradient = torch.randn_like(attended)
    found = torch.ops.ortmodule.attention_backward(gradient, *given, attended, sums)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, exact, gradient.transpose(1, 2)))


@pytest.mark.parametrize("size", [7, 80, 256])
def test_head_sizes(size: int) -> None:
    """Small and large heads, and odd sizes, equal eager too."""
    assert compare(Attention(MASKS["padding"], size=size)) == len(BATCHES)


def test_grouped_queries() -> None:
    """Two queries that share a key equal eager."""
    mask: Mask = lambda lengths: {"is_causal": True, "enable_gqa": True}  # noqa: E731
    assert compare(Attention(mask, groups=2)) == len(BATCHES)


@pytest.mark.parametrize("frozen", [["keys"], ["queries", "values"]], ids="+".join)
def test_frozen_inputs(frozen: list[str]) -> None:
    """An input without a gradient, such as a layer that LoRA freezes, gets none."""
    model = Attention(MASKS["causal"])
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    assert compare(model) == len(BATCHES)


class Cross(nn.Module):
    """Attention to another sequence, by parts of one tensor that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(16, 32)
        self.others = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the attention."""
        queries = self.queries(x).unflatten(2, (4, 8))
        keys, values = self.others(y).unflatten(2, (4, 16)).chunk(2, -1)
        heads = (part.transpose(1, 2) for part in (queries, keys, values))
        return functional.scaled_dot_product_attention(*heads).square().mean()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_other_sequences(shared: bool) -> None:
    """Keys may have another length than queries, and the whole batch may share them."""
    batches = [
        (torch.randn(rows, 9, 16), torch.randn(1 if shared else rows, length, 16))
        for rows, length in ((2, 5), (3, 12), (1, 1))
    ]
    assert compare(Cross(), batches) == len(batches)


class Latents(Cross):
    """Trained queries, which all samples share, and a layer that reads the sizes of the result."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 9, 16))
        self.out = nn.Linear(32, 3)
        self.turned = turned

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """Return the mean square of a layer after the attention."""
        queries = self.queries(self.latents).unflatten(2, (4, 8)).transpose(1, 2)
        # As rotary positions do, this leaves the dimensions swapped where the kernel gets them.
        queries = queries * 1.5 if self.turned else queries
        keys, values = self.others(y).unflatten(2, (4, 16)).chunk(2, -1)
        heads = (queries, keys.transpose(1, 2), values.transpose(1, 2))
        found = functional.scaled_dot_product_attention(*heads).transpose(1, 2)
        mean: torch.Tensor = self.out(found.reshape(*found.shape[:2], -1)).square().mean()
        return mean


@pytest.mark.parametrize("turned", [False, True])
def test_one_query_for_all_samples(turned: bool) -> None:
    """The result has the batch of the keys, and the sizes that later layers read."""
    batches = [(torch.randn(rows, length, 16),) for rows, length in ((2, 5), (3, 12), (1, 1))]
    assert compare(Latents(turned), batches) == len(batches)


def test_no_second_forward_pass() -> None:
    """The graph has the kernel and the kernel's derivative, and keeps no scores."""
    module = wrapped(Attention(MASKS["padding"]))
    module(*BATCHES[0]).backward()
    nodes = training_graph(module).node
    operators = [
        one.s.decode() for node in nodes for one in node.attribute if one.name == "operator"
    ]
    assert [name for name in operators if name.startswith("ortmodule")] == [
        attention_operator.MASKED,
        attention_operator.FORWARD,
        attention_operator.BACKWARD,
    ]
    assert not {"PythonOp", "Softmax"} & {node.op_type for node in nodes}


def test_gradient_checkpointing() -> None:
    """With recomputation, too, gradients equal eager's."""
    model = llama()
    model.activation_checkpointing_enable()
    assert compare(Loss(model.train()), [(TOKENS[0],)]) == 2


class Learned(Attention):
    """Attention with a trained bias, for whose gradient torch has no fused kernel."""

    def __init__(self) -> None:
        super().__init__(self.biased)
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def biased(self, lengths: torch.Tensor) -> dict[str, Any]:
        """Return the mask with the bias."""
        return {"attn_mask": self.bias + added(lengths)}


def test_what_has_no_kernel_is_written_out() -> None:
    """A mask with a gradient, which a note names, and attention below the size limit use ONNX nodes."""
    tally.notes.clear()
    assert compare(Learned()) == 0
    # The fixture restores it.
    attention_choice.FUSED_ATTENTION_SCORES = LENGTH * LENGTH + 1
    assert compare(Attention(MASKS["causal"])) == 0
    assert tally.notes == [
        "attention with a mask that is trained is written out in the graph: torch has no kernel for it",
    ]


def test_attention_of_the_list_stays_torchs() -> None:
    """Attention that the settings list is torch's with a trained mask too; no note denies it."""
    tally.notes.clear()
    assert compare(Learned(), torch_operators=["scaled_dot_product_attention"]) == len(BATCHES)
    assert not tally.notes


def llama(**config: Any) -> Any:
    """Return a Llama with two queries for each key."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, use_cache=False, **config)
    )


def test_no_copies_around_the_kernel() -> None:
    """The kernel reads tensors in the order of dimensions that they have: no copy swaps it."""
    module = wrapped(Loss(llama()))
    module(TOKENS[0]).backward()
    swaps = [node for node in training_graph(module).node if node.op_type == "Transpose"]
    # Rotary positions need the other order: of queries and keys, in both passes of two layers.
    assert len([one for one in swaps if list(one.attribute[0].ints) == [0, 2, 1, 3]]) == 8


class Loss(nn.Module):
    """The loss of a language model on tokens, and on one more input called `name`."""

    def __init__(self, model: nn.Module, name: str = "") -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, tokens: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        named = {self.name: other[0]} if other else {}
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, **named).loss
        return loss


def masks_given(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each attention of transformers whether it got a mask."""
    found: list[bool] = []
    original = functional.scaled_dot_product_attention

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(kwargs.get("attn_mask") is not None)
        return original(*args, **kwargs)

    # transformers reads the function from this module at each call.
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noting)
    return found


TOKENS = [torch.randint(0, 40, (2, length)) for length in (9, 5)]


def test_a_causal_mask_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model counts the positions itself, the mask is left out at any length, as in eager."""
    given = masks_given(monkeypatch)
    # Two layers, each with one call a batch.
    assert compare(Loss(llama()), [(tokens,) for tokens in TOKENS]) == 2 * len(TOKENS)
    assert not any(given)


def test_documents_by_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given positions may be of packed documents, so every pass makes the mask."""
    given = masks_given(monkeypatch)
    # The first batch is one document a sample, the second has two: the graph must not fix the mask.
    positions = [torch.arange(9).expand(2, 9), torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])]
    compare(Loss(llama(), "position_ids"), list(zip(TOKENS, positions)))
    assert any(given)
