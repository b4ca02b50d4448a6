"""The optimizer that runs, the reason for a replacement, and the parameters with weight decay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.worker.engine.lamb import Lamb
from ortlaunch.worker.engine.optimizer import (
    _reason_fused_adam_is_refused_or_empty,
    build_optimizer,
    require_trained_parameters,
)
from ortlaunch.worker.model.parameter_groups import build_parameter_groups_and_notes

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Net(nn.Module):
    """A model with transformers' names of weights, biases and norms of several families."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.LayerNorm = nn.LayerNorm(3)
        self.input_layernorm = nn.LayerNorm(3, bias=False)
        self.q_norm = nn.LayerNorm(3, bias=False)


def recipe(**fields: Any) -> Optimizer:
    return Optimizer(**{"learning_rate": 0.1, "weight_decay": 0.01, **fields})


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    return [
        name for name, p in model.named_parameters() if any(p is other for other in group["params"])
    ]


@pytest.mark.parametrize(
    ("no_decay", "decayed", "spared"),
    [
        (
            None,
            ["dense.weight"],
            [
                "dense.bias",
                "LayerNorm.weight",
                "LayerNorm.bias",
                "input_layernorm.weight",
                "q_norm.weight",
            ],
        ),
        (
            ("bias",),
            ["dense.weight", "LayerNorm.weight", "input_layernorm.weight", "q_norm.weight"],
            ["dense.bias", "LayerNorm.bias"],
        ),
        (("dense", "norm", "Norm"), [], [name for name, _ in Net().named_parameters()]),
        ((), [name for name, _ in Net().named_parameters()], []),
    ],
)
def test_words_of_no_decay_choose_the_group(
    no_decay: Any, decayed: list[str], spared: list[str]
) -> None:
    """Each parameter is in one group, without decay if its name matches; no group is empty."""
    model = Net()
    groups, notes = build_parameter_groups_and_notes(
        recipe(**({} if no_decay is None else {"no_decay": no_decay})), model
    )
    assert notes == ()
    found = {group["weight_decay"]: names(model, group) for group in groups}
    assert found == {decay: group for decay, group in ((0.01, decayed), (0.0, spared)) if group}


def test_frozen_parameters_are_left_out() -> None:
    """A frozen parameter is in no group, and a name that matches only frozen ones is noted."""
    model = Net()
    model.dense.requires_grad_(False)
    groups, notes = build_parameter_groups_and_notes(recipe(no_decay=("dense", "norm")), model)
    assert [names(model, group) for group in groups] == [
        ["LayerNorm.weight", "LayerNorm.bias"],
        ["input_layernorm.weight", "q_norm.weight"],
    ]
    assert notes == ("optimizer.no_decay: no parameter's name contains dense",)


def test_nothing_to_train() -> None:
    """A model without trained parameters is an input error in one line."""
    with pytest.raises(
        InputError, match=r"^model: there is nothing to train: it has no parameters$"
    ):
        build_optimizer(recipe(), nn.ReLU(), "eager", torch.device("cpu"))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="none of its 2 parameters has requires_grad"):
        build_optimizer(recipe(), frozen, "eager", torch.device("cpu"))
    with pytest.raises(InputError, match=r"requires_grad under model.freeze=\['\*'\]: leave out"):
        require_trained_parameters(frozen, ["*"])


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"no_decay": ("bias", "gamma", "beta")}, "gamma, beta"),
        ({"no_decay": ("bias", "LayerNorm")}, None),
        ({"no_decay": ("gamma",), "weight_decay": 0.0}, None),
        ({}, None),
    ],
)
def test_an_idle_word_is_noted(fields: dict[str, Any], noted: str | None) -> None:
    """A name of the user that matches nothing is noted, but not one of the default."""
    # Without weight decay no name matters.
    chosen = build_optimizer(recipe(**fields), Net(), "eager", CPU)
    assert chosen.notes == (
        (f"optimizer.no_decay: no parameter's name contains {noted}",) if noted else ()
    )


@pytest.mark.parametrize(
    ("name", "kind", "used", "why"),
    [
        ("adamw", torch.optim.AdamW, "torch.optim.AdamW(fused=True)", ""),
        ("sgd", torch.optim.SGD, "torch.optim.SGD", ""),
        ("lamb", Lamb, "ortlaunch.worker.engine.lamb.Lamb", ""),
        (
            "fused_adam",
            torch.optim.AdamW,
            "torch.optim.AdamW(fused=True)",
            "ONNX Runtime's is for CUDA only",
        ),
    ],
)
def test_what_runs_on_cpu(name: str, kind: type, used: str, why: str) -> None:
    """The record names the class that runs, and the reason if it replaces another."""
    chosen = build_optimizer(recipe(name=name), Net(), "ort", CPU)
    assert (type(chosen.optimizer), chosen.used, chosen.replacement_reason) == (kind, used, why)
    assert bool(chosen.optimizer.defaults.get("fused")) is (kind is torch.optim.AdamW)


class Layouts(nn.Module):
    """Parameters whose elements are not in the order of their indices."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


@pytest.mark.parametrize("name", ["adamw", "fused_adam"])
@pytest.mark.parametrize(
    ("parameters", "used", "note"),
    [
        ({"turned": torch.ones(5, 3).t(), "scalar": torch.ones(())}, "fused", None),
        (
            {"gaps": torch.ones(6, 10)[:, ::2]},
            "foreach",
            "a parameter of shape (6, 5) has gaps or overlaps in memory",
        ),
        (
            {"waves": torch.ones(3, dtype=torch.complex64)},
            "foreach",
            "a parameter of shape (3,) has type complex64",
        ),
    ],
)
def test_fused_adamw_is_torchs_loop_for_any_layout(
    name: str, parameters: dict[str, torch.Tensor], used: str, note: str | None
) -> None:
    """Also where the gradients' layout is another one, for which torch's kernel mixes elements."""
    model = Layouts(**parameters)
    expected = copy.deepcopy(model)
    chosen = build_optimizer(recipe(name=name), model, "eager", CPU)
    assert chosen.used == f"torch.optim.AdamW({used}=True)"
    assert chosen.notes == ((f"AdamW is not fused: {note}",) if note else ())
    loop = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.01, foreach=False)
    torch.manual_seed(0)
    for _ in range(3):
        for weight, other in zip(model.parameters(), expected.parameters()):
            weight.grad = torch.randn(weight.shape, dtype=weight.dtype)
            other.grad = weight.grad.clone()
        chosen.optimizer.step()
        loop.step()
    for weight, other in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)


def test_fused_adam_on_a_gpu_without_onnx_runtime() -> None:
    """Without engine ort, torch's fused AdamW replaces FusedAdam, with the reason."""
    chosen = build_optimizer(recipe(name="fused_adam"), Net(), "inductor", CUDA)
    assert chosen.used == "torch.optim.AdamW(fused=True)"
    assert chosen.replacement_reason == "ONNX Runtime is not loaded with engine inductor"


def test_settings_arrive() -> None:
    """The optimizer has the recipe's rate, betas, epsilon, momentum and decay."""
    adam = build_optimizer(recipe(betas=(0.8, 0.9), epsilon=1e-3), Net(), "eager", CPU).optimizer
    lamb = build_optimizer(
        recipe(name="lamb", betas=(0.8, 0.9), epsilon=1e-3), Net(), "eager", CPU
    ).optimizer
    sgd = build_optimizer(recipe(name="sgd", momentum=0.7), Net(), "eager", CPU).optimizer
    for optimizer in (adam, lamb):
        assert [(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups] == [
            (0.1, (0.8, 0.9), 1e-3)
        ] * 2
    assert [(g["lr"], g["momentum"], g["weight_decay"]) for g in sgd.param_groups] == [
        (0.1, 0.7, 0.01),
        (0.1, 0.7, 0.0),
    ]


def by_hand(
    mode: str, weights: list[torch.Tensor], gradients: list[list[torch.Tensor]], **settings: Any
) -> None:
    """Apply the formulas of ORT 1.19.2's multi_tensor_adam.cu in place.

    The modes are ADAMW_TORCH and ADAMW_TRANSFORMERS.
    """
    rate = settings["lr"]
    decay = settings["weight_decay"]
    epsilon = settings["eps"]
    first, second = settings["betas"]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step, of_step in enumerate(gradients, 1):
        one = 1 - first**step
        two = 1 - second**step
        for weight, gradient, mean, square in zip(weights, of_step, means, squares):
            if mode == "ADAMW_TORCH":
                weight.sub_(weight * rate * decay)
            mean.copy_(first * mean + (1 - first) * gradient)
            square.copy_(second * square + (1 - second) * gradient * gradient)
            if mode == "ADAMW_TORCH":
                weight.sub_(rate * mean / (one * (square.sqrt() / two**0.5 + epsilon)))
            else:
                weight.sub_(rate * two**0.5 / one * mean / (square.sqrt() + epsilon))
                weight.sub_(rate * decay * weight)


def stepped(
    optimizer: torch.optim.Optimizer, weights: list[Any], gradients: list[list[torch.Tensor]]
) -> None:
    for of_step in gradients:
        for weight, gradient in zip(weights, of_step):
            weight.grad = gradient.to(weight)
        optimizer.step()


def fifty_steps(dtype: torch.dtype) -> tuple[nn.Module, list[list[torch.Tensor]]]:
    """Return a model, and gradients of many sizes, down to sizes where epsilon matters."""
    torch.manual_seed(3)
    model = Net().to(dtype)
    sizes = [10.0**-k for k in range(8)]
    return model, [
        [size * torch.randn(p.shape, dtype=dtype) for size, p in zip(sizes, model.parameters())]
        for _ in range(50)
    ]


def test_torchs_fused_adamw_is_onnx_runtimes_formula() -> None:
    """torch's fused AdamW makes the same 50 steps as ORT's torch mode, not its other mode."""
    model, gradients = fifty_steps(torch.float64)
    fields: Any = {"weight_decay": 0.1, "epsilon": 1e-6, "betas": (0.9, 0.99), "no_decay": ()}
    chosen = build_optimizer(recipe(name="fused_adam", **fields), model, "ort", CPU)
    assert chosen.used == "torch.optim.AdamW(fused=True)"
    settings = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.9, 0.99)}
    expected, other = ([p.detach().clone() for p in model.parameters()] for _ in range(2))
    by_hand("ADAMW_TORCH", expected, gradients, **settings)
    by_hand("ADAMW_TRANSFORMERS", other, gradients, **settings)
    stepped(chosen.optimizer, list(model.parameters()), gradients)
    for weight, right, wrong in zip(model.parameters(), expected, other):
        torch.testing.assert_close(weight.detach(), right, rtol=1e-6, atol=1e-12)
        assert not torch.allclose(right, wrong, rtol=1e-3)


@pytest.mark.parametrize(
    ("zero", "ranks", "why"),
    [
        (None, 8, "counts in int32, and a tensor has 2,300,000,000 elements on a rank"),
        ({"stage": 1}, 2, "counts in int32, and a tensor has 3,370,000,000 elements on a rank"),
        ({"stage": 0}, 8, "counts in int32, and a tensor has 6,740,000,000 elements on a rank"),
        ({"stage": 2}, 4, ""),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            4,
            "zero.offload keeps the optimizer off the GPU",
        ),
    ],
)
def test_fused_adam_is_replaced_where_it_would_write_elsewhere(
    zero: Any, ranks: int, why: str
) -> None:
    """torch's AdamW replaces FusedAdam for tensors of 2^31 or more elements or in host memory."""
    # ZeRO flattens the tensors of a group, so that their sum counts.
    # Real tensors of these sizes would need 27 GB.
    model = nn.ParameterList(
        [nn.Parameter(torch.empty(size, device="meta")) for size in (2_300_000_000, 4_440_000_000)]
    )
    if zero is None:
        model = nn.ParameterList([*model][:1])
    found = _reason_fused_adam_is_refused_or_empty(
        build_parameter_groups_and_notes(recipe(), model)[0], zero, ranks
    )
    assert why in found
    assert bool(why) == bool(found)


@pytest.mark.gpu
def test_onnx_runtimes_fused_adam_is_torchs_fused_adamw() -> None:
    """On a GPU, 50 steps of ORT's kernel and of torch's give the same weights."""
    pytest.importorskip("onnxruntime.training")
    from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps

    import_ortmodule_with_repairs_and_export_steps()
    model, gradients = fifty_steps(torch.float32)
    ours = copy.deepcopy(model).cuda()
    theirs = model.cuda()
    fields = recipe(name="fused_adam", weight_decay=0.1)
    kernels = [
        build_optimizer(fields, ours, "eager", CUDA),
        build_optimizer(fields, theirs, "ort", CUDA),
    ]
    assert [kernel.used for kernel in kernels] == [
        "torch.optim.AdamW(fused=True)",
        "onnxruntime.training.optim.FusedAdam",
    ]
    for kernel, net in zip(kernels, (ours, theirs)):
        stepped(kernel.optimizer, list(net.parameters()), gradients)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
