"""FSDP2 and tensor parallelism on two and four ranks: losses, evaluations, exports of one process."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import Mesh
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.run_folder.cached_prediction import cached_prediction_path
from ortlaunch.worker.engine.engine import (
    _move_model_or_buffers_if_weights_are_divided,
    _require_no_layerdrop,
)
from ortlaunch.worker.engine.stepping import ShardedStepper, TorchStepper
from ortlaunch.worker.model.fsdp import shard_model_in_place
from ortlaunch.worker.tasks.bench import compare_and_gather_worst_parity_verdict_json
from tests.e2e.runs import (
    BERT,
    EAGER,
    FULL,
    SMALL,
    TOY,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    exported_again,
    exported_evaluation,
    merged,
)
from tests.makers import bert, plan

FOUR_RANKS = ("--launcher=torchrun", "--nproc-per-node=4")
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Tied embeddings, evaluations, clipping; steps of two micro batches on one rank.
WHOLE = merged(
    BERT,
    {**EAGER, "model": {"config": STILL}, "train": {"max_steps": 8, "max_grad_norm": 0.5}},
)
LLAMA = {
    "task": "causal-lm",
    "config": {"model_type": "llama", **SMALL, "max_position_embeddings": 32},
    "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
}
DIVIDED = merged(WHOLE, {"parallel": {}})
# Its embeddings are tied, and its norms of heads get a part of their gradient on each rank.
QWEN = {
    "task": "causal-lm",
    "config": {
        "model_type": "qwen3",
        **SMALL,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
# Its gates and ups are fused, and experts lie in one tensor.
MIXTRAL = {
    "task": "causal-lm",
    "config": {"model_type": "mixtral", **SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
}
BERT_PLAN = {
    **{
        f"bert.encoder.layer.*.attention.self.{name}": "colwise"
        for name in ("query", "key", "value")
    },
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}
OWN = """
import os
import torch
from torch import nn
from toys import data

class Ranked(nn.Module):
    # Its first values depend on the rank; and it uses other layers there, if asked.
    def __init__(self, uses):
        super().__init__()
        self.rank, self.uses = int(os.environ["RANK"]), uses
        torch.manual_seed(self.rank)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.5)) for _ in "ab")
        self.out = nn.Linear(8, 1)
        self.register_buffer("marks", torch.full((2,), self.rank, dtype=torch.int16))

    def forward(self, x, y):
        if self.uses == "weights":
            x = nn.functional.linear(x, self.layers[0][0].weight)
        layers = self.layers if self.uses != "other" else [self.layers[self.rank % 2]]
        for layer in layers:
            x = x + layer(x)
        return ((self.out(x) - y) ** 2).mean()

def net(uses="same"):
    return Ranked(uses)
"""

SCALED = """
import torch
from torch import nn
from toys import data

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gate * self.down(nn.functional.gelu(self.up(x)))

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList(Layer() for _ in "ab"), nn.Linear(8, 1)
        self.scale, self.fixed = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(2.0), False)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return ((self.scale.exp() * self.out(x) / self.fixed - y) ** 2).mean()

def net():
    return Scaled()
"""


@pytest.fixture(scope="module")
def whole(train: Train) -> Run:
    """A small BERT in one process."""
    return ended_well(train("whole", WHOLE))


@pytest.fixture(scope="module")
def divided(train: Train) -> Run:
    """The same on two ranks, which share it."""
    return ended_well(train("divided", DIVIDED, *TWO_RANKS))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "export/model.safetensors")


def require_same_training(run: Run, whole: Run) -> None:
    """Losses, norms, evaluations and exported weights are those of one process."""
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-6)
    for name in ("gradient_norm", "evaluation_loss"):
        expected = [value for _, value in whole.values(name)]
        assert [value for _, value in run.values(name)] == pytest.approx(expected, rel=1e-5)
    exported, expected_weights = weights(run), weights(whole)
    assert exported.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-5)


def test_two_ranks_that_share_a_model_train_as_one(divided: Run, whole: Run) -> None:
    """Every value of the run is that of one process, and the record says what was divided."""
    require_same_training(divided, whole)
    assert divided.truth()["sharding"] == (
        "FSDP2: 1 x the model, each on 2 ranks, gathered in 2 layers and the rest"
    )
    for name in ("parameters", "trained_parameters"):
        assert divided.truth()[name] == whole.truth()[name]
    assert "mesh: 1 x the model, each shared by 2 ranks (FSDP2): 0-1" in divided.err + divided.out
    # Half of weights, gradients and two moments.
    measured = json.loads((divided.folder / "memory.json").read_text())["measured"]
    assert measured["model"] == pytest.approx(divided.truth()["parameters"] * 4 * 4 / 2, rel=0.05)
    assert "in blocks of up to 1 MiB" in divided.truth()["freed_memory"] or sys.platform != "linux"


@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_of_parts_as_a_model(divided: Run, home: Path) -> None:
    """`ortlaunch export` of the checkpoint is the run's own export, to the byte."""
    assert exported_again(divided, home)


@pytest.mark.slow
@pytest.mark.ci
def test_pretrained_weights_that_rank_0_reads_one_by_one(whole: Run, train: Train) -> None:
    """With and without adapters, for which rank 0 builds the whole model, training is that of one process."""
    folder = str(whole.folder / "export")
    for name, fields in (
        ("read", {}),
        ("adapted", {"lora": {"r": 4, "target_modules": ["query"]}}),
    ):
        pretrained = {"model": {"pretrained": folder, **fields}, "data": {"tokenizer": folder}}
        one = ended_well(train(f"{name}-one", merged(WHOLE, pretrained)))
        two = ended_well(train(f"{name}-two", merged(DIVIDED, pretrained), *TWO_RANKS))
        require_same_training(two, one)
        assert two.truth()["pretrained"] == one.truth()["pretrained"]


@pytest.mark.slow
@pytest.mark.ci
def test_copies_of_a_divided_model(train: Train, whole: Run) -> None:
    """Four ranks, two copies on two ranks each (HSDP), train as one process."""
    recipe = merged(DIVIDED, {"parallel": {"shard": 2}, "batch": {"micro_size": 4}})
    run = ended_well(train("copies", recipe, *FOUR_RANKS))
    require_same_training(run, whole)
    assert run.truth()["sharding"].startswith("FSDP2: 2 x the model, each on 2 ranks")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("inductor", {"engine": {"name": "inductor"}}),
        ("lora", {"model": {**LLAMA, "config": {**LLAMA["config"]}}}),
        ("recomputed", {"model": {"gradient_checkpointing": True}}),
        ("accumulated", {"batch": {"micro_size": 2}}),
        ("chunked", {"engine": {"chunked_loss": 32}}),
        ("sgd", {"optimizer": {"name": "sgd", "momentum": 0.9}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_form_is_that_of_one_process(
    name: str, changes: dict[str, Any], train: Train
) -> None:
    """Each form on two ranks trains as the same form in one process."""
    base = {**WHOLE, "model": changes["model"]} if name == "lora" else merged(WHOLE, changes)
    one = ended_well(train(f"{name}-one", base))
    two = ended_well(train(f"{name}-two", {**base, "parallel": {}}, *TWO_RANKS))
    require_same_training(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_weights_are_near_those_of_one_process(precision: str, train: Train) -> None:
    """In 16 bits losses are those of one process within rounding."""
    one = ended_well(train(f"{precision}-one", merged(WHOLE, {"precision": precision})))
    two = ended_well(
        train(f"{precision}-two", merged(DIVIDED, {"precision": precision}), *TWO_RANKS)
    )
    assert two.losses() == pytest.approx(one.losses(), rel=0.02)


@pytest.mark.slow
def test_narrow_weights_beside_inputs_in_float32(train: Train) -> None:
    """An evaluation computes in 16 bits, as training does."""
    recipe = merged(FULL, {"log": {"trackers": []}, "model": {"arguments": {"dropout": 0.0}}})
    one = ended_well(train("wide-inputs", recipe))
    narrow = {**recipe, "parallel": {}, "precision": "bf16"}
    two = ended_well(train("wide-inputs-two", narrow, *TWO_RANKS))
    for name in ("loss", "evaluation_loss"):
        expected = [value for _, value in one.values(name)]
        assert [value for _, value in two.values(name)] == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.ci
def test_a_module_of_ones_own_is_divided_by_its_lists(train: Train, home: Path) -> None:
    """A custom module, of which a rank has no row of a small parameter; named blocks, too."""
    recipe = merged(FULL, {"log": {"trackers": []}, "model": {"arguments": {"dropout": 0.0}}})
    one = ended_well(train("own-one", recipe))
    for name, parallel in (("own-two", {}), ("own-named", {"blocks": ["Linear"]})):
        two = ended_well(train(name, {**recipe, "parallel": parallel}, *TWO_RANKS))
        assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
        expected = exported_evaluation(two, home)
        assert two.values("evaluation_loss")[-1][1] == pytest.approx(expected, rel=1e-5)
        assert "2 layers" in two.truth()["sharding"]
    refused = train("own-wrong", {**recipe, "parallel": {"blocks": ["Linaer"]}}, *TWO_RANKS)
    assert refused.status == 2
    assert "parallel.blocks: the model has no layer of class Linaer; its classes are" in refused.err


@pytest.fixture(scope="module")
def ranked(home: Path) -> dict[str, Any]:
    """The recipe of a module that differs from rank to rank."""
    (home / "ranked.py").write_text(OWN)
    evaluation = {
        "format": "custom",
        "factory": "toys:data",
        "arguments": {"samples": 17, "seed": 1},
    }
    return merged(
        TOY,
        {
            **EAGER,
            "model": {"factory": "ranked:net"},
            "data": {"evaluation": evaluation},
            "train": {"max_steps": 4, "evaluate_every_steps": 2},
        },
    )


def test_first_values_and_buffers_are_those_of_rank_0(
    train: Train, home: Path, ranked: dict[str, Any]
) -> None:
    """Copies of a model begin with the same values, and are evaluated with the exported statistics."""
    one = ended_well(train("ranked-one", ranked))
    two = ended_well(train("ranked-two", {**ranked, "parallel": {"shard": 1}}, *TWO_RANKS))
    # Batch statistics of micro batches, which both have in the same sizes.
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
    evaluated = weights(two)
    assert evaluated["marks"].tolist() == [0, 0]
    # Plain PyTorch with the exported weights and statistics.
    samples = runpy.run_path(str(home / "toys.py"))["data"](samples=17, seed=1)
    x, y = (torch.stack([sample[name] for sample in samples]) for name in ("x", "y"))
    for number in range(2):
        layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
        prefix = f"layers.{number}."
        layer.load_state_dict(
            {k.removeprefix(prefix): v for k, v in evaluated.items() if k.startswith(prefix)}
        )
        x = x + layer(x)
    x = nn.functional.linear(x, evaluated["out.weight"], evaluated["out.bias"])
    assert two.values("evaluation_loss")[-1][1] == pytest.approx(
        float(((x - y) ** 2).mean()), rel=1e-5
    )


def test_ranks_that_use_other_layers(train: Train, ranked: dict[str, Any]) -> None:
    """Their gradients would be added up without an error: the first step ends with the names."""
    recipe = {**merged(ranked, {"model": {"arguments": {"uses": "other"}}}), "parallel": {}}
    run = train("ranked-other", recipe, *TWO_RANKS)
    assert run.status == 1
    assert not run.values("loss")
    assert (
        "the loss of this step uses model.layers.0.0.bias, model.layers.0.0.weight, "
        "model.layers.0.1.bias, model.layers.0.1.weight, model.layers.1.0.bias and 3 more on some "
        "ranks only"
    ) in run.err


@pytest.mark.slow
def test_weights_that_are_used_outside_of_their_layer(train: Train, ranked: dict[str, Any]) -> None:
    """The error has the setting, and not only an operator of torch."""
    recipe = {**merged(ranked, {"model": {"arguments": {"uses": "weights"}}}), "parallel": {}}
    run = train("ranked-weights", recipe, *TWO_RANKS)
    assert run.status == 2
    assert "give in parallel.blocks the classes of layers that are called as a whole" in run.err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("shape '[4, 5, 4, 4]' is invalid for input of size 160", "4, 4]' .* write -1 for the number"),
        ("got mixed torch.Tensor and DTensor", "without calling it, as in nn.MultiheadAttention"),
    ],
)  # fmt: skip
def test_a_forward_with_sizes_of_whole_layers(
    message: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice has other sizes, and weights of its own: the error has the remedy."""
    monkeypatch.setattr(TorchStepper, "run_micro_batch", Mock(side_effect=RuntimeError(message)))
    stepper = ShardedStepper.__new__(ShardedStepper)
    stepper.group = SimpleNamespace(mesh=Mesh(1, 1, 2))  # type: ignore[assignment]
    with pytest.raises(InputError, match=f"parallel.tensor: .*{expected}"):
        stepper.run_micro_batch({}, is_last_of_step=True)
    stepper.group.mesh = Mesh(1, 2)
    with pytest.raises(InputError if "mixed" in message else RuntimeError):
        stepper.run_micro_batch({}, is_last_of_step=True)


def test_layers_that_are_left_out_at_random() -> None:
    """Each rank would leave out others, and wait for those that it has."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.layerdrop = 0.1  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"parallel: layerdrop is 0.1, .*: \{layerdrop: 0.0\}"):
        _require_no_layerdrop(model)


def test_the_whole_model_never_lies_on_a_device() -> None:
    """FSDP2 moves one layer after another there; a device without memory for all is enough."""
    group: Any = SimpleNamespace(mesh=Mesh(1, 2), device=torch.device("cuda"))
    model = nn.Linear(2, 2)
    _move_model_or_buffers_if_weights_are_divided(model, group, bert(zero=None))
    assert model.weight.device.type == "cpu"


def test_a_bench_compares_no_divided_weights() -> None:
    """The verdict has the reason, and not the error of an operator."""
    engine = SimpleNamespace(record=SimpleNamespace(engine=SimpleNamespace(used="inductor")))
    session: Any = SimpleNamespace(engine=engine, group=SimpleNamespace(mesh=Mesh(1, 2)))
    assert compare_and_gather_worst_parity_verdict_json(session) == {
        "verdict": "not compared",
        "why": "with parallel no rank has all weights for the comparison",
    }


def test_measured_engines_are_not_those_of_whole_models() -> None:
    """`engine: auto` would take engine ort from a run without `parallel`."""
    recipe = bert(zero=None)
    settled = plan(recipe)
    divided = recipe.model_copy(update={"parallel": Parallel()})
    assert cached_prediction_path(divided, settled) != cached_prediction_path(recipe, settled)


def with_model(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The small recipe with another model, at a rate at which it does not amplify roundings."""
    return merged({**WHOLE, "model": model}, {"optimizer": {"learning_rate": 1e-3}, **sections})


@pytest.fixture(scope="module")
def unsliced(train: Train) -> Run:
    """A small Qwen in one process."""
    return ended_well(train("unsliced", with_model(QWEN)))


@pytest.fixture(scope="module")
def sliced(train: Train) -> Run:
    """The same on two ranks, which compute each layer together."""
    compared = {"parallel": {"tensor": 2}, "engine": {"parity_steps": 1}}
    return ended_well(train("sliced", with_model(QWEN, **compared), *TWO_RANKS))


def test_two_ranks_that_compute_each_layer_train_as_one(sliced: Run, unsliced: Run) -> None:
    """They read the same samples; the record has the dimension of each slice."""
    require_same_training(sliced, unsliced)
    parity = sliced.truth()["parity"]
    assert (parity["verdict"], parity["loss_difference"] < 1e-6) == ("passed", True)
    assert 0 < parity["gradient_difference"] < 2e-6
    slices = sliced.truth()["tensor_slices"]
    assert slices["model.embed_tokens.weight"] == 0
    assert slices["model.layers.*.self_attn.o_proj.weight"] == 1
    assert slices["model.layers.*.self_attn.q_norm.weight"] is None
    assert [value for _, value in sliced.values("samples")] == [
        value for _, value in unsliced.values("samples")
    ]


@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_of_slices_continues_in_other_worlds(
    sliced: Run, train: Train, unsliced: Run, home: Path
) -> None:
    """Its export is the run's own, to the byte; and it goes on with ZeRO, and on 2 x 2 ranks."""
    assert exported_again(sliced, home)
    half = {"checkpoint": {"every_steps": 4}, "schedule": {"name": "constant"}}
    whole = ended_well(train("constant", with_model(QWEN, **half)))
    worlds: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"parallel": {"tensor": 2}}, TWO_RANKS),
        ({"zero": {"stage": 1}}, TWO_RANKS),
        ({"parallel": {"tensor": 2}, "batch": {"micro_size": 4}}, FOUR_RANKS),
    ]
    for number, (sections, launcher) in enumerate(worlds):
        steps = {"train": {"max_steps": (3, 6, 8)[number]}}
        run = ended_well(
            train("lives", merged(with_model(QWEN, **half), {**sections, **steps}), *launcher)
        )
    assert [step for step, _ in run.values("loss")] == [step for step, _ in whole.values("loss")]
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "model", "changes", "launcher"),
    [
        ("experts", MIXTRAL, {"parallel": {"tensor": 2}, "batch": {"micro_size": 4}}, FOUR_RANKS),
        ("copies", QWEN, {"parallel": {"tensor": 2, "shard": 1}, "batch": {"micro_size": 4}}, FOUR_RANKS),
        ("adapters", {**LLAMA, "lora": {"r": 4, "target_modules": "all-linear"}}, {}, TWO_RANKS),
        (
            "whole-head",
            {**LLAMA, "lora": {"r": 4, "target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"]}},
            {},
            TWO_RANKS,
        ),
        ("compiled", QWEN, {"engine": {"name": "inductor"}}, TWO_RANKS),
        ("planned", WHOLE["model"], {"parallel": {"tensor": 2, "tensor_plan": BERT_PLAN}}, TWO_RANKS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_sliced_form_is_that_of_one_process(
    name: str,
    model: dict[str, Any],
    changes: dict[str, Any],
    launcher: tuple[str, ...],
    train: Train,
) -> None:
    """Fused experts, copies, adapters, compiled layers and a plan of the recipe train as one rank."""
    one = ended_well(train(f"{name}-unsliced", with_model(model)))
    sections = {"parallel": {"tensor": 2}, **changes}
    two = ended_well(train(f"{name}-sliced", with_model(model, **sections), *launcher))
    require_same_training(two, one)


def test_a_plan_that_lacks_a_layer_is_found(train: Train) -> None:
    """Norms between sliced layers would get a part of their gradient, without an error of torch."""
    plan = dict.fromkeys(
        ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"), "replicate"
    )
    recipe = with_model(QWEN, parallel={"tensor": 2, "tensor_plan": plan})
    run = train("lacking", recipe, *TWO_RANKS)
    assert run.status == 1
    assert not run.values("loss")
    assert "engine eager and plain PyTorch differ by more than 0.0001 in step 1" in run.err
    assert re.search(r"layers.0.self_attn.[qk]_norm.weight +0.\d", run.err)
    assert "such as a norm of heads, is replicated_with_grad_allreduce" in run.err


@pytest.mark.slow
@pytest.mark.ci
def test_parameters_without_a_dimension(train: Train, home: Path, ranked: dict[str, Any]) -> None:
    """Each rank has them whole: they train, are counted, saved and read as in one process."""
    (home / "scaled.py").write_text(SCALED)
    changes = {"model": {"factory": "scaled:net"}, "train": {"max_grad_norm": 0.5}}
    constant = {"checkpoint": {"every_steps": 2}, "schedule": {"name": "constant"}}
    recipe = merged(ranked, {**changes, **constant})
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    one = ended_well(train("scaled-one", recipe))
    two = ended_well(train("scaled-two", {**recipe, "parallel": {}}, *TWO_RANKS))
    assert "the rest; whole on each: model.scale, model.fixed" in two.truth()["sharding"]
    sliced = merged(recipe, {"parallel": {"tensor": 2, "tensor_plan": plan}})
    four = ended_well(train("scaled-four", sliced, *FOUR_RANKS))
    for run in (two, four):
        require_same_training(run, one)
    assert exported_again(two, home)
    # Saved by two ranks, read by one, and the reverse.
    for steps, sections, launcher in (
        (2, {"parallel": {}}, TWO_RANKS),
        (3, {}, ()),
        (4, {"parallel": {}}, TWO_RANKS),
    ):
        lived = merged(recipe, {**sections, "train": {"max_steps": steps}})
        lives = ended_well(train("scaled-lives", lived, *launcher))
    assert lives.losses() == pytest.approx(one.losses(), rel=1e-6)


def test_a_gradient_scaler_takes_divided_gradients_only() -> None:
    """With fp16 a parameter without a dimension is refused by name."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    group: Any = SimpleNamespace()
    with pytest.raises(InputError, match=r"cannot divide scale, .*, and precision: fp16 needs all"):
        shard_model_in_place(model, Parallel(), group, torch.float16)


@pytest.mark.slow
@pytest.mark.ci
def test_a_module_of_ones_own_is_sliced_by_its_names(train: Train) -> None:
    """Names are exact, or have `*` for numbers; what does not fit is an error before step 1."""
    recipe = merged(FULL, {"log": {"trackers": []}, "model": {"arguments": {"dropout": 0.0}}})
    one = ended_well(train("named-one", recipe))
    plan = {"layers.0": "colwise", "layers.3": "rowwise"}
    parallel = {"parallel": {"tensor": 2, "tensor_plan": plan}}
    two = ended_well(train("named-two", merged(recipe, parallel), *TWO_RANKS))
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
    for name, wrong_plan, message in (
        ("none", {}, "transformers has no plan for Net; give parallel.tensor_plan"),
        ("style", {"layers.0": "colwize"}, "got colwize for layers.0; a style is one of"),
        ("layer", {"layer.0": "colwise"}, "no layer of the model is named layer.0; its linear layers are layers.*"),
    ):  # fmt: skip
        parallel = {"parallel": {"tensor": 2, "tensor_plan": wrong_plan}}
        refused = train(f"named-{name}", merged(recipe, parallel), *TWO_RANKS)
        assert refused.status == 2
        assert message in refused.err
