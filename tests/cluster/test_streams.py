"""Packed chats that two hosts stream, whose ranks are killed again and again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND, EAGER, environment, merged
from tests.e2e.test_stream import RECIPE, write_shards
from tests.worker.data.test_stream import write_chat_shards

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]
KILLS = int(os.environ.get("KILLS", "10"))
STEPS = 40
# Ranges of files, at the address of the login node.
SERVE = """
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from tests.worker.data.test_stream import Server
handler = type("Handler", (Server,), {"folder": Path(sys.argv[1]), "requests": []})
server = ThreadingHTTPServer(("10.77.0.1", 0), handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step; for a repeated step, the last one."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_killed_hosts_train_on_the_same_chats(lab: Lab, tmp_path: Path) -> None:
    """All losses are those of one process that was not interrupted."""
    write_shards(tmp_path)
    (tmp_path / "chats").mkdir()
    (tmp_path / "cache").mkdir()
    write_chat_shards(tmp_path / "chats", count=8, rows=200)
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    env = {**lab.environ, **environment(tmp_path), "PATH": lab.environ["PATH"]}
    command = lab.command(
        LOGIN, [str(COMMAND.with_name("python")), "-c", SERVE, str(tmp_path / "chats")]
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            assert server.stdout is not None
            url = f"http://10.77.0.1:{int(server.stdout.readline())}"
            recipe = recipe_of_chats(url)
            (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
            train = ("env", "--chdir", str(tmp_path), str(COMMAND), "train", "recipe.yaml")
            ended = lab.run(LOGIN, *train, "--run-dir=whole", env=env, timeout=200)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            hosts = (*train, "--run-dir=killed", "--hostfile=hosts", "--launcher=torchrun")
            kills = 0
            chance = random.Random(7)
            while len(losses(tmp_path / "killed")) < STEPS:
                kills += train_until_killed(lab, hosts, env, tmp_path / "killed", chance)
        finally:
            server.kill()
    found, expected = (losses(tmp_path / name) for name in ("killed", "whole"))
    assert kills >= KILLS
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(expected) == STEPS


def recipe_of_chats(url: str) -> dict[str, Any]:
    chats = {
        "format": "jsonl", "path": [f"{url}/part{number}.jsonl" for number in range(8)],
        "prompt_column": "ask", "response_column": "say", "stream": {"buffer": "1MiB", "shuffle": 16},
    }  # fmt: skip
    changes = {
        **EAGER,
        "data": {"packing": True, "sequence_length": 128, "chat_template": "chatml"},
        "batch": {"global_size": 4, "micro_size": 2},
        "train": {"max_steps": STEPS},
        "checkpoint": {"every_steps": 2},
    }
    recipe = merged(RECIPE, changes)
    recipe["data"]["train"] = chats
    return recipe


def train_until_killed(
    lab: Lab, command: tuple[str, ...], env: dict[str, str], run: Path, chance: random.Random
) -> int:
    """Train on the hosts, and kill a rank after some steps; return 1 if it was killed."""
    first = len(losses(run))
    stop_after = first + chance.randrange(1, 6)
    deadline = time.monotonic() + 120
    with subprocess.Popen(
        lab.command(LOGIN, command), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as training:  # fmt: skip
        while training.poll() is None and len(losses(run)) < stop_after:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.1))
        ranks = pids_of_ranks(run)
        if training.poll() is None and ranks:
            os.kill(chance.choice(ranks), signal.SIGKILL)
            assert training.wait(120) != 0
            return 1
        assert training.wait(120) == 0
    return 0


def pids_of_ranks(run: Path) -> list[int]:
    """Return the ranks' processes of a run, on whichever hosts they are."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_rank = any(variable.startswith(b"RANK=") for variable in variables)
        if is_rank and any(bytes(run.parent) in variable for variable in variables):
            pids.append(int(process.name))
    return pids
