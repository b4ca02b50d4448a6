"""Tests of a sweep's trials with runs that are planted: ends of every kind, limits, shares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.api import trial_starts, trials
from ortlaunch.api.submit import submit
from ortlaunch.api.sweep import Sweep, sweep
from ortlaunch.base import machine
from ortlaunch.base.errors import InputError, PlanError, RunError
from ortlaunch.planning.hosts import Host, filter_hosts_by_include_or_exclude, parse_hostfile
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.folder import RunDir
from tests.makers import CUSTOM, OWN_MODULE, recipe

pytest.importorskip("optuna")
SEED = {"seed": {"int": [0, 99]}}
# What a planted run does: its exit status and its evaluations.
Plan = Callable[[RunDir, int], tuple[int, list[float]]]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A function that lets each start of a trial end as planned, and the names of the starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "_POLL_SECONDS", 0)
    Path("mine.py").write_text(OWN_MODULE)

    def plant(does: Plan) -> list[str]:
        starts = list[str]()

        def start(loaded: Any, share: Any, run: RunDir, prepared: Any) -> Any:
            path = run.path
            path.mkdir(parents=True, exist_ok=True)
            run.recipe.write_text(dump_recipe_yaml(loaded.file.recipe))
            starts.append(path.name)
            status, losses = does(run, starts.count(path.name))
            lines = [{"step": 5 * n, "evaluation_loss": loss} for n, loss in enumerate(losses, 1)]
            run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return SimpleNamespace(poll=lambda: status, wait=int, terminate=int)

        monkeypatch.setattr(trials, "start_or_queue_trial", start)
        verdict = SimpleNamespace(end_text=lambda: "ran out of luck\nmore")
        made = lambda path: SimpleNamespace(path=path, status=lambda: verdict)  # noqa: E731
        monkeypatch.setattr(trials, "Run", made)
        return starts

    return plant


def swept(**keys: Any) -> dict[str, Any]:
    """Return the mapping of a recipe with a sweep."""
    held_out = {"format": "custom", "factory": "mine:data"}
    data = {**CUSTOM["data"], "evaluation": held_out}
    return {**CUSTOM, "data": data, "sweep": {"space": SEED, "trials": 3, **keys}}


def states(found: Sweep) -> list[tuple[str, int]]:
    """Return state and steps of each trial."""
    return [(one.state, one.steps) for one in found.trials()]


def test_a_sweep(planted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trial starts once; the best one's recipe is a file; the same call has nothing to do."""
    starts = planted(lambda run, start: (0, [3.0, abs(int(run.path.name) - 1)]))
    found = sweep(swept(parallel=2), progress=True)
    assert found.path == Path("sweeps/made")
    assert sorted(starts) == ["0000", "0001", "0002"]
    assert states(found) == [("complete", 10)] * 3
    assert [one.number for one in found.best()] == [1]
    best = recipe(**swept()).model_copy(
        update={"sweep": None, "seed": found.trials()[1].fields["seed"]}
    )
    assert found.recipe(1).read_text() == dump_recipe_yaml(best)
    assert [path.name for path in found.path.glob("best*")] == ["best_0001.yaml"]
    assert "trial 1: complete after step 10: loss 0; seed=" in capsys.readouterr().out
    assert str(found).splitlines()[0].split() == ["trial", "state", "steps", "result"]
    assert json.loads(found.to_json())[2]["run"] == "sweeps/made/trials/0002"
    sweep(swept(trials=4, parallel=1))
    assert (len(starts), starts[-1]) == (4, "0003")
    with pytest.raises(PlanError, match=r"is the sweep of another recipe.*\nseed: 42 -> 1$"):
        sweep(swept(), seed=1)


def test_an_objective_of_ones_own(planted: Any) -> None:
    """A function of each complete run gives the value that the search improves."""
    planted(lambda run, start: (0, [3.0]))
    found = sweep(swept(), objective=lambda run: abs(int(run.path.name) - 1))
    assert [one.values["loss"] for one in found.trials()] == [1.0, 0.0, 1.0]
    assert [one.number for one in found.best()] == [1]


def test_a_killed_trial_continues(planted: Any) -> None:
    """A trial that is killed or preempted starts again in its folder, and counts once."""
    starts = planted(lambda run, start: ((137, 85, 0)[start - 1], [1.0] * start))
    assert states(sweep(swept(trials=1))) == [("complete", 15)]
    assert starts == ["0000"] * 3


def test_a_trial_is_killed_before_its_record(planted: Any) -> None:
    """A command that is killed before job.json starts again, too; three such ends are a failure."""

    def does(run: RunDir, start: int) -> tuple[int, list[float]]:
        if start < 3 or run.path.name == "0001":
            raise RunError("a line of an earlier start", -9)
        return 0, [1.0]

    starts = planted(does)
    assert states(sweep(swept(trials=2))) == [("complete", 5), ("fail", 0)]
    assert starts == ["0000"] * 3 + ["0001"] * 3


def test_trials_that_only_die(planted: Any) -> None:
    """Three starts without a checkpoint are a failure; three failures alone end the sweep."""
    starts = planted(lambda run, start: (-9, []))
    with pytest.raises(RunError, match=r"all trials failed; seed=\d+; ran out of luck$") as error:
        sweep(swept(trials=9))
    assert error.value.exit_status == 1
    assert starts == [name for name in ("0000", "0001", "0002") for _ in range(3)]
    assert states(Sweep("sweeps/made")) == [("fail", 0)] * 3


def test_failed_trials_do_not_end_a_sweep(planted: Any) -> None:
    """A failed trial is recorded with its reason, one without a number too; others go on."""
    planted(lambda run, start: ((0, [float("nan")]), (0, [2.0]), (1, [1.0]))[int(run.path.name)])
    found = sweep(swept())
    assert states(found) == [("fail", 5), ("complete", 5), ("fail", 5)]
    assert [one.reason for one in found.trials()] == [
        "its last evaluation has no number for loss",
        "",
        "ran out of luck\nmore",
    ]


def test_a_pruned_trial(planted: Any) -> None:
    """A trial that a killed sweep had pruned is not started again."""
    train = {"max_steps": 20, "evaluate_every_steps": 5}
    starts = planted(lambda run, start: (0, [1.0]))
    sweep({**swept(pruner="asha", trials=1), "train": train})
    study = trials.Study(trials.SweepDir(Path("sweeps/made")), recipe(**swept(pruner="asha")), True)
    study.report_values_and_decide_to_prune(study.draw_trial_values_and_return_number(), {1: 5.0})
    study.set_attributes(1, pruned=1)
    del study
    found = sweep({**swept(pruner="asha", trials=2), "train": train})
    assert [one.state for one in found.trials()] == ["complete", "pruned"]
    assert starts == ["0000"]


def test_a_trial_is_pruned_while_it_runs(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running trial with a bad evaluation is requested to stop, and its end counts as pruned."""
    planted(lambda run, start: (85 * int(run.path.name), [1.0 + int(run.path.name)]))
    plant = trials.start_or_queue_trial
    stopped = list[str]()

    def start(*arguments: Any) -> Any:
        process: Any = plant(*arguments)
        codes = [None, process.poll()]
        process.poll = lambda: codes.pop(0) if len(codes) > 1 else codes[0]
        return process

    monkeypatch.setattr(trials, "start_or_queue_trial", start)
    monkeypatch.setattr(
        trials.requests,
        "request_stop_and_wait_if_asked",
        lambda run, waits_for_end, sender: stopped.append(f"{run.path.name} by {sender}"),
    )
    train = {"max_steps": 20, "evaluate_every_steps": 5}
    found = sweep({**swept(pruner="asha"), "train": train})
    assert [one.state for one in found.trials()] == ["complete", "pruned", "pruned"]
    assert stopped == [f"{name} by the pruner of its sweep" for name in ("0001", "0002")]
    assert [one.number for one in found.best()] == [0]


def test_no_trial_is_pruned_after_its_last_step(
    planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial whose bad evaluation is that of its last step is complete."""
    planted(lambda run, start: (0, [1.0 + int(run.path.name)]))
    plant = trials.start_or_queue_trial

    def start(*arguments: Any) -> Any:
        process: Any = plant(*arguments)
        codes = [None, process.poll()]
        process.poll = lambda: codes.pop(0) if len(codes) > 1 else codes[0]
        return process

    monkeypatch.setattr(trials, "start_or_queue_trial", start)
    monkeypatch.setattr(
        trials.requests, "request_stop_and_wait_if_asked", lambda *_, **__: pytest.fail("stopped")
    )
    train = {"max_steps": 5, "evaluate_every_steps": 5}
    found = sweep({**swept(pruner="asha"), "train": train})
    assert [one.state for one in found.trials()] == ["complete"] * 3


def test_the_same_values_again(planted: Any) -> None:
    """A trial with an earlier one's values takes its result; ten in a row end the sweep."""
    losses = {"0000": 2.0, "0001": 1.0}
    starts = planted(lambda run, start: (0, [losses.get(run.path.name, 0.5)]))
    space = {"seed": {"choice": [1, 2]}}
    found = sweep(swept(space=space, sampler="random", trials=None, steps=999))
    assert len(starts) == 2
    trials = found.trials()
    assert all(one.repeats for one in trials[-10:])
    for one in trials:
        first = trials[[each.fields for each in trials].index(one.fields)]
        assert (one.state, one.values) == ("complete", first.values)
        assert one.repeats == (one is not first)
        assert one.reason in ("", f"not trained: trial {first.number} has these values")
    assert [one.repeats for one in found.best()] == [False]


def test_limits(planted: Any) -> None:
    """No trial starts after the limit of steps or hours."""
    planted(lambda run, start: (0, [1.0, 1.0]))
    assert len(sweep(swept(trials=None, steps=25)).trials()) == 3
    assert len(sweep(swept(trials=9, hours=1e-9), run_dir="late").trials()) == 0


def test_refusals(planted: Any, tmp_path: Path) -> None:
    """A recipe without a sweep, the folder of a run, and hosts for parallel trials are refused."""
    planted(lambda run, start: (0, [1.0]))
    with pytest.raises(InputError, match="has no section sweep"):
        sweep(swept(), sweep=None)
    Path("run").mkdir()
    Path("run/job.json").write_text("{}")
    with pytest.raises(PlanError, match="--run-dir run: is the folder of a run"):
        sweep(swept(), run_dir="run")
    Path("hosts").write_text("a slots=2\n")
    with pytest.raises(PlanError, match=r"sweep\.parallel: got 2, and 1 host for them"):
        sweep(swept(parallel=2), options=LaunchOptions(hostfile="hosts"))
    with pytest.raises(PlanError, match=r"sweep\.submit: Slurm chooses the hosts"):
        sweep(swept(submit=True), options=LaunchOptions(hostfile="hosts"))
    with pytest.raises(
        InputError, match=r"sweep\.submit: got true, and submit\.scheduler is azureml"
    ):
        sweep(swept(submit=True), "submit.scheduler=azureml")
    with pytest.raises(InputError, match=r"run: has no study\.journal: it is no sweep's folder"):
        Sweep("run")
    with pytest.raises(InputError, match=r"sweep: a job is one run; .* sweep\.submit=true queues"):
        submit(swept())


def shares(parallel: int, environ: dict[str, str], **launch: Any) -> list[Any]:
    """Return the variables of each trial at the same time."""
    made = recipe(**swept(parallel=parallel), launch=launch)
    found = trial_starts.divide_hosts_or_gpus_among_concurrent_trials(
        made, LaunchOptions(), environ
    )
    return [one.environ for one in found]


def test_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials at the same time share GPUs and cores; one trial alone has them all."""
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "usable_core_count", lambda: 8)
    for number in range(5):
        (tmp_path / f"nvidia{number}").touch()
    assert shares(1, {}) == [{}]
    assert shares(2, {}) == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    chosen = {"CUDA_VISIBLE_DEVICES": "4,1", "OMP_NUM_THREADS": "3"}
    assert shares(2, chosen)[1] == {**chosen, "CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(PlanError, match=r"sweep\.parallel: got 6, and 5 GPUs for them"):
        shares(6, {})
    assert shares(4, {}, device="cpu") == [{"OMP_NUM_THREADS": "2"}] * 4


def test_shares_of_hosts(tmp_path: Path) -> None:
    """Trials at the same time get equally many of the chosen hosts, with the chosen slots."""
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nme@b slots=2\n[::1] slots=1\nc slots=2\nd slots=2\n")
    options = LaunchOptions(hostfile=str(file), exclude="c@b:0")
    found = trial_starts.divide_hosts_or_gpus_among_concurrent_trials(
        recipe(**swept(parallel=2)), options
    )
    assert [one.options.include for one in found] == ["a:0,1@b:1", "[::1]:0@d:0,1"]
    hosts = parse_hostfile(file.read_text(), "hosts").hosts
    assert filter_hosts_by_include_or_exclude(hosts, found[0].options.include) == (
        hosts[0],
        Host("me@b", 1, (1,)),
    )
    assert {one.options.exclude for one in found} == {None}
