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
    STREAMS,
    batches,
    served,
    trained,
    write_chat_shards,
    write_shards,
)

_CONTEXT = multiprocessing.get_context("fork")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.ci), pytest.param(50, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("form", ["text", "chats"])
def test_killed_ranks_take_the_same_samples(tmp_path: Path, kills: int, form: str) -> None:
    """Each rank of 1, 2 and 3 takes its part of an uninterrupted training's steps, exactly."""
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards) if form == "text" else write_chat_shards(shards)
    names = sorted(path.name for path in shards.iterdir())
    chance = random.Random(7)
    with served(shards, failing=5, seconds=0.002) as (url, handler):
        paths = [f"{url}/{name}" for name in names]
        for number in range(kills):
            ranks = start(number % 3 + 1, paths, tmp_path, form)
            wait_for(tmp_path, chance.randrange(1, 7), ranks)
            time.sleep(chance.uniform(0, 0.05))
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join()
    found = lines(tmp_path)
    samples = STREAMS[form](shards / "*", tmp_path / "whole")
    whole = trained(batches(samples), range(max(line["step"] for line in found) + 1))
    for line in found:
        micro = GLOBAL // line["world"]
        first = line["rank"] * micro
        expected = whole[line["step"]][first : first + micro]
        assert [tuple(each) for each in line["taken"]] == expected, line
    assert {line["step"] for line in found} == {*range(len(whole))}
    assert {line["world"] for line in found} == {1, 2, 3}
    assert len(whole) > kills
    assert len(handler.requests) > 2 * kills


def start(world: int, paths: list[str], folder: Path, form: str) -> list[Any]:
    meet = _CONTEXT.Barrier(world)
    ranks = [
        _CONTEXT.Process(target=stream_ranks.run, args=(rank, world, paths, folder, meet, form))
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
