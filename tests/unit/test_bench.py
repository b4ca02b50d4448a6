"""The pure parts of `ortlaunch bench`: variants, figures, the choice of auto, and what it is remembered by."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch import bench, control, doctor, extensions, machine
from ortlaunch.bench import Length, auto, picture, report
from ortlaunch.bench.turns import Player
from ortlaunch.bench.variants import ENGINES, Variant, engine_overrides, settle, split_values, variants
from ortlaunch.control import Settled, settle_run
from ortlaunch.errors import EngineError, InputError, MissingDependency, PlanError
from ortlaunch.recipe.engine import Engine
from ortlaunch.rundir import RunDir, read_json, write_json, write_text
from ortlaunch.world import Asked
from tests.makers import CUSTOM

TORCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in a folder and with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "require", lambda *_: None)  # whatever is installed here


def settled(*overrides: str, environ: dict[str, str] | None = None, **sections: Any) -> Settled:
    """A custom recipe with engine auto and these sections, read from a file here."""
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump({**CUSTOM, "engine": {"name": "auto"}, **sections}))
    return settle_run(path, overrides, Asked(), environ or {})


def player(name: str, took: list[list[float]], parity: dict[str, Any] | None = None, *chosen: str) -> Player:
    """A variant with these seconds of its steps, turn by turn."""
    found = settle(Variant(name, chosen), settled())
    made = Player(found, RunDir(f"out/{found.slug}"))
    made.ready = {"flops_per_token": None, "peak_flops": None, "engine": {}, "first_step": {"since_launch": 3.0}}
    made.turns = [{"seconds": seconds, "memory": [1 << 20]} for seconds in took]
    made.parity = parity or {"verdict": "passes", "largest": 1e-6}
    return made


def rows(*players: Player) -> list[dict[str, Any]]:
    """Their figures."""
    return report.results([each.variant for each in players], players)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1", ["0", "1"]),
        ("{a: [1, 2]}, {b: 2}", ["{a: [1, 2]}", "{b: 2}"]),
        ("'a,b',\"c,d\",[1,[2,3]]", ["'a,b'", '"c,d"', "[1,[2,3]]"]),
        ("one", ["one"]),
        ("'it]s',x", ["'it]s'", "x"]),
    ],
)
def test_values_of_vary(text: str, values: list[str]) -> None:
    """Commas separate, but not inside brackets or quotes."""
    assert list(split_values(text)) == values


def test_variants_are_engines_times_values() -> None:
    """Every engine with every combination, engines next to each other; names say only what was varied."""
    found = variants(["ort", "eager"], ["engine.memory_optimization=0,1", "optimizer.learning_rate=0.1,1.5"])
    assert len(found) == 8
    assert [variant.engine for variant in found[:2]] == ["ort", "eager"]
    assert found[0].name == "ort memory_optimization=0 learning_rate=0.1"
    assert found[0].slug == "ort-memory_optimization=0-learning_rate=0.1"
    assert len({variant.slug for variant in found}) == 8


def test_an_engine_replaces_the_recipes() -> None:
    """What is ort's stays behind where another engine comes; ort never falls back in a bench."""
    assert engine_overrides("eager") == ('engine={"name": "eager"}',)
    before = Engine(name="auto", parity_steps=2, memory_optimization=1)
    assert engine_overrides("inductor", before) == ('engine={"name": "inductor", "parity_steps": 2}',)
    assert engine_overrides("eager", before) == ('engine={"name": "eager"}',)
    base = settled(engine={"name": "ort", "memory_optimization": 1, "allow_fallback": True})
    assert base.again(*Variant("eager", ()).overrides).file.recipe.engine == Engine(name="eager")
    ort = base.again(*Variant("ort", ()).overrides).file.recipe.engine
    assert (ort.memory_optimization, ort.allow_fallback) == (1, False)


def test_a_refused_variant_says_why() -> None:
    """The recipe's rules refuse a variant alone; when all are refused, that is an error with every reason."""
    base = settled(precision="bf16")
    refused = settle(Variant("ort", ()), base)
    assert (refused.settled, "precision: got bf16 with engine ort" in refused.refused) == (None, True)
    assert settle(Variant("eager", ()), base).settled is not None
    with pytest.raises(InputError) as caught:
        bench.prepared(base, ["ort"], ["seed=1,2"])
    assert str(caught.value).count("ort seed=") == 2


def test_medians_spread_and_ratios() -> None:
    """Figures of known steps: the median of all steps of all turns, against eager with the same varied keys."""
    ort, eager = rows(player("ort", [[1.0, 2.0], [3.0, 4.0]]), player("eager", [[5.0, 5.0], [5.0, 9.0]]))
    assert ort["seconds"] == {"median": 2.5, "quartile_1": 1.75, "quartile_3": 3.25, "min": 1.0, "max": 4.0}
    assert (ort["samples_per_second"], eager["samples_per_second"]) == (2 / 2.5, 2 / 5.0)
    assert (ort["ratio"], eager["ratio"], ort["ratio_to"]) == (2.0, 1.0, "eager")
    text = report.table([ort, eager])
    cells = text.splitlines()[1].split()
    assert (cells[:5], cells[-3:]) == (["ort", "2.5", "1.75", "-", "3.25"], ["1e-06", "2.00", "x"])


def test_ratio_within_the_same_option() -> None:
    """An option's own eager is the yardstick, not that of another option."""
    made = rows(
        player("eager", [[1.0]], None, "seed=1"),
        player("eager", [[4.0]], None, "seed=2"),
        player("ort", [[2.0]], None, "seed=2"),
    )
    assert (made[2]["ratio_to"], made[2]["ratio"]) == ("eager seed=2", 2.0)


def test_mfu_has_one_yardstick() -> None:
    """The highest rate that any variant measured is the peak of all of them."""
    made = []
    for name, peak in (("ort", 100.0), ("eager", 400.0)):
        one = player(name, [[1.0]])
        one.variant = settle(Variant(name, ()), settled(data=_words(), model=_bert()))
        one.ready.update(flops_per_token=2.0, peak_flops=peak)
        made.append(one)
    tokens = made[0].variant.settled.plan.batch.tokens_per_step  # type: ignore[union-attr]
    assert [row["mfu"] for row in rows(*made)] == [2.0 * tokens / 400.0] * 2


def _words() -> dict[str, Any]:
    return {"train": "python-docs", "tokenizer": "here", "sequence_length": 128}


def _bert() -> dict[str, Any]:
    return {"task": "masked-lm", "config": {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}}


DIFFERS = {"verdict": "differs", "largest": 0.25, "why": "loss 1 against 2"}
UNKNOWN = {"verdict": "not compared", "why": "RuntimeError: x"}


@pytest.mark.parametrize("parity", [DIFFERS, UNKNOWN])
def test_only_what_passes_parity_can_win(parity: dict[str, Any]) -> None:
    """The fastest of all is not chosen where it computes something else, or nobody knows; the reason is told."""
    made = rows(player("ort", [[1.0]], parity), player("inductor", [[2.0]]), player("eager", [[3.0]]))
    choice = auto.decide(made)
    assert choice["chosen"] == "inductor"
    today = time.strftime("%Y-%m-%d")
    assert choice["why"].startswith(f"measured 1.50 x eager on {today}; ort left out: parity: {parity['verdict']}")
    assert choice["measured"]["ort"]["parity"] == parity
    text = report.table(made)
    assert ("DIFFERS 2e-01" if parity is DIFFERS else "NOT COMPARED") in text
    assert f"ort: parity: {parity['why']}" in text


def test_auto_picks_the_measured_fastest() -> None:
    """By samples a second, whatever the order; the beaten ones are named with their ratios."""
    made = rows(player("ort", [[3.0]]), player("inductor", [[2.0]]), player("eager", [[1.0]], {"verdict": "reference"}))
    choice = auto.decide(made)
    assert (choice["asked"], choice["chosen"]) == ("auto", "eager")
    assert choice["why"].startswith("measured 3.00 x ort, 2.00 x inductor on ")


def test_auto_without_any_engine() -> None:
    """Where none can be chosen, every reason is in the error."""
    broken = player("ort", [])
    broken.failed = "Traceback (most recent call last):\n  x\nValueError: planted\n\nortlaunch: rank 0"
    with pytest.raises(EngineError) as caught:
        auto.decide(rows(broken, player("eager", [[1.0]], UNKNOWN)))
    assert "ort failed: ValueError: planted" in str(caught.value)
    assert "eager left out: parity: not compared: RuntimeError: x" in str(caught.value)


def remembered_choice(base: Settled, chosen: str = "inductor") -> None:
    """As a bench leaves it."""
    choice = {"asked": "auto", "chosen": chosen, "why": "measured 2 x eager", "measured": {}, "key": auto.digest(base)}
    write_json(auto._path(base), {"key": auto.key(base), "choice": choice})


def never() -> None:
    """In place of a check before measuring."""
    raise AssertionError("nothing may be measured")


def test_a_remembered_choice_is_taken() -> None:
    """Without measuring; the note says which, why and that it is remembered; the run folder gets the choice."""
    base = settled()
    remembered_choice(base)
    found = auto.choose(base, RunDir("run"), never)
    assert found.file.recipe.engine == Engine(name="inductor")
    assert found.world.notes[-1] == "engine auto: inductor: measured 2 x eager (cached)"
    control.write_run(found, RunDir("run"))
    assert read_json(RunDir("run").choice)["chosen"] == "inductor"
    assert auto.foreseen(base).file.recipe.engine.name == "inductor"


def test_a_run_keeps_its_engine() -> None:
    """What the run folder says goes before what was measured since; another recipe without checkpoints does not."""
    base, run = settled(), RunDir("run")
    remembered_choice(base, "inductor")
    write_json(run.choice, {"asked": "auto", "chosen": "eager", "why": "then", "key": auto.digest(base)})
    assert auto.choose(base, run, never).world.notes[-1] == "engine auto: eager: then (as this run began)"
    write_json(run.choice, {"asked": "auto", "chosen": "eager", "why": "then", "key": "of another model"})
    assert auto.choose(base, run, never).file.recipe.engine.name == "inductor"
    write_text(run.checkpoint(5) / "COMPLETE", "")
    assert auto.choose(base, run, never).file.recipe.engine.name == "eager"


def test_a_run_that_names_its_engine_forgets_the_choice() -> None:
    """The run folder's choice belongs to engine auto alone."""
    run = RunDir("run")
    write_json(run.choice, {"chosen": "ort"})
    control.write_run(settled(engine={"name": "eager"}), run)
    assert not run.choice.exists()


def test_a_rank_cannot_measure() -> None:
    """Under a launcher auto takes what is remembered, and refuses before anything is done where nothing is."""
    base = settled(environ=TORCH)
    with pytest.raises(PlanError, match=r"run `ortlaunch bench recipe\.yaml` once outside of the launcher"):
        auto.choose(base, RunDir("run"), never)
    assert not Path("run").exists()
    remembered_choice(settled(batch={"micro_size": 8, "accumulation_steps": 1}))
    with pytest.raises(PlanError, match=r"the nearest that was measured differs in batch: \[8, 1\] -> \[2, 1\]$"):
        auto.choose(settled(environ=TORCH), RunDir("run"), never)
    remembered_choice(settled())
    assert auto.choose(base, RunDir("run"), never).choice is not None


def test_what_would_fail_anyway_fails_before_measuring() -> None:
    """The checks of the run come first: no minute is spent on a run that cannot start."""
    Path("mine").write_text("")
    with pytest.raises(PlanError, match="is a file; give a folder"):
        control.train(settled(), Path("mine"))
    assert not Path("bench").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"micro_size": 4, "accumulation_steps": 1}},
        {"batch": {"micro_size": 2, "accumulation_steps": 2}},
        {"precision": "bf16"},
        {"zero": {"stage": 1}},
        {"optimizer": {"name": "adamw", "learning_rate": 0.1}},
        {"model": {"task": "custom", "factory": "mine:model", "arguments": {"width": 3}}},
        {"data": {"train": {"format": "custom", "factory": "mine:data", "arguments": {"length": 3}}}},
        {"engine": {"name": "auto", "memory_optimization": 1}},
        {"launch": {"processes_per_node": 2}},
        {"launch": {"env": {"OMP_NUM_THREADS": "7"}}},
    ],
    ids=str,
)
def test_what_decides_speed_is_in_the_key(change: dict[str, Any]) -> None:
    """Model, shape, batch, precision, sharding, optimizer, options, ranks and threads: another one, another key."""
    assert auto.digest(settled(**change)) != auto.digest(settled())


def test_versions_hardware_and_code_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, another processor, or another text of the user's module: measured anew."""
    Path("mine.py").write_text("one")
    before = auto.digest(settled())
    Path("mine.py").write_text("two")
    changed = {before, auto.digest(settled())}
    monkeypatch.setattr(machine, "hardware", lambda: {"processor": "another"})
    changed.add(auto.digest(settled()))
    monkeypatch.setattr(extensions, "version", {"torch": "99"}.get)
    changed.add(auto.digest(settled()))
    assert len(changed) == 4


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"seed": 7}, {"train": {"max_steps": 9}}, {"engine": {"name": "ort"}}]
)
def test_what_does_not_decide_speed_is_not_in_the_key(change: dict[str, Any]) -> None:
    """A longer run, another seed or the recipe's own engine ask for no other measurement."""
    assert auto.digest(settled(**change)) == auto.digest(settled())


def test_a_bench_refreshes_what_auto_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is shorter than auto's own is no reason to change the engine."""
    base, made = settled(), rows(player("ort", [[1.0]]), player("eager", [[2.0]]))
    auto.remember(base, {"variants": made, "rounds": 3, "steps": 2}, Path("bench"))
    assert (auto.remembered(base), capsys.readouterr().out) == (None, "")
    auto.remember(base, {"variants": made, "rounds": 3, "steps": 3}, Path("bench"))
    found = auto.remembered(base)
    assert found is not None
    assert (found["chosen"], found["bench"]) == ("ort", str(Path("bench").resolve()))
    assert capsys.readouterr().out == "engine.name: auto will take ort for this recipe on this machine\n"


def test_threads_that_nobody_chose_are_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets OMP_NUM_THREADS=1, which its ranks do not heed: a bench under it and a rank of it share a key."""
    two = {"launch": {"processes_per_node": 2}}
    before = auto.digest(settled(**two))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert auto.digest(settled(**two)) == before
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert auto.digest(settled(**two)) != before
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = auto.digest(settled())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert auto.digest(settled()) != one


def test_plan_and_dry_run_measure_nothing() -> None:
    """They say that it will be measured, and plan nothing else until then."""
    base = settled()
    shown = control.foreseen(base)
    assert shown.plan == base.plan
    assert shown.world.notes[-1].startswith("engine auto: measured when training starts")


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the bench ends before anything is run, with what to type."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency, match=r'pip install "ortlaunch\[bench\]", or leave the picture out: --no-picture'
    ):
        bench.bench(settled(), ["eager"], (), Length(), None, picture=True)
    assert not Path("bench").exists()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """A bar a variant, as a PNG."""
    pytest.importorskip("matplotlib")
    picture.draw(rows(player("ort", [[1.0, 2.0]]), player("eager", [[3.0]])), "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_variants_that_do_not_fit_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, with both figures; where they fit, or nobody can tell, all stay resident."""
    said: list[str] = []
    made = [player("eager", [[1.0]]), player("ort", [[1.0]])]
    assert bench._that_fits(Length(), made, said.append) == Length()
    for each in made:
        each.variant = settle(each.variant, settled(data=_words(), model=_bert()))
    assert bench._that_fits(Length(), made, said.append) == Length()
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    assert bench._that_fits(Length(), made, said.append).one_at_a_time
    assert "1.0 MiB are free: one at a time" in said[0]


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that works beside the bench is named."""
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert any(f"({busy.pid}): " in line for line in machine.others_at_work())
        finally:
            busy.kill()
    said: list[str] = []
    monkeypatch.setattr(machine, "others_at_work", list)
    bench._say_busy(said.append, (0.0, 0.0, 0.0))
    assert said == []
    bench._say_busy(said.append, (1000.0, 0.0, 0.0))
    assert said[0].startswith("WARNING: this machine is busy (load 1000.0 on ")


def test_hardware_names_processor_and_cores() -> None:
    """What the key and bench.json say of this machine."""
    found = machine.hardware()
    assert (found["cores"] > 0, bool(found["processor"]), found["gpus"]) == (True, True, machine._gpus())
    json.dumps(found)


def test_a_job_that_works_while_it_waits_is_told() -> None:
    """Half a core in the others' time spoils their figures."""
    made, said = player("ort", [[1.0]]), []
    made.turns[0]["waited"] = {"seconds": 10.0, "processor_seconds": 5.0}
    bench._say_spinning([made], said.append)
    assert said[0].startswith("WARNING: ort used 5.0 s of processor time in 10.0 s of waiting")


def test_all_engines_by_default() -> None:
    """The three of the recipe's field, but auto."""
    assert [variant.engine for variant in variants(ENGINES, ())] == ["ort", "inductor", "eager"]
