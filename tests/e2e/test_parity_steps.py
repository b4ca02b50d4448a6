"""`engine.parity_steps` and `ortlaunch parity` in runs on one and two ranks, good and bad."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.e2e.runs import COMMAND, TWO_RANKS, environment, merged
from tests.ort import build, needs_ort

# The toys' failures: a wrong operator, and programs that an export could change silently.
TOYS = '''
import torch
from torch import nn


class Net(nn.Module):
    """Batch statistics, tanh, dropout as a module and as a number; `noise` on top."""

    def __init__(self, dropout, noise):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.second, self.attention_dropout, self.noise = nn.Linear(16, 1), dropout, noise

    def forward(self, x, y):
        hidden = self.drop(torch.tanh(self.norm(self.first(x))))
        hidden = nn.functional.dropout(hidden, self.attention_dropout, self.training)
        if self.noise:
            hidden = hidden + self.noise * torch.rand_like(hidden)
        return ((self.second(hidden) - y) ** 2).mean()


def net(dropout=0.0, noise=0.0, wrong=False):
    if wrong:  # as an exporter with a bug, on whose graph no error is raised
        torch.onnx.register_custom_op_symbolic("aten::tanh", lambda g, x: g.op("Sigmoid", x), 9)
    return Net(dropout, noise)


class Unexportable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        return torch.logcumsumexp(self.linear(x), dim=0).square().mean()


def unexportable(dropout):
    return Unexportable()


class Moving(nn.Module):
    """The second layer follows the first by `.data =`, as MoCo's key encoder."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, y):
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1
        return ((self.query(x) - y) ** 2).mean() + (self.query(x) - self.key(x).detach()).square().mean()


class Nested(nn.Module):
    """Reads a number of passes that lies deeper than an export looks."""

    def __init__(self):
        super().__init__()
        self.linear, self.state = nn.Linear(8, 1), {"a": [{"b": {"c": [{"d": 0}]}}]}

    def forward(self, x, y):
        self.state["a"][0]["b"]["c"][0]["d"] += 1
        return ((self.linear(x) - y) ** 2).mean() * self.state["a"][0]["b"]["c"][0]["d"]


class Sampled(nn.Module):
    """A variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x, y):
        mean, spread = self.encoder(x).chunk(2, -1)
        return (self.decoder(mean + spread.exp() * torch.randn_like(mean)) - x).square().mean()


def program(name, dropout):
    return {"moving": Moving, "nested": Nested, "sampled": Sampled}[name]()


def identity(model, operator="Identity"):
    import onnx

    nodes = [*model.graph.node]
    at = next(i for i, node in enumerate(nodes) if model.graph.output[0].name in node.output)
    between = onnx.helper.make_node(operator, [nodes[at].input[0]], ["between"])
    nodes[at].input[0] = "between"
    model.graph.node.insert(at, between)
    return model


def wrong_value(model):
    return identity(model, "Tanh")


def data(samples=64):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "y": row.sum().reshape(1)} for row in x]
'''
TOY: dict[str, Any] = {
    "name": "toy",
    "model": {"task": "custom", "factory": "parity_toys:net", "arguments": {"dropout": 0.2}},
    "data": {"train": {"format": "custom", "factory": "parity_toys:data"}},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2},
    "train": {"max_steps": 4, "max_grad_norm": 0.5},
    "log": {"every_steps": 2},
}
PASSED = re.compile(r"^parity: passed: (\d) steps within 0.0001; see .*parity.jsonl$", re.MULTILINE)


class Run(NamedTuple):
    folder: Path
    status: int
    out: str
    err: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def truth(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "engine.json").read_text()))

    def curve(self) -> list[tuple[float, float]]:
        return [(line["loss"], line["gradient_norm"]) for line in self.lines("metrics.jsonl")]


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A function that runs a verb on the changed toy recipe, with built extensions."""
    home = tmp_path_factory.mktemp("parity")
    (home / "parity_toys.py").write_text(TOYS)
    (home / "cache").mkdir()
    # The build is slow, so that all tests share it.
    build()

    def run(verb: str, folder: str, changes: dict[str, Any], *arguments: str) -> Run:
        (home / f"{folder}.yaml").write_text(yaml.safe_dump(merged(TOY, changes)))
        command = [str(COMMAND), verb, f"{folder}.yaml", *arguments, f"--run-dir={folder}"]
        ended = subprocess.run(
            command,
            cwd=home,
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return Run(home / folder, ended.returncode, ended.stdout, ended.stderr)

    return run


def ended_well(run: Run) -> Run:
    assert run.status == 0, f"{run.out[-3000:]}\n{run.err[-3000:]}"
    return run


def counted(truth: dict[str, Any]) -> dict[str, Any]:
    """Return ONNX Runtime's counts, without exports, time and free memory."""
    others = ("exports", "export_seconds", "deepcopy_before_export", "settings")
    return {name: value for name, value in truth["onnxruntime"].items() if name not in others}


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_training_is_what_it_is_without(start: Start) -> None:
    """A training whose first two steps are compared equals, bit for bit, one without comparison."""
    without = ended_well(start("train", "without", {"engine": {"parity_steps": 0}}))
    compared = ended_well(start("train", "compared", {"engine": {"parity_steps": 2}}))
    assert compared.curve() == without.curve()
    assert [line["step"] for line in compared.lines("parity.jsonl")] == [1, 2]
    assert compared.out.count("parity, step ") == 2
    assert PASSED.findall(compared.out) == ["2"]
    truth = compared.truth()
    assert counted(truth) == counted(without.truth())
    assert "parity" not in without.truth()
    parity = truth["parity"]
    assert (parity["verdict"], parity["steps"], parity["tolerance"]) == ("passed", [1, 2], 1e-4)
    # The module's and the functional dropout.
    assert parity["dropouts_switched_off"] == 2
    assert parity["gradient_difference"] < 1e-4
    assert parity["worst"][0][1] == parity["gradient_difference"]
    losses = [line["loss"] for line in compared.lines("parity.jsonl")]
    # The optimizer stepped between the compared steps.
    assert losses[0] != losses[1]
    assert (compared.folder / "export").exists()


@needs_ort
@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, 1, 2])
def test_two_ranks_compare_each_its_own_batch(start: Start, zero: int | None) -> None:
    """`ortlaunch parity` compares each rank's batch, steps the optimizer, and saves nothing."""
    sharding = {"zero": None if zero is None else {"stage": zero}}
    run = ended_well(start("parity", f"two-{zero}", sharding, *TWO_RANKS))
    assert PASSED.findall(run.out) == ["3"]
    assert "largest relative differences of 6 gradients:" in run.out
    # Three steps have three batches, and so three losses.
    records = run.lines("parity.jsonl")
    assert len({record["loss"] for record in records}) == 3
    assert run.truth()["parity"]["gradient_difference"] < 1e-4
    assert run.truth()["onnxruntime"]["backward_passes"] == 2 * 2  # two steps of two passes
    assert not (run.folder / "checkpoints").exists()
    assert not (run.folder / "export").exists()


@needs_ort
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="one rank"),
        pytest.param(TWO_RANKS, id="two ranks", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_a_wrong_operator_stops_the_run(start: Start, arguments: tuple[str, ...]) -> None:
    """A run with a wrong operator ends before step 1, with the layer, both values and advice."""
    wrong = {"model": {"arguments": {"wrong": True, "dropout": 0.0}}}
    run = start("train", f"wrong-{len(arguments)}", wrong, *arguments)
    assert run.status == 1
    assert "differ by more than 0.0001 in step 1" in run.err
    assert re.search(r"^loss: \S+ on ort, \S+ in PyTorch$", run.err, re.MULTILINE)
    assert re.search(
        r"^  (first|norm|second)\.(weight|bias) +\S+  \(norm \S+ on ort, \S+ in PyTorch\)$",
        run.err,
        re.M,
    )
    assert "engine.name=inductor or eager" in run.err
    assert "engine.parity_steps=0 trains without a comparison" in run.err
    # torchrun prints a traceback of its own.
    assert arguments or "Traceback" not in run.err
    parity = run.truth()["parity"]
    assert parity["verdict"] == "failed"
    assert parity["gradient_difference"] > 0.1
    assert run.lines("parity.jsonl")[0]["passed"] is False
    assert run.lines("metrics.jsonl") == []
    assert not (run.folder / "checkpoints").exists()


@needs_ort
@pytest.mark.slow
def test_a_function_on_the_graph_is_compared(start: Start) -> None:
    """An Identity changes no bit of the training; a function that changes values ends the run."""
    plain = ended_well(start("train", "no-function", {"engine": {"parity_steps": 0}}))
    named = {"engine": {"postprocess": "parity_toys:identity"}}
    run = ended_well(start("train", "identity", named))
    assert run.curve() == plain.curve()
    assert run.truth()["parity"]["why"] == "engine.postprocess changes the graph"
    found = run.truth()["onnxruntime"]["postprocess"]
    before, after = found.pop("nodes_before"), found.pop("nodes_after")
    assert (found, after) == ({"function": "parity_toys:identity"}, before + 1)
    assert f"setting postprocess: parity_toys:identity made {after} nodes of an" in run.out
    wrong = start("train", "changed", {"engine": {"postprocess": "parity_toys:wrong_value"}})
    assert wrong.status == 1
    assert "differ by more than 0.0001 in step 1" in wrong.err
    assert "engine.postprocess=parity_toys:wrong_value changed the graph that ran" in wrong.err
    assert wrong.lines("metrics.jsonl") == []


@needs_ort
@pytest.mark.slow
def test_the_tolerance_is_the_recipes(start: Start) -> None:
    """A tolerance above a wrong operator's error passes; one below rounding errors fails."""
    wrong = {"model": {"arguments": {"wrong": True}}, "engine": {"parity_tolerance": 1e9}}
    loose = ended_well(start("parity", "loose", wrong, "--steps=1"))
    assert "tolerance 1e+09" in loose.out
    tight = start("parity", "tight", {"engine": {"parity_tolerance": 1e-12}}, "--steps=1")
    assert tight.status == 1
    assert "differ by more than 1e-12 in step 1" in tight.err


@needs_ort
@pytest.mark.slow
def test_what_cannot_be_compared_is_said(start: Start) -> None:
    """Both passes get the same random numbers; a fallback is recorded as not compared."""
    noisy = {"model": {"arguments": {"noise": 0.1}}}
    drawn = ended_well(start("parity", "noisy", noisy))
    assert PASSED.findall(drawn.out) == ["3"]
    assert "both were given the same random numbers, which training draws itself" in drawn.out
    assert [line["draws"] for line in drawn.lines("parity.jsonl")] == [1, 1, 1]
    # The shared random numbers must not hide a wrong operator.
    wrong = start("train", "noisy-wrong", merged(noisy, {"model": {"arguments": {"wrong": True}}}))
    assert wrong.status == 1
    assert "differ by more than 0.0001 in step 1" in wrong.err
    fallback = {"model": {"factory": "parity_toys:unexportable"}}
    engine = {"engine": {"allow_fallback": True, "parity_steps": 2, "torch_operators": "off"}}
    run = ended_well(start("train", "fallback", merged(fallback, engine)))
    assert "parity: not compared: plain PyTorch itself runs" in run.out
    assert run.truth()["parity"]["verdict"] == "not compared"
    # The verb without anything to compare is a failure; training is not.
    only = start("parity", "fallback-only", merged(fallback, engine))
    assert only.status == 1
    assert "nothing to compare" in only.err


@needs_ort
@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "name", "status"),
    [
        ("train", "moving", 1),
        ("parity", "moving", 1),
        ("parity", "nested", 1),
        pytest.param("parity", "sampled", 0, marks=pytest.mark.ci),
    ],
)
def test_a_program_is_eagers_or_ends(start: Start, verb: str, name: str, status: int) -> None:
    """A model that once trained silently wrong equals PyTorch, or its run ends with a cause."""
    run = start(
        verb,
        f"program-{verb}-{name}",
        {"model": {"factory": "parity_toys:program", "arguments": {"name": name}}},
    )
    assert run.status == status, run.err[-3000:]
    assert (
        "parity: passed" in run.out
        if status == 0
        else re.search("differ by more than|cannot run|changes", run.err)
    )


@pytest.mark.slow
def test_a_compiled_model_passes(start: Start) -> None:
    """Engine inductor passes in bf16 and fp32; a comparison changes neither losses nor graphs."""
    engine = {"engine": {"name": "inductor"}}
    without = ended_well(start("train", "inductor-without", engine))
    run = ended_well(start("train", "inductor", merged(engine, {"engine": {"parity_steps": 2}})))
    assert run.curve() == without.curve()
    assert run.truth()["inductor"] == without.truth()["inductor"]
    assert run.truth()["parity"]["gradient_difference"] < 1e-4
    half = ended_well(start("parity", "inductor-bf16", merged(engine, {"precision": "bf16"})))
    # bf16 has 8 bits of precision, so the tolerance is wider.
    assert half.truth()["parity"]["tolerance"] == 0.2
