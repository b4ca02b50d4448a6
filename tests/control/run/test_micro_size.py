"""Tests of `micro_size: auto`: the sizes tried, the result, refusals. The trials are replaced."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import LaunchError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.make_plan import plan_with_batch_memory_and_deepspeed_of_recipe
from ortlaunch.recipe import Recipe, dump_recipe_yaml
from ortlaunch.run import micro_size
from ortlaunch.run.micro_size import (
    MEMORY_MARGIN,
    SizeTrial,
    candidate_micro_sizes,
    recorded_micro_size_or_none,
    search_and_record_largest_micro_size,
    undetermined_micro_size_lines,
)
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from tests.makers import bert, host, plan, recipe


def auto(total: int, **sections: Any) -> Recipe:
    """A recipe that requests a search for the size."""
    return recipe(batch={"global_size": total, "micro_size": "auto"}, **sections)


def stand_in(monkeypatch: pytest.MonkeyPatch, limit: float) -> list[int]:
    """Replace the trials: memory is proportional to the size. Returns the sizes tried, in order."""
    tried: list[int] = []

    def try_one(made: Recipe, resolved: Plan, run: RunDir, size: int) -> SizeTrial:
        tried.append(size)
        # A trial at the limit uses exactly the allowed share.
        share = MEMORY_MARGIN * size / limit
        return SizeTrial(size, share <= MEMORY_MARGIN, share if share < 1 else None, "")

    monkeypatch.setattr(micro_size, "_run_micro_size_trial", try_one)
    return tried


def test_sizes_of_the_largest_batch_take_no_time() -> None:
    """The sizes of the largest possible batch are found at once."""
    # Dividing by all numbers up to 10**9 would take minutes.
    started = time.perf_counter()
    found = candidate_micro_sizes(plan(auto(10**9)).batch)
    assert (len(found), found[:6], found[-1]) == (100, [1, 2, 4, 5, 8, 10], 10**9)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("total", [1, 7, 24, 31, 64, 96, 1000, 4096])
def test_the_largest_that_fits_is_found(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every limit, the largest divisor below it is found, with few trials and none twice."""
    made = auto(total)
    resolved = plan(made)
    for limit in range(1, min(total, 200) + 2):
        tried = stand_in(monkeypatch, limit + 0.5)
        expected = max(size for size in range(1, total + 1) if total % size == 0 and size <= limit)
        assert search_and_record_largest_micro_size(made, resolved, RunDir(tmp_path)) == expected
        assert len(tried) == len(set(tried))
        assert max(tried) <= total
        assert len(tried) <= 14


def test_no_try_goes_far_beyond_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While sizes increase, a trial uses at most twice the available memory."""
    # Far more could end other processes of the host.
    made = auto(4096)
    for limit in (1.5, 3, 20, 70, 300):
        tried = stand_in(monkeypatch, limit)
        search_and_record_largest_micro_size(made, plan(made), RunDir(tmp_path))
        assert max(tried) <= 2 * limit


def test_sizes_keep_the_global_batch() -> None:
    """Each size divides a rank's share of the global batch."""
    made = auto(48)
    assert candidate_micro_sizes(plan(made, [host("localhost", 2)], "torchrun").batch) == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        24,
    ]


def test_a_trial_of_ranks_that_compute_each_layer(tmp_path: Path) -> None:
    """They read the same samples: the largest size is one pass over the whole batch."""
    made = auto(8, parallel={"tensor": 2, "tensor_plan": {"up": "colwise"}})
    resolved = plan(made, [host("localhost", 2)], "torchrun")
    assert candidate_micro_sizes(resolved.batch) == [1, 2, 4, 8]
    for size, passes in ((8, 1), (4, 2), (1, 2)):
        trial = micro_size._write_trial_files_and_return_plan(
            made, resolved, RunDir(tmp_path / str(size)), size
        )
        assert trial.batch.global_samples == size * passes
        assert (trial.batch.micro_samples, trial.batch.accumulation_steps) == (size, passes)


def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is too large for one sample gives an error."""
    stand_in(monkeypatch, 0.5)
    with pytest.raises(LaunchError, match="not even 1 sample per rank fits"):
        search_and_record_largest_micro_size(auto(8), plan(auto(8)), RunDir(tmp_path))


def test_what_was_found_is_known_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart in the run folder uses the size that was found, for the same batch and ranks."""
    run = RunDir(tmp_path)
    made = auto(24)
    assert recorded_micro_size_or_none(made, plan(made).batch, run) is None
    stand_in(monkeypatch, 9)
    search_and_record_largest_micro_size(made, plan(made), run)
    assert json.loads(run.micro_size.read_text())["tries"][0]["size"] == 1
    # 12 does not fit below the limit of 9.
    assert recorded_micro_size_or_none(made, plan(made).batch, run) == 8
    assert recorded_micro_size_or_none(auto(32), plan(auto(32)).batch, run) is None
    assert (
        recorded_micro_size_or_none(made, plan(made, [host("localhost", 2)], "torchrun").batch, run)
        is None
    )
    # Another sharding leaves other memory.
    sharded = auto(24, zero={"stage": 2})
    assert recorded_micro_size_or_none(sharded, plan(made).batch, run) is None


def test_the_found_size_is_planned_and_written() -> None:
    """A size that was found gives the same plan as a recipe with that number."""
    made = auto(24, zero={"stage": 1})
    batch = made.batch.model_copy(update={"micro_size": 8})
    found = made.model_copy(update={"batch": batch})
    again = plan_with_batch_memory_and_deepspeed_of_recipe(found, plan(made))
    assert again == plan(found)
    assert again.batch.accumulation_steps == 3
    assert again.deepspeed is not None
    assert again.deepspeed["train_micro_batch_size_per_gpu"] == 8
    assert "micro_size: 8" in dump_recipe_yaml(found)


def test_plan_says_that_it_will_be_found() -> None:
    """`plan` shows the sizes that would be tried, and the memory of a sample."""
    made = bert(batch={"global_size": 64, "micro_size": "auto"})
    lines = undetermined_micro_size_lines(plan(made))
    assert "from 1, 2, 4, 8, 16, 32, 64; the plan above uses 1" in lines[0]
    assert "MiB of activations" in lines[1]


@pytest.mark.parametrize(
    ("cause", "signal", "memory"),
    [
        ("out-of-memory", None, True),
        # The kernel's out-of-memory killer sends SIGKILL.
        ("killed", 9, True),
        ("raised", None, False),
        ("crash", 11, False),
    ],
)
def test_which_failures_are_memory(
    cause: str, signal: int | None, memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an end for lack of memory means that a size does not fit; others end the search."""
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
    request = micro_size.load_backend("local").launch_request_of_plan(
        plan(made), run.micro_size_trial_folder(1)
    )
    error = run.micro_size_trial_folder(1).rank_error_path(0)
    error.parent.mkdir(parents=True)
    # The trial is a shell that writes this record and fails.
    argv = ("/bin/sh", "-c", 'printf %s "$1" > "$0"; exit 1', str(error), json.dumps(record))
    monkeypatch.setattr(
        "ortlaunch.launch.local.launch_request_of_plan", lambda *_: request._replace(argv=argv)
    )
    if memory:
        assert micro_size._run_micro_size_trial(made, plan(made), run, 1)[:3] == (1, False, None)
    else:
        with pytest.raises(LaunchError, match="not because of memory"):
            micro_size._run_micro_size_trial(made, plan(made), run, 1)


# Schedulers send USR1 and TERM, a user's Ctrl-C sends INT.
@pytest.mark.parametrize(("name", "status"), [("USR1", 85), ("TERM", 85), ("INT", 130)])
def test_a_stop_in_a_try(
    name: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during a trial ends the search, and requests another start unless it was Ctrl-C."""
    # Slurm sends USR1 before the end of the job's time.
    made = auto(4)
    run = RunDir(tmp_path)
    request = micro_size.load_backend("local").launch_request_of_plan(
        plan(made), run.micro_size_trial_folder(1)
    )
    argv = ("/bin/sh", "-c", f"kill -s {name} $PPID; sleep 9")
    monkeypatch.setattr(
        "ortlaunch.launch.local.launch_request_of_plan",
        lambda *_: request._replace(argv=argv, stop=None),
    )
    with pytest.raises(micro_size.MicroSizeSearchStopped, match=f"stopped by SIG{name}") as caught:
        micro_size._run_micro_size_trial(made, plan(made), run, 1)
    assert caught.value.exit_status == status


def test_a_try_is_the_run_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial has the run's ranks, its size, and two passes a step where the batch has as many."""
    made = auto(24, zero={"stage": 2})
    run = RunDir(tmp_path)
    resolved = plan(made, [host("localhost", 2)], "torchrun")
    # The result of an older trial in the same folder must not be read again.
    write_json_atomically(run.micro_size_trial_folder(4).trial, {"share": 0.1})
    for size, passes in ((4, 2), (12, 1)):
        tried = micro_size._write_trial_files_and_return_plan(
            made, resolved, run.micro_size_trial_folder(size), size
        )
        assert tried.nodes == resolved.nodes
        assert tried.batch[:4] == (size * passes * 2, size, passes, 2)
        assert (tried.task, tried.argv) == ("try", resolved.argv)
        assert (
            json.loads(run.micro_size_trial_folder(size).deepspeed.read_text()) == tried.deepspeed
        )
    assert not run.micro_size_trial_folder(4).trial.exists()
