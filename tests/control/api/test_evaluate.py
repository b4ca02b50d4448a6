"""Tests of `ortlaunch evaluate`: the checkpoint, the ranks and the folder of an evaluation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api import evaluate as evaluations
from ortlaunch.base.errors import InputError, PlanError
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import dump_recipe_yaml, parse_resolved_recipe
from ortlaunch.resolve import resume
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from ortlaunch.run_folder.origin import ORIGIN, origin_of_run_to_start
from ortlaunch.tables import tasks
from tests import makers

EVALUATION = ("data.evaluation.format=custom", "data.evaluation.factory=mine:data")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of one rank with steps of 8 samples, and a checkpoint of step 10."""
    (tmp_path / "mine.py").write_text(makers.OWN_MODULE)
    recipe = makers.recipe(batch={"global_size": 8, "micro_size": 2})
    found = RunDir(tmp_path / "run")
    found.checkpoint_folder(10).mkdir(parents=True)
    (found.checkpoint_folder(10) / "COMPLETE").touch()
    found.recipe.write_text(dump_recipe_yaml(recipe))
    # The plan has the folder of the user's modules.
    found.plan.write_text(makers.plan(recipe).to_json().replace('"here"', f'"{tmp_path}"'))
    return found


def test_what_is_started(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation may have another number of ranks, and uses the run's modules."""
    # The global batch of 8 is not divisible by 3 ranks.
    started: list[Any] = []
    monkeypatch.setattr(
        evaluations.control,
        "lock_folder_and_run_training",
        lambda *given: started.append(given) or 3,
    )
    options = LaunchOptions("torchrun", 3)
    assert evaluations.evaluate_checkpoint_in_own_run(run, None, EVALUATION, options) == 3
    ((resolved, folder, resume),) = started
    assert (resolved.plan.task, resolved.plan.world_size, resolved.plan.batch.global_samples) == (
        "evaluate",
        3,
        6,
    )
    assert resolved.plan.modules == str(run.path.parent)
    assert folder == run.path / "evaluations/step_00000010"
    assert resume.choice == str(run.checkpoint_folder(10))


def test_what_is_said_of_it(run: RunDir) -> None:
    """The printed changes are those that concern an evaluation: neither batches nor steps."""
    trained = parse_resolved_recipe(run.recipe.read_text())
    write_json_atomically(run.checkpoint_folder(10) / "manifest.json", {"step": 10})
    write_json_atomically(
        run.checkpoint_folder(10) / ORIGIN,
        origin_of_run_to_start(trained, makers.plan(trained).batch, 1, "cpu", {}, None),
    )
    found = evaluations._resolve_evaluation_with_training_batch_or_refuse(
        run, (*EVALUATION, "log.every_steps=7"), LaunchOptions("torchrun", 3)
    )
    options = ResumeOptions(str(run.checkpoint_folder(10)))
    lines = resume.choose_checkpoint_and_list_or_refuse_changes(
        run.evaluation_folder(10), found, None, options
    ).text_lines
    assert lines[0] == f"evaluating after step 10 from {run.checkpoint_folder(10)}"
    assert "  changed: log.every_steps: 10 -> 7: applied" in lines
    assert [line for line in lines if "batch" in line or "world" in line] == []
    assert (
        plan_description_text(found.plan, found.recipe_file.recipe).splitlines()[0]
        == "made: 3 ranks on 1 host, cpu, launcher torchrun"
    )
    assert [
        line
        for line in plan_description_text(found.plan, found.recipe_file.recipe).splitlines()
        if line[0] != " "
    ][1:] == []


def _words(run: RunDir) -> RunDir:
    """Make the run one on text, whose checkpoint has a record of its origin."""
    recipe = makers.bert(data={**makers.WORDS, "evaluation": "python-docs"})
    run.recipe.write_text(dump_recipe_yaml(recipe))
    write_json_atomically(run.checkpoint_folder(10) / "manifest.json", {"step": 10})
    write_json_atomically(
        run.checkpoint_folder(10) / ORIGIN,
        origin_of_run_to_start(recipe, makers.plan(recipe).batch, 1, "cpu", {}, None),
    )
    # With its own vocabulary, the training data no longer determine the tokens.
    write_json_atomically(run.vocabulary, {})
    return run

    # Any other file than the corpus of the training.


def _other_text(run: RunDir) -> str:
    return f"data.train={{format: text, path: {run.path.parent / 'mine.py'}}}"


def _lines(run: RunDir, *overrides: str) -> tuple[str, ...]:
    found = evaluations._resolve_evaluation_with_training_batch_or_refuse(
        run, overrides, LaunchOptions("local")
    )
    return resume.choose_checkpoint_and_list_or_refuse_changes(
        run.evaluation_folder(10), found, None, ResumeOptions(str(run.checkpoint_folder(10)))
    ).text_lines


def test_changes_that_concern_training_alone(run: RunDir) -> None:
    """Changes that concern the training alone are left out; others are printed without --allow."""
    _words(run)
    lines = _lines(
        run, "data.sequence_length=64", "seed=7", _other_text(run), "optimizer.learning_rate=0.5"
    )
    assert [line for line in lines[1:] if "code." not in line] == [
        "  changed: seed: 42 -> 7: applied",
        "  changed: data.sequence_length: 128 -> 64: applied",
    ]
    with pytest.raises(PlanError) as caught:
        _lines(run, "model.config={model_type: bert, num_hidden_layers: 3}")
    assert "model.config" in str(caught.value)
    assert "refused (the weights belong to a different model)" in str(caught.value)
    assert "allow" not in str(caught.value)


def test_a_run_that_keeps_no_vocabulary(run: RunDir) -> None:
    """A run without a stored vocabulary must be evaluated with the same training data."""
    # Its tokens and labels may have been derived from those data.
    _words(run).vocabulary.unlink()
    with pytest.raises(
        PlanError, match=r"data.train: .* refused \(its tokens and labels may come from this data"
    ):
        _lines(run, _other_text(run), "data.sequence_length=64")


@pytest.mark.parametrize(
    ("step", "overrides", "message"),
    [(20, EVALUATION, "--step: .* has no complete checkpoint of step 20; it has steps 10"),
     (None, (), "has no data.evaluation; set it")],
)  # fmt: skip
def test_refusals(step: int | None, overrides: tuple[str, ...], message: str, run: RunDir) -> None:
    """An absent step and an absent evaluation corpus are refused before a process starts."""
    with pytest.raises(InputError, match=message):
        evaluations.evaluate_checkpoint_in_own_run(run, step, overrides, LaunchOptions("local"))


@pytest.fixture
def model(run: RunDir) -> Path:
    """An exported model of a run, with a task that transformers has."""
    words = makers.recipe(
        model={"task": "masked-lm", "config": {"model_type": "bert"}},
        data={
            "train": "python-docs",
            "tokenizer": {"train": "wordpiece", "vocab_size": 300},
            "sequence_length": 24,
        },
        engine={"name": "ort"},
    )
    run.recipe.write_text(dump_recipe_yaml(words))
    folder = run.export_folder(10, "onnx")
    folder.mkdir(parents=True)
    for name in ("model.onnx", "config.json", "tokenizer_config.json"):
        (folder / name).touch()
    return folder


def test_a_model_is_measured_by_its_runs_recipe(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is measured by its run's recipe, with the tokenizer and graph of its own folder."""
    started: list[Any] = []
    monkeypatch.setattr(tasks, "run_task_alone", lambda request: started.append(request) or 3)
    corpus = ("data.evaluation=python-docs",)
    assert (
        evaluations.is_model_path(model),
        evaluations.is_model_path(model.parents[1]),
    ) == (
        True,
        # parents[1] is the run itself, whose checkpoints are evaluated in another way.
        False,
    )
    assert (
        evaluations.evaluate_exported_model_in_process(model, None, corpus, prints_json=False) == 3
    )
    given = started[0]
    assert (given.model, given.modules) == (str(model / "model.onnx"), str(model.parents[2]))
    recipe = parse_resolved_recipe(given.recipe)
    assert (recipe.engine.name, recipe.data.tokenizer, recipe.model.pretrained) == (
        "eager",
        str(model),
        None,
    )

    # Without a graph, transformers loads the weights.
    (model / "model.onnx").unlink()
    evaluations.evaluate_exported_model_in_process(model, None, corpus, prints_json=False)
    assert parse_resolved_recipe(started[1].recipe).model.pretrained == str(model)
    elsewhere = model.parents[2] / "elsewhere"
    for wrong, overrides, message in (
        (model, (), "has no data.evaluation; set it"),
        (model / "other.onnx", corpus, "no such file or folder: "),
        (model.parent, corpus, "contains only adapters"),
        (elsewhere, corpus, "is not in a run folder"),
    ):
        # In another folder the model has no run, and so no recipe.
        if wrong == elsewhere:
            model.rename(elsewhere)
        with pytest.raises(InputError, match=message):
            evaluations.evaluate_exported_model_in_process(
                wrong, None, overrides, prints_json=False
            )


CHATS = {"train": "python-chats", "chat_template": "chat.jinja"}


@pytest.mark.parametrize(
    ("task", "data"),
    [
        ("masked-lm", {}),
        ("causal-lm", CHATS),
        (
            "causal-lm",
            {"train": [{"source": {"format": "text", "path": "mine.txt", "document": "line"}}]},
        ),
        (
            "sequence-classification",
            {"train": {"format": "jsonl", "path": "mine.jsonl", "label_column": "a b"}},
        ),
        (
            "sequence-classification",
            {"train": {"format": "hub", "name": "stanfordnlp/imdb", "split": "train[:9]"}},
        ),
    ],
)
def test_the_advice_can_be_typed(
    task: str, data: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The override that the error suggests for an evaluation corpus is valid."""
    monkeypatch.setattr(tasks, "run_task_alone", lambda request: 3)
    family = "llama" if task == "causal-lm" else "bert"
    made = makers.recipe(
        model={"task": task, "config": {"model_type": family}}, data={**makers.WORDS, **data}
    )
    RunDir(model.parents[1]).recipe.write_text(dump_recipe_yaml(made))
    # The recipe has no evaluation corpus.
    with pytest.raises(InputError) as caught:
        evaluations.evaluate_exported_model_in_process(model, None, (), prints_json=False)
    advice = str(caught.value).partition("set it, as ")[2]
    assert (
        evaluations.evaluate_exported_model_in_process(
            model, None, tuple(shlex.split(advice)), prints_json=False
        )
        == 3
    )


def test_the_advice_for_samples_of_ones_own_can_be_typed(run: RunDir) -> None:
    """The suggested evaluation function for samples of the user's own is valid."""
    with pytest.raises(InputError) as caught:
        evaluations.evaluate_checkpoint_in_own_run(run, None, (), LaunchOptions("local"))
    advice = tuple(shlex.split(str(caught.value).partition("set it, as ")[2]))
    (Path(run.path).parent / "mine.py").write_text(f"{makers.OWN_MODULE}\n\ndef held_out(): ...\n")
    assert evaluations._resolve_evaluation_with_training_batch_or_refuse(
        run, advice, LaunchOptions("local")
    ).recipe_file.recipe.data.evaluation
