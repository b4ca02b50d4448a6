"""Groups of parameters with their own rate, decay and optimizer, and frozen parameters."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.rank import Rank
from ortlaunch.recipe.fields.optimizer import Optimizer, ParameterGroup
from ortlaunch.worker.checkpoint.restore import load_checkpoint_print_notes_and_return_loop_state
from ortlaunch.worker.checkpoint.snapshot import snapshot_of_this_rank
from ortlaunch.worker.engine.optimizer import build_optimizer
from ortlaunch.worker.engine.stepping import TorchStepper
from ortlaunch.worker.model.parameter_groups import (
    freeze_parameters_matching_patterns,
    layer_count_above_by_parameter_name,
)
from ortlaunch.worker.process_group.distributed import DistributedContext

CPU = torch.device("cpu")
ALONE = DistributedContext(Rank(0, 1, 0, 1), CPU)


class Stack(nn.Module):
    """A model with embeddings, two numbered layers and a head."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        loss: torch.Tensor = self.head(self.norm(hidden)).square().mean()
        return loss


def recipe(*groups: dict[str, Any], **fields: Any) -> Optimizer:
    return Optimizer(
        learning_rate=0.01,
        groups=tuple(ParameterGroup(**{"match": ("*",), **group}) for group in groups),
        **fields,
    )


def stepper(recipe: Optimizer, model: nn.Module) -> TorchStepper:
    return TorchStepper(
        model, build_optimizer(recipe, model, "eager", CPU).optimizer, ALONE, "fp32", 1, None
    )


def rate(step: int) -> float:
    return 0.01 * (1 - step / 50)


def train(trained: TorchStepper, steps: range) -> None:
    for step in steps:
        ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(step))
        trained.model(ids).backward()
        trained.clip_step_and_clear_gradients(rate(step))


def same(one: nn.Module, other: nn.Module, within: float = 0.0) -> bool:
    pairs = zip(one.parameters(), other.parameters())
    return all(float((a - b).detach().abs().max()) <= within for a, b in pairs)


def test_fifty_steps_equal_torchs_own_optimizers() -> None:
    """Groups by pattern, by optimizer and by layer are those of a loop in plain torch."""
    model = Stack()
    plain = copy.deepcopy(model)
    freeze_parameters_matching_patterns(model, ["norm.*"])
    made = stepper(
        recipe(
            {"match": ("embed.*",), "name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
            {"match": ("head.weight",), "betas": (0.8, 0.9), "weight_decay": 0.3},
            name="muon", weight_decay=0.1, no_decay=("bias",), layer_decay=0.5, epsilon=1e-6,
        ),
        model,
    )  # fmt: skip
    train(made, range(50))
    plain.norm.requires_grad_(False)
    layers = [plain.layers[0], plain.layers[1]]
    adam = {"eps": 1e-6, "weight_decay": 0.0}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(plain.embed.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.Muon(
            [{"params": [layer.weight], "lr": 0.01 * 0.5 ** (2 - at)} for at, layer in enumerate(layers)],
            weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": [layer.bias], "lr": 0.01 * 0.5 ** (2 - at), **adam} for at, layer in enumerate(layers)]
            + [{"params": [plain.head.bias], "lr": 0.01, **adam},
               {"params": [plain.head.weight], "lr": 0.01, **adam, "betas": (0.8, 0.9), "weight_decay": 0.3}],
        ),
    ]  # fmt: skip
    peaks = [[group["lr"] for group in each.param_groups] for each in optimizers]
    for step in range(50):
        ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(step))
        plain(ids).backward()
        for each, of_each in zip(optimizers, peaks):
            for group, peak in zip(each.param_groups, of_each):
                group["lr"] = peak * rate(step) / 0.01
            each.step()
            each.zero_grad()
    assert same(model, plain, 1e-6)
    assert same(model.norm, Stack().norm)


def plain_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer as its own package's documentation creates it."""
    decays = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) is decayed],
            "weight_decay": decay,
        }
        for decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    if name == "adafactor":
        from transformers import Adafactor

        return Adafactor(decays, lr=0.01, scale_parameter=False, relative_step=False)
    bitsandbytes = pytest.importorskip("bitsandbytes")
    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(decays, lr=0.01, eps=1e-6)
    return made


IN_CI = (pytest.mark.slow, pytest.mark.ci)


@pytest.mark.parametrize("name", ["adafactor", pytest.param("adamw_8bit", marks=IN_CI)])
def test_a_small_state_is_the_packages_own(name: str, tmp_path: Path) -> None:
    """50 steps equal the package's optimizer in a loop, also after a resume from two ranks' files."""
    # A matrix of 6,400 values has a state of 8 bits, and the files' halves cut through one.
    model = Stack(80)
    chosen = {"epsilon": 1e-6} if name == "adamw_8bit" else {}
    settings = recipe(name=name, weight_decay=0.1, **chosen)
    plain = plain_optimizer(name, (by_hand := copy.deepcopy(model)))
    made = stepper(settings, model)
    for step in range(50):
        ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(step))
        by_hand(ids).backward()
        for group in plain.param_groups:
            group["lr"] = rate(step)
        plain.step()
        plain.zero_grad()
        if step == 30:
            for rank in range(2):
                context = DistributedContext(Rank(rank, 2, rank, 2), CPU)
                snapshot_of_this_rank(made.named_state(), {}, context).write_rank_file_and_index(
                    tmp_path
                )
            made = stepper(settings, Stack(80))
            load_checkpoint_print_notes_and_return_loop_state(tmp_path, made.named_state(), ALONE)
        train(made, range(step, step + 1))
    assert same(made.model, by_hand)


def test_an_exception_to_a_freeze() -> None:
    """The last pattern that matches a parameter decides whether it is frozen."""
    model = Stack()
    freeze_parameters_matching_patterns(model, ["*", "!head.*", "!layers.1.*", "*.bias"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["layers.1.weight", "head.weight"]
    with pytest.raises(InputError, match=r"no parameter matches heads"):
        freeze_parameters_matching_patterns(model, ["*", "!heads"])


def test_a_resumed_run_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The states of several optimizers are in a checkpoint; a group's new optimizer starts anew."""
    several = recipe({"match": ("head.*",), "name": "sgd", "momentum": 0.9}, name="muon")
    whole, first, second = (stepper(several, Stack()) for _ in range(3))
    train(whole, range(6))
    train(first, range(3))
    for rank in range(2):
        snapshot_of_this_rank(
            first.named_state(), {}, DistributedContext(Rank(rank, 2, rank, 2), CPU)
        ).write_rank_file_and_index(tmp_path)
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, second.named_state(), ALONE)
    assert capsys.readouterr().out == ""
    train(second, range(3, 6))
    assert same(whole.model, second.model)
    third = stepper(
        recipe({"match": ("embed.*",), "name": "sgd", "momentum": 0.9}, name="muon"), Stack()
    )
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, third.named_state(), ALONE)
    assert "starts with a new state for 3 tensors: embed.weight" in capsys.readouterr().out


def test_every_parameter_is_recorded() -> None:
    """The record has each parameter once, with its group, and frozen ones apart."""
    model = Stack()
    freeze_parameters_matching_patterns(model, ["embed.weight"])
    groups = build_optimizer(
        recipe({"match": ("head.*",), "learning_rate": 0.02}), model, "eager", CPU
    ).groups
    assert [(g.optimizer, g.learning_rate, g.values) for g in groups] == [
        ("adamw", 0.01, 42 + 42 + 12), ("adamw", 0.02, 21), (None, 0.0, 42)
    ]  # fmt: skip
    listed = sorted(name for group in groups for name in group.parameters)
    assert listed == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            "bert.embeddings.word.weight bert.encoder.layer.0.a bert.encoder.layer.1.a bert.pooler.a cls.a",
            [3, 2, 1, 0, 0],
        ),
        ("model.embed.weight model.layers.0.a model.layers.1.a model.norm.a head.a", [3, 2, 1, 0, 0]),
        (
            "shared.a encoder.block.0.layer.0.q encoder.block.0.layer.1.q encoder.norm.a "
            "decoder.embed.a decoder.block.0.layer.0.q decoder.block.1.layer.0.q decoder.norm.a head.a",
            [2, 1, 1, 0, 3, 2, 1, 0, 0],
        ),
        ("first.weight last.weight", [0, 0]),
    ],
)  # fmt: skip
def test_layers_are_counted_from_the_head(names: str, expected: list[int]) -> None:
    """Each stack has its own layers; what comes before them is below, what comes after is above."""
    assert [*layer_count_above_by_parameter_name(names.split()).values()] == expected


def test_a_function_gives_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimizer.attributes` is called with each name and parameter, and comes before groups."""
    module = ModuleType("mine_attributes")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module)["rates"] = lambda name, p: {"learning_rate": 0.5} if p.ndim == 1 else None
    chosen = recipe(
        {"match": ("layers.*",), "weight_decay": 0.7}, attributes="mine_attributes:rates"
    )
    groups = build_optimizer(chosen, Stack(), "eager", CPU).groups
    assert {(g.learning_rate, g.weight_decay): g.parameters for g in groups} == {
        (0.01, 0.7): ["layers.0.weight", "layers.1.weight"],
        (0.01, 0.0): ["embed.weight", "head.weight"],
        (0.5, 0.0): ["layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias", "head.bias"],
    }
    vars(module)["rates"] = lambda name, p: {"learning_rat": 1}
    with pytest.raises(InputError, match=r"mine_attributes:rates\('embed.weight', ...\) returned"):
        build_optimizer(chosen, Stack(), "eager", CPU)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (recipe({"match": ("heads.*", "*.bias")}), "optimizer.groups: no trained parameter matches heads.*;"),
        (recipe({"match": ("embed.*",)}), "optimizer.groups: no trained parameter matches embed.*;"),
        (recipe({"match": ("*.bias",), "name": "muon"}), "muon is for matrices only, and not for layers.0.bias,"),
    ],
)  # fmt: skip
def test_a_pattern_without_parameters_is_an_error(chosen: Optimizer, message: str) -> None:
    """A pattern matches a trained parameter, and an optimizer fits what it is given."""
    model = Stack()
    model.embed.requires_grad_(False)
    with pytest.raises(InputError) as caught:
        build_optimizer(chosen, model, "eager", CPU)
    assert message in str(caught.value)
    with pytest.raises(
        InputError, match=r"model.freeze: no parameter matches emb\.\*; .* embed\.w"
    ):
        freeze_parameters_matching_patterns(model, ["emb.*", "head.*"])
