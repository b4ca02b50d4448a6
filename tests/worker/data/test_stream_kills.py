"""Ranks on a streamed corpus that are killed again and again, behind a slow server that fails."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.worker import stream_ranks
from tests.worker.data.test_stream import (
    GLOBAL,
    MOTO,
    STREAMS,
    batches,
    served,
    served_by_s3,
    trained,
    write_chat_shards,
    write_shards,
)
from tests.worker.stream_ranks import Training

# A fork of this process, in which the server has threads, may inherit a lock that a thread holds,
# and never ends then. The server of forks has none.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.worker.stream_ranks"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.ci), pytest.param(50, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("form", ["text", "chats"])
def test_killed_ranks_take_the_same_samples(tmp_path: Path, kills: int, form: str) -> None:
    """Each rank of 1, 2 and 3 takes its part of an uninterrupted training's steps, exactly."""
    shards = write_shards_of_form(tmp_path, form)
    names = sorted(path.name for path in shards.iterdir())
    with served(shards, failing=5, seconds=0.002) as (url, handler):
        training = Training([f"{url}/{name}" for name in names], tmp_path, form, {})
        kill_starts(training, range(kills))
    assert_each_sample_once(training, shards, kills)
    assert len(handler.requests) > 2 * kills


@pytest.mark.slow
@pytest.mark.skipif(not MOTO.exists(), reason="make test-ci installs moto, a server of S3")
@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.ci), pytest.param(30, marks=pytest.mark.nightly)]
)
def test_killed_ranks_take_the_same_chats_of_s3(tmp_path: Path, kills: int) -> None:
    """Packed chats of a bucket, whose server is down for a while, are taken once, as above."""
    shards = write_shards_of_form(tmp_path, "chats")
    with served_by_s3(shards) as (environ, outage):
        training = Training(["s3://bucket/data/*.jsonl"], tmp_path, "chats", environ)
        kill_starts(training, range(kills // 2))
        outage(0.5)
        kill_starts(training, range(kills // 2, kills))
    assert_each_sample_once(training, shards, kills)


def write_shards_of_form(folder: Path, form: str) -> Path:
    shards = folder / "shards"
    shards.mkdir()
    write_shards(shards) if form == "text" else write_chat_shards(shards)
    return shards


def kill_starts(training: Training, start_numbers: range) -> None:
    """Start 1, 2 and 3 ranks in turn, and kill them after some steps."""
    chance = random.Random(7 + start_numbers.start)
    for number in start_numbers:
        world = number % 3 + 1
        # A process has the barrier by its name, which ends with this object.
        meet = _CONTEXT.Barrier(world)
        ranks = start(world, meet, training)
        wait_for(training.folder, chance.randrange(1, 7), ranks)
        time.sleep(chance.uniform(0, 0.05))
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()


def assert_each_sample_once(training: Training, shards: Path, kills: int) -> None:
    """Check what the ranks wrote against an uninterrupted training on the local files."""
    found = lines(training.folder)
    samples = STREAMS[training.form](shards / "*", training.folder / "whole")
    whole = trained(batches(samples), range(max(line["step"] for line in found) + 1))
    for line in found:
        micro = GLOBAL // line["world"]
        first = line["rank"] * micro
        expected = whole[line["step"]][first : first + micro]
        assert [tuple(each) for each in line["taken"]] == expected, line
    assert {line["step"] for line in found} == {*range(len(whole))}
    assert {line["world"] for line in found} == {1, 2, 3}
    assert len(whole) > kills


def start(world: int, meet: Any, training: Training) -> list[Any]:
    ranks = [
        _CONTEXT.Process(target=stream_ranks.run, args=(rank, world, meet, training))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def wait_for(folder: Path, steps: int, ranks: list[Any]) -> None:
    """Wait until this start has made so many steps."""
    limit = time.monotonic() + 60
    before = len(lines(folder))
    while len(lines(folder)) < before + steps * len(ranks):
        assert all(rank.is_alive() for rank in ranks)
        assert time.monotonic() < limit, "no progress"
        time.sleep(0.02)


def lines(folder: Path) -> list[Any]:
    """Return the complete lines of all ranks."""
    found = []
    for path in folder.glob("rank*.jsonl"):
        for text in path.read_text().splitlines():
            # The last line of a killed rank may be cut, and the next start's follows it.
            if text.endswith("}") and text.count('"step"') == 1 and text.startswith("{"):
                found.append({**json.loads(text), "rank": int(path.stem[4:])})
    return found
