"""The export cache: a restart does not export, and nothing else ever runs another export's graph."""

from __future__ import annotations

import functools
import json
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.recipe.engine import Engine
from ortlaunch.worker.ort import compat, export_cache, export_key
from ortlaunch.worker.ort.tally import tally
from ortlaunch.worker.ort.wrap import wrap
from tests.distributed.modules import python
from tests.ort import needs_ort, share_extensions


@pytest.fixture
def folder(built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of exports."""
    compat.import_ortmodule()  # its extensions are in the real one
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    tally.not_cached.clear()
    return tmp_path / "exports"


class Net(nn.Module):
    """Dropout, batch normalization, a buffer, a constant, a settings object, and arguments of several kinds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)
        self.settings = types.SimpleNamespace(power=2, names=["a"], **settings)
        self.register_buffer("scale", torch.tensor(2.0))
        self.constant = torch.ones(4)

    def forward(self, x: torch.Tensor, bias: Any = None, twice: bool = False) -> torch.Tensor:
        hidden = (
            self.dropout(self.norm(self.first(x.to(self.first.weight.dtype)).float()))
            * self.constant
            * self.scale.item()
        )
        y = self.second(hidden if bias is None else hidden + bias)
        return y.pow(self.settings.power).mean() * (2 if twice else 1)


X = torch.linspace(-1, 2, 24).reshape(6, 4)


def net(**settings: Any) -> Net:
    torch.manual_seed(0)
    return Net(**settings)


def run(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Everything that comes out of a training pass and an evaluation pass, and how the two graphs were had."""
    before = tally.exports, tally.cache_hits
    module = wrap(model, Engine(), threads=1)
    torch.manual_seed(1)
    loss = module(*args, **kwargs)
    loss.backward()
    module.eval()
    with torch.no_grad():
        evaluated = [module(*args, **kwargs).item() for _ in range(2)]
    return {
        "loss": loss.item(),
        "evaluated": evaluated,
        "gradients": [p.grad.tolist() for p in model.parameters() if p.grad is not None],
        "buffers": [b.tolist() for b in model.buffers()],
        "exports": tally.exports - before[0],
        "hits": tally.cache_hits - before[1],
    }


@needs_ort
def test_the_same_model_is_exported_once(folder: Path) -> None:
    """The second time both graphs come from the cache, with the same numbers; evaluation is eager's, no dropout."""
    first = run(net(), X)
    second = run(net(), X)
    assert (first["exports"], first["hits"], second["exports"], second["hits"]) == (2, 0, 0, 2), tally.not_cached
    assert {name: first[name] for name in list(first)[:4]} == {name: second[name] for name in list(second)[:4]}
    eager = net()
    eager(X)
    eager.eval()
    assert second["evaluated"] == pytest.approx([eager(X).item()] * 2, rel=1e-5)
    assert second["buffers"][3] == 1  # batches: what only a trace sees is kept with the graph
    assert len(list(folder.iterdir())) == 2


def frozen() -> Net:
    model = net()
    model.first.requires_grad_(False)
    return model


def changed(path: str, value: Any) -> Net:
    model = net()
    owner, _, name = path.rpartition(".")
    target: Any = functools.reduce(getattr, owner.split("."), model) if owner else model
    setattr(target, name, value)
    return model


def tied() -> Net:
    model = net()
    model.norm.bias = model.norm.weight
    return model


def hooked() -> Net:
    model = net()
    model.first.register_forward_hook(lambda module, inputs, output: output * 3)
    return model


class Keyed(BaseException):
    """Ends an export where its key is known."""


def keys(model: nn.Module, *args: Any, opset: int | None = None, level: int = 0, **kwargs: Any) -> list[str]:
    """Keys of the training and the evaluation graph."""
    module, found = wrap(model, Engine(opset=opset, memory_optimization=level), threads=1), []
    for training in (True, False):
        with pytest.raises(Keyed) as ended, torch.set_grad_enabled(training):
            module(*args, **kwargs)
        found.append(str(ended.value))
    return found


def keys_under_autocast() -> list[str]:
    with torch.autocast("cpu", torch.bfloat16):
        return keys(net(), X)


def typed() -> Net:
    model = net()
    model.first.double()
    return model


BIAS = torch.ones(4)
OTHERS: dict[str, Callable[[], list[str]]] = {
    "the same": lambda: keys(net(), X),
    "opset": lambda: keys(net(), X, opset=16),
    "memory level": lambda: keys(net(), X, level=1),
    "weights' type": lambda: keys(typed(), X),
    "input's type": lambda: keys(net(), X.double()),
    "input's rank": lambda: keys(net(), X[None]),
    "input's gradient": lambda: keys(net(), X.clone().requires_grad_()),
    "input more": lambda: keys(net(), X, BIAS),
    "input by name": lambda: keys(net(), x=X),
    "truth in the call": lambda: keys(net(), X, twice=True),
    "number in the call": lambda: keys(net(), X, 2),
    "another number in the call": lambda: keys(net(), X, 3),
    "a size of one": lambda: keys(net(), X[:1]),
    "frozen weights": lambda: keys(frozen(), X),
    "tied weights": lambda: keys(tied(), X),
    "a hook": lambda: keys(hooked(), X),
    "a layer's setting": lambda: keys(changed("norm.eps", 0.5), X),
    "the dropout": lambda: keys(changed("dropout.p", 0.1), X),
    "a setting in an object": lambda: keys(changed("settings.power", 3), X),
    "a word in a list in an object": lambda: keys(changed("settings.names", ["b"]), X),
    "a constant tensor": lambda: keys(changed("constant", torch.full((4,), 2.0)), X),
    "a buffer's value": lambda: keys(changed("scale", torch.tensor(3.0)), X),
    "another layer": lambda: keys(changed("second", nn.Linear(4, 2)), X),
    "a layer's mode": lambda: keys(changed("norm.training", False), X),
    "autocast": keys_under_autocast,
}


@needs_ort
def test_each_difference_has_its_own_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever single thing differs in the model, the call or the settings, both keys do; a batch's size does not."""

    def end(export: dict[str, Any]) -> str:
        raise Keyed(export_key.key_of(export))

    monkeypatch.setattr(export_cache, "key_of", end)
    found = {name: other() for name, other in OTHERS.items()}
    assert len({key for pair in found.values() for key in pair}) == 2 * len(OTHERS)
    assert keys(net(), X) == keys(net(), torch.zeros(9, 4)) == found["the same"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not set(keys(net(), X)) & set(found["the same"])


@needs_ort
def test_a_changed_setting_gives_its_own_numbers(folder: Path) -> None:
    """After the graph of power 2 is kept, power 3 gives eager's numbers for power 3."""
    run(net(), X)
    eager = changed("settings.power", 3)
    eager(X)
    eager.eval()
    assert run(changed("settings.power", 3), X)["evaluated"][0] == pytest.approx(eager(X).item(), rel=1e-5)


# ----------------------------------------------------------------------------------------------------- restarts

MODEL = """
import torch
FACTOR = {factor}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        return scaled(self.linear(x)).sum()
def scaled(y):
    return y * FACTOR
"""
RESTART = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ortlaunch.recipe.engine import Engine
from ortlaunch.worker.ort.wrap import wrap
from ortlaunch.worker.ort.tally import tally
import torch, model
torch.manual_seed(0)
net = model.Model()
loss = wrap(net, Engine(), threads=1)(torch.ones(2, 4))
loss.backward()
print(json.dumps([tally.exports, tally.cache_hits, loss.item(), net.linear.weight.grad.tolist(), tally.not_cached]))
"""


def restart(folder: Path, factor: int) -> list[Any]:
    """A fresh process that trains a step of the model as it is written now."""
    source = MODEL.format(factor=factor)
    if not (folder / "model.py").exists() or (folder / "model.py").read_text() != source:
        (folder / "model.py").write_text(source)
    done = python(RESTART, str(folder), ORTLAUNCH_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_ort
@pytest.mark.slow
def test_a_restart_does_not_export_and_changed_code_does(built: None, tmp_path: Path) -> None:
    """The same model in a second process is read; a number changed in its source file is exported."""
    share_extensions(tmp_path / "cache")
    first, second, third = restart(tmp_path, 2), restart(tmp_path, 2), restart(tmp_path, 3)
    assert [found[:2] for found in (first, second, third)] == [[1, 0], [0, 1], [1, 0]], first[4]
    assert second[2:] == first[2:]
    assert third[2] == pytest.approx(first[2] * 1.5)


# -------------------------------------------------------------------------------------------------------- files


@needs_ort
def test_a_broken_file_is_written_again(folder: Path) -> None:
    """Whatever was cut off or changed in a file, it is not read; its place gets a whole one."""
    expected = run(net(), X)
    for damage in (b"", b"short", None):
        for path in folder.iterdir():
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage is None else damage)
        again = run(net(), X)
        assert (again["exports"], again["hits"], again["loss"]) == (2, 0, expected["loss"])
        assert run(net(), X)["hits"] == 2


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    """Ranks that export the same model write the same file, and readers see a whole one or none."""
    path, bodies = tmp_path / "exports" / "a.graph", [bytes([n]) * 200_000 for n in range(4)]
    writers = [threading.Thread(target=export_cache._write, args=(path, body)) for body in bodies]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_bytes()[32:] in bodies
    assert [found.name for found in path.parent.iterdir()] == ["a.graph"]


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files used last stay, by number and by size; a left half file goes when it is old."""
    for age in range(6):
        (tmp_path / f"{age}.graph").write_bytes(b"x" * 10)
        os.utime(tmp_path / f"{age}.graph", (1e9 - age, 1e9 - age))
    (tmp_path / ".old.part").write_bytes(b"")
    os.utime(tmp_path / ".old.part", (1e9, 1e9))
    (tmp_path / ".new.part").write_bytes(b"")
    monkeypatch.setattr(export_cache, "_FILES", 5)
    export_cache._prune(tmp_path)
    assert not (tmp_path / ".old.part").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.part", *(f"{age}.graph" for age in range(5))]
    monkeypatch.setattr(export_cache, "_BYTES", 25)
    export_cache._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.graph")) == ["0.graph", "1.graph"]


@needs_ort
def test_an_unwritable_cache_is_told(folder: Path) -> None:
    """Training goes on, and the reason is kept."""
    folder.write_text("")
    assert run(net(), X)["exports"] == 2
    assert "exports" in tally.not_cached[0]


@needs_ort
def test_without_the_cache_nothing_is_kept(folder: Path) -> None:
    """`export_cache: false` neither reads nor writes."""
    run(net(), X)
    kept, before = len(list(folder.iterdir())), tally.exports
    wrap(net(), Engine(export_cache=False), threads=1)(X)
    assert (len(list(folder.iterdir())), tally.exports - before) == (kept, 1)


@needs_ort
def test_orts_own_cache_is_never_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORTMODULE_CACHE_DIR, under which an evaluation runs the training graph, changes nothing and is told."""
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "ort"))
    found = run(net(), X)
    assert found["evaluated"][0] == found["evaluated"][1]
    assert not (tmp_path / "ort").exists()
    assert any("ORTMODULE_CACHE_DIR" in note for note in tally.notes)


# ------------------------------------------------------------------------------------- what a key cannot hold


@needs_ort
@pytest.mark.parametrize(
    ("value", "reason"),
    [(threading.Lock(), "lock"), (nn.Linear(1, 1), "no part of the model"), (iter([1]).__class__, None)],
    ids=["lock", "hidden layer", "class"],
)
def test_a_model_with_an_unknown_part_is_not_cached(folder: Path, value: Any, reason: str | None) -> None:
    """An object whose state cannot be told keeps the model out of the cache, with the reason."""
    model = net()
    model.settings.part = [value] if reason == "no part of the model" else value
    run(model, X)
    assert (tally.not_cached != []) == (reason is not None)
    if reason:
        assert reason in tally.not_cached[0]
        assert "settings" in tally.not_cached[0]
        assert not folder.exists()
