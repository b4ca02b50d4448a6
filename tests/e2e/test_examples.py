"""The example recipes: each is copied as a user copies it, and trains on engine ort."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.recipe import load_recipe
from ortlaunch.resolve import shipped
from ortlaunch.worker.data import collate
from ortlaunch.worker.model.model import require_scalar_loss
from tests.e2e.runs import COMMAND, environment
from tests.ort import needs_ort

# The loss that each example must be below after training; a uniform guess has a far higher one.
LEARNED = {
    "own-module": 0.05,
    "vit": 0.9,
    "whisper": 1.2,
    "text-classification": 1.1,
    "gpt2": 5.9,
    "questions": 2.5,
    "summary": 5.8,
    "on-device/bytes": 5.2,
}
OWN = [
    name
    for name in LEARNED
    if load_recipe(shipped.shipped_recipe_path_or_refuse(f"examples/{name}")).recipe.model.factory
]


def test_each_example_is_held_to_its_loss() -> None:
    """Every shipped example has a limit for its loss."""
    assert {f"examples/{name}" for name in LEARNED} == {
        name for name in shipped.shipped_recipe_names() if name.startswith("examples")
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "own-module" else pytest.mark.slow) for name in OWN],
)
def test_the_modules_of_an_example_fit_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example's model trains on a batch of its samples, and its samples are reproducible."""
    path = shipped.shipped_recipe_path_or_refuse(f"examples/{name}")
    recipe = load_recipe(path).recipe

    def made(target: str, arguments: dict[str, Any]) -> Any:
        module, _, function = target.partition(":")
        spec = importlib.util.spec_from_file_location(module, path.with_name(f"{module}.py"))
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return getattr(found, function)(**arguments)

    source: Any = recipe.data.train
    samples, model = (
        made(source.factory, source.arguments),
        made(str(recipe.model.factory), recipe.model.arguments),
    )
    assert len(samples) == source.arguments["samples"]
    batch, again = (collate([samples[0], samples[5]]) for _ in range(2))
    assert all(batch[key].equal(again[key]) for key in batch)
    require_scalar_loss(model(**batch)).backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )


@needs_ort
@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_an_example_learns(name: str, home: Path, tmp_path: Path) -> None:
    """An example, copied as a user copies it, trains to a loss far below chance."""
    env = environment(home)
    run(COMMAND, "recipes", "copy", f"examples/{name}", ".", cwd=tmp_path, env=env)
    # Some examples have a script that makes their data.
    for script in ("docstrings.py", "first_lines.py"):
        if (tmp_path / script).exists():
            run(sys.executable, script, cwd=tmp_path, env=env)
    run(COMMAND, "train", f"{Path(name).name}.yaml", "--run-dir=run", cwd=tmp_path, env=env)
    truth = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert truth["engine"]["used"] == "ort"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"] < LEARNED[name]


def run(*command: str | Path, cwd: Path, env: dict[str, str]) -> None:
    done = subprocess.run(
        list(command), cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
