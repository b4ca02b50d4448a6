"""Tests of launch/node.py: the rank variables of one node, and the meaning of its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ortlaunch.base.errors import RankError
from ortlaunch.launch.node import require_node_index_in_environ
from ortlaunch.rank import Rank

NODE = [sys.executable, "-m", "ortlaunch.launch.node"]


def start(script: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    """Start a node whose ranks are shells."""
    env = {"PATH": os.environ["PATH"], **variables}
    argv = [*NODE, *(options or ("--nodes=1", "--ranks=2")), "--", "sh", "-c", script]
    return subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_every_rank_finds_its_place() -> None:
    """Ranks get their variables on two nodes, by a Job's variable and by Kubeflow Trainer's."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMPI_COMM_WORLD_RANK",
    )
    script = f"echo {' '.join(f'{name}=${name}' for name in names)}"
    trainer = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "29400", "PET_NODE_RANK": "1"}
    nodes = [
        start(
            script,
            "--nodes=2",
            "--ranks=2",
            "--master=localhost",
            JOB_COMPLETION_INDEX="0",
            # Left by a shell: it would contradict torchrun's variables.
            OMPI_COMM_WORLD_RANK="9",
        ),
        start(script, "--nodes=2", "--ranks=2", **trainer),
    ]
    lines = [line for node in nodes for line in node.communicate(timeout=30)[0].splitlines()]
    found = [dict(word.split("=") for word in line.split()) for line in lines]
    ranks = [
        Rank.from_environ({name: value for name, value in one.items() if value}) for one in found
    ]
    assert sorted(ranks) == [Rank(0, 4, 0, 2), Rank(1, 4, 1, 2), Rank(2, 4, 0, 2), Rank(3, 4, 1, 2)]
    assert {one["MASTER_ADDR"] for one in found} == {"localhost"}
    assert sorted({one["MASTER_PORT"] for one in found}) == ["29400", "29500"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("test $RANK = 1 && exit 7; exec sleep 60", 7),
        ("test $RANK = 1 && kill -9 $$; exec sleep 60", 137),
        ("exit 85", 85),
        ("test $RANK = 1 && sleep 0.3 && exit 7; exit 85", 7),
    ],
)
def test_the_end_of_a_node(script: str, status: int) -> None:
    """A node has the first failing rank's status, and 85 if its ranks have saved."""
    node = start(script)
    node.communicate(timeout=30)
    assert node.returncode == status


def test_a_stop_reaches_every_rank() -> None:
    """SIGTERM to the node reaches each rank, which has time to save."""
    node = start('trap "sleep 0.3; exit 85" TERM; echo up; while :; do sleep 0.05; done')
    assert node.stdout is not None
    # Only then both shells have set their trap.
    assert [node.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    began = time.monotonic()
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=30)
    assert node.returncode == 85
    assert time.monotonic() - began < 5


def test_a_first_node_that_takes_its_time() -> None:
    """The wait for the first node's name is printed, and has a limit."""
    # The name is unknown as long as the platform adds nodes.
    node = start("echo up", "--nodes=2", "--ranks=1", "--master=no.such.host.invalid", "--name-seconds=0.4",
                 JOB_COMPLETION_INDEX="1")  # fmt: skip
    said = node.communicate(timeout=30)[0]
    assert node.returncode == 1
    assert (
        "waiting for the first node's name no.such.host.invalid to resolve, at most 0.4 s" in said
    )
    assert "the first node's name no.such.host.invalid does not resolve after 0.4 s" in said


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {},
            "the number of this node \\(of 2\\) is unknown: none of "
            "JOB_COMPLETION_INDEX, PET_NODE_RANK, SKYPILOT_NODE_RANK, DST",
        ),
        (
            {"JOB_COMPLETION_INDEX": "0", "PET_NODE_RANK": "1"},
            "JOB_COMPLETION_INDEX=0 PET_NODE_RANK=1",
        ),
        (
            {"JOB_COMPLETION_INDEX": "2"},
            "JOB_COMPLETION_INDEX=2 is not one of 2 nodes, which count from 0",
        ),
        ({"PET_NODE_RANK": "a"}, "PET_NODE_RANK=a is not one of 2 nodes"),
    ],
)
def test_a_node_that_is_not_counted(environ: dict[str, str], said: str) -> None:
    """A node without a valid, unambiguous number is refused."""
    with pytest.raises(RankError, match=said):
        require_node_index_in_environ(2, environ)


DOCS = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "1",
    "DSTACK_MASTER_NODE_IP": "127.0.0.1",
}


@pytest.mark.parametrize(
    ("begins", "variables", "number_of"),
    [("name: train", SKYPILOT, "SKYPILOT_NODE_RANK"), ("type: task", DSTACK, "DSTACK_NODE_RANK")],
)
def test_the_examples_of_the_docs(
    begins: str, variables: dict[str, str], number_of: str, tmp_path: Path
) -> None:  # fmt: skip
    """The SkyPilot and dstack examples of docs/guides/clusters.md start the ranks of two nodes."""
    text = next(
        block for block in DOCS.read_text().split("```yaml\n") if block.startswith(begins)
    ).partition("```")[0]
    task = yaml.safe_load(text)
    script = task["run"] if "run" in task else task["commands"][-1]
    # Stand-ins on the PATH: each node prints its variables instead of training.
    (tmp_path / "ortlaunch").write_text(
        '#!/bin/sh\necho "$RANK of $WORLD_SIZE at $MASTER_ADDR: $*"\n'
    )
    (tmp_path / "ortlaunch").chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(DOCS.parents[2]),
        **variables,
    }
    said = [
        subprocess.run(["bash", "-c", script], env={**env, number_of: str(node)}, capture_output=True, text=True,
                       timeout=30, check=True).stdout
        for node in range(2)
    ]  # fmt: skip
    assert said == [
        f"{rank} of 2 at 127.0.0.1: train my.yaml --run-dir /shared/run\n" for rank in range(2)
    ]
