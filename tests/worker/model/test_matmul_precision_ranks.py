"""Two real ranks: `engine.matmul_precision` applies to every rank of every engine, for one run."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from ortlaunch import recipe
from ortlaunch.base import machine
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from tests.makers import host, plan
from tests.makers import recipe as made
from tests.ort import needs_ort
from tests.torchrun import torchrun
from tests.worker.precision_ranks import WORDS

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, needs_ort, pytest.mark.usefixtures("built")]
MODULE = '''
import torch


class Net(torch.nn.Module):
    """Weights as wide as take torch's products inside ONNX Runtime's graph."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

    def forward(self, x):
        return (self.last(torch.relu(self.first(x))) - x).square().mean()


def model():
    return Net()


def data():
    return [{"x": row} for row in torch.randn(64, 256, generator=torch.Generator().manual_seed(0))]
'''


@pytest.fixture(
    scope="module",
    params=[pytest.param(("ort", "eager"), marks=pytest.mark.ci), ("inductor",)],
    ids=" and ".join,
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[dict[str, Any]]]]:
    """The results of both ranks by engine, at highest, medium and highest again."""
    folder = tmp_path_factory.mktemp("precision")
    (folder / "mine.py").write_text(MODULE)
    for name in request.param:
        for i, word in enumerate(WORDS):
            # At highest oneDNN is off, because it would set torch's precision to medium.
            asked = made(
                batch={"micro_size": 16, "accumulation_steps": 1}, zero={"stage": 1}, launch={"device": "cpu"},
                engine={"name": name, "matmul_precision": word, **({"onednn": False} if word == "highest" else {})},
            )  # fmt: skip
            run = RunDir(folder / f"{name}-{i}")
            write_text_atomically(run.recipe, recipe.dump_recipe_yaml(asked))
            planned = plan(asked, [host("localhost", 2)], launcher="torchrun")
            write_text_atomically(
                # The module of the model is in this folder.
                run.plan,
                planned.to_json().replace('"modules": "here"', f'"modules": "{folder}"'),
            )
    words = (str(folder), str(folder / "found.json"), *request.param)
    torchrun(2, "-m", "tests.worker.precision_ranks", *words, timeout=280)
    read: list[list[dict[str, Any]]] = json.loads((folder / "found.json").read_text())
    return {
        name: read[place * len(WORDS) :][: len(WORDS)] for place, name in enumerate(request.param)
    }


def test_medium_is_in_force_in_every_rank_and_off_again(
    found: dict[str, list[list[dict[str, Any]]]],
) -> None:
    """An engine's matmuls change if torch's do, and the third run equals the first, bit for bit."""
    for name, rank in itertools.product(found, range(2)):
        first, medium, again = (run[rank] for run in found[name])
        assert [run["engine"] for run in (first, medium, again)] == [name] * 3
        assert [run["inside"] for run in (first, medium, again)] == list(WORDS)
        assert [run["after"] for run in (first, medium, again)] == ["highest"] * 3
        assert (medium["gradients"] != first["gradients"]) == (
            medium["product"] != first["product"]
        )
        assert (again["gradients"], again["product"]) == (first["gradients"], first["product"])
        assert medium["told"]["in_force"] == "medium"
        assert medium["told"]["mantissa_bits"] == (
            7 if "amx_bf16" in machine.bfloat16_matmul_units() else 23
        )
