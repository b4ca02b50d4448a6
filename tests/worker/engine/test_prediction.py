"""Predictions: the counted work of a model, its memory, and the seconds that follow from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ortlaunch.base import machine
from ortlaunch.planning.prediction_table import engine_prediction_table_lines
from ortlaunch.recipe import load_recipe
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.resolve import shipped
from ortlaunch.run_folder.cached_prediction import (
    cache_measured_seconds_if_writable,
    cache_prediction_record,
    cached_prediction_path,
    read_cached_prediction_or_none,
    run_seconds_by_engine_of_earlier_runs,
)
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.run_folder.records import Prediction, Summary
from ortlaunch.worker.engine import prediction
from ortlaunch.worker.engine.prediction import (
    StepWork,
    count_step_work,
    measure_seconds_per_unit_by_operator,
    operators_with_contradictory_rates,
)
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.tasks import engine_predictions
from ortlaunch.worker.tasks.engine_predictions import (
    plain_pytorch_seconds_by_operator,
    predict_seconds_and_memory_by_engine,
)
from ortlaunch.worker.training.final_results import training_summary_lines
from tests import makers
from tests.training import run_here

RECIPE = load_recipe(
    shipped.shipped_recipe_path_or_refuse("llama2-7b/tiny"), ["engine.name=eager"]
).recipe
CPU = torch.device("cpu")


def llama() -> tuple[LossModule, dict[str, Any]]:
    """Return a small Llama and a batch of 4 x 64 tokens."""
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=1000, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1000, (4, 64))
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    return LossModule(model), {"input_ids": ids, "labels": ids}


def test_work_of_a_llama_is_that_of_its_matrices() -> None:
    """The matmuls of two passes are 6 operations for each weight and token; weights do not change."""
    model, batch = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = count_step_work(RECIPE, model, batch, CPU, 1)
    two = count_step_work(RECIPE, model, batch, CPU, 2)
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n
    )
    flops = sum(units for kind, _, units in one.operators if kind == "matmul")
    assert flops == 6 * matrices * 256
    assert sum(units for kind, _, units in two.operators if kind == "matmul") == 2 * flops
    # Adam's step is not repeated.
    adam = [[each for each in found.operators if each[0] == "adam"] for found in (one, two)]
    assert adam[0] == adam[1] != []
    assert one.model_bytes == 16 * sum(p.numel() for p in model.parameters()) + 4 * 21
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("hidden", [0, 8])
def test_attention_is_counted_as_transformers_calls_it(hidden: int) -> None:
    """A mask that hides no token is left out, as in a run; attention is causal then."""
    model, batch = llama()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :hidden] = 0
    counted, computed = (
        count_step_work(RECIPE, model, batch, CPU, 1, values) for values in (False, True)
    )
    kinds = {kind for kind, *_ in counted.operators}
    assert ("causal attention" in kinds, "attention" in kinds) == (not hidden, bool(hidden))
    attention = [
        {each for each in found.operators if "attention" in each[0]}
        for found in (counted, computed)
    ]
    assert attention[0] == attention[1] != set()


def test_frozen_parameters_have_no_gradients() -> None:
    """A model with frozen parameters, such as LoRA's, is counted without their gradients."""
    model, batch = llama()
    whole = count_step_work(RECIPE, model, batch, CPU, 1)
    frozen = model.model.get_input_embeddings().requires_grad_(False).weight
    found = count_step_work(RECIPE, model, batch, CPU, 1)
    # Its gradient, Adam's two moments, and the count of Adam's steps.
    assert whole.model_bytes - found.model_bytes == 3 * frozen.nbytes + 4
    assert found.peak_bytes < whole.peak_bytes


def test_peak_is_that_of_a_real_step() -> None:
    """The peak without values is that of the same step with values, by torch's memory tracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, batch = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert count_step_work(RECIPE, model, batch, CPU, 1).peak_bytes == pytest.approx(peak, rel=0.02)


def test_rates_cover_all_kinds_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of a model's operators has a rate, and large matmuls are faster than small ones."""
    # The larger sizes and more rounds take ten seconds.
    monkeypatch.setattr(prediction, "_SIZES", prediction._SIZES[:2])
    monkeypatch.setattr(prediction, "_ROUNDS", 1)
    monkeypatch.setattr(prediction, "_MOST_ROUNDS", 2)
    model, batch = llama()
    rates = measure_seconds_per_unit_by_operator(CPU, torch.float32)
    counted = count_step_work(RECIPE, model, batch, CPU, 1)
    assert {kind for kind, *_ in counted.operators} <= rates.keys()
    assert rates["matmul"][-1][1] < rates["matmul"][0][1]
    begun = predict_seconds_and_memory_by_engine(RECIPE, "cpu", counted, rates, "llama")
    assert begun.keys() == {"eager", "inductor", "ort"}
    assert 0 < begun["eager"]["seconds"] < 10
    divided = RECIPE.model_copy(update={"parallel": Parallel()})
    assert predict_seconds_and_memory_by_engine(divided, "cpu", counted, rates, "llama").keys() == {
        "eager",
        "inductor",
    }
    # A compared step on ort takes more memory; a GPU's allocator counts tensors alone.
    compared = RECIPE.model_copy(
        update={"engine": RECIPE.engine.model_copy(update={"parity_steps": 2})}
    )
    assert (
        predict_seconds_and_memory_by_engine(compared, "cpu", counted, rates, "llama")["eager"]
        == begun["eager"]
    )
    assert (
        predict_seconds_and_memory_by_engine(RECIPE, "cpu", counted, rates, "opt")["ort"]["memory"]
        > begun["ort"]["memory"]
    )
    assert (
        predict_seconds_and_memory_by_engine(RECIPE, "cuda", counted, rates, "llama")["eager"][
            "memory"
        ]
        == counted.peak_bytes
    )


def test_rate_between_two_sizes_is_interpolated() -> None:
    """Between measured sizes a rate is interpolated in logarithms; beyond them it is the last."""
    rates = {"matmul": [(10.0, 1.0), (1000.0, 0.01)]}
    for size, seconds in ((1, 1.0), (10, 1.0), (100, 0.1), (1000, 0.01), (5000, 0.01)):
        counted = StepWork([("matmul", size, 1.0)], 0, 0)
        assert plain_pytorch_seconds_by_operator(counted, rates) == {
            "matmul": pytest.approx(seconds)
        }


def test_a_prediction_in_doubt_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan names the processes beside a measurement; the next `plan --predict` replaces it."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    model, batch = llama()
    busy = iter((["sort (7): 98% of a core"], []))
    monkeypatch.setattr(machine, "watch_and_describe_other_busy_processes", lambda: next(busy))
    kinds = {kind for kind, *_ in count_step_work(RECIPE, model, batch, CPU, 1).operators}
    rates = {kind: [(1.0, 1.0)] for kind in kinds}
    # Measuring takes seconds and is test_rates_cover_all_kinds_of_work's.
    monkeypatch.setattr(
        engine_predictions, "measure_seconds_per_unit_by_operator", lambda *_: rates
    )
    plan = makers.plan(RECIPE)
    engine_predictions.count_measure_and_cache_prediction(RECIPE, plan, model, batch)
    found = read_cached_prediction_or_none(RECIPE, plan)
    assert found is not None
    assert found.reason_seconds_are_doubtful == "1 other process ran while the rates were measured"
    assert [*engine_prediction_table_lines(RECIPE, plan)][-1] == "    sort (7): 98% of a core"
    engine_predictions.count_measure_and_cache_prediction(RECIPE, plan, model, batch)
    again = read_cached_prediction_or_none(RECIPE, plan)
    assert again is not None
    assert again.reason_seconds_are_doubtful == ""


def test_runs_correct_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured step replaces the predicted one, and scales those of other engines."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    plan = makers.plan(RECIPE)
    engines = {name: {"seconds": 3.0, "memory": 1} for name in ("eager", "ort")}
    write_json_atomically(cached_prediction_path(RECIPE, plan), {"engines": engines, "others": []})
    cache_measured_seconds_if_writable(RECIPE, plan, "eager", 0.3, 5.0)
    found = read_cached_prediction_or_none(RECIPE, plan)
    assert found is not None
    assert (
        found.measured_or_corrected_step_seconds("eager"),
        found.measured_or_corrected_step_seconds("ort"),
    ) == (0.3, pytest.approx(0.3))
    assert any("0.3 (of a run)" in line for line in engine_prediction_table_lines(RECIPE, plan))
    # A later prediction keeps what was measured.
    cache_prediction_record(RECIPE, plan, {"engines": engines, "others": ["sort (7)"]})
    assert run_seconds_by_engine_of_earlier_runs(RECIPE, "cpu", 2, plan.batch, 10) == {
        "eager": pytest.approx(8.0)
    }


def test_runs_without_a_prediction_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a run are no prediction; an unwritable cache is no error."""
    plan = makers.plan(RECIPE)
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder, kept in ((blocked, {}), (tmp_path / "cache", {"ort": pytest.approx(6.0)})):
        monkeypatch.setenv("ORTLAUNCH_CACHE", str(folder))
        cache_measured_seconds_if_writable(RECIPE, plan, "ort", 0.5, 1.0)
        assert run_seconds_by_engine_of_earlier_runs(RECIPE, "cpu", 2, plan.batch, 10) == kept
        assert read_cached_prediction_or_none(RECIPE, plan) is None


@pytest.mark.parametrize(("predicted", "is_wrong"), [(0.9, False), (12.1, True), (0.3, True)])
def test_a_wrong_prediction_is_named(predicted: float, is_wrong: bool) -> None:
    """A prediction of twice the measured step, or of half of it, is printed as a wrong one."""
    summary = Summary(
        1, 1, 1.0, None, None, 1.0, {}, {}, step_seconds=0.8, predicted=Prediction(predicted, 2**20)
    )
    (line,) = (line for line in training_summary_lines(summary) if line.startswith("a step"))
    assert line.startswith(f"a step: 0.8 s, predicted {predicted} s and 1.0 MiB a rank")
    assert (f"the prediction was wrong, {predicted / 0.8:.2g} times the step" in line) == is_wrong


def test_a_damaged_record_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has trained must not end with an error of the cache."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    plan = makers.plan(RECIPE)
    path = cached_prediction_path(RECIPE, plan)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    cache_measured_seconds_if_writable(RECIPE, plan, "ort", 0.5, 1.0)
    assert str(path) in capsys.readouterr().out
    kept = run_seconds_by_engine_of_earlier_runs(RECIPE, "cpu", 2, plan.batch, 10)
    assert kept == {"ort": pytest.approx(6.0)}


@pytest.mark.parametrize(
    ("curve", "is_wrong"),
    [
        ([(64, 1e-11), (128, 9e-12), (1024, 5e-12)], False),
        # Seen beside a busy process: a product of 128 was 168 times as slow a unit as one of 64.
        ([(64, 1e-11), (128, 1.68e-9), (1024, 5e-12)], True),
    ],
)
def test_rates_that_contradict_themselves(
    curve: list[tuple[float, float]], is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such rates are measured again, some times, and are named if they stay."""
    assert operators_with_contradictory_rates({"matmul": curve}) == ["matmul"] * is_wrong
    seconds = iter([1.0, 1.0, 500.0, 1.0] if is_wrong else [1.0, 1.0, 1.0])
    monkeypatch.setattr(
        prediction,
        "_operator_kinds_with_sample_calls",
        lambda *_: [("sum", lambda: torch.ones(8).sum())],
    )
    monkeypatch.setattr(prediction, "_least_call_seconds", lambda *_, **__: next(seconds))
    rounds: list[object] = []
    monkeypatch.setattr(
        prediction,
        "operators_with_contradictory_rates",
        lambda rates: rounds.append(rates) or (["sum"] if is_wrong and len(rounds) < 2 else []),
    )
    measure_seconds_per_unit_by_operator(CPU, torch.float32)
    assert len([*seconds]) == 0


@pytest.mark.slow
@pytest.mark.ci
def test_end_of_a_run_prints_the_prediction_beside_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`plan --predict` shows every engine; the run's end and its records have both figures."""
    from ortlaunch.api.plan import resolve_run_for_planning
    from ortlaunch.cli import main

    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    name = "llama2-7b/tiny"
    changes = ("engine.name=eager", "train.max_steps=6")
    found = resolve_run_for_planning(shipped.shipped_recipe_path_or_refuse(name), changes, None, {})
    recipe = found.resolved.recipe_file.recipe
    assert "not predicted" in next(engine_prediction_table_lines(recipe, found.plan))
    monkeypatch.setattr(sys, "argv", ["ortlaunch", "plan", name, *changes, "--predict"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert re.search(r"-> eager +[\d.e-]+ +[\d.]+ MiB", capfd.readouterr().out)
    run = run_here(tmp_path / "run", recipe)
    printed = capfd.readouterr().out
    summary = json.loads(run.summary.read_text())
    # Where other processes were at work, their number stands in place of the figure.
    if "not_predicted" in summary:
        assert re.search(r"a step: [\d.]+ s, not predicted: \d+ other process", printed)
        return
    assert re.search(r"a step: [\d.]+ s, predicted [\d.]+ s and [\d.]+ MiB a rank", printed)
    assert summary["predicted"]["step_seconds"] > 0 < summary["step_seconds"]
