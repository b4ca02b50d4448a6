"""The CPU image: the steps of docker/Dockerfile in a chroot of Debian, and trainings in what they make."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import labs
from tests.cluster.dockerfile import Stage, build, run_in

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(3600)]
# As `docker run --read-only --tmpfs /tmp --tmpfs /cache:exec --volume FOLDER:/work`, with Docker's defaults.
READ_ONLY = (
    "mount -o remount,bind,ro $ROOT", "mount -t tmpfs -o noexec,nosuid,nodev tmpfs $ROOT/tmp",
    "mount -t tmpfs -o nosuid,nodev tmpfs $ROOT/cache", "chmod 1777 $ROOT/tmp $ROOT/cache",
    "mount -t tmpfs -o noexec,nosuid,nodev,size=64m tmpfs $ROOT/dev/shm", "mount --bind {work} $ROOT/work",
)  # fmt: skip
STRANGER = 4711


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The stage `cpu`, built once."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        labs.skip("an image is built by root, with debootstrap")
    folder = tmp_path_factory.mktemp("image")
    try:
        started = time.monotonic()
        stage = build(ROOT / "docker" / "Dockerfile", ROOT, "cpu", folder, _torch_index())
        size = int(
            subprocess.check_output(["du", "-s", "--block-size=1M", str(stage.root)]).split()[0]
        )
        print(f"the image has {size:,} MiB and took {time.monotonic() - started:.0f} s")
        yield stage
    finally:
        shutil.rmtree(folder)


def _torch_index() -> dict[str, str]:
    """Return an empty TORCH_INDEX where the Dockerfile's cannot be reached, as in the Makefile."""
    url = re.search(
        r"^ARG TORCH_INDEX=(\S+/cpu)$", (ROOT / "docker" / "Dockerfile").read_text(), re.M
    )[1]
    option = subprocess.check_output(
        [sys.executable, ROOT / "tools" / "torch-index", url], text=True
    )
    return {} if option else {"TORCH_INDEX": ""}


def _train(image: Stage, work: Path, *words: str) -> tuple[str, dict[str, object]]:
    """Train in the image as a user without a name, with a root that cannot be written."""
    work.mkdir()
    os.chown(work, STRANGER, STRANGER)
    mounts = [line.format(work=work) for line in READ_ONLY]
    command = [*image.entry_point, "train", "bert-large/tiny", "--run-dir", "runs/one", *words]
    started = time.monotonic()
    done = run_in(image, command, {}, mounts, f"{STRANGER}:{STRANGER}")
    print(f"{' '.join(words)}: {time.monotonic() - started:.0f} s")
    return done.stdout, json.loads((work / "runs/one/engine.json").read_text())


def test_the_image_trains_on_every_engine_as_a_stranger(image: Stage, tmp_path: Path) -> None:
    """Another user id, a read-only root, a mounted folder: engines ort and inductor train, all files are the user's."""
    assert image.user == "1000:1000"
    for engine in ("ort", "inductor"):
        output, record = _train(
            image, tmp_path / engine, f"engine.name={engine}", "train.max_steps=20"
        )
        assert record["engine"]["used"] == engine, output
        owners = {path.stat().st_uid for path in (tmp_path / engine).rglob("*")}
        assert owners == {STRANGER}


def test_the_root_of_a_run_is_read_only(image: Stage, tmp_path: Path) -> None:
    """Even root cannot write beside the mounted folders."""
    mounts = [line.format(work=tmp_path) for line in READ_ONLY]
    command = ["sh", "-c", "! touch /opt/ortlaunch/one 2> /dev/null && touch /work/one"]
    run_in(image, command, {}, mounts)
    assert (tmp_path / "one").exists()


def test_several_ranks_and_mpirun_run_in_the_image(image: Stage, tmp_path: Path) -> None:
    """Two ranks of Open MPI, which the image has from PyPI."""
    output, _ = _train(
        image, tmp_path / "mpi", "--nproc-per-node=2", "--launcher=mpi", "train.max_steps=4"
    )
    assert "2 ranks" in output
