"""Tests of `engine.name: auto`: the chosen engine, the stored choice, refusals to measure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base import machine
from ortlaunch.base.errors import EngineError, PlanError
from ortlaunch.bench import auto, command, report
from ortlaunch.bench.command import measure_print_and_write_bench_and_cache_engine
from ortlaunch.bench.measure import BenchStopped, MeasurementLength
from ortlaunch.bench.variants import Variant
from ortlaunch.recipe import load_recipe
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run import control
from ortlaunch.run.choices import (
    apply_recorded_engine_and_micro_size,
    measure_cache_and_apply_engine,
)
from ortlaunch.run.preview import apply_known_engine_if_auto_without_measuring
from ortlaunch.run_folder.cached_prediction import cache_measured_seconds_if_writable
from ortlaunch.run_folder.engine_report import Choice, MeasuredEngine
from ortlaunch.run_folder.folder import (
    RunDir,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from tests.control.benches import player, resolved, rows
from tests.makers import OWN_MODULE

pytestmark = pytest.mark.usefixtures("workbench")

TORCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# Results of a comparison with plain PyTorch, and a choice of an earlier start.
DIFFERS = {"verdict": "differs", "largest": 0.25, "why": "loss 1 against 2"}
THEN = {"asked": "auto", "chosen": "eager", "why": "then", "measured": {}}
FIGURES = {"eager": MeasuredEngine("measured")}
# Steps of a run that is worth a measurement.
LONG: dict[str, Any] = {"train": {"max_steps": 10**6}}
UNKNOWN = {"verdict": "not compared", "why": "RuntimeError: x"}


@pytest.mark.parametrize("parity", [DIFFERS, UNKNOWN])
def test_only_what_passes_parity_can_win(parity: dict[str, Any]) -> None:
    """An engine that differs from plain PyTorch, or was not compared, is never chosen."""
    # By speed alone, ort would win.
    made = rows(
        player("ort", [[1.0]], parity), player("inductor", [[2.0]]), player("eager", [[3.0]])
    )
    choice = auto.choose_fastest_engine_of_bench_or_raise(made, Path("bench"))
    assert choice.chosen == "inductor"
    today = time.strftime("%Y-%m-%d")
    assert choice.why.startswith(
        f"measured 1.50 x eager on {today}; ort left out: parity: {parity['verdict']}"
    )
    assert choice.measured["ort"].parity == parity
    text = report.bench_table_and_notes_text(made)
    assert ("DIFFERS 2e-01" if parity is DIFFERS else "NOT COMPARED") in text
    assert f"ort: parity: {parity['why']}" in text


def test_auto_picks_the_measured_fastest() -> None:
    """The engine with the most samples a second is chosen, and the others' ratios are given."""
    made = rows(
        player("ort", [[3.0]]),
        player("inductor", [[2.0]]),
        player("eager", [[1.0]], {"verdict": "reference"}),
    )
    choice = auto.choose_fastest_engine_of_bench_or_raise(made, Path("bench"))
    assert (choice.asked, choice.chosen) == ("auto", "eager")
    assert choice.why.startswith("measured 3.00 x ort, 2.00 x inductor on ")


def test_auto_counts_compilation_and_spread() -> None:
    """A short run takes the engine that starts first; so does one within the spread of another."""
    fast = player("inductor", [[1.0, 1.05, 1.1]])
    fast.ready_answer["first_step"] = {"since_launch": 279.0, "since_model": 270.0}
    plain = player("eager", [[1.12, 1.15, 1.2]], {"verdict": "reference"})
    plain.ready_answer["first_step"] = {"since_launch": 36.0, "since_model": 30.0}
    made = rows(fast, plain)
    chosen = {
        steps: auto.choose_fastest_engine_of_bench_or_raise(made, Path("bench"), steps).chosen
        for steps in (3, 200, 10**5)
    }
    assert chosen == {3: "eager", 200: "eager", 10**5: "inductor"}
    why = auto.choose_fastest_engine_of_bench_or_raise(made, Path("bench"), 10**5).why
    assert "inductor begins 243 s later than eager: ahead after 2,430 steps" in why
    # The cached figures decide again for a run of another length.
    base = resolved(train={"max_steps": 3})
    auto.cache_measured_engine_choice_and_add_its_key(
        base, auto.choose_fastest_engine_of_bench_or_raise(made, Path("bench"), 10**5)
    )
    assert (
        auto.apply_cached_engine_or_note_later_measurement(base).recipe_file.recipe.engine.name
        == "eager"
    )
    noisy = player("inductor", [[1.0, 1.1, 1.3]])
    noisy.ready_answer["first_step"] = fast.ready_answer["first_step"]
    made = rows(noisy, plain)
    assert (
        auto.choose_fastest_engine_of_bench_or_raise(made, Path("bench"), 10**5).chosen == "eager"
    )
    overlap = "inductor and eager cannot be told apart: the middle halves of their steps overlap"
    assert report.fastest_variant_tie_and_break_even_lines(made) == [
        "fastest: inductor or eager",
        overlap,
    ]


def test_auto_without_any_engine() -> None:
    """If no engine can be chosen, the error has every reason."""
    broken = player("ort", [])
    broken.failure_text = (
        "ValueError: planted\n\nTraceback (most recent call last):\n  x\nValueError: planted"
    )
    with pytest.raises(EngineError) as caught:
        auto.choose_fastest_engine_of_bench_or_raise(
            rows(broken, player("eager", [[1.0]], UNKNOWN)), Path("bench")
        )
    assert "ort failed: ValueError: planted" in str(caught.value)
    assert "eager left out: parity: not compared: RuntimeError: x" in str(caught.value)


def remembered_choice(base: ResolvedRun, chosen: str = "inductor") -> None:
    """Store a choice as a bench does."""
    auto.cache_measured_engine_choice_and_add_its_key(
        base, Choice("auto", chosen, "measured 2 x eager", FIGURES)
    )


def test_a_remembered_choice_is_taken() -> None:
    """A stored choice is used without measuring, with a note, and copied to the run folder."""
    base = resolved()
    remembered_choice(base)
    found = apply_recorded_engine_and_micro_size(base, RunDir("run"))
    assert found.recipe_file.recipe.engine == Engine(name="inductor")
    assert found.notes[-1] == "engine auto: inductor: measured 2 x eager (cached)"
    write_run_files_and_clear_earlier_start(
        RunDir("run"), found.recipe_file.recipe, found.plan, found.engine_choice
    )
    assert read_json_or_raise_damaged(RunDir("run").choice)["chosen"] == "inductor"
    assert (
        auto.apply_cached_engine_or_note_later_measurement(base).recipe_file.recipe.engine.name
        == "inductor"
    )


def test_a_changed_choice_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    """A stored choice that was edited by hand is ignored."""
    base = resolved()
    remembered_choice(base)
    path = auto._choice_cache_path(base)
    before = path.stat().st_size
    path.write_text(path.read_text().replace("inductor", "eager"))
    assert auto.read_cached_choice_or_forget_damaged(base) is None
    # "inductor" has three letters more than "eager".
    assert (
        capsys.readouterr().out == f"{path}: has {before - 3} bytes, and had {before}; forgotten\n"
    )


def test_what_trains_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training uses the recipe that was measured, also if its file changes meanwhile."""
    base = resolved(seed=1, train={"max_steps": 5}, log={"profile_steps": [2, 3]})
    measured = rows(player("ort", [[2.0]]), player("inductor", [[1.0]]), player("eager", [[3.0]]))

    def measure(run: ResolvedRun, found: list[Variant], *_: Any) -> dict[str, Any]:
        recipes = [each.resolved_run.recipe_file.recipe for each in found if each.resolved_run]
        # The measurement profiles no steps; the training does.
        assert {(each.seed, each.log.profile_steps) for each in recipes} == {(1, None)}
        # As if the user edited the file while the bench runs.
        resolved(seed=2, train={"max_steps": 99})
        return {"variants": measured, "rounds": 3, "steps": 3}

    monkeypatch.setattr(auto, "measure_variants_and_build_report", measure)
    found = measure_cache_and_apply_engine(base)
    run = RunDir("run")
    write_run_files_and_clear_earlier_start(
        run, found.recipe_file.recipe, found.plan, found.engine_choice
    )
    trained = load_recipe(run.recipe).recipe
    assert (trained.engine.name, trained.seed, trained.train.max_steps) == ("inductor", 1, 5)
    assert trained.log.profile_steps == (2, 3)
    assert found.plan.batch == base.plan.batch


@pytest.mark.parametrize(("number", "status"), [(15, 85), (10, 85), (2, 130)])
def test_a_stop_while_it_is_measured(
    number: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop during the measurement requests another start, unless it was Ctrl-C."""
    # Nothing has begun, so nothing is lost.

    def measure(*_: Any) -> dict[str, Any]:
        raise BenchStopped(number)

    monkeypatch.setattr(auto, "measure_variants_and_build_report", measure)
    with pytest.raises(BenchStopped) as caught:
        measure_cache_and_apply_engine(resolved())
    assert caught.value.exit_status == status


def test_a_run_keeps_its_engine() -> None:
    """The choice in the run folder is used, if its recipe is the same or it has checkpoints."""
    base = resolved()
    run = RunDir("run")
    remembered_choice(base, "inductor")
    write_json_atomically(run.choice, {**THEN, "key": auto.choice_key_digest(base)})
    assert (
        apply_recorded_engine_and_micro_size(base, run).notes[-1]
        == "engine auto: eager: then (at the start of this run)"
    )
    # The key of another recipe: without checkpoints, the stored choice of today is used.
    write_json_atomically(run.choice, {**THEN, "key": "of another model"})
    assert (
        apply_recorded_engine_and_micro_size(base, run).recipe_file.recipe.engine.name == "inductor"
    )
    # With checkpoints, a change of the engine would change the training.
    write_text_atomically(run.checkpoint_folder(5) / "COMPLETE", "")
    assert apply_recorded_engine_and_micro_size(base, run).recipe_file.recipe.engine.name == "eager"


def test_a_run_that_names_its_engine_forgets_the_choice() -> None:
    """A recipe with a fixed engine removes the choice from the run folder."""
    run = RunDir("run")
    write_json_atomically(run.choice, {"chosen": "ort"})
    made = resolved(engine={"name": "eager"})
    write_run_files_and_clear_earlier_start(
        run, made.recipe_file.recipe, made.plan, made.engine_choice
    )
    assert not run.choice.exists()


def test_a_run_of_few_steps_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """48 steps of a measurement are at most 5 % of 960 steps; a shorter run takes the default."""
    short = resolved(train={"max_steps": 959})
    found = apply_recorded_engine_and_micro_size(short, RunDir("run"))
    # No measurement has shown that ort can run the model.
    assert found.recipe_file.recipe.engine == Engine(name="ort", allow_fallback=True)
    why = (
        "engine auto: ort: not measured: 48 steps of a measurement are more than 5% of 959; "
        "`ortlaunch bench recipe.yaml` measures for all later runs"
    )
    assert found.notes[-1] == apply_known_engine_if_auto_without_measuring(short).notes[-1] == why
    write_run_files_and_clear_earlier_start(
        RunDir("run"), found.recipe_file.recipe, found.plan, found.engine_choice
    )
    assert read_json_or_raise_damaged(RunDir("run").choice)["why"] in why
    # The same without ONNX Runtime; a rank of a launcher needs no measurement either.
    narrow = resolved(TORCH, precision="bf16", train={"max_steps": 959})
    assert (
        apply_recorded_engine_and_micro_size(narrow, RunDir("two")).recipe_file.recipe.engine.name
        == "eager"
    )
    # Later runs that are longer do not get this choice, and a measured one comes first.
    enough = resolved(train={"max_steps": 960})
    assert (
        apply_recorded_engine_and_micro_size(enough, RunDir("three")).recipe_file.recipe.engine.name
        == "auto"
    )
    remembered_choice(enough)
    assert (
        apply_recorded_engine_and_micro_size(short, RunDir("four")).recipe_file.recipe.engine.name
        == "inductor"
    )
    assert capsys.readouterr().out == ""


def test_a_run_of_few_steps_takes_the_engine_of_the_fastest_earlier_run() -> None:
    """Start and steps of two engines' own runs decide; one engine alone has nothing beside it."""
    short, shorter = (resolved(train={"max_steps": steps}) for steps in (100, 10))
    recipe, plan = short.recipe_file.recipe, short.plan
    cache_measured_seconds_if_writable(recipe, plan, "eager", 0.3, 3.0)
    found = auto.apply_cached_engine_or_note_later_measurement(short)
    assert found.notes[-1].startswith("engine auto: ort: not measured")
    cache_measured_seconds_if_writable(recipe, plan, "ort", 0.25, 5.0)
    for run, engine, figures in (
        (short, "ort", "100 steps: ort 30 s, eager 33 s"),
        (shorter, "eager", "10 steps: eager 6 s, ort 7.5 s"),
    ):
        found = apply_recorded_engine_and_micro_size(run, RunDir("run"))
        assert found.recipe_file.recipe.engine.name == engine
        assert found.notes[-1] == f"engine auto: {engine}: by earlier runs, for {figures}"
    # An engine that cannot run here, as ort in bf16 on a CPU, is left out.
    narrow = resolved(precision="bf16", train={"max_steps": 100})
    for engine, step_seconds in (("ort", 0.1), ("eager", 0.2), ("inductor", 0.3)):
        cache_measured_seconds_if_writable(
            narrow.recipe_file.recipe, narrow.plan, engine, step_seconds, 1.0
        )
    note = auto.apply_cached_engine_or_note_later_measurement(narrow).notes[-1]
    assert note == "engine auto: eager: by earlier runs, for 100 steps: eager 21 s, inductor 31 s"


@pytest.mark.parametrize(("step", "chosen"), [(0.05, "inductor"), (0.04, "ort")])
def test_a_predicted_run_is_weighed(
    step: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager's first steps predict the run; where 5 % of it are less than the cost, ort is taken."""
    # 6 starts of 3 s and 48 steps: 20.4 s of 410 s (5.0 %), and 19.9 s of 328 s (6.1 %).
    base = resolved(train={"max_steps": 8200})
    jobs = [player(name, [[1.0]]) for name in ("ort", "eager")]
    made = rows(player("ort", [[2.0]]), player("inductor", [[1.0]]))

    def measure(*arguments: Any) -> dict[str, Any]:
        for job in jobs:
            job.ready_answer["step"] = step
            arguments[-1](job)
        return {"variants": made}

    monkeypatch.setattr(auto, "measure_variants_and_build_report", measure)
    found = measure_cache_and_apply_engine(base)
    assert found.recipe_file.recipe.engine.name == chosen
    is_measured = chosen == "inductor"
    assert (auto.read_cached_choice_or_forget_damaged(base) is not None) is is_measured
    if not is_measured:
        assert found.engine_choice is not None
        assert found.engine_choice.why == (
            "not measured: a measurement of 0:19 is more than 5% of 5:28, as predicted by eager's "
            "first steps; `ortlaunch bench recipe.yaml` measures for all later runs"
        )


def test_a_rank_cannot_measure() -> None:
    """A rank uses a stored choice, and is refused without one before anything is written."""
    base = resolved(environ=TORCH, **LONG)
    with pytest.raises(
        PlanError, match=r"run `ortlaunch bench recipe\.yaml` once outside the launcher"
    ):
        apply_recorded_engine_and_micro_size(base, RunDir("run"))
    assert not Path("run").exists()
    # A measurement of another batch is only named in the error.
    remembered_choice(resolved(batch={"micro_size": 8, "accumulation_steps": 1}))
    with pytest.raises(
        PlanError, match=r"the nearest measurement differs in batch: \[8, 1\] -> \[2, 1\]$"
    ):
        apply_recorded_engine_and_micro_size(base, RunDir("run"))
    remembered_choice(resolved())
    assert apply_recorded_engine_and_micro_size(base, RunDir("run")).engine_choice is not None


def test_what_would_fail_anyway_fails_before_measuring() -> None:
    """A run that cannot start fails before minutes of measuring."""
    Path("mine").write_text("")
    with pytest.raises(PlanError, match="is a file, not a folder; give a folder"):
        control.lock_folder_and_run_training(resolved(), Path("mine"))
    assert not Path("bench").exists()


def test_plan_and_dry_run_measure_nothing() -> None:
    """`plan` and `--dry-run` measure nothing, and note that `train` will."""
    base = resolved(**LONG)
    shown = apply_known_engine_if_auto_without_measuring(base)
    assert shown.plan == base.plan
    assert shown.notes[-1].startswith("engine auto: measured when training starts")


def test_a_bench_refreshes_what_auto_remembers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bench updates the stored choice, unless it is shorter than auto's own."""
    base = resolved()
    made = rows(player("ort", [[1.0]]), player("eager", [[2.0]]))
    hardware = {"processor": "a CPU", "cores": 2, "gpus": []}
    figures = {
        "variants": made, "rounds": 3, "name": "tiny", "device": "cpu", "hardware": hardware,
    }  # fmt: skip
    monkeypatch.setattr(command, "resolve_variants_or_refuse_if_none_can_run", lambda *_: [])
    monkeypatch.setattr(command, "measure_variants_and_build_report", lambda *_: figures)
    # Two steps are fewer than auto measures, three are enough.
    for steps, folder in ((2, "short"), (3, "bench")):
        assert auto.read_cached_choice_or_forget_damaged(base) is None
        figures["steps"] = steps
        measure_print_and_write_bench_and_cache_engine(
            base, (), (), MeasurementLength(), Path(folder), False
        )
    found = auto.read_cached_choice_or_forget_damaged(base)
    assert found is not None
    assert (found.chosen, found.bench) == ("ort", str(Path("bench").resolve()))
    assert (
        capsys.readouterr().out.count(
            "engine.name: auto will choose ort for this recipe on this machine\n"
        )
        == 1
    )


@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"micro_size": 4, "accumulation_steps": 1}},
        {"batch": {"micro_size": 2, "accumulation_steps": 2}},
        {"precision": "bf16"},
        {"zero": {"stage": 1}},
        {"parallel": {}},
        {"optimizer": {"name": "adamw", "learning_rate": 0.1}},
        {"model": {"task": "custom", "factory": "mine:model", "arguments": {"width": 3}}},
        {
            "data": {
                "train": {"format": "custom", "factory": "mine:data", "arguments": {"length": 3}}
            }
        },
        {"engine": {"name": "auto", "memory_optimization": 1}},
        {"launch": {"processes_per_node": 2}},
        {"launch": {"env": {"OMP_NUM_THREADS": "7"}}},
    ],
    ids=str,
)
def test_what_decides_speed_is_in_the_key(change: dict[str, Any]) -> None:
    """Each part of a recipe that determines the speed changes the key of the stored choice."""
    assert auto.choice_key_digest(resolved(**change)) != auto.choice_key_digest(resolved())


def test_versions_hardware_and_code_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, another processor and another text of the user's module change the key."""
    Path("mine.py").write_text(f"{OWN_MODULE}one = 1")
    before = auto.choice_key_digest(resolved())
    # The text of the module counts, also where its functions are the same.
    Path("mine.py").write_text(f"{OWN_MODULE}two = 2")
    changed = {before, auto.choice_key_digest(resolved())}
    monkeypatch.setattr(machine, "hardware_record", lambda: {"processor": "another"})
    changed.add(auto.choice_key_digest(resolved()))
    monkeypatch.setattr(auto, "installed_version_by_package_name", lambda names: {"torch": "99"})
    changed.add(auto.choice_key_digest(resolved()))
    assert len(changed) == 4


def test_each_module_of_a_package_is_in_the_key() -> None:
    """A change of any module of the user's package changes the key."""
    package = Path("own_package")
    package.mkdir()
    (package / "__init__.py").write_text("from own_package.inner import model")
    (package / "inner.py").write_text("one = 1")
    before = auto._user_module_digest_or_factory_name(Path(), "own_package:model")
    (package / "inner.py").write_text("two = 2")
    assert auto._user_module_digest_or_factory_name(Path(), "own_package:model") != before


def test_threads_that_nobody_chose_are_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of OMP_NUM_THREADS that torchrun set does not change the key."""
    # Its ranks ignore that value, so a bench without torchrun and a rank of it share a key.
    # With a single core, one thread would be the default.
    monkeypatch.setattr(machine, "usable_core_count", lambda: 8)
    before = auto.choice_key_digest(resolved())
    assert auto.choice_key_digest(resolved({"OMP_NUM_THREADS": "1"})) != before
    assert (
        auto.choice_key_digest(resolved({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}))
        == before
    )


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"seed": 7}, {"train": {"max_steps": 9}}, {"engine": {"name": "ort"}}],
)
def test_what_does_not_decide_speed_is_not_in_the_key(change: dict[str, Any]) -> None:
    """Parts of a recipe that do not determine the speed leave the key the same."""
    assert auto.choice_key_digest(resolved(**change)) == auto.choice_key_digest(resolved())
