"""model.onnx of a user's own model: its outputs besides the loss, and the inputs that they need."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import EngineError, InputError
from ortlaunch.run_folder.export_records import OnnxCheck
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.onnx.onnx_export import write_and_check_onnx_folder
from tests import makers
from tests.ort import needs_ort

pytestmark = needs_ort


class Own(nn.Module):
    """A model with two scores for each sample, of a row of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)

    def scores(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.last(self.drop(self.first(x[..., None]).relu())).mean(1)
        return found if scale is None else found * scale

    def loss(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, y)


class Mapped(Own):
    """Returns a mapping; `mean` has no row for each sample."""

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> Any:
        scores = self.scores(x, scale)
        found = {"scores": scores, "best": scores.argmax(-1), "mean": scores.mean()}
        return found if y is None else {"loss": self.loss(scores, y), **found}


class Tuple(Own):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = self.scores(x)
        return scores if y is None else (self.loss(scores, y), scores)


class Regression(Own):
    """Compares two numbers with two by a loss that broadcasts them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = self.scores(x)
        targets = torch.zeros(len(x), 2) + (0 if y is None else y[:, None])
        return {"loss": nn.functional.smooth_l1_loss(scores, targets), "scores": scores}


class Weighted(Own):
    """Accepts weights for its loss, but also has a loss without them."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, w: torch.Tensor | None = None
    ) -> Any:
        scores = self.scores(x)
        if y is None:
            return {"scores": scores}
        lost = nn.functional.cross_entropy(scores, y, reduction="none")
        return {"loss": lost.mean() if w is None else (lost * w).mean(), "scores": scores}


class SameName(Own):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return {"x": x, "scores": self.scores(x)} | (
            {} if y is None else {"loss": self.loss(self.scores(x), y)}
        )


class Mute(Own):
    """Fails when it is traced, with an error without text."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        # The export runs the model several times before it is traced.
        if torch.jit.is_tracing():
            raise AssertionError
        return {"scores": self.scores(x)} | (
            {} if y is None else {"loss": self.loss(self.scores(x), y)}
        )


class Branching(Own):
    """Branches on a value that random samples almost never have."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = self.scores(x)
        if x.max() > 0.9999999:
            scores = scores * 10
        return {"scores": scores} | ({} if y is None else {"loss": self.loss(scores, y)})


class Sized(Own):
    """Takes the number of samples into Python, as many detectors do."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = self.scores(x) + torch.ones(int(x.shape[0]), 2)
        return {"scores": scores} | ({} if y is None else {"loss": self.loss(scores, y)})


class Squeezed(Own):
    """Returns a scalar for a batch of one sample."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = self.scores(x)
        more = {} if y is None else {"loss": self.loss(scores, y)}
        return {"scores": scores, "one": scores[:, 0].squeeze(), "none": scores[:, :0], **more}


class Needy(Own):
    def forward(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        scores = self.scores(x)
        # The scores depend on the labels, too.
        return {"loss": self.loss(scores, y), "scores": scores + y[:, None]}


class Silent(Own):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.loss(self.scores(x), y)


class Fixed(Own):
    """Uses the size of its batch as a Python integer."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        # len() gives an integer, which tracing makes a constant.
        rows = torch.zeros(len(x), 2)
        return {
            "loss": self.scores(x).sum() * 0,
            "scores": torch.cat([self.scores(x), rows])[: len(rows)] + rows,
        }


class Attending(Own):
    """Uses operators that torch's exporter lacks, or exports wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        steps = x.diff(dim=1)[..., None].expand(-1, -1, 4)
        scores = self.attention(steps, steps, steps)[0].mean(1)
        return {"scores": scores} if y is None else {"loss": self.loss(scores, y), "scores": scores}


def data() -> list[dict[str, torch.Tensor]]:
    """Return rows of one length."""
    return [
        {"x": torch.rand(5), "scale": torch.tensor([2.0, 0.5]), "y": torch.tensor(n % 2)}
        for n in range(6)
    ]


def weighted() -> list[dict[str, torch.Tensor]]:
    """Return rows with a weight in the loss."""
    return [{**row, "w": torch.tensor(1.0 + n)} for n, row in enumerate(data())]


def ragged() -> list[dict[str, torch.Tensor]]:
    """Return rows of different lengths, which `longest` pads."""
    return [{"x": torch.rand(3 + n), "y": torch.tensor(n % 2)} for n in range(6)]


def ragged_later() -> list[dict[str, torch.Tensor]]:
    """Return rows of which only the sixth is longer."""
    return [{"x": torch.rand(3 + n // 5), "y": torch.tensor(n % 2)} for n in range(6)]


def longest(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = nn.utils.rnn.pad_sequence([each["x"] for each in samples], batch_first=True)
    return {"x": rows, "y": torch.stack([each["y"] for each in samples])}


def exported(
    model: type[nn.Module], folder: Path, patch: pytest.MonkeyPatch, **own: str
) -> tuple[OnnxCheck, nn.Module]:
    """Export a model as `ortlaunch export` does; return the check and the model."""
    # The recipe names the model and the data by this module.
    module: Any = types.ModuleType("own_onnx")
    module.model = model
    module.data = data
    module.longest = longest
    module.ragged = ragged
    module.ragged_later = ragged_later
    module.weighted = weighted
    patch.setitem(sys.modules, "own_onnx", module)
    train = {"format": "custom", "factory": own.get("data", "own_onnx:data")}
    collate = {"collate": own["collate"]} if "collate" in own else {}
    recipe = makers.recipe(
        model={"task": "custom", "factory": "own_onnx:model"}, data={"train": train, **collate}
    )
    read = LoadedData(recipe)
    built = seed_and_build_loss_module_on_cpu(recipe, read)
    return write_and_check_onnx_folder(recipe, folder, built, read), built.model


def test_what_the_loss_alone_takes_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of the loss alone and scalar outputs are left out of the graph."""
    import onnxruntime

    found, model = exported(Mapped, tmp_path, monkeypatch)
    assert (found.inputs, found.outputs, found.batches) == (
        ["x", "scale"],
        ["scores", "best"],
        [[3], [2], [1]],
    )
    assert found.open_axes == {"x": [0], "scale": [0], "scores": [0], "best": [0]}
    # A batch size that the export has not compared.
    x = torch.rand(9, 5)
    scale = torch.rand(9, 2)
    session = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    scores, best = session.run(None, {"x": x.numpy(), "scale": scale.numpy()})
    with torch.no_grad():
        expected = model.eval()(x, scale)
    torch.testing.assert_close(torch.from_numpy(scores), expected["scores"])
    assert best.tolist() == expected["best"].tolist()


def test_labels_of_a_loss_that_broadcasts_are_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's exporter takes what the loss has broadcast for the scores."""
    found, _ = exported(Regression, tmp_path, monkeypatch)
    assert (found.inputs, found.outputs) == (["x"], ["scores"])


def test_lengths_that_differ_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that differ between batches are variable; a bare tensor is named `output`."""
    found, _ = exported(
        Tuple, tmp_path, monkeypatch, data="own_onnx:ragged", collate="own_onnx:longest"
    )
    assert (found.outputs, found.open_axes) == (["output"], {"x": [0, 1], "output": [0]})
    # Batches of samples 0 to 2, 3 and 4, and 5, each padded to its longest.
    assert found.batches == [[3, 5], [2, 7], [1, 8]]


def test_a_length_that_differs_in_the_last_batch_alone_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that differs only in the last batch is variable too."""
    found, _ = exported(
        Tuple, tmp_path, monkeypatch, data="own_onnx:ragged_later", collate="own_onnx:longest"
    )
    assert (found.open_axes, found.batches) == (
        {"x": [0, 1], "output": [0]},
        [[3, 3], [2, 3], [1, 4]],
    )


def test_weights_of_the_loss_are_not_in_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of the loss, on which no output depends, are left out and printed."""
    found, _ = exported(Weighted, tmp_path, monkeypatch, data="own_onnx:weighted")
    assert (found.inputs, found.open_axes) == (["x"], {"x": [0], "scores": [0]})
    assert (
        capsys.readouterr().out == "not inputs of the graph, because no output depends on them: w\n"
    )


def test_an_output_named_like_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output with the name of an input is refused, as a graph cannot have both."""
    with pytest.raises(
        InputError, match=r"SameName\.forward returns 'x', which is an input's name, too"
    ):
        exported(SameName, tmp_path, monkeypatch)


def test_what_python_decided_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that Python reads while tracing are printed and recorded with file and line."""
    # The compared batches need not show a difference.
    found, _ = exported(Branching, tmp_path, monkeypatch)
    (place,) = found.python_decisions
    assert place.startswith(f"{__file__}:")
    assert f"{place}: Python reads a tensor's value here" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    assert exported(Mapped, tmp_path / "other", monkeypatch)[0].python_decisions == []


def test_a_size_that_python_reads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A graph of one number of samples is refused; its line and a remedy are all that is printed."""
    with pytest.raises(EngineError, match="ONNX Runtime cannot run it"):
        exported(Sized, tmp_path, monkeypatch)
    printed = capfd.readouterr()
    assert f"{__file__}:" in printed.out
    assert "for a size write x.shape[0] without int" in printed.out
    # Not what ONNX Runtime prints of the error that it raises.
    assert printed.err == ""


def test_an_error_without_words_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error without text is reported by its class."""
    with pytest.raises(EngineError, match=r"the model does not export: AssertionError$"):
        exported(Mute, tmp_path, monkeypatch)
    # After a failed export, torch itself leaves the cache off.
    assert torch.is_autocast_cache_enabled()


def test_outputs_that_one_sample_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is a scalar for one sample is left out; empty outputs are equal."""
    found, _ = exported(Squeezed, tmp_path, monkeypatch)
    assert found.outputs == ["scores", "none"]


def test_infinities_are_equal_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal infinities count as equal."""
    # A model may use them for answers that it excludes.
    monkeypatch.setattr(
        Tuple, "scores", lambda self, x: self.last(self.first(x[..., None])).mean(1) * math.inf
    )
    found, _ = exported(Tuple, tmp_path, monkeypatch)
    assert found.largest_difference == 0.0


def test_forms_that_torch_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that torch's exporter lacks are exported, as in training by ONNX Runtime."""
    # For example `diff`, which Whisper's mask uses.
    found, _ = exported(Attending, tmp_path, monkeypatch)
    assert (found.inputs, found.outputs) == (["x"], ["scores"])


def test_labels_that_forward_needs_are_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels without which forward does not run are inputs."""
    found, _ = exported(Needy, tmp_path, monkeypatch)
    assert (found.inputs, found.outputs) == (["y", "x"], ["scores"])


def test_a_loss_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that returns its loss alone is refused, with the required form."""
    with pytest.raises(
        InputError,
        match=r'Silent\.forward returns nothing beside its loss .* let it return {"loss": ',
    ):
        exported(Silent, tmp_path, monkeypatch)


def test_a_size_asked_in_python_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that Python reads is fixed in the graph, which is an error."""
    with pytest.raises(EngineError, match="--format onnx: "):
        exported(Fixed, tmp_path, monkeypatch)
