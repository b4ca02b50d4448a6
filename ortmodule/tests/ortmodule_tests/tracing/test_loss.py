"""Cross entropy in ORT's graph: ignored labels are left out, and torch's kernels run on the CPU.

Loss and gradients equal eager's.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule import Settings
from ortmodule._internal.base.counters import tally
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule._internal.torch_in_graph import own_operators, rms_norm_gradient, torch_kernels
from ortmodule._internal.tracing import cross_entropy
from ortmodule_tests.modules import Checkpointed, same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]
BATCH = 40
CLASSES = 23
# A second name for the function, bound at import, as user code may have.
LOSS = nn.functional.cross_entropy


class Scores(nn.Module):
    """A head as in transformers: dense, GELU, LayerNorm, scores, and the functional loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)
        self.options = options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.norm(nn.functional.gelu(self.dense(x)))).view(-1, CLASSES)
        return nn.functional.cross_entropy(scores, labels.view(-1), **self.options).sum()


class Along(Scores):
    """A loss with the classes in the second of three dimensions."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.dense(x)).transpose(1, 2), labels)


def batch(counting: float, ignored: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of 4 x 10 samples and their labels.

    Args:
        counting: the share of labels that are not ignored.
        ignored: the value of ignored labels.
    """
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(1, CLASSES, (4, 10), generator=generator)
    labels.view(-1)[torch.randperm(BATCH, generator=generator)[round(counting * BATCH) :]] = ignored
    return torch.randn(4, 10, 8, generator=generator), labels


def check(module: Any, eager: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> None:
    """Compare loss and gradients of one forward and backward pass."""
    losses = []
    for each in (module, eager):
        each.zero_grad()
        losses.append(each(x, labels))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    ours = dict(module.named_parameters())
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(autouse=True)
def _density() -> None:
    """Reset the density that earlier exports recorded."""
    tally.label_density = None


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "one a label": {"reduction": "none"},
    "another label ignored": {"ignore_index": 0},
    "weights": {"weight": torch.linspace(0.5, 2, CLASSES)},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, weights": {"label_smoothing": 0.2, "weight": torch.linspace(0.5, 2, CLASSES)},
    "smoothed, sum": {"label_smoothing": 0.1, "reduction": "sum"},
    "smoothed, one a label": {"label_smoothing": 0.1, "reduction": "none"},
}


@pytest.mark.parametrize(
    ("options", "density"),
    [
        *((name, 0.2) for name in OPTIONS),
        *(
            pytest.param(name, 1.0, marks=[] if name == "mean" else pytest.mark.slow)
            for name in OPTIONS
        ),
    ],
)
def test_loss_and_gradients_are_eagers(
    options: str, density: float, witness: PassAndGraphCounters
) -> None:
    """Loss and gradients equal eager's for all options, densities and sizes, in one graph."""
    model = Scores(**OPTIONS[options])
    eager = copy.deepcopy(model)
    ignored = OPTIONS[options].get("ignore_index", -100)
    module = wrapped(model, torch_operators="off")
    check(module, eager, *batch(density, ignored))
    # Densities 1.0 and 0.2 in turn: the graph must be right for another density than its export's.
    check(module, eager, *batch(1.2 - density, ignored))
    check(module, eager, *(part[:3] for part in batch(0.5, ignored)))
    # All batches ran in one graph.
    assert len(witness.graphs) == 1


class Likely(Scores):
    """A loss whose labels are probabilities of the classes."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        likely = nn.functional.one_hot(labels.clamp(min=0), CLASSES).float() * 0.7 + 0.3 / CLASSES
        scores = self.head(self.dense(x)).view(-1, CLASSES)
        return nn.functional.cross_entropy(scores, likely.view(-1, CLASSES), **self.options).sum()


@pytest.mark.parametrize("options", ["mean", "another label ignored", "smoothed", "weights"])
def test_labels_of_one_byte(options: str) -> None:
    """Labels may be bytes, as in eager PyTorch, in training and evaluation."""
    eager = Scores(**OPTIONS[options])
    module = wrapped(copy.deepcopy(eager))
    x, labels = batch(0.5, ignored=0)
    check(module, eager, x, labels.byte())
    with torch.no_grad():
        torch.testing.assert_close(
            module.eval()(x, labels.byte()), eager.eval()(x, labels.byte()), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("options", ["mean", "sum", "one a label", "smoothed, weights"])
def test_probabilities_for_labels(options: str, witness: PassAndGraphCounters) -> None:
    """Loss and gradients equal eager's, and no label is ignored."""
    model = Likely(**OPTIONS[options])
    check(wrapped(model), copy.deepcopy(model), *batch(0.2))
    assert tally.label_density is None


def test_other_forms_of_the_loss_are_left_alone(witness: PassAndGraphCounters) -> None:
    """Scores in other shapes than one row for each label are left to ORT."""
    model = Along()
    check(wrapped(model), copy.deepcopy(model), *batch(0.2))
    assert tally.label_density is None


@pytest.mark.parametrize("matmul", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_label_counts(
    reduction: str, matmul: bool, witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all labels are ignored, the mean is nan and the sum zero, as in PyTorch.

    The next batch is right again.
    """
    monkeypatch.setattr(torch_kernels, "LEAST_MATRIX_WIDTH", 4)
    model = Scores(reduction=reduction)
    eager = copy.deepcopy(model)
    module = wrapped(model, torch_matmul=matmul)
    check(module, eager, *batch(0.2))
    if reduction == "sum":
        check(module, eager, *batch(0.0))
    else:
        loss = module(*batch(0.0))
        loss.backward()
        assert torch.isnan(loss)
        assert torch.isnan(eager(*batch(0.0)))
    check(module, eager, *batch(0.3))


class Legacy(Scores):
    """The loss by another name and with old arguments, and a gather of the model's own.

    The arguments are those of torch before 0.4.
    """

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = self.dense(x).view(-1, 8)
        chosen = flat[(x.view(-1, 8)[:, 0] > 0).nonzero()]
        scores = self.head(flat)
        labels = labels.view(-1)
        each = LOSS(scores, labels, reduce=False)
        return LOSS(scores, labels, size_average=False) + each.mean() + chosen.square().mean()


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning")
def test_other_ways_to_the_loss(witness: PassAndGraphCounters) -> None:
    """Old arguments of the loss are handled, and the model's own gathers are unchanged."""
    model = Legacy()
    check(wrapped(model), copy.deepcopy(model), *batch(0.2))
    assert tally.label_density == 0.2


def test_ignored_labels_are_left_out(witness: PassAndGraphCounters) -> None:
    """Few labels that count are gathered and reported; with nearly all, or if off, they are not."""
    wrapped(Scores())(*batch(0.2)).backward()
    assert witness.graphs[-1].forward["ShrunkenGather"] > 0
    assert tally.label_density == 0.2
    tally.label_density = None
    for density, settings in (
        (0.95, {}),
        (0.2, {"sparsity_optimizer": False}),
        (0.2, {"compute_optimizer": False}),
    ):
        wrapped(Scores(), **settings)(*batch(density)).backward()
        assert witness.graphs[-1].forward["ShrunkenGather"] == 0
    assert tally.label_density is None


def test_scores_of_ignored_labels_are_not_computed(tmp_path: Any) -> None:
    """The gather comes before the matmul of the head, not after it."""
    import onnx

    wrapped(Scores(), save_onnx=str(tmp_path))(*batch(0.2)).backward()
    graph = onnx.load(tmp_path / "rank_00000_execution_model_training.onnx").graph
    makers = {name: node for node in graph.node for name in node.output}

    def maker(name: str) -> str:
        # Reshapes between the layers do not matter here.
        while name in makers and makers[name].op_type in ("Reshape", "Squeeze"):
            name = makers[name].input[0]
        if name not in makers:
            return "input"
        operators = [one.s.decode() for one in makers[name].attribute if one.name == "operator"]
        return operators[0] if operators else makers[name].op_type

    # Of the labels, which are an input, and of the LayerNorm's output before the head.
    gathered = {maker(node.input[0]) for node in graph.node if node.op_type == "ShrunkenGather"}
    assert gathered == {"input", "native_layer_norm"}


def test_evaluation_takes_every_label(witness: PassAndGraphCounters) -> None:
    """An evaluation graph has eager's loss and gathers nothing."""
    model = Scores()
    eager = copy.deepcopy(model).eval()
    module = wrapped(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(module(*batch(0.2)), eager(*batch(0.2)))
    assert witness.graphs[-1].forward["ShrunkenGather"] == 0


def test_plain_pytorch_is_as_it_was() -> None:
    """The loss is replaced only during an export, also if the export fails."""
    # The function that an export replaces.
    before = torch._C._nn.cross_entropy_loss

    class Fails(Scores):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            super().forward(x, labels)
            raise RuntimeError("in the trace")

    wrapped(Scores())(*batch(0.2))
    with pytest.raises(Exception, match="in the trace"):
        wrapped(Fails())(*batch(0.2))
    # After an export that worked and one that failed.
    assert torch._C._nn.cross_entropy_loss is before


def test_torchs_kernels_compute_the_loss(witness: PassAndGraphCounters) -> None:
    """On the CPU the training graph has torch's operators in place of ORT's, in both passes."""
    wrapped(Scores())(*batch(1.0)).backward()
    graph = witness.graphs[-1]
    wanted = {"_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data"}
    wanted |= {"gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward"}
    assert wanted <= set(graph.aten)
    assert not [
        name
        for name in graph.forward + graph.backward
        if name.startswith("SoftmaxCrossEntropyLoss")
    ]
    replaced = {"Gelu", "GeluGrad", "LayerNormalization", "LayerNormalizationGrad"}
    assert not replaced & {*graph.forward, *graph.backward}


class Gated(nn.Module):
    """RMSNorm and a gated SiLU as in Llama, and the GELU of CLIP."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.gate = nn.Linear(8, 24, bias=False)
        self.up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(24, CLASSES)
        self.alpha = alpha

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # RMSNorm as transformers writes it, which ONNX Runtime fuses.
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = self.gate(x)
        # ONNX Runtime fuses x * sigmoid(factor * x) into one QuickGelu.
        x = x + self.scale * (gate * torch.sigmoid(self.alpha * gate) * self.up(x)).sum(-1, True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        scores = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return nn.functional.cross_entropy(scores.view(-1, CLASSES), labels.view(-1))


def test_torchs_kernels_compute_gated_layers(witness: PassAndGraphCounters) -> None:
    """The gradient of RMSNorm and SiLU are torch's; another factor in its sigmoid keeps ORT's."""
    # 1.702 is the factor of CLIP's GELU, for which torch has no operator.
    for alpha, ours in ((1.0, 2), (1.702, 1)):
        model = Gated(alpha)
        eager = copy.deepcopy(model)
        module = wrapped(model)
        check(module, eager, *batch(1.0))
        # Another batch size: the graph has no fixed one.
        check(module, eager, *(part[:3] for part in batch(1.0)))
        graph = witness.graphs[-1]
        assert graph.aten["silu"] == graph.aten["silu_backward"] == ours
        assert graph.forward["QuickGelu"] == graph.backward["QuickGeluGrad"] == 2 - ours
        assert graph.aten[rms_norm_gradient.BACKWARD] == 2
        assert not graph.backward["SimplifiedLayerNormalizationGrad"]


class Tanh(Scores):
    """GELU as transformers' gelu_new writes it for GPT-2 and ALBERT."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        cubic = x + 0.044715 * torch.pow(x, 3.0)
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_torchs_kernels_compute_the_tanh_form_of_gelu(witness: PassAndGraphCounters) -> None:
    """ORT fuses the tanh form of GELU to FastGelu; torch computes it in both passes."""
    eager = Tanh()
    check(wrapped(copy.deepcopy(eager)), eager, *batch(1.0))
    graph = witness.graphs[-1]
    assert graph.aten[own_operators.GELU] == graph.aten[own_operators.GELU_BACKWARD] == 1
    assert not {"FastGelu", "FastGeluGrad"} & {*graph.forward, *graph.backward}


class Convolved(nn.Module):
    """Convolutions of one and two dimensions with every setting, and gathered values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The first one has an input without gradient.
        self.first = nn.Conv1d(8, 16, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(4, 8, (3, 2), padding=(1, 0), dilation=(1, 2), groups=2)
        self.last = nn.Conv1d(8, 8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.transpose(1, 2)).unflatten(1, (4, 4))
        hidden = self.last(self.second(hidden).flatten(2))
        places = labels[:, None, :8].clamp(min=0) % hidden.shape[-1]
        return hidden.gather(2, places.expand(-1, 8, -1)).square().mean() + hidden.mean()


def test_torchs_kernels_compute_convolutions_and_gathers(witness: PassAndGraphCounters) -> None:
    """Convolutions and gathers have torch's kernels, and their gradients, too."""
    eager = Convolved()
    module = wrapped(copy.deepcopy(eager))
    check(module, eager, *batch(1.0))
    check(module, eager, *(part[:3] for part in batch(1.0)))
    graph = witness.graphs[-1]
    assert graph.aten["convolution"] == graph.aten[own_operators.CONVOLUTION_BACKWARD] == 3
    assert graph.aten[own_operators.GATHER_BACKWARD] == 1


class Products(nn.Module):
    """Layers with and without bias, a tied weight, batched matmuls, and a transposed matmul."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(CLASSES, 8)
        self.plain = nn.Linear(8, 8, bias=False)
        self.biased = nn.Linear(8, 8)
        self.free = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.biased(self.words(labels.clamp(min=0)) + self.plain(x))
        attended = (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden
        factored = nn.functional.linear(hidden, self.free.t() @ self.biased.weight)
        crossed = (self.free @ self.free.t() @ self.plain.weight.t()) @ attended[0].t()
        scores = (attended @ self.free) @ self.words.weight.t() + crossed.mean() + factored.mean()
        return nn.functional.cross_entropy(scores.view(-1, CLASSES), labels.view(-1))


class Added(nn.Module):
    """Matrices of two dimensions with a bias: a linear layer, and transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, CLASSES))
        self.bias = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = torch.addmm(self.bias, self.dense(x.flatten(0, 1)), self.weight)
        return nn.functional.cross_entropy(scores, labels.flatten())


def test_torchs_matrix_products_add_a_bias(
    witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Gemm with a bias is one call of torch."""
    monkeypatch.setattr(torch_kernels, "LEAST_MATRIX_WIDTH", 4)
    eager = Added()
    module = wrapped(copy.deepcopy(eager))
    check(module, eager, *batch(1.0))
    check(module, eager, *(part[:3] for part in batch(1.0)))
    graph = witness.graphs[-1]
    assert graph.aten["addmm"] == 1 <= graph.aten["linear"]
    assert not {"Gemm", "MatMul", "FusedMatMul", "Add"} & {*graph.forward, *graph.backward}


class Shifted(Added):
    """A linear layer with a bias, and the addition of another vector to its result."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = torch.addmm(self.bias, x.flatten(0, 1), self.weight) + self.bias
        scores = scores + (self.dense(x.flatten(0, 1)) + self.weight[:, 0]).sum(1, keepdim=True)
        # Softmax ignores a number that is added to all classes; cumsum makes it count.
        return nn.functional.cross_entropy(scores.cumsum(1), labels.flatten())


def test_a_vector_added_to_a_layer_with_a_bias_leaves_the_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The product's own bias is not replaced by the next vector that is added."""
    monkeypatch.setattr(torch_kernels, "LEAST_MATRIX_WIDTH", 4)
    eager = Shifted()
    check(wrapped(copy.deepcopy(eager)), eager, *batch(1.0))


@pytest.mark.parametrize("kind", [Products, Scores])
def test_torchs_matrix_products(
    kind: type[nn.Module], witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matmuls with a matrix are torch's in both passes, with eager's loss and gradients."""
    monkeypatch.setattr(torch_kernels, "LEAST_MATRIX_WIDTH", 4)
    model = kind()
    eager = copy.deepcopy(model)
    module = wrapped(model, torch_matmul=True)
    check(module, eager, *batch(0.2))
    check(module, eager, *(part[:3] for part in batch(1.0)))
    graph = witness.graphs[-1]
    assert {"linear", "matmul", "tensordot"} <= graph.aten.keys()
    # The gradients of the biases, and no additions of biases that torch's matmul can add.
    assert graph.aten["sum"] == (1 if kind is Products else 2)
    assert graph.forward["Add"] == (3 if kind is Products else 0)
    theirs = sum(
        (graph.forward + graph.backward)[name] for name in ("MatMul", "FusedMatMul", "Gemm")
    )
    # Attention's matmuls stay ORT's: their operands have three dimensions, or three and two.
    assert theirs <= (7 if kind is Products else 0)


def test_recomputed_products_stay_onnx_runtimes(
    witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recomputation matmuls stay ORT's, because it has no operators of torch."""
    monkeypatch.setattr(torch_kernels, "LEAST_MATRIX_WIDTH", 4)
    wrapped(Scores(), torch_matmul=True, memory_optimization=1)(*batch(1.0)).backward()
    assert "linear" not in witness.graphs[-1].aten


def test_a_models_own_checkpoints_keep_its_products_and_say_so(
    witness: PassAndGraphCounters,
) -> None:
    """A model's checkpoints become recomputation, so its matmuls stay ORT's, with a note."""
    wrapped(Checkpointed(reentrant=False), torch_matmul=True)(torch.randn(3, 8)).backward()
    assert any("torch_matmul is off" in note for note in tally.notes)


def test_products_are_torchs_unless_refused_or_recomputed() -> None:
    """Without a setting, matmuls are torch's; not so with memory optimization."""
    assert torch_kernels.may_torch_compute_matmuls(Settings())
    assert not torch_kernels.may_torch_compute_matmuls(Settings(torch_matmul=False))
    assert not torch_kernels.may_torch_compute_matmuls(Settings(memory_optimization=1))


def test_a_label_that_is_no_class_is_an_error(witness: PassAndGraphCounters) -> None:
    """A label that is no class is an error; ORT's own kernel would read beyond the scores."""
    x, labels = batch(1.0)
    # The first class number that is out of range.
    labels[0, 0] = CLASSES
    module = wrapped(Scores())
    # The export runs in plain PyTorch, which would raise the error by itself.
    module(*batch(1.0))
    with pytest.raises(Exception, match="out of bounds"):
        module(x, labels)


class OneSample(Scores):
    """Scores of a single sample, and its class."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(self.dense(x)).sum((0, 1)), labels.max(), **self.options
        )


@pytest.mark.parametrize("options", ["mean", "one a label", "smoothed, weights"])
def test_scores_of_one_sample(options: str, witness: PassAndGraphCounters) -> None:
    """Loss and gradients equal eager's, where ONNX Runtime alone aborts the process."""
    model = OneSample(**OPTIONS[options])
    check(wrapped(model), copy.deepcopy(model), *batch(0.2))


class GivenScores(nn.Module):
    """A loss whose scores are the batch's or a weight, beside one of computed scores."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.weight = weight
        self.scores = nn.Parameter(torch.randn(6, CLASSES))
        self.layer = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy
        given = self.scores if self.weight else x
        return loss(given, labels) * loss(self.layer(self.scores + x), labels)


@pytest.mark.parametrize("weight", [False, True], ids=["batch", "weight"])
def test_scores_that_no_layer_computes(weight: bool) -> None:
    """The scores of a loss may be the batch itself or a weight."""
    # Without the repair the process crashes in the build of the graph.
    torch.manual_seed(0)
    model = GivenScores(weight)
    eager = copy.deepcopy(model)
    x, labels = torch.randn(6, CLASSES), torch.arange(6)
    losses = [each(x, labels) for each in (wrapped(model), eager)]
    for found in losses:
        found.backward()
    torch.testing.assert_close(*losses)
    same(model, eager)


def test_a_loss_under_autocast_is_computed_in_float32() -> None:
    """An export casts the scores as CUDA's autocast does inside the operator."""
    types = []

    def plain(scores: torch.Tensor, *rest: object) -> torch.Tensor:
        types.append(scores.dtype)
        return scores.sum()

    loss = cross_entropy._wrap_loss_for_probabilities_and_smoothing(plain)
    scores = torch.zeros(2, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(scores, torch.zeros(2, dtype=torch.long), None, 1, -100, 0.0)
    loss(scores, torch.zeros(2, dtype=torch.long), None, 1, -100, 0.0)
    assert types == [torch.float32, torch.bfloat16]
