"""Operators that ONNX Runtime cannot export or derive run as torch in its graph and equal eager."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule import ORTModule, Settings
from ortmodule._internal.base import torch_calls
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.settings import SettingError
from ortmodule._internal.native import extensions
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule._internal.torch_in_graph import operator_table
from ortmodule_tests.modules import executed, language_model, same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [
    needs_ort,
    pytest.mark.usefixtures("built", "seeded"),
    pytest.mark.skipif(
        bool(extensions.reason_interop_is_unbuildable_or_empty()),
        reason="ONNX Runtime's torch_interop_utils is not built",
    ),
]


class Sequences(nn.Module):
    """A bidirectional LSTM, RMSNorm, complex numbers, a sort with its indices, and Mish."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.norm = nn.RMSNorm(10)
        self.last = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(functional.mish(self.norm(self.first(x)[0])))
        values, places = hidden.sort(-1)
        spectrum = torch.fft.rfft(hidden) * 2
        # The exporter's form of this permute, and ORT's gradient of it, are wrong.
        turned = hidden.permute(0, -1, -2).logsumexp(1).mean()
        return (
            turned
            + (values * places).mean()
            + spectrum.abs().square().mean()
            + torch.fft.irfft(spectrum).sin().mean()
        )


class Images(nn.Module):
    """A convolutional net with GroupNorm, an uneven pool, PReLU and Huber loss."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.prelu = nn.PReLU()
        self.back = nn.ConvTranspose2d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.back(self.prelu(self.norm(self.convolution(x))))
        return functional.huber_loss(
            functional.adaptive_avg_pool2d(hidden, 5), torch.ones_like(hidden[..., :5, :5])
        )


def trained(model: nn.Module, module: Any, batches: list[Any]) -> list[float]:
    """Return the losses of SGD's steps on these batches; the last gradients remain."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def compare(model: nn.Module, batches: list[Any], **settings: Any) -> None:
    """Check that losses, gradients and buffers on ORT equal eager's."""
    eager = copy.deepcopy(model)
    assert trained(model, wrapped(model, **settings), batches) == pytest.approx(
        trained(eager, eager, batches), rel=1e-5
    )
    same(model, eager, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes", "operators"),
    [
        (
            Sequences,
            [(2, 6, 4), (3, 5, 4)],
            {
                "lstm",
                "rms_norm",
                "mish",
                "fft_rfft",
                "mul",
                "abs",
                "fft_irfft",
                "permute",
                "logsumexp",
            },
        ),
        (Images, [(2, 1, 8, 8), (3, 1, 9, 8)], {"prelu", "huber_loss", "_convolution"}),
    ],
)
def test_operators_without_a_form_or_a_gradient(
    kind: Any, sizes: list[Any], operators: set[str], witness: PassAndGraphCounters
) -> None:
    """Batches of two sizes need one export, and torch's operators are counted."""
    # The counters of a process, which earlier tests have used.
    torch_calls.reset_call_and_pass_counts()
    before = tally.exports
    compare(kind(), [(torch.randn(size),) for size in sizes])
    found = {name.removeprefix("aten.") for name in torch_calls.call_counts_by_called_name()}
    assert operators <= found, found
    # Once for each of the two batches; the calls in the export do not count.
    assert {calls.forward for calls in torch_calls.call_counts_by_called_name().values()} == {2}
    assert 0 < torch_calls.torch_fraction_of_pass_time() < 1
    # One export, although the batches have two sizes.
    assert tally.exports == before + 1


def test_a_tensor_that_ort_writes_over_is_kept() -> None:
    """Torch and ORT never share memory that one of them overwrites."""

    # ORT plans its memory by the graph, in which it does not see the tensors that torch saves.
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(
                    functional.elu(functional.softplus(layer(x).exp()).sqrt()) + 0.1
                ).tanh()
            return x.square().mean()

    compare(Reused(), [(torch.randn(8, 64),) for _ in range(3)])


def test_named_operators(witness: PassAndGraphCounters) -> None:
    """`torch_operators: [softmax]` keeps exactly this operator as torch's."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids).softmax(-1).square().sum()

    plain, named = (
        executed(witness, Attends(), torch_operators=asked) for asked in ("auto", ["softmax"])
    )
    assert not plain.python
    # In one graph Softmax is ONNX's operator, in the other it is torch's.
    assert plain.forward["Softmax"] == 1 > named.forward["Softmax"]
    assert any("aten.softmax" in name for name in named.python)


class Pools(nn.Linear):
    """A pool of images without a batch dimension, for which ONNX Runtime cannot infer shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(super().forward(x), 2).square().sum()


def test_an_operator_of_unknown_shape_is_exported_again_as_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator of unknown shape is exported again as torch's, or named in the error."""
    # Without its row in the table the fault shows only in ORT's shape inference.
    monkeypatch.delitem(operator_table._TORCH_ROWS_BY_NAME, "aten::avg_pool2d")
    compare(Pools(6, 6), [(torch.randn(rows, 4, 6),) for rows in (2, 3)])
    assert any(
        note.startswith("exported once more with aten::avg_pool2d as torch's")
        for note in tally.notes
    )
    with pytest.raises(
        RuntimeError,
        match=r"infer the shape of avg_pool2d's result .*write it with other operators",
    ):
        wrapped(Pools(6, 6), torch_operators="off")(torch.randn(2, 4, 6))


class Rows(nn.Linear):
    """A model that splits a batch into parts of three rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part.square().sum() for part in torch.unsafe_split(super().forward(x), 3))


def test_another_number_of_tensors_is_refused_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch call that returns another number of tensors than in the first batch is an error."""
    module = wrapped(Rows(4, 4), torch_operators=["unsafe_split"])
    module(torch.randn(6, 4)).backward()
    with pytest.raises(
        RuntimeError,
        match=r"split at \S+test_operator_translation.py:\d+ returns 3 tensors, and 2 in",
    ):
        module(torch.randn(9, 4))


def test_off_refuses() -> None:
    with pytest.raises(Exception, match="rms_norm"):
        wrapped(Sequences(), torch_operators="off")(torch.randn(2, 6, 4))


@pytest.mark.parametrize("settings", [{"torch_operators": "some"}, {"torch_modules": "lstm"}])
def test_values_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        Settings(**settings)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_usual_models_have_none(family: str, witness: PassAndGraphCounters) -> None:
    model = language_model(family, "sdpa")
    ids = torch.randint(99, (2, 8))
    wrapped(model)(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).backward()
    assert not witness.graphs[-1].python


class Decides(nn.Module):
    """A layer that packs sequences, branches on values, and averages over all batches.

    It also returns a value of a tensor, and a text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        # momentum=None averages over all batches, by a counter that changes in each pass.
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
        # A branch on a value, which a trace would fix.
        x = x * 2 if x.sum().item() > 0 else x.tanh()
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        found, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return {
            "found": self.norm(found.transpose(1, 2)),
            "longest": lengths.max(),
            "name": "decides",
        }


class Holds(nn.Module):
    """Such a layer between two layers that ONNX Runtime runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Decides()
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = self.inner(self.first(x), lengths)
        return self.last(found["found"].transpose(1, 2)).square().mean() * found["longest"]


def test_a_module_that_no_trace_follows() -> None:
    """The error names the setting and the layer; with the setting all values equal eager's."""
    # Three batch sizes, for one graph.
    batches = [(torch.randn(n, 5, 4), torch.tensor([5, 3, 2, 1][:n])) for n in (3, 4, 2)]
    # Without the setting the model is refused, with the setting as the remedy.
    with pytest.raises(Exception, match=r"torch_modules=\['inner'\]"):
        ORTModule(Holds())(*batches[0])
    compare(Holds(), batches, torch_modules=["inner"])


class Counts(nn.Module):
    """A layer that also returns a list with how often each index is the largest.

    The list differs from batch to batch.
    """

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        return x.tanh(), functional.one_hot(x.argmax(-1), x.shape[-1]).sum(0).tolist()


class Experts(nn.Module):
    """A layer that is never called itself; its owner calls its methods, as in JetMoe."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.linear = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def each(self, x: torch.Tensor) -> torch.Tensor:
        x, sizes = self.counts(x)
        return torch.cat([layer(part) for layer, part in zip(self.linear, x.split(sizes))])


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts.each(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.owner = Owner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.owner(self.first(x)).square().mean()


@torch.library.custom_op("ortmodule_tests_operators::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """A registered operator with its own gradient."""
    return x * by


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.by = inputs[1]


# Twice the true gradient, so that a derivative by ORT would not pass.
scaled.register_autograd(lambda ctx, gradient: (2 * gradient * ctx.by, None), setup_context=_keep)


@torch.library.custom_op("ortmodule_tests_operators::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    """A registered operator that changes its argument."""
    x.mul_(2)


def test_registered_operators_run_as_torch(witness: PassAndGraphCounters) -> None:
    """An operator of torch.library has its own gradient; one that changes a tensor is refused."""

    class Registered(nn.Linear):
        changes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x) * 1
            if self.changes:
                torch.ops.ortmodule_tests_operators.double(h)
            return scaled(h, 1.5).square().mean()

    eager = Registered(4, 4)
    model = copy.deepcopy(eager)
    for one in (wrapped(model), eager):
        one(torch.ones(2, 4)).backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    model.changes = True
    with pytest.raises(
        Exception, match=rf"::double at {__file__}:\d+ .* changes a tensor in place"
    ):
        wrapped(model)(torch.ones(2, 4))


def test_a_layer_whose_methods_are_called_names_the_one_around_it() -> None:
    """The error for a layer that is never called names its owner.

    If named itself, the layer would never run as torch, and the error would stay the same.
    """
    # Without a name the innermost layer is advised; if the named layer is never called, its owner.
    for named, advised in (([], "owner.experts.counts"), (["owner.experts"], "owner")):
        with pytest.raises(Exception, match=rf"torch_modules=\['{advised}'\]"):
            wrapped(Block(), torch_modules=named)(torch.randn(6, 4))
    compare(Block(), [(torch.randn(6, 4),) for _ in range(3)], torch_modules=["owner"])


def test_why_a_call_of_torch_fails_is_told() -> None:
    """The error of a failed torch call has its reason; ONNX Runtime reports only a failed node."""
    module = wrapped(Block(), torch_modules=["owner.experts.counts"])
    module(torch.randn(6, 4))
    with pytest.raises(
        Exception, match=r"counts runs as torch, and returns .*torch_modules=\['owner.experts'\]"
    ):
        # Other rows give another list of counts than in the export.
        module(torch.randn(5, 4))


def test_a_path_that_names_no_layer() -> None:
    with pytest.raises(
        SettingError, match=r"torch_modules: outer names no layer of the model; it has first, inner"
    ):
        wrapped(Holds(), torch_modules=["outer"])(torch.randn(2, 5, 4), torch.tensor([5, 3]))


def test_layers_whose_buffers_a_graph_would_not_change() -> None:
    """Layers that update buffers, as spectral norm and InstanceNorm, run as torch, with a note."""

    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
            self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(x)).square().mean()

    compare(Buffers(), [(torch.randn(3, 4, 6),) for _ in range(3)])
    assert any(note.startswith("norm runs as torch") for note in tally.notes)


def test_layer_norms_without_bias_or_weights() -> None:
    """LayerNorms without bias or weights equal eager in training and in evaluation.

    ORT's gradient of one is wrong, so it gets a bias of zeros. ORT cannot run the other, which
    torch computes.
    """
    torch_calls.reset_call_and_pass_counts()
    norms = nn.LayerNorm(6, bias=False), nn.LayerNorm(6, elementwise_affine=False)
    model = nn.Sequential(nn.Linear(4, 6), norms[0], nn.Tanh(), norms[1])
    eager = copy.deepcopy(model)
    x = torch.randn(3, 4)
    module = wrapped(model)
    for run in (module, eager):
        run(x).sin().sum().backward()
    same(model, eager)
    assert torch_calls.call_counts_by_called_name()["aten.layer_norm"].forward == 1
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), eager.eval()(x))


def test_dropout_of_torch_is_drawn_once_a_pass() -> None:
    """An operator that draws random numbers uses the same ones in both passes."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (functional.rrelu(self.weight * x, 0.1, 0.9, training=True) * x).sum()

    model = Drops()
    module = wrapped(model)
    # Negative, because rrelu draws slopes for negative inputs only.
    x = -torch.ones(1000)
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = module(x)
        loss.backward()
        # The loss is linear in the weight, which is 1, so both are equal if the slopes are.
        assert model.weight.grad.sum().item() == pytest.approx(loss.item(), rel=1e-5)
        losses.append(loss.item())
    # Each pass draws new numbers.
    assert losses[0] != losses[1]
    # The mean slope is 0.5, over 1,000 elements.
    assert 400 < losses[0] < 600


class Router(nn.Linear):
    """A layer that keeps a loss of its own in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = super().forward(x).square().mean()
        return super().forward(x).softmax(-1)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_loss_that_a_torch_layer_keeps_outside_its_result(frozen: bool) -> None:
    """The layer's own weights get eager's gradients.

    If earlier layers would miss theirs, the backward pass is refused.
    """
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(not frozen), Router(4, 4))
    eager = copy.deepcopy(model)
    module = wrapped(model, torch_modules=["1"])
    for x in torch.randn(3, 6, 4):
        (eager(x).sin().sum() + eager[1].loss).backward()
        loss = module(x).sin().sum() + model[1].loss
        if frozen:
            loss.backward()
            torch.testing.assert_close(model[1].weight.grad, eager[1].weight.grad)
        else:
            with pytest.raises(
                RuntimeError,
                match=r"a tensor that 1, which runs as torch, keeps outside its result",
            ):
                loss.backward()


class Writes(nn.Module):
    """Writes a part with fewer dimensions than the whole, and reads along the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what was written."""
        whole = x.new_zeros(x.shape[0], 2, 3, 4)
        whole[:, -1, :, 1:] = self.layer(x)
        return whole[:, :, :, :3].square().mean()


def test_a_part_of_fewer_dimensions_is_refused() -> None:
    """Called with the part's rank, torch's exporter would end the process (Longformer)."""
    module = wrapped(Writes(), torch_operators=["index_put"])
    with pytest.raises(
        Exception, match=r"index_put.*type of the part that is written.*torch_modules"
    ):
        module(torch.randn(2, 3, 3))
    # By default the form of ONNX is exact.
    equals_eager(Writes(), (2, 4))


class Windows(nn.Module):
    """Overlapping windows of two samples or heads, read by strides."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.swap = swap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the windows, weighted by their position."""
        y = self.layer(x)
        y = y.transpose(0, 1) if self.swap else y
        windows = y.as_strided((len(y), 2, 2, 3), (y.stride(0), y.stride(1), y.stride(1), 1))
        return (windows * torch.arange(2).view(2, 1, 1)).square().mean()


class Layers(nn.Module):
    """A list of lists of layers, of which the last is in a Sequential."""

    def __init__(self, inside: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict(), inside])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the value of the last."""
        value: torch.Tensor = self.layers[1]["last"](x)
        return value


def test_windows_of_a_tensor_that_is_not_contiguous_are_refused() -> None:
    """The exporter reads a tensor as contiguous: Longformer's loss was another one."""
    module = wrapped(Windows(swap=True))
    with pytest.raises(Exception, match=r"as_strided.*memory.*torch_modules\)"):
        module(torch.randn(3, 3, 3))
    with pytest.raises(Exception, match=r"torch_modules=\[\\?'1\.0\\?'\]\)"):
        wrapped(nn.Sequential(nn.Linear(3, 3), nn.Sequential(Windows(swap=True))))(
            torch.randn(3, 3, 3)
        )
    # The error names the layer, once for all of its kind.
    inside = nn.ModuleDict({"last": nn.Sequential(Windows(swap=True))})
    with pytest.raises(Exception, match=r"torch_modules=\[\\?'layers\.\*\.last\.0\\?'\]\)"):
        wrapped(Layers(inside))(torch.randn(3, 3, 3))
    assert wrapped(Layers(inside), torch_modules=["layers.*.last.0"])(torch.randn(3, 3, 3)) > 0
    # Sizes after the first that never change give the same strides in every batch.
    equals_eager(Windows(swap=False), (2, 4))


def equals_eager(model: nn.Module, rows: Sequence[int]) -> None:
    """Compare the gradients of batches of so many rows of 3 x 3 with eager's."""
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for count in rows:
        x = torch.randn(count, 3, 3)
        module(x).backward()
        eager(x).backward()
        same(model, eager, atol=1e-6)
