"""Custom autograd functions in ORT's graph: their own backward runs, with eager's gradients."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.native import extensions
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.forks import Run
from ortmodule_tests.modules import Reverse, same, training_graph, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort


@pytest.fixture(scope="module", autouse=True)
def _callable(built: None) -> None:
    """Skip where ORT's extension that calls custom functions could not be built."""
    if extensions.reason_interop_is_unbuildable_or_empty():
        pytest.skip(f"not on this torch: {extensions.reason_interop_is_unbuildable_or_empty()}")


class Cube(torch.autograd.Function):
    """A cube that saves an input and an output, with a backward twice as large as it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        # Twice the true derivative, so that a derivative by ORT would not pass.
        return gradient * (6 * x * x + 0 * y)


class Bilinear(torch.autograd.Function):
    """A function of a weight and a bias, like a fused layer.

    Its backward reads which gradients are needed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            # Three times the true gradient, for the same reason as in Cube.
            3 * gradient @ weight if wanted[0] else None,
            gradient.t() @ x if wanted[1] else None,
            gradient.sum(0) if wanted[2] else None,
        )


class Split(torch.autograd.Function):
    """A function that also returns a boolean tensor, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = x > 0
        ctx.mark_non_differentiable(chosen)
        return x * 2, chosen

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        return gradient * 3


class Mixed(torch.autograd.Function):
    """A function of non-tensor arguments and a mask, with two outputs.

    The arguments are numbers of each type, a tuple, a text and None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
        power: int,
        on: bool,
        sizes: Any,
        name: str,
        no: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # ORT passes a boolean tensor as uint8.
        assert mask.dtype == torch.bool
        assert (power, on, sizes, name, no) == (2, True, (3, 4), "text", None)
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return torch.where(mask, x * scale, x), x.detach().abs().sum(-1)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, first * 10, first) + second.unsqueeze(-1), *(None,) * 7


class Model(nn.Module):
    """Two layers with a custom function between them, which is called `uses` times."""

    def __init__(self, function: Any, uses: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)
        self.function = function
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(self.uses):
            hidden = self.function(hidden)
        return self.second(hidden).square().mean()


class Fused(Model):
    """A model whose first layer's weights are arguments of a custom function.

    frozen: whether the first weight has no gradient.
    """

    def __init__(self, frozen: bool) -> None:
        super().__init__(None)
        # The function must not compute the gradient of a frozen weight.
        self.first.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.second(torch.tanh(Bilinear.apply(x, self.first.weight, self.first.bias)))
            .square()
            .mean()
        )


class Asking(torch.autograd.Function):
    """A layer whose backward asks its saved tensors whether they need a gradient.

    It saves one by save_for_backward, and one in a list.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rest = [weight]
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (x,), (weight,) = ctx.saved_tensors, ctx.rest
        # Three times the true gradient, for the same reason as in Cube.
        return tuple(
            found if saved.requires_grad else torch.zeros_like(saved)
            for saved, found in ((x, 3 * gradient @ weight), (weight, gradient.t() @ x))
        )


class Asked(Model):
    """A model whose second weight only a custom function takes."""

    def __init__(self) -> None:
        super().__init__(None)
        self.second = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Asking.apply(torch.tanh(self.first(x)), self.second.weight).square().mean()


class Recorded(torch.autograd.Function):
    """A function that keeps a graph of its own from the forward to the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.begin = [x.detach().requires_grad_()]
            ctx.end = ctx.begin[0].sin().square()
        return ctx.end.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(ctx.end, ctx.begin, gradient)[0]


class Without(torch.autograd.Function):
    """A product that gives its second factor no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def scaling(factor: float) -> Any:
    """Return a function; all that this makes have one name."""

    class Scaled(torch.autograd.Function):
        """A product that a view returns, with gradients that are no tensors of their own."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return (x * factor).t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.t() * factor

    return Scaled.apply


class Viewed(torch.autograd.Function):
    """A function that returns its argument and a sum; the second gradient is a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.sizes = x.shape
        return x.view_as(x), x.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        # None of both has memory of its own.
        return second.expand(ctx.sizes) if first is None else first + second


class TransformerLike(nn.Module):
    """Embedding, attention and loss of a small transformer, with a custom function in three places.

    Attention is written out, and the loss ignores padding.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = Cube.apply(self.embedding(ids))
        scores = (self.query(x) @ self.key(x).transpose(1, 2)) / 8**0.5
        x = x + self.out(torch.softmax(scores, -1) @ self.value(x))
        logits = self.head(Reverse.apply(Cube.apply(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mixed(x: torch.Tensor) -> torch.Tensor:
    first, second = Mixed.apply(x, x > 0, 0.5, 2, True, (3, 4), "text", None)
    return first * second.unsqueeze(-1)


def split(x: torch.Tensor) -> torch.Tensor:
    doubled, chosen = Split.apply(x)
    return torch.where(chosen, doubled, -doubled)


def python_ops(module: Any) -> int:
    """Return the number of PythonOp nodes in the training graph that ORT runs."""
    return sum(node.op_type == "PythonOp" for node in training_graph(module).node)


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of any gradient, relative to the largest gradient."""
    pairs = [
        (mine.grad, eagers.grad) for mine, eagers in zip(ours.parameters(), theirs.parameters())
    ]
    assert all((mine is None) == (eagers is None) for mine, eagers in pairs)
    trained = [(mine, eagers) for mine, eagers in pairs if eagers is not None]
    largest = max(eagers.abs().max() for _, eagers in trained)
    # Relative to the largest, because float32 keeps seven digits of it.
    return (max((mine - eagers).abs().max() for mine, eagers in trained) / largest).item()


def compare(model: nn.Module, ours: Any, *batch: torch.Tensor) -> None:
    """Compare loss and every gradient of one step in eager and ORT, then clear the gradients."""
    expected = model(*batch)
    got = ours(*batch)
    expected.backward()
    got.backward()
    assert got.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    assert difference(ours, model) < 1e-5  # rounding differs between processors
    model.zero_grad()
    ours.zero_grad()


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (Model(Reverse.apply), 1),
        (Model(Cube.apply), 1),
        (Model(Cube.apply, uses=2), 2),
        (Model(mixed), 1),
        (Model(split), 1),
        (Fused(frozen=False), 1),
        (Fused(frozen=True), 1),
        (Asked(), 1),
        (Model(Recorded.apply, uses=2), 2),
        (Model(lambda x: scaling(2.0)(x).t() + scaling(5.0)(x).t()), 2),
        (Model(lambda x: x * Viewed.apply(x)[1]), 1),
        (Model(lambda x: sum(Viewed.apply(x))), 1),
    ],
    ids=[
        "reversal",
        "saved tensors",
        "used twice",
        "other arguments",
        "boolean output",
        "weights",
        "a frozen weight",
        "asked for their gradient",
        "a graph of its own",
        "two of one name",
        "an expanded gradient",
        "its argument",
    ],
)
def test_gradients_equal_eagers(model: nn.Module, count: int) -> None:
    """Three steps with batches of different sizes have eager's losses and gradients.

    The functions are nodes of the graph.
    """
    ours = wrapped(copy.deepcopy(model))
    # The third batch has another size.
    for step, rows in enumerate((3, 3, 5)):
        compare(model, ours, torch.randn(rows, 4, generator=torch.Generator().manual_seed(step)))
    assert python_ops(ours) == count


def test_an_input_without_a_gradient_has_zeros() -> None:
    """Where a function returns None for a weight, the others have eager's gradients."""
    model = Model(None)
    model.scale = nn.Parameter(torch.ones(4))
    model.function = lambda x: Without.apply(x, model.scale)
    x = torch.randn(3, 4)
    model(x).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    # Eager PyTorch has no gradient there.
    assert expected.pop("scale") is None
    expected["scale"] = torch.zeros(4)
    model.zero_grad()
    wrapped(model)(x).backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def test_a_transformer_with_custom_functions_trains_like_eager() -> None:
    """Ten AdamW steps of a transformer with three custom functions have eager's losses."""
    model = TransformerLike()
    ours = wrapped(copy.deepcopy(model))
    ids = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(1))
    # -100 is cross_entropy's ignored label.
    labels = torch.where(ids < 15, torch.full_like(ids, -100), ids)
    compare(model, ours, ids, labels)
    losses = []
    for module in (model, ours):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(10):
            loss = module(ids, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert python_ops(ours) >= 3


def test_two_passes_before_one_backward() -> None:
    """Each backward finds its own context after two forward passes."""
    model = Model(Cube.apply)
    ours = wrapped(copy.deepcopy(model))
    x = torch.randn(3, 4)
    y = torch.randn(5, 4)
    for module in (model, ours):
        (module(x) + 2 * module(y)).backward()
    assert difference(ours, model) < 1e-5  # rounding differs between processors


def test_evaluation_and_no_grad_run_the_forward_only() -> None:
    """eval() under no_grad has eager's value, before and after a training step."""
    model = Model(Cube.apply)
    ours = wrapped(copy.deepcopy(model))
    x = torch.randn(3, 4)
    for _ in range(2):
        ours.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-6)
        ours.train()
        compare(model, ours, x)


class Witnessed(torch.autograd.Function):
    """A function that keeps a weak reference to a tensor that it saves."""

    alive: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        # An attribute, besides the tensors of save_for_backward.
        ctx.kept = x.new_zeros(1)
        Witnessed.alive.append(weakref.ref(ctx.kept))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x + 0 * ctx.kept


def test_twenty_steps_leave_no_context_behind() -> None:
    """Each step's context, with its saved tensors, is freed after its backward."""
    ours = wrapped(Model(Witnessed.apply))
    Witnessed.alive.clear()
    for step in range(20):
        ours(torch.randn(3, 4)).backward()
        del step
    # Contexts may be in reference cycles.
    gc.collect()
    assert len(Witnessed.alive) >= 20
    # The last step's context may still be referenced.
    assert sum(reference() is not None for reference in Witnessed.alive) <= 1


def test_functions_stay_in_the_graph_and_none_falls_back(witness: PassAndGraphCounters) -> None:
    """The witness counts passes of ORT, and no fallback."""
    ours = wrapped(Model(Reverse.apply))
    ours(torch.randn(3, 4)).backward()
    assert (witness.forward_passes, witness.backward_passes, witness.fallbacks) == (1, 1, 0)


TWO_RANKS = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from ortmodule_tests.modules import wrapped
from ortmodule_tests.base.test_custom_functions import Cube, Model, difference
import copy
rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = Model(Cube.apply, uses=2)
modules = DistributedDataParallel(copy.deepcopy(model)), DistributedDataParallel(wrapped(model))
x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
for _ in range(5):
    losses = []
    for module in modules:
        loss = module(x)
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.01 * parameter.grad
        losses.append(loss.item())
    assert difference(modules[1], modules[0]) < 1e-5
    print(rank, *losses, flush=True)
dist.barrier()
os._exit(0)  # a gloo group that is freed may hang
"""


@pytest.mark.slow
@pytest.mark.ci
def test_two_ranks_average_the_custom_gradients(tmp_path: Any) -> None:
    """Under DistributedDataParallel on two gloo ranks, both ranks have eager's averaged gradients."""
    command = [
        sys.executable,
        "-c",
        TWO_RANKS,
        str(Path(__file__).parents[2]),
        str(tmp_path / "store"),
    ]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            # A rank that waits for a failed one would hang.
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err
            assert sum(line.startswith(f"{rank} ") for line in out.splitlines()) == 5
    finally:
        for process in ranks:
            process.kill()


_CHECKPOINTED = """
import copy, torch
from torch.utils.checkpoint import checkpoint
from ortmodule import ORTModule
from ortmodule_tests.base.test_custom_functions import Cube

class Cubed(torch.nn.Linear):
    def forward(self, x):
        return Cube.apply(super().forward(x))

eager = Cubed(4, 3)
model = copy.deepcopy(eager)
for run in (eager, ORTModule(model)):
    checkpoint(run, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
torch.testing.assert_close(model.weight.grad, eager.weight.grad)
print("equal")
"""


def test_a_checkpoint_around_the_module_does_not_deadlock(fresh_ort: Run) -> None:
    """A checkpoint's hooks are not called for tensors that a function inside the graph saves."""
    # ONNX Runtime holds a lock there: a hook would hang, and a signal would end the process.
    done = fresh_ort(_CHECKPOINTED, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["equal"]), done.stderr


class Saving(torch.autograd.Function):
    """A square that saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class SavingLater(torch.autograd.Function):
    """The same square in the form with setup_context; it saves a view of its argument."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        # A view, which shares the argument's memory.
        ctx.save_for_backward(inputs[0].view(-1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.view_as(gradient) * gradient


class Squares(nn.Module):
    """Layers of squares, whose arguments are in memory that ORT plans."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.rand(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.relu(
                # The function's argument is an intermediate result, whose memory ORT uses again.
                weight @ (self.function(torch.add(x.view(-1), 0.4).view(16, -1)) + weight[0]) / 100
            )
        return x.sum()


@pytest.mark.parametrize("function", [Saving, SavingLater])
def test_what_is_saved_stays_until_the_backward_pass(function: Any) -> None:
    """Saved tensors keep their values until the backward pass, in the second step and later too."""
    model = Squares(function.apply)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for _ in range(3):
        x = torch.rand(16, 16)
        for one in (module, eager):
            one.zero_grad()
            one(x).backward()
        same(model, eager)


def test_a_function_keeps_its_name_in_the_graph() -> None:
    """A function has its own name in the graph."""
    module = wrapped(Squares(Saving.apply))
    module(torch.rand(16, 16)).backward()
    nodes = [node for node in training_graph(module).node if node.op_type == "PythonOp"]
    names = {a.s.decode() for node in nodes for a in node.attribute if a.name == "func_name"}
    # ONNX Runtime decides by the name which functions it recomputes, such as flash attention.
    assert names == {f"{Saving.__module__}.{Saving.__qualname__}"}


class Halved(nn.Module):
    """A layer of a transformer without its second half, with a function behind the softmax."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(2, (2, 4)).transpose(1, 2) for part in self.parts[:3]
        )
        shares = self.function((query @ key.transpose(-1, -2)).softmax(-1))
        return self.norm(self.parts[3]((shares @ value).transpose(1, 2).flatten(2)) + x)


def test_layers_with_functions_are_recomputed() -> None:
    """Recomputed layers with a function of one's own train as in eager."""
    model = nn.Sequential(*(Halved(Saving.apply) for _ in range(3)))
    eager = copy.deepcopy(model)
    module = wrapped(model, memory_optimization=1)
    for one in (module, eager):
        one(torch.linspace(-1, 1, 80).view(2, 5, 8)).pow(3).sum().backward()
    same(module, eager, atol=1e-5)
