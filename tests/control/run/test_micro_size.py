"""`micro_size: auto`: which sizes are tried, what is found, what is refused. Tries are stood in for here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.errors import LaunchError
from ortlaunch.plan import Plan
from ortlaunch.planning.make_plan import replan
from ortlaunch.recipe import Recipe, to_yaml
from ortlaunch.run import micro_size
from ortlaunch.run.micro_size import MARGIN, Try, find, known, note, sizes
from ortlaunch.run_folder.folder import RunDir, write_json
from tests.makers import bert, host, plan, recipe


def auto(total: int, **sections: Any) -> Recipe:
    """A recipe that asks for a size to be found."""
    return recipe(batch={"global_size": total, "micro_size": "auto"}, **sections)


def stand_in(monkeypatch: pytest.MonkeyPatch, limit: float) -> list[int]:
    """Memory grows with the size, and ends at `limit`; returns the sizes tried, as they are."""
    tried: list[int] = []

    def try_one(made: Recipe, resolved: Plan, run: RunDir, size: int) -> Try:
        tried.append(size)
        share = MARGIN * size / limit
        return Try(size, share <= MARGIN, share if share < 1 else None, "")

    monkeypatch.setattr(micro_size, "_try", try_one)
    return tried


def test_sizes_of_the_largest_batch_take_no_time() -> None:
    """The largest global size that a recipe may give: its divisors, not a walk through all numbers below it."""
    started = time.perf_counter()
    found = sizes(plan(auto(10**9)).batch)
    assert (len(found), found[:6], found[-1]) == (100, [1, 2, 4, 5, 8, 10], 10**9)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("total", [1, 7, 24, 31, 64, 96, 1000, 4096])
def test_the_largest_that_fits_is_found(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every limit: the largest divisor below it, no size twice, none beyond the batch, few tries."""
    made = auto(total)
    resolved = plan(made)
    for limit in range(1, min(total, 200) + 2):
        tried = stand_in(monkeypatch, limit + 0.5)
        expected = max(size for size in range(1, total + 1) if total % size == 0 and size <= limit)
        assert find(made, resolved, RunDir(tmp_path)) == expected
        assert len(tried) == len(set(tried))
        assert max(tried) <= total
        assert len(tried) <= 14


def test_no_try_goes_far_beyond_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way up, a try takes at most twice of what is there."""
    made = auto(4096)
    for limit in (1.5, 3, 20, 70, 300):
        tried = stand_in(monkeypatch, limit)
        find(made, plan(made), RunDir(tmp_path))
        assert max(tried) <= 2 * limit


def test_sizes_keep_the_global_batch() -> None:
    """Each size divides what a rank takes of the global batch."""
    made = auto(48)
    assert sizes(plan(made, [host("localhost", 2)], "torchrun").batch) == [1, 2, 3, 4, 6, 8, 12, 24]


def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is too large for one sample is an error, with the try's own reason."""
    stand_in(monkeypatch, 0.5)
    with pytest.raises(LaunchError, match="not even 1 sample a rank fits"):
        find(auto(8), plan(auto(8)), RunDir(tmp_path))


def test_what_was_found_is_known_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart in the run folder takes the number, but not for another batch or other ranks."""
    run = RunDir(tmp_path)
    made = auto(24)
    assert known(made, plan(made).batch, run) is None
    stand_in(monkeypatch, 9)
    find(made, plan(made), run)
    assert json.loads(run.micro_size.read_text())["tries"][0]["size"] == 1
    assert known(made, plan(made).batch, run) == 8
    assert known(auto(32), plan(auto(32)).batch, run) is None
    assert known(made, plan(made, [host("localhost", 2)], "torchrun").batch, run) is None


def test_the_found_size_is_planned_and_written() -> None:
    """A number in place of auto gives the batch, DeepSpeed's fields and memory of that number."""
    made = auto(24, zero={"stage": 1})
    batch = made.batch.model_copy(update={"micro_size": 8})
    found = made.model_copy(update={"batch": batch})
    again = replan(found, plan(made))
    assert again == plan(found)
    assert again.batch.accumulation_steps == 3
    assert again.deepspeed is not None
    assert again.deepspeed["train_micro_batch_size_per_gpu"] == 8
    assert "micro_size: 8" in to_yaml(found)


def test_plan_says_that_it_will_be_found() -> None:
    """`plan` shows the sizes that would be tried, and what a sample takes."""
    made = bert(batch={"global_size": 64, "micro_size": "auto"})
    lines = note(plan(made))
    assert "among 1, 2, 4, 8, 16, 32, 64; the plan above is for 1" in lines[0]
    assert "MiB of activations" in lines[1]


@pytest.mark.parametrize(
    ("cause", "signal", "memory"),
    [
        ("out-of-memory", None, True),
        ("killed", 9, True),
        ("raised", None, False),
        ("crash", 11, False),
    ],
)
def test_which_failures_are_memory(
    cause: str, signal: int | None, memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an end for lack of memory means that a size does not fit; others end the search with their text."""
    made = auto(4)
    run = RunDir(tmp_path)
    ended = {
        "summary": "ended",
        "traceback": "planted",
        "secondary": False,
        "time": 0,
        "exit_status": 1,
        "rank": 0,
    }
    record = {**ended, "cause": cause, "signal": signal}
    request = micro_size.backend("local").request(plan(made), run.trial_of(1))
    error = run.trial_of(1).error(0)
    error.parent.mkdir(parents=True)
    argv = ("/bin/sh", "-c", 'printf %s "$1" > "$0"; exit 1', str(error), json.dumps(record))
    monkeypatch.setattr("ortlaunch.launch.local.request", lambda *_: request._replace(argv=argv))
    if memory:
        assert micro_size._try(made, plan(made), run, 1)[:3] == (1, False, None)
    else:
        with pytest.raises(LaunchError, match="not for memory"):
            micro_size._try(made, plan(made), run, 1)


@pytest.mark.parametrize(("name", "status"), [("USR1", 85), ("TERM", 85), ("INT", 130)])
def test_a_stop_in_a_try(
    name: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has begun, so that the run is to be run again; also by the notice that Slurm sends before the end."""
    made = auto(4)
    run = RunDir(tmp_path)
    request = micro_size.backend("local").request(plan(made), run.trial_of(1))
    argv = ("/bin/sh", "-c", f"kill -s {name} $PPID; sleep 9")
    monkeypatch.setattr(
        "ortlaunch.launch.local.request", lambda *_: request._replace(argv=argv, stop=None)
    )
    with pytest.raises(micro_size.SearchStopped, match=f"stopped by SIG{name}") as caught:
        micro_size._try(made, plan(made), run, 1)
    assert caught.value.exit_status == status


def test_a_try_is_the_run_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same ranks, the size, two passes a step where the batch has as many; an old try's words are gone."""
    made = auto(24, zero={"stage": 2})
    run = RunDir(tmp_path)
    resolved = plan(made, [host("localhost", 2)], "torchrun")
    write_json(run.trial_of(4).trial, {"share": 0.1})
    for size, passes in ((4, 2), (12, 1)):
        tried = micro_size._write(made, resolved, run.trial_of(size), size)
        assert tried.nodes == resolved.nodes
        assert tried.batch[:4] == (size * passes * 2, size, passes, 2)
        assert (tried.task, tried.argv) == ("try", resolved.argv)
        assert json.loads(run.trial_of(size).deepspeed.read_text()) == tried.deepspeed
    assert not run.trial_of(4).trial.exists()
