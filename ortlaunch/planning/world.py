"""Hosts, launcher and device of a run, from the command line, the recipe and this machine.

The module reads this machine's GPUs, cores and launcher environment, without torch. Each choice is
made here only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ortlaunch import machine
from ortlaunch.errors import PlanError
from ortlaunch.launch_plan import Node
from ortlaunch.launchers import INSIDE, LAUNCHERS, launcher_row, reason_launcher_is_refused
from ortlaunch.planning.forwarding import forwarded
from ortlaunch.planning.hosts import Host, hostfile_text, parse_hostfile, select
from ortlaunch.planning.slurm_names import hosts_of_step
from ortlaunch.rank import Rank, detect_rank_and_launcher
from ortlaunch.recipe import Recipe
from ortlaunch.units import count_with_noun

# For tests: 1 lets ranks share the GPUs of this host, over gloo, if there are fewer GPUs than
# ranks.
SHARE_VARIABLE = "ORTLAUNCH_SHARE_GPUS"


class LaunchOptions(NamedTuple):
    """Launch options of the command line; None where an option is not given."""

    launcher: str | None = None
    processes_per_node: int | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    # The plan is only shown, so GPUs that this host lacks may exist on others.
    planned_only: bool = False
    # The command that the user typed.
    task: str = "train"
    # launch.nodes and launch.processes_per_node give the hosts, which a scheduler will find.
    declared: bool = False
    # Another machine trains: files of this one are not those of the run.
    elsewhere: bool = False
    # The host file's text after the first read: a pipe can be read only once.
    hosts_text: str | None = None
    # The command line, the program first; empty if there was none.
    typed: tuple[str, ...] = ()

    def with_hosts_text(self) -> LaunchOptions:
        """Return the options with the host file's text, which is read at most once.

        Raises:
            HostfileError: it cannot be read or is not UTF-8.
        """
        if self.hostfile is None or self.hosts_text is not None:
            return self
        return self._replace(hosts_text=hostfile_text(self.hostfile))


class World(NamedTuple):
    """The hosts, launcher and device of a run, with this process's rank and notes for the user.

    `inside` is the rank if a launcher has already started this process.
    """

    hosts: tuple[Host, ...]
    launcher: str  # local | torchrun | mpi | inside
    device: str  # cpu | cuda
    inside: Rank | None
    notes: tuple[str, ...]
    # OMP threads of each rank; None if ranks are on other hosts, whose cores are unknown here.
    threads: int | None
    # Names of variables of the user's shell that every rank gets.
    forward: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks: one for each slot."""
        return sum(host.slots for host in self.hosts)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The hosts with their ranks, which are counted in the order of the hosts."""
        firsts = itertools.accumulate((host.slots for host in self.hosts), initial=0)
        return tuple(
            Node(host.name, host.slots, first, host.devices)
            for host, first in zip(self.hosts, firsts)
        )


def resolve_world(recipe: Recipe, options: LaunchOptions, environ: Mapping[str, str]) -> World:
    """Resolve the world of a run.

    Raises:
        PlanError, HostfileError, RankError: the requested options do not fit together, or not on
            this machine.
    """
    # The command line checks its options itself; the Python API passes any value.
    if refused := reason_launcher_is_refused(options.launcher):
        raise PlanError(f"launcher: {refused}")
    if options.processes_per_node is not None and options.processes_per_node < 1:
        raise PlanError(f"processes_per_node: got {options.processes_per_node}; give 1 or more")
    found = None if options.declared else _enclosing(environ)
    gpus = machine.visible_gpu_count(environ)
    device = recipe.launch.device if recipe.launch.device != "auto" else ("cuda" if gpus else "cpu")
    hosts, notes = _hosts(recipe, options, gpus if device == "cuda" else 0, found, environ)
    if device == "cuda" and gpus and environ.get(SHARE_VARIABLE) == "1":
        hosts, shared = _on_shared_gpus(hosts, gpus)
        notes += shared
    launcher = _launcher(recipe, options, hosts, found)
    _check_nodes(recipe, hosts, options)
    _check_job(recipe, hosts, options, environ)
    starter = launcher_row(launcher)
    if starter.is_ours:
        notes += tuple(_check_this_host(hosts, device, gpus, options))
        if (recipe.launch.device, device) == ("auto", "cpu") and not all(
            host.is_here for host in hosts
        ):
            notes += (
                "launch.device is auto, and this host has no GPU: cpu is used; if other hosts "
                "have GPUs, set launch.device=cuda",
            )
    notes += tuple(filter(None, [starter.note]))
    rank = None if starter.is_ours or not found else found[0]
    forward = forwarded(recipe, environ, secret=not starter.is_ours and rank is None)
    return World(hosts, launcher, device, rank, notes, _threads(recipe, hosts, environ), forward)


def _on_shared_gpus(hosts: tuple[Host, ...], gpus: int) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Give slots of this host beyond its GPUs its GPUs in turns."""
    shared = tuple(
        host._replace(devices=tuple(device % gpus for device in host.devices))
        if host.is_here
        else host
        for host in hosts
    )
    note = (
        f"{SHARE_VARIABLE}=1: ranks share {count_with_noun(gpus, 'GPU')} over gloo, for tests only"
    )
    return shared, (note,) if shared != hosts else ()


def _enclosing(environ: Mapping[str, str]) -> tuple[Rank, str] | None:
    """Return the rank that a launcher gave to this process, and the launcher's name.

    A shell in a Slurm allocation (`srun --pty`) has none.
    """
    found = detect_rank_and_launcher(environ)
    return None if found and found[1] == "Slurm" and found[0].world_size == 1 else found


def _threads(recipe: Recipe, hosts: tuple[Host, ...], environ: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS of the recipe or the shell, else a rank's share of this host's cores."""
    asked = environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 where the user has set nothing.
    if asked == "1" and "TORCHELASTIC_RUN_ID" in environ:
        asked = ""
    asked = recipe.launch.env.get("OMP_NUM_THREADS", asked)
    if asked.isdecimal() and int(asked):
        return int(asked)
    here = len(hosts) == 1 and hosts[0].is_here
    return machine.threads_per_rank(hosts[0].slots) if here else None


def _hosts(
    recipe: Recipe,
    options: LaunchOptions,
    gpus: int,
    found: tuple[Rank, str] | None,
    environ: Mapping[str, str],
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts and notes, from the first source that names any."""
    per_node = options.processes_per_node or recipe.launch.processes_per_node
    if recipe.launch.elastic and (options.declared or (found and not options.hostfile)):
        raise PlanError(
            f"launch.nodes is {recipe.launch.nodes}, a range, which only --hostfile supports: "
            "the job of a scheduler has a fixed number of hosts; give one number, as "
            "launch.nodes=2"
        )
    if options.hostfile:
        return _from_file(options, per_node)
    if options.include or options.exclude:
        raise PlanError("--include and --exclude need a host file: give --hostfile")
    if options.declared:
        return _declared(
            recipe, per_node or (None if gpus or recipe.launch.device == "cuda" else 1)
        )
    if found is not None and not options.processes_per_node:
        return _of_slurm(found, environ) or _of_launcher(found[0]), ()
    nodes = max(recipe.launch.node_counts, default=1)
    if nodes > 1 and options.planned_only:
        return _declared(recipe, per_node)
    if nodes > 1:
        raise PlanError(
            f"launch.nodes is {recipe.launch.nodes}, and there is no --hostfile; give one, or "
            "start under a scheduler (ortlaunch submit), or override launch.nodes=1 to train on "
            "this host alone"
        )
    slots = per_node or gpus or 1
    return (Host("localhost", slots, tuple(range(slots))),), ()


def _from_file(
    options: LaunchOptions, per_node: int | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    assert options.hostfile is not None
    text = hostfile_text(options.hostfile) if options.hosts_text is None else options.hosts_text
    listed = parse_hostfile(text, options.hostfile, per_node)
    hosts = tuple(map(_by_name, select(listed.hosts, options.include, options.exclude)))
    if options.processes_per_node:
        hosts = tuple(_first_slots(host, options.processes_per_node) for host in hosts)
    return hosts, (f"{options.hostfile}: read as {listed.dialect}; hosts: {len(hosts)}",)


def _by_name(host: Host) -> Host:
    """Return the host with the name localhost in place of the address ::1, which no mpirun accepts."""
    return host._replace(name="localhost") if host.name == "::1" else host


def _first_slots(host: Host, slots: int) -> Host:
    """Return the host with its first slots only, as --nproc-per-node requests."""
    if slots > host.slots:
        raise PlanError(
            f"--nproc-per-node is {slots}, and {host.name} has {host.slots} slots in the host file"
        )
    return host._replace(slots=slots, devices=host.devices[:slots])


def _declared(recipe: Recipe, per_node: int | None) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return placeholder hosts, by the numbers in the recipe."""
    nodes = max(recipe.launch.node_counts, default=1)
    if per_node is None:
        raise PlanError(
            f"launch.nodes is {nodes}, and their ranks are not known here; give "
            "launch.processes_per_node, or --hostfile"
        )
    names = (Host(f"node{number}", per_node, tuple(range(per_node))) for number in range(nodes))
    return tuple(names), (f"hosts: {nodes} (launch.nodes); the job's start determines their names",)


def _of_slurm(found: tuple[Rank, str], environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return the nodes of a step by Slurm's names, or None; a step on one node is this host."""
    if found[1] != "Slurm" or found[0].local_world_size == found[0].world_size:
        return None
    return hosts_of_step(environ)


def _of_launcher(inside: Rank) -> tuple[Host, ...]:
    """Return the hosts as the enclosing launcher made them; the launcher does not give their names."""
    per_node = inside.local_world_size
    if inside.world_size % per_node:
        raise PlanError(
            f"the launcher started {count_with_noun(inside.world_size, 'rank')}, {per_node} of them on "
            "this host: the hosts have different numbers of ranks; give --hostfile with the "
            "slots of each"
        )
    count = inside.world_size // per_node
    names = ("localhost",) if count == 1 else tuple(f"node{i}" for i in range(count))
    return tuple(Host(name, per_node, tuple(range(per_node))) for name in names)


def _launcher(
    recipe: Recipe, options: LaunchOptions, hosts: tuple[Host, ...], found: tuple[Rank, str] | None
) -> str:
    """Return the name of the launcher, by the options, the recipe and the hosts."""
    chosen = options.launcher or recipe.launch.launcher
    if found and chosen == "auto" and not options.processes_per_node:
        return INSIDE
    if found and found[0].world_size > 1:
        raise PlanError(
            f"this is already rank {found[0].rank} of {found[0].world_size} under {found[1]}; "
            "leave --launcher at auto to be that rank, or start `ortlaunch train` once, outside "
            f"{found[1]}"
        )
    ranks = sum(host.slots for host in hosts)
    here = len(hosts) == 1 and hosts[0].is_here
    # The scheduler's own launcher will start the ranks there.
    if options.declared or (chosen == "auto" and len(hosts) > 1 and options.hostfile is None):
        return INSIDE
    starter = LAUNCHERS.get(chosen)
    if recipe.launch.elastic and starter and not starter.sees_lost_hosts:
        raise PlanError(
            f"launcher {chosen} with launch.nodes {recipe.launch.nodes}: only launcher torchrun "
            "detects a lost host; use torchrun or auto"
        )
    if chosen == "auto" and recipe.launch.elastic:
        return "torchrun"
    if chosen == "auto":
        return ("local" if ranks == 1 else "torchrun") if here else "mpi"
    if starter and starter.single and (ranks > 1 or not here):
        asked = (
            f"{count_with_noun(ranks, 'rank')} on "
            f"{hosts[0].name if len(hosts) == 1 else f'{len(hosts)} hosts'}"
        )
        raise PlanError(
            f"launcher {chosen} runs one process on this host, not {asked}; use torchrun or mpi"
        )
    return chosen


def _check_nodes(recipe: Recipe, hosts: tuple[Host, ...], options: LaunchOptions) -> None:
    """Raise PlanError if the hosts and slots are not those of the recipe.

    A world never shrinks by itself.
    """
    nodes = recipe.launch.nodes
    per_node = options.processes_per_node or recipe.launch.processes_per_node
    if nodes is not None and len(hosts) not in recipe.launch.node_counts:
        must = "it must be one of these" if recipe.launch.elastic else "they must be equal"
        raise PlanError(f"launch.nodes is {nodes}, and there are {len(hosts)} hosts; {must}")
    uneven = [
        f"{host.name} {host.slots}"
        for host in hosts
        if per_node is not None and host.slots != per_node
    ]
    if uneven:
        raise PlanError(
            f"launch.processes_per_node is {per_node}, and hosts have other numbers of slots: "
            f"{', '.join(uneven[:8])}"
        )


def _check_job(
    recipe: Recipe, hosts: tuple[Host, ...], options: LaunchOptions, environ: Mapping[str, str]
) -> None:
    """Raise PlanError in a Slurm job's script with several nodes or tasks.

    The script runs once, on the first node; only srun starts the job's tasks.
    """
    job = environ.get("SLURM_JOB_ID")
    if (
        job is None
        or options.declared
        or detect_rank_and_launcher(environ)
        or options.hostfile
        or recipe.launch.nodes is not None
    ):
        return
    nodes = _count(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    tasks = _count(environ, "SLURM_NTASKS", "SLURM_NPROCS") or nodes
    ranks = sum(host.slots for host in hosts)
    chosen = options.processes_per_node or recipe.launch.processes_per_node
    if nodes > 1 or (tasks > ranks and not chosen):
        raise PlanError(
            f"Slurm job {job} has {tasks} tasks on {nodes} nodes, and this is its script or "
            f"shell, not one of its tasks: {ranks} on this node would train; start all with "
            "`srun ortlaunch train ...`, or set launch.nodes=1 to train on this node only"
        )


def _count(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of these variables that is a number, or 0."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), 0)


def _check_this_host(
    hosts: tuple[Host, ...], device: str, gpus: int, options: LaunchOptions
) -> Iterator[str]:
    """Check that the slots of this host exist, and yield notes.

    Ranks check the other hosts before they build a model.
    """
    here = [host for host in hosts if host.is_here]
    if len(here) > 1:
        raise PlanError(
            f"{' and '.join(host.name for host in here)} are all this host; write it once, with "
            "all its slots"
        )
    for host in here:
        if device == "cuda" and not gpus:
            lacks = (
                f"launch.device is cuda, and {host.name} has no GPU that CUDA_VISIBLE_DEVICES shows"
            )
            if not options.planned_only:
                raise PlanError(
                    f"{lacks}; start on a host that has one, name such hosts with --hostfile, or "
                    "set launch.device=cpu"
                )
            yield f"{lacks}: planned as if it had {host.slots}"
        elif device == "cuda" and max(host.devices) >= gpus:
            raise PlanError(
                f"{host.name} has {gpus} GPUs, and {host.slots} ranks are requested; give it at "
                f"most {gpus} slots"
            )
        if (
            device == "cpu"
            and options.hostfile is not None
            and host.slots > machine.usable_core_count()
        ):
            raise PlanError(
                f"{host.name} has {machine.usable_core_count()} cores and no GPU, and the host file gives it "
                f"{host.slots} slots; lower them, or use --nproc-per-node without a host file to "
                "put more ranks than cores on this machine"
            )
