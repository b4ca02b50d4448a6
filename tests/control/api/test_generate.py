"""Tests of `ortlaunch generate`: the model, and refusals before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api import generate as generation
from ortlaunch.base.errors import InputError
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import GenerationRequest
from tests import makers

# As small as possible: only the type of the model matters.
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def run_of(folder: Path, task: str) -> RunDir:
    """Write a run of this task with checkpoints of steps 10 and 20."""
    config = LLAMA if task == "causal-lm" else makers.BERT
    recipe = makers.recipe(model={"task": task, "config": config}, data=makers.WORDS)
    found = RunDir(folder)
    for step in (10, 20):
        found.checkpoint_folder(step).mkdir(parents=True)
        (found.checkpoint_folder(step) / "COMPLETE").touch()
    found.recipe.write_text(dump_recipe_yaml(recipe))
    found.plan.touch()
    return found


def asked(model: Path, step: Any = None) -> GenerationRequest:
    return GenerationRequest(str(model), "The", step, 5, 0.0, 0, False)


@pytest.mark.parametrize(
    ("step", "finished", "taken"),
    [
        # `finished` is the step of the run's export; 20 is the newest checkpoint.
        (None, 20, ("run/export", None)),
        (None, 10, ("run", 20)),
        (10, 20, ("run", 10)),
        (None, None, ("run", 20)),
        # keep_best.export: the training has 20 steps, and its export is of step 10.
        (None, -10, ("run", 20)),
        ("best", -10, ("run/export", None)),
    ],
    ids=["export", "export of another step", "asked for", "not finished", "best", "--step best"],
)
def test_which_model(
    step: Any,
    finished: int | None,
    taken: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The export is used if it is of the newest checkpoint, else the requested or newest one."""
    run = run_of(tmp_path / "run", "causal-lm")
    started = list[Any]()
    if finished:
        best = {"best": {"step": 10, "exported": True}} if finished < 0 else {}
        write_json_atomically(run.summary, {"steps": finished if finished > 0 else 20, **best})
        write_json_atomically(run.export / "config.json", {})

    monkeypatch.setattr(
        tasks,
        "run_task_and_return_stdout_or_raise",
        lambda request, _: started.append(request) or "The\n",
    )
    assert generation.generate_text_in_process(asked(run.path, step)) == "The"
    (given,) = started
    assert (given.model, given.step) == (str(tmp_path / taken[0]), taken[1])


def test_refusals(tmp_path: Path) -> None:
    """A run of another task, a model that is not causal, and other folders are refused."""
    for task in ("masked-lm", "pretraining"):
        run = run_of(tmp_path / task, task)
        with pytest.raises(InputError, match=f"trains task {task}; only causal-lm generates text"):
            generation.generate_text_in_process(asked(run.path))
    write_json_atomically(tmp_path / "bert/config.json", {"architectures": ["BertForMaskedLM"]})
    with pytest.raises(
        InputError, match="bert contains a BertForMaskedLM; only causal models generate text"
    ):
        generation.generate_text_in_process(asked(tmp_path / "bert"))
    # A folder with neither a plan.json nor a config.json.
    with pytest.raises(
        InputError,
        match=r"is neither a run folder \(plan.json\) nor a folder of a transformers model",
    ):
        generation.generate_text_in_process(asked(tmp_path / "nothing"))
    with pytest.raises(
        InputError,
        match=r"--step: .* is not a run folder, and has no checkpoints",
    ):
        generation.generate_text_in_process(asked(tmp_path / "bert", 10))
