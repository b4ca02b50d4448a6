"""What is refused of DeepSpeed's checkpoints, and what is said of one that is taken in; files as DeepSpeed makes them.

tests/e2e/test_deepspeed_checkpoint.py has DeepSpeed's own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.errors import InputError
from ortlaunch.rank import Rank
from ortlaunch.run.folder import RunDir, write_json
from ortlaunch.worker.checkpoint.restore import Shards
from ortlaunch.worker.deepspeed.take_in import take_in
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.model import LossModule
from ortlaunch.worker.named_state import Part
from tests.makers import plan, recipe

MODEL, RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
ALONE = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
GROUP = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 7, "params": [0]}


Place = type("fragment_address", (), {"__module__": "deepspeed.utils.tensor_fragment"})  # of DeepSpeed, to a pickle


@pytest.fixture(autouse=True)
def _deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that a pickle can name."""
    for name in ("deepspeed", "deepspeed.utils", Place.__module__):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[Place.__module__], Place.__name__, Place, raising=False)


def place(start: int, numel: int) -> Any:
    """Where a parameter's piece lies."""
    made: Any = Place()
    made.start, made.numel = start, numel
    return made


def model_file(**changed: Any) -> dict[str, Any]:
    """Of a Linear(3, 2) after five steps on batches of 6."""
    weights = OrderedDict(weight=torch.zeros(2, 3), bias=torch.zeros(2))
    made = {"module": weights, "buffer_names": [], "optimizer": None, "ds_version": "0.19.8", "skipped_steps": 0,
            "param_shapes": [OrderedDict((name, value.shape) for name, value in weights.items())], "global_steps": 5,
            "global_samples": 30, "mp_world_size": 1, "ds_config": "ds.json"}  # fmt: skip
    return {**made, **changed}


def rank_file(rank: int, **changed: Any) -> dict[str, Any]:
    """Of two: the first has 5 of the 6 weights' elements, the second the last of them, and the bias."""
    places = [{"weight": place(0, 5)}, {"weight": place(0, 1), "bias": place(1, 2)}][rank]
    count = sum(each.numel for each in places.values())
    flat = torch.arange(count, dtype=torch.float32) + 5 * rank
    kept = {"exp_avg": flat + 10, "exp_avg_sq": flat + 20}
    made = {"base_optimizer_state": {"state": {0: kept}, "param_groups": [GROUP]}, "partition_count": [2],
            "single_partition_of_fp32_groups": [flat], "param_slice_mappings": [OrderedDict(places)]}  # fmt: skip
    return {"optimizer_state_dict": {**made, **changed}}


def written(folder: Path, model: dict[str, Any], *ranks: dict[str, Any]) -> RunDir:
    """DeepSpeed's files, and a run folder that asks for them."""
    theirs, run = folder / "theirs", RunDir(folder / "run")
    theirs.mkdir()
    torch.save(model, theirs / MODEL)
    for rank, state in enumerate(ranks):
        torch.save(state, theirs / RANK.format(rank))
    write_json(run.resume, {"deepspeed": str(theirs)})
    return run


def taken(run: RunDir, model: nn.Module | None = None, **train: Any) -> Any:
    """Taken in by a recipe whose data have 10 samples."""
    made = recipe(optimizer={"name": "adamw", "learning_rate": 0.2}, train=train or {"max_steps": 6})
    return take_in(run, made, plan(made), LossModule(model or nn.Linear(3, 2)), 10, ALONE)


def test_weights_moments_and_what_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, out of two ranks' flat tensors; each number of theirs that does not hold has its line."""
    found = taken(
        written(tmp_path, model_file(lr_scheduler={"last": 5}), rank_file(0), rank_file(1, dynamic_loss_scale=True))
    )
    shards = Shards(found.folder)
    assert (found.step, shards.index["state"]) == (5, {"step": 5, "samples": 30, "skipped": 0})
    for kind, first in (("weight", 0), ("exp_avg", 10), ("exp_avg_sq", 20)):
        for name, begin, count in (("model.weight", 0, 6), ("model.bias", 6, 2)):
            into = torch.empty(count)
            shards.read(kind, Part(name, 0, count, into, 0, {}), into)
            assert into.tolist() == [first + begin + number for number in range(count)]
    assert shards.numbers["step"] == {"model.weight": 7.0, "model.bias": 7.0}
    assert capsys.readouterr().out.splitlines() == [
        f"taken in as step 5: {tmp_path}/theirs of DeepSpeed 0.19.8, ZeRO 1 on 2 ranks; 30 samples seen",
        "  not taken: its loss scale; under fp16 it begins anew",
        "  not taken: its learning_rate 0.1; the recipe's holds: 0.2",
        "  not taken: its global batch of 6; the recipe's holds: 2",
        "  not taken: its schedule, its gradient clipping, random numbers and order of samples; the recipe's hold",
        "  the next sample is number 31 of the recipe's order",
    ]


def test_elastic_checkpoints(tmp_path: Path) -> None:
    """With `elastic_checkpoint` DeepSpeed lists what it keeps, and has the step beside it."""
    kept = {"exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}
    files = [rank_file(rank, base_optimizer_state=[kept], base_optimizer_state_step=9) for rank in (0, 1)]
    found = taken(written(tmp_path, model_file(), *files))
    assert Shards(found.folder).numbers["step"] == {"model.weight": 9.0, "model.bias": 9.0}


class Planted:
    """What a pickle can do when it is read as Python reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["model", "rank"])
def test_a_planted_pickle_is_refused_and_not_run(where: str, tmp_path: Path) -> None:
    """In either file; named with what it would have called."""
    mark, planted = tmp_path / "ran", {"client": Planted(tmp_path / "ran")}
    model = model_file(**(planted if where == "model" else {}))
    run = written(tmp_path, model, rank_file(0), rank_file(1, **(planted if where == "rank" else {})))
    name = MODEL if where == "model" else RANK.format(1)
    with pytest.raises(
        InputError, match=rf"theirs/{name} holds .*(Path|getattr).*: refused, and nothing in it was run"
    ):
        taken(run)
    assert not mark.exists()
    assert not run.checkpoints.exists()


def other_optimizer(**kept: torch.Tensor) -> dict[str, Any]:
    return {"base_optimizer_state": {"state": {0: kept}, "param_groups": [GROUP]}}


def unsharded(*groups: list[int]) -> dict[str, Any]:
    return {"param_shapes": None, "optimizer": {"state": {}, "param_groups": [{**GROUP, "params": g} for g in groups]}}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sgd": ({}, other_optimizer(), r"rank_0_.*: the optimizer keeps step of weight; taken in are the exp_avg, exp_avg"),
    "amsgrad": ({}, other_optimizer(exp_avg=torch.ones(5), exp_avg_sq=torch.ones(5), max_exp_avg_sq=torch.ones(5)),
                r"keeps step, exp_avg, exp_avg_sq, max_exp_avg_sq of weight"),
    "ZeRO 3": ({}, {"zero_stage": 3}, r"rank_0_.* is of ZeRO 3; ZeRO 0, 1 and 2 are taken in$"),
    "a rank's file is lost": ({}, {"partition_count": [3]}, r"is of 3 ranks, and .*theirs has the files of 2; copy"),
    "ranks of two saves": ({}, {"base_optimizer_state": {"state": {0: {
        "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}}, "param_groups": [{**GROUP, "step": 6}]}},
        r"rank_1_.* has 7 steps of weight, and another rank's file 6: they are of different saves$"),
    "no rank's files": ({}, {}, r"theirs has no .*zero_pp_rank_N_mp_rank_00_optim_states.pt; copy all that save_check"),
    "bf16 alone": ({}, {"single_partition_of_fp32_groups": [torch.ones(5, dtype=torch.bfloat16)]},
                   r"has 5 elements of torch.bfloat16 where weight should lie in float32$"),
    "no names": ({}, {"param_slice_mappings": [{}]}, r"theirs has 1 of 6 elements of weight$"),
    "tensor parallel": ({"mp_world_size": 2}, {}, r"is of a model in parts \(mp_world_size 2\); here every rank has"),
    "not DeepSpeed's": ({"module": None}, {}, r"model_states.pt was not written by DeepSpeed's engine.save_checkpoint"),
    "another form": ({}, {"base_optimizer_state": {}}, r"theirs is not as DeepSpeed 0.19.8 writes it: KeyError: "),
    "no such buffer": ({"buffer_names": ["seen"]}, {}, r"not as DeepSpeed 0.19.8 writes it: KeyError: 'seen'$"),
    "no counter": ({"global_steps": None}, {}, r"as DeepSpeed 0.19.8 writes it: TypeError: global_steps is None$"),
    "weights alone": ({"param_shapes": None}, {}, r"has weights and no optimizer's state; give them as model.pret"),
    "groups without names": (unsharded([0], [1]), {}, r"has 2 parameter groups, and under ZeRO 0 no names; under ZeRO"),
    "other parameters": (unsharded([0, 1, 2]), {}, r"has the state of 3 parameters, and 2 are trained here; under"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_taken_in(kind: str, tmp_path: Path) -> None:
    model, rank, said = REFUSED[kind]
    ranks = (rank_file(0, **rank), rank_file(1)) if kind != "no rank's files" else ()
    run = written(tmp_path, model_file(**model), *ranks)
    with pytest.raises(InputError, match=f"^DeepSpeed's checkpoint was not taken in: .*{said}"):
        taken(run)
    assert not run.checkpoints.exists()


@pytest.mark.parametrize(
    ("train", "said"), [({"max_steps": 5}, "train.max_steps: 5"), ({"epochs": 3}, "train.epochs: 3 of 10 samples")]
)
def test_nothing_left_to_train(train: dict[str, Any], said: str, tmp_path: Path) -> None:
    run = written(tmp_path, model_file(), rank_file(0), rank_file(1))
    with pytest.raises(InputError, match=rf"theirs has 5 steps and 30 samples: nothing to train by {said}; raise it$"):
        taken(run, **train)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(4, 2), r"weight is \[2, 3\] there and \[2, 4\] here"),
        (nn.Linear(3, 2, bias=False), "it has bias"),
        (nn.Sequential(nn.Linear(3, 2)), r"it lacks 0.weight \(and 1 more\), and it has weight \(and 1 more\)"),
    ],
)
def test_another_model(model: nn.Module, said: str, tmp_path: Path) -> None:
    run = written(tmp_path, model_file(), rank_file(0), rank_file(1))
    with pytest.raises(InputError, match=rf"theirs is of another model: {said}; the recipe's model must be the one"):
        taken(run, model)


def test_frozen_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """Which are not taken in, for no checkpoint of ours holds them: another base is refused."""

    def half(frozen: float) -> nn.Module:
        model = nn.Linear(3, 2)
        model.register_parameter("base", nn.Parameter(torch.full((2,), frozen), requires_grad=False))
        return model

    made = model_file()
    made["module"]["base"] = torch.ones(2)
    run = written(tmp_path, made, rank_file(0), rank_file(1))
    with pytest.raises(InputError, match=r"theirs: base is frozen, and other there than here; see model.pretrained"):
        taken(run, half(2.0))
    assert taken(run, half(1.0)).step == 5
