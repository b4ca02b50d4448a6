"""Each common MPI starts ranks on two hosts: the own Open MPI 5, Debian's 4, and MPICH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests import labs
from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import environment
from tests.launch.tiny import MODULE
from tests.makers import CUSTOM

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(120)]
# Debian's file name; mpi4py loads libmpi.so.12.
MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")
HERE = Path(sys.executable)


def _with(mpirun: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Make a virtual environment with this one's packages and another `mpirun`.

    Returns:
        Its Python, and the environment variables that select the MPI.
    """
    program = shutil.which(mpirun)
    if program is None:
        labs.skip(f"no {mpirun} here: apt-get install openmpi-bin mpich")
    venv = folder / "venv"
    tools = folder / "tools"
    subprocess.run([HERE, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    # A .pth file shares the installed packages without this environment's bin folder.
    (packages / "all.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    tools.mkdir()
    (tools / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (tools / "mpirun").chmod(0o755)
    if MPICH.exists():
        (tools / "libmpi.so.12").symlink_to(MPICH)
    path = os.pathsep.join([str(tools), "/usr/bin", "/bin"])
    # All hosts have one kernel, so UCX would use shared memory between them.
    own = {"PATH": path, "LD_LIBRARY_PATH": str(tools), "TOOLS": str(tools), "UCX_TLS": "tcp,self"}
    return venv / "bin" / "python", own


@pytest.mark.parametrize("mpirun", ["own", "mpirun.openmpi", "mpirun.mpich"])
def test_two_hosts(mpirun: str, lab: Lab, tmp_path: Path) -> None:
    """Ranks of both hosts connect through this MPI and train."""
    python, own = (HERE, {}) if mpirun == "own" else _with(mpirun, tmp_path)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(CUSTOM))
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    words = ("train", "recipe.yaml", "--hostfile", "hosts", "--run-dir", "run", "log.every_steps=1")
    env = {**lab.environ, **environment(tmp_path), "PATH": lab.environ["PATH"], **own}
    # As in Debian's /etc/hosts, a host's own name is 127.0.0.1. On a rank's host, the name of the
    # launching host then resolves to the rank's host.
    names = (lab.folder / "hosts").read_text().replace("10.77.0.1 login", "127.0.0.1 login")
    (tmp_path / "etc_hosts").write_text(names)
    for name in (
        "host1",
        "host2",
    ):
        lab.run(name, "mount", "--bind", str(tmp_path / "etc_hosts"), "/etc/hosts")
    try:
        ended = lab.run(
            LOGIN, str(python), "-m", "ortlaunch.cli", *words, cwd=tmp_path, env=env, timeout=60
        )
    finally:
        for name in ("host1", "host2"):
            lab.run(name, "umount", "/etc/hosts")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks on 2 hosts, cpu, launcher mpi" in ended.stdout
    losses = [
        json.loads(line).get("loss")
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(loss is not None for loss in losses) == CUSTOM["train"]["max_steps"]
    assert (
        f"{own.get('TOOLS', HERE.parent)}/mpirun -n 2 "
        in (tmp_path / "run" / "request.sh").read_text()
    )
