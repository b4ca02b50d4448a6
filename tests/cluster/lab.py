"""A cluster on one machine: hosts with their own network, name, processes, sshd and disk, and
Slurm.

Every host is a set of namespaces. The namespaces exist as long as the host's first process, which
ends when the process that made the lab ends. A crash leaves only a folder, which the next lab
removes. All addresses are inside these namespaces.

The lab needs root and Debian's iproute2, nftables, openssh-server, slurm-wlm and munge. `make lab`
opens one by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NEEDED = (
    "ip",
    "nft",
    "unshare",
    "nsenter",
    "setpriv",
    "sshd",
    "ssh-keygen",
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
)
LOGIN = "login"
_NAME = "ortlaunch-lab"
# sshd and slurmd are in /usr/sbin, which a user's PATH may lack.
_SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS = f"{os.environ.get('PATH', '')}:{_SYSTEM}"
_NETWORK = "10.77.0"
# The host's first process. The private mounts are invisible outside its mount namespace.
# /root/.bashrc is hidden since ssh reads it, and it may be slow.
_INIT = """\
set -e
hostname "$1"
mount -t tmpfs tmpfs /mnt
mount -t tmpfs -o size=512m tmpfs /dev/shm
mkdir -p /run/sshd
mount --bind "$2/hosts" /etc/hosts
if test -e "$HOME/.bashrc"; then mount --bind /dev/null "$HOME/.bashrc"; fi  # which ssh reads, and may take long
mount --bind "$2/ssh_config" /etc/ssh/ssh_config
ip link set lo up
echo ready > "$2/$1.ready"
while :; do sleep 3600 & wait; done
"""
# MaxStartups: tests open many connections at once, and sshd's default drops some.
_SSHD = """\
Port 22
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/user.key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
MaxStartups 500:30:1000
MaxSessions 500
"""
_SSH = """\
Host *
  IdentityFile {folder}/user.key
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""
# JobAcctGather and accounting are off, as on many small clusters, so that sacct does not work.
# A requeued job waits for cred_expire, 120 s by default.
_SLURM = """\
ClusterName=lab
SlurmctldHost=login({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
KillWait=20
MinJobAge=600
JobRequeue=1
InactiveLimit=0
SchedulerParameters=sched_interval=2,requeue_delay=1,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=host[1-{hosts}] CPUs={cpus} CoresPerSocket={cpus} RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


def lacking() -> str:
    """Return the reason why this machine cannot run a lab; empty if it can."""
    if os.geteuid() != 0:
        return "a lab takes root"
    absent = [name for name in NEEDED if shutil.which(name, path=_TOOLS) is None]
    if absent:
        return (
            f"no {', '.join(absent)} here: apt-get install iproute2 nftables "
            "openssh-server slurm-wlm munge"
        )
    spaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")  # as of a host's
    tried = subprocess.run(["unshare", *spaces, "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


class Lab:
    """A running cluster: `login`, with Slurm's controller, and `host1` to `hostN`.

    The hosts share this machine's disk.
    """

    def __init__(self, hosts: int = 3, cpus: int = 4, aliases: int = 0) -> None:
        self.names = [f"host{number}" for number in range(1, hosts + 1)]
        self.cpus = cpus
        self.aliases = aliases
        # One lab for each process of tests, so that parallel test runs do not collide.
        self.folder = Path(tempfile.gettempdir()) / f"{_NAME}-{os.getpid()}"
        self._inits: dict[str, int] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        _clean_stale()
        self.folder.mkdir()
        try:
            self._write()
            self._start_hosts()
            self._connect()
            self._start_daemons()
        except BaseException as error:
            # The logs are in the lab's folder, which close() removes.
            told = self._last_words()
            self.close()
            raise RuntimeError(f"no lab: {error}\n{told}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts: the kernel ends a host's processes together with its first one."""
        # The daemons end before the namespaces that contain them.
        for process in reversed(self._started):
            process.kill()
        for process in self._started:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _last_words(self) -> str:
        """Return the last three lines of each daemon's log."""
        logs = sorted((*self.folder.glob("*.log"), *self.folder.glob("*.out")))
        return "\n".join(
            f"{path.name}: {line}" for path in logs for line in path.read_text().splitlines()[-3:]
        )

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on a host in the current folder."""
        enter = [
            "nsenter",
            "--target",
            str(self._inits[host]),
            "--net",
            "--uts",
            "--mount",
            "--pid",
        ]
        # pdeathsig: the command ends with the process that started it.
        return [*enter, "env", "--chdir", os.getcwd(), "setpriv", "--pdeathsig", "KILL", *argv]

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a shell on any of the hosts."""
        return {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": _TOOLS}

    def run(
        self,
        host: str,
        *argv: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end.

        After `timeout` seconds, the command and the processes of its group are killed.

        Raises:
            subprocess.TimeoutExpired: the command ran longer than `timeout`.
        """
        command = self.command(host, ["env", "--chdir", str(cwd or os.getcwd()), *argv])
        environ = self.environ if env is None else env
        # A process group of its own, so that killpg reaches all that the command started.
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            # Reap the process and close its pipes.
            process.communicate()
            raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def link(self, host: str, up: bool) -> None:
        """Connect a host to the network, or disconnect it."""
        self._outside("ip", "link", "set", f"to-{host}", "up" if up else "down")

    @contextlib.contextmanager
    def firewall(self, rule: str, *hosts: str) -> Iterator[None]:
        """Drop incoming packets that an nftables rule selects on these hosts."""
        chain = "add chain inet lab in { type filter hook input priority 0 ; }"
        try:
            for host in hosts:
                for words in (
                    "add table inet lab",
                    chain,
                    f"add rule inet lab in iif eth0 {rule} drop",
                ):
                    done = self.run(host, "nft", words)
                    assert done.returncode == 0, done.stderr
            yield
        finally:
            # Also where a rule was refused: the hosts are shared by all tests.
            for host in hosts:
                self.run(host, "nft", "delete table inet lab")

    def processes(self, host: str) -> list[str]:
        """Return the command lines of ortlaunch's living processes on a host."""
        words = self.run(host, "ps", "-eo", "args=").stdout.splitlines()
        return [line.strip() for line in words if "ortlaunch" in line and "bash -c" not in line]

    def _write(self) -> None:
        """Write the keys and the configuration files that all hosts share."""
        for name in ("user", LOGIN, *self.names):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.folder}/{name}.key"],
                check=True,
            )
        # Numbers are the last part of the addresses: the login node's .1, the hosts' from .10.
        numbers = {LOGIN: 1, **{name: 10 + number for number, name in enumerate(self.names)}}
        also = {name: self.aliases_of(name) for name in numbers}
        lines = [
            f"{_NETWORK}.{number} {' '.join((name, *also[name]))}\n"
            for name, number in numbers.items()
        ]
        self._file("hosts", "127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
        keys = {name: (self.folder / f"{name}.key.pub").read_text() for name in numbers}
        self._file(
            "known_hosts",
            "".join(f"{','.join((name, *also[name]))} {key}" for name, key in keys.items()),
        )
        self._file("ssh_config", _SSH.format(folder=self.folder))
        for name in numbers:
            # The tested package may be in another folder than the one installed here.
            path = os.environ.get("PYTHONPATH")
            shared = f"SetEnv PYTHONPATH={path}\n" if path else ""
            self._file(f"{name}.sshd", _SSHD.format(folder=self.folder, name=name) + shared)
        (self.folder / "state").mkdir()
        self._file(
            "slurm.conf",
            _SLURM.format(
                folder=self.folder, network=_NETWORK, hosts=len(self.names), cpus=self.cpus
            ),
        )
        self._file("gres.conf", f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-1]\n")
        # Slurm only counts these files; nothing opens them.
        for number in range(2):
            self._file(f"gpu{number}", "")
        self._file("cgroup.conf", "CgroupPlugin=cgroup/v1\n")
        self._file("munge.key", "")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        # munged refuses a key that others can read.
        key.chmod(0o400)

    def aliases_of(self, name: str) -> list[str]:
        """Return further names of a host, so that few hosts can act as many."""
        if name == LOGIN:
            return []
        return [f"{name}-{number}" for number in range(1, self.aliases + 1)]

    def _file(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def _start_hosts(self) -> None:
        # Hosts start in parallel; the loop below waits for each one.
        for name in (LOGIN, *self.names):
            self._spawn(
                "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork",
                "--kill-child", "--mount-proc", "sh", "-c", _INIT, "init", name, str(self.folder),
            )  # fmt: skip
        for name, process in zip((LOGIN, *self.names), self._started):
            wait_for(lambda name=name: (self.folder / f"{name}.ready").exists(), f"host {name}")
            # unshare forks the host's first process; nsenter needs that child's id.
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            self._inits[name] = int(children[0])

    def _connect(self) -> None:
        """Create a bridge on the login node, and a virtual cable (veth) from it to each host."""
        self._outside("ip", "link", "add", "eth0", "type", "bridge")
        self._outside("ip", "address", "add", f"{_NETWORK}.1/24", "dev", "eth0")
        self._outside("ip", "link", "set", "eth0", "up")
        for number, name in enumerate(self.names):
            pid = str(self._inits[name])
            cable = f"to-{name}"
            self._outside(
                "ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", pid
            )
            self._outside("ip", "link", "set", cable, "master", "eth0", "up")
            inside = ["nsenter", "--target", pid, "--net", "ip"]
            _do(*inside, "address", "add", f"{_NETWORK}.{10 + number}/24", "dev", "eth0")
            _do(*inside, "link", "set", "eth0", "up")

    def _outside(self, *argv: str) -> None:
        """Run a command in the login node's network, with this machine's processes and files."""
        _do("nsenter", "--target", str(self._inits[LOGIN]), "--net", *argv)

    def _start_daemons(self) -> None:
        munge = ("--key-file", "--pid-file", "--seed-file", "--log-file", "--socket")
        files = (f"{option}={self.folder}/munge.{option[2:].partition('-')[0]}" for option in munge)
        self._daemon(LOGIN, "munged", "--foreground", "--force", *files)
        # slurmctld and slurmd authenticate through munged's socket from their start.
        wait_for((self.folder / "munge.socket").exists, "munged")
        self._daemon(LOGIN, "slurmctld", "-D")
        for name in (LOGIN, *self.names):
            self._daemon(
                name,
                # sshd re-executes itself, so it must be started by its absolute path.
                shutil.which("sshd", path=_TOOLS) or "sshd",
                "-D",
                "-f",
                f"{self.folder}/{name}.sshd",
            )
        for name in self.names:
            self._daemon(name, "slurmd", "-D", "-N", name)
        wait_for(lambda: self._idle() == len(self.names), "Slurm's nodes")

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stop slurmctld, and start it again afterwards."""
        assert self.run(LOGIN, "pkill", "-x", "slurmctld").returncode == 0
        wait_for(lambda: self.run(LOGIN, "pgrep", "-x", "slurmctld").returncode, "slurmctld's end")
        try:
            yield
        finally:
            self._daemon(LOGIN, "slurmctld", "-D")
            wait_for(lambda: self.run(LOGIN, "scontrol", "ping").returncode == 0, "slurmctld")

    def _idle(self) -> int:
        return (
            self.run(LOGIN, "sinfo", "--noheader", "--Node", "-p", "main", "-o", "%t")
            .stdout.split()
            .count("idle")
        )

    def _daemon(self, host: str, *argv: str) -> None:
        # Nothing of the user's environment reaches the daemons.
        clean = {"PATH": _SYSTEM, "SLURM_CONF": f"{self.folder}/slurm.conf", "LANG": "C.UTF-8"}
        with open(self.folder / f"{host}.{Path(argv[0]).name}.out", "ab") as log:
            self._started.append(
                subprocess.Popen(
                    self.command(host, argv),
                    env=clean,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _spawn(self, *argv: str) -> None:
        self._started.append(
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": _TOOLS})
        )


def _do(*argv: str) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, "PATH": _TOOLS}, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def wait_for(there: object, what: str, seconds: float = 30) -> None:
    """Wait until a function returns a true value."""
    deadline = time.monotonic() + seconds
    while not there():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come up within {seconds:.0f} s")
        time.sleep(0.02)


def _clean_stale() -> None:
    """Remove the folders of labs whose maker has ended; their hosts ended with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_NAME}-*"):
        number = folder.name.rpartition("-")[2]
        # A folder with this process's id is from an earlier process that had the same id.
        if number.isdecimal() and (
            int(number) == os.getpid() or not Path(f"/proc/{number}").exists()
        ):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def shell(hosts: int) -> Iterator[Lab]:
    """Run a lab, and print some commands to try in it."""
    began = time.monotonic()
    with Lab(hosts) as lab:
        print(
            f"{hosts} hosts in {time.monotonic() - began:.1f} s; try: ssh host1, sinfo, "
            "sbatch; exit ends all"
        )
        yield lab


def main() -> int:
    """Run a shell, or one command, on a lab's login node.

    python -m tests.cluster.lab [HOSTS [COMMAND...]]
    """
    lack = lacking()
    if lack:
        print(f"no lab: {lack}", file=sys.stderr)
        return 1
    words = sys.argv[1:]
    hosts = int(words.pop(0)) if words else 2
    with shell(hosts) as lab:
        return subprocess.run(
            # --norc: the user's startup file could change PATH.
            lab.command(LOGIN, words or ["bash", "--norc"]),
            env=lab.environ,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
