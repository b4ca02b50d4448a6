"""Hosts, launcher and device of a run, from the command line, the recipe and this machine.

The module reads this machine's GPUs, cores and launcher environment, without torch. Each choice is
made here only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ortlaunch.base import machine
from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch_plan import Node
from ortlaunch.planning.forwarding import forwarded_variable_names_or_refuse_unset
from ortlaunch.planning.hosts import (
    Host,
    filter_hosts_by_include_or_exclude,
    parse_hostfile,
    read_hostfile_text,
)
from ortlaunch.planning.slurm_names import slurm_step_hosts_or_none
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none
from ortlaunch.recipe import Recipe
from ortlaunch.tables.launchers import INSIDE, LAUNCHERS, launcher_row, reason_launcher_is_refused

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

    def copy_with_hostfile_text(self) -> LaunchOptions:
        """Return the options with the host file's text, which is read at most once.

        Raises:
            HostfileError: it cannot be read or is not UTF-8.
        """
        if self.hostfile is None or self.hosts_text is not None:
            return self
        return self._replace(hosts_text=read_hostfile_text(self.hostfile))


class World(NamedTuple):
    """The hosts, launcher and device of a run, with this process's rank and notes for the user.

    `inside` is the rank if a launcher has already started this process.
    """

    hosts: tuple[Host, ...]
    launcher: str  # local | torchrun | mpi | inside
    device: str  # cpu | cuda
    enclosing_rank: Rank | None
    notes: tuple[str, ...]
    # OMP threads of each rank; None if ranks are on other hosts, whose cores are unknown here.
    threads: int | None
    # Names of variables of the user's shell that every rank gets.
    forward: tuple[str, ...] = ()

    @property
    def rank_count(self) -> int:
        """The number of ranks: one for each slot."""
        return sum(host.slots for host in self.hosts)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The hosts with their ranks, which are counted in the order of the hosts."""
        first_ranks = itertools.accumulate((host.slots for host in self.hosts), initial=0)
        return tuple(
            Node(host.name, host.slots, first_rank, host.devices)
            for host, first_rank in zip(self.hosts, first_ranks)
        )


def resolve_hosts_launcher_and_device(
    recipe: Recipe, launch_options: LaunchOptions, environ: Mapping[str, str]
) -> World:
    """Resolve the world of a run.

    Raises:
        PlanError, HostfileError, RankError: the requested options do not fit together, or not on
            this machine.
    """
    # The command line checks its options itself; the Python API passes any value.
    if refusal := reason_launcher_is_refused(launch_options.launcher):
        raise PlanError(f"launcher: {refusal}")
    if launch_options.processes_per_node is not None and launch_options.processes_per_node < 1:
        raise PlanError(
            f"processes_per_node: got {launch_options.processes_per_node}; give 1 or more"
        )
    enclosing_rank_and_launcher = (
        None
        if launch_options.declared
        else _enclosing_rank_and_launcher_unless_single_slurm(environ)
    )
    gpu_count = machine.visible_gpu_count(environ)
    device = (
        recipe.launch.device if recipe.launch.device != "auto" else ("cuda" if gpu_count else "cpu")
    )
    hosts, notes = _resolve_hosts_and_notes_or_refuse(
        recipe,
        launch_options,
        gpu_count if device == "cuda" else 0,
        enclosing_rank_and_launcher,
        environ,
    )
    if device == "cuda" and gpu_count and environ.get(SHARE_VARIABLE) == "1":
        hosts, shared_notes = _hosts_with_shared_gpus_and_note(hosts, gpu_count)
        notes += shared_notes
    launcher = _resolve_launcher_name_or_refuse(
        recipe, launch_options, hosts, enclosing_rank_and_launcher
    )
    _refuse_other_host_or_slot_counts(recipe, hosts, launch_options)
    _refuse_start_in_slurm_job_script(recipe, hosts, launch_options, environ)
    launcher_traits = launcher_row(launcher)
    if launcher_traits.is_ours:
        notes += tuple(
            _refuse_absent_slots_or_yield_notes(hosts, device, gpu_count, launch_options)
        )
        if (recipe.launch.device, device) == ("auto", "cpu") and not all(
            host.is_here for host in hosts
        ):
            notes += (
                "launch.device is auto, and this host has no GPU: cpu is used; if other hosts "
                "have GPUs, set launch.device=cuda",
            )
    notes += tuple(filter(None, [launcher_traits.note]))
    rank = (
        None
        if launcher_traits.is_ours or not enclosing_rank_and_launcher
        else enclosing_rank_and_launcher[0]
    )
    forward = forwarded_variable_names_or_refuse_unset(
        recipe, environ, may_come_from_secret=not launcher_traits.is_ours and rank is None
    )
    return World(
        hosts,
        launcher,
        device,
        rank,
        notes,
        _thread_count_of_rank_or_none(recipe, hosts, environ),
        forward,
    )


def _hosts_with_shared_gpus_and_note(
    hosts: tuple[Host, ...], gpu_count: int
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Give slots of this host beyond its GPUs its GPUs in turns."""
    shared_hosts = tuple(
        host._replace(devices=tuple(device % gpu_count for device in host.devices))
        if host.is_here
        else host
        for host in hosts
    )
    note = f"{SHARE_VARIABLE}=1: ranks share {count_with_noun(gpu_count, 'GPU')} over gloo, for tests only"
    return shared_hosts, (note,) if shared_hosts != hosts else ()


def _enclosing_rank_and_launcher_unless_single_slurm(
    environ: Mapping[str, str],
) -> tuple[Rank, str] | None:
    """Return the rank that a launcher gave to this process, and the launcher's name.

    A shell in a Slurm allocation (`srun --pty`) has none.
    """
    rank_and_launcher = rank_and_launcher_name_or_none(environ)
    return (
        None
        if rank_and_launcher
        and rank_and_launcher[1] == "Slurm"
        and rank_and_launcher[0].world_size == 1
        else rank_and_launcher
    )


def _thread_count_of_rank_or_none(
    recipe: Recipe, hosts: tuple[Host, ...], environ: Mapping[str, str]
) -> int | None:
    """Return OMP_NUM_THREADS of the recipe or the shell, else a rank's share of this host's cores."""
    requested_threads = environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 where the user has set nothing.
    if requested_threads == "1" and "TORCHELASTIC_RUN_ID" in environ:
        requested_threads = ""
    requested_threads = recipe.launch.env.get("OMP_NUM_THREADS", requested_threads)
    if requested_threads.isdecimal() and int(requested_threads):
        return int(requested_threads)
    is_this_host_alone = len(hosts) == 1 and hosts[0].is_here
    return machine.threads_per_rank(hosts[0].slots) if is_this_host_alone else None


def _resolve_hosts_and_notes_or_refuse(
    recipe: Recipe,
    launch_options: LaunchOptions,
    gpu_count: int,
    enclosing_rank_and_launcher: tuple[Rank, str] | None,
    environ: Mapping[str, str],
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts and notes, from the first source that names any."""
    processes_per_node = launch_options.processes_per_node or recipe.launch.processes_per_node
    if recipe.launch.elastic and (
        launch_options.declared or (enclosing_rank_and_launcher and not launch_options.hostfile)
    ):
        raise PlanError(
            f"launch.nodes is {recipe.launch.nodes}, a range, which only --hostfile supports: "
            "the job of a scheduler has a fixed number of hosts; give one number, as "
            "launch.nodes=2"
        )
    if launch_options.hostfile:
        return _filtered_hosts_and_note_from_hostfile(launch_options, processes_per_node)
    if launch_options.include or launch_options.exclude:
        raise PlanError("--include and --exclude need a host file: give --hostfile")
    if launch_options.declared:
        return _placeholder_hosts_and_note_or_refuse(
            recipe,
            processes_per_node or (None if gpu_count or recipe.launch.device == "cuda" else 1),
        )
    if enclosing_rank_and_launcher is not None and not launch_options.processes_per_node:
        return _slurm_hosts_unless_one_node(
            enclosing_rank_and_launcher, environ
        ) or _unnamed_hosts_of_enclosing_launcher(enclosing_rank_and_launcher[0]), ()
    max_nodes = max(recipe.launch.node_counts, default=1)
    if max_nodes > 1 and launch_options.planned_only:
        return _placeholder_hosts_and_note_or_refuse(recipe, processes_per_node)
    if max_nodes > 1:
        raise PlanError(
            f"launch.nodes is {recipe.launch.nodes}, and there is no --hostfile; give one, or "
            "start under a scheduler (ortlaunch submit), or override launch.nodes=1 to train on "
            "this host alone"
        )
    slots = processes_per_node or gpu_count or 1
    return (Host("localhost", slots, tuple(range(slots))),), ()


def _filtered_hosts_and_note_from_hostfile(
    launch_options: LaunchOptions, processes_per_node: int | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    assert launch_options.hostfile is not None
    hosts_text = (
        read_hostfile_text(launch_options.hostfile)
        if launch_options.hosts_text is None
        else launch_options.hosts_text
    )
    host_list = parse_hostfile(hosts_text, launch_options.hostfile, processes_per_node)
    hosts = tuple(
        map(
            _replace_ipv6_localhost,
            filter_hosts_by_include_or_exclude(
                host_list.hosts, launch_options.include, launch_options.exclude
            ),
        )
    )
    if launch_options.processes_per_node:
        hosts = tuple(
            _host_with_first_slots_or_refuse(host, launch_options.processes_per_node)
            for host in hosts
        )
    return hosts, (f"{launch_options.hostfile}: read as {host_list.dialect}; hosts: {len(hosts)}",)


def _replace_ipv6_localhost(host: Host) -> Host:
    """Return the host with the name localhost in place of the address ::1, which no mpirun accepts."""
    return host._replace(name="localhost") if host.name == "::1" else host


def _host_with_first_slots_or_refuse(host: Host, slot_count: int) -> Host:
    """Return the host with its first slots only, as --nproc-per-node requests."""
    if slot_count > host.slots:
        raise PlanError(
            f"--nproc-per-node is {slot_count}, and {host.name} has {host.slots} slots in the host file"
        )
    return host._replace(slots=slot_count, devices=host.devices[:slot_count])


def _placeholder_hosts_and_note_or_refuse(
    recipe: Recipe, processes_per_node: int | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return placeholder hosts, by the numbers in the recipe."""
    node_count = max(recipe.launch.node_counts, default=1)
    if processes_per_node is None:
        raise PlanError(
            f"launch.nodes is {node_count}, and their ranks are not known here; give "
            "launch.processes_per_node, or --hostfile"
        )
    placeholders = (
        Host(f"node{node_index}", processes_per_node, tuple(range(processes_per_node)))
        for node_index in range(node_count)
    )
    return tuple(placeholders), (
        f"hosts: {node_count} (launch.nodes); the job's start determines their names",
    )


def _slurm_hosts_unless_one_node(
    enclosing_rank_and_launcher: tuple[Rank, str], environ: Mapping[str, str]
) -> tuple[Host, ...] | None:
    """Return the nodes of a step by Slurm's names, or None; a step on one node is this host."""
    if (
        enclosing_rank_and_launcher[1] != "Slurm"
        or enclosing_rank_and_launcher[0].local_world_size
        == enclosing_rank_and_launcher[0].world_size
    ):
        return None
    return slurm_step_hosts_or_none(environ)


def _unnamed_hosts_of_enclosing_launcher(enclosing_rank: Rank) -> tuple[Host, ...]:
    """Return the hosts as the enclosing launcher made them; the launcher does not give their names."""
    processes_per_node = enclosing_rank.local_world_size
    if enclosing_rank.world_size % processes_per_node:
        raise PlanError(
            f"the launcher started {count_with_noun(enclosing_rank.world_size, 'rank')}, "
            f"{processes_per_node} of them on "
            "this host: the hosts have different numbers of ranks; give --hostfile with the "
            "slots of each"
        )
    node_count = enclosing_rank.world_size // processes_per_node
    node_names = ("localhost",) if node_count == 1 else tuple(f"node{i}" for i in range(node_count))
    return tuple(
        Host(name, processes_per_node, tuple(range(processes_per_node))) for name in node_names
    )


def _resolve_launcher_name_or_refuse(
    recipe: Recipe,
    launch_options: LaunchOptions,
    hosts: tuple[Host, ...],
    enclosing_rank_and_launcher: tuple[Rank, str] | None,
) -> str:
    """Return the name of the launcher, by the options, the recipe and the hosts."""
    requested_launcher = launch_options.launcher or recipe.launch.launcher
    if (
        enclosing_rank_and_launcher
        and requested_launcher == "auto"
        and not launch_options.processes_per_node
    ):
        return INSIDE
    if enclosing_rank_and_launcher and enclosing_rank_and_launcher[0].world_size > 1:
        raise PlanError(
            f"this is already rank {enclosing_rank_and_launcher[0].rank} of "
            f"{enclosing_rank_and_launcher[0].world_size} under {enclosing_rank_and_launcher[1]}; "
            "leave --launcher at auto to be that rank, or start `ortlaunch train` once, outside "
            f"{enclosing_rank_and_launcher[1]}"
        )
    rank_count = sum(host.slots for host in hosts)
    is_this_host_alone = len(hosts) == 1 and hosts[0].is_here
    # The scheduler's own launcher will start the ranks there.
    if launch_options.declared or (
        requested_launcher == "auto" and len(hosts) > 1 and launch_options.hostfile is None
    ):
        return INSIDE
    launcher_traits = LAUNCHERS.get(requested_launcher)
    if recipe.launch.elastic and launcher_traits and not launcher_traits.sees_lost_hosts:
        raise PlanError(
            f"launcher {requested_launcher} with launch.nodes {recipe.launch.nodes}: only launcher torchrun "
            "detects a lost host; use torchrun or auto"
        )
    if requested_launcher == "auto" and recipe.launch.elastic:
        return "torchrun"
    if requested_launcher == "auto":
        return ("local" if rank_count == 1 else "torchrun") if is_this_host_alone else "mpi"
    if launcher_traits and launcher_traits.single and (rank_count > 1 or not is_this_host_alone):
        request_text = (
            f"{count_with_noun(rank_count, 'rank')} on "
            f"{hosts[0].name if len(hosts) == 1 else f'{len(hosts)} hosts'}"
        )
        raise PlanError(
            f"launcher {requested_launcher} runs one process on this host, not {request_text}; use torchrun or mpi"
        )
    return requested_launcher


def _refuse_other_host_or_slot_counts(
    recipe: Recipe, hosts: tuple[Host, ...], launch_options: LaunchOptions
) -> None:
    """Raise PlanError if the hosts and slots are not those of the recipe.

    A world never shrinks by itself.
    """
    planned_nodes = recipe.launch.nodes
    processes_per_node = launch_options.processes_per_node or recipe.launch.processes_per_node
    if planned_nodes is not None and len(hosts) not in recipe.launch.node_counts:
        demand = "it must be one of these" if recipe.launch.elastic else "they must be equal"
        raise PlanError(
            f"launch.nodes is {planned_nodes}, and there are {len(hosts)} hosts; {demand}"
        )
    uneven_hosts = [
        f"{host.name} {host.slots}"
        for host in hosts
        if processes_per_node is not None and host.slots != processes_per_node
    ]
    if uneven_hosts:
        raise PlanError(
            f"launch.processes_per_node is {processes_per_node}, and hosts have other numbers of slots: "
            f"{', '.join(uneven_hosts[:8])}"
        )


def _refuse_start_in_slurm_job_script(
    recipe: Recipe,
    hosts: tuple[Host, ...],
    launch_options: LaunchOptions,
    environ: Mapping[str, str],
) -> None:
    """Raise PlanError in a Slurm job's script with several nodes or tasks.

    The script runs once, on the first node; only srun starts the job's tasks.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if (
        job_id is None
        or launch_options.declared
        or rank_and_launcher_name_or_none(environ)
        or launch_options.hostfile
        or recipe.launch.nodes is not None
    ):
        return
    node_count = _first_number_of_variables(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    task_count = _first_number_of_variables(environ, "SLURM_NTASKS", "SLURM_NPROCS") or node_count
    rank_count = sum(host.slots for host in hosts)
    processes_per_node = launch_options.processes_per_node or recipe.launch.processes_per_node
    if node_count > 1 or (task_count > rank_count and not processes_per_node):
        raise PlanError(
            f"Slurm job {job_id} has {task_count} tasks on {node_count} nodes, and this is its script or "
            f"shell, not one of its tasks: {rank_count} on this node would train; start all with "
            "`srun ortlaunch train ...`, or set launch.nodes=1 to train on this node only"
        )


def _first_number_of_variables(environ: Mapping[str, str], *variable_names: str) -> int:
    """Return the first of these variables that is a number, or 0."""
    return next(
        (int(environ[name]) for name in variable_names if environ.get(name, "").isdecimal()), 0
    )


def _refuse_absent_slots_or_yield_notes(
    hosts: tuple[Host, ...], device: str, gpu_count: int, launch_options: LaunchOptions
) -> Iterator[str]:
    """Check that the slots of this host exist, and yield notes.

    Ranks check the other hosts before they build a model.
    """
    hosts_here = [host for host in hosts if host.is_here]
    if len(hosts_here) > 1:
        raise PlanError(
            f"{' and '.join(host.name for host in hosts_here)} are all this host; write it once, with "
            "all its slots"
        )
    for host in hosts_here:
        if device == "cuda" and not gpu_count:
            missing_gpu_text = (
                f"launch.device is cuda, and {host.name} has no GPU that CUDA_VISIBLE_DEVICES shows"
            )
            if not launch_options.planned_only:
                raise PlanError(
                    f"{missing_gpu_text}; start on a host that has one, name such hosts with --hostfile, or "
                    "set launch.device=cpu"
                )
            yield f"{missing_gpu_text}: planned as if it had {host.slots}"
        elif device == "cuda" and max(host.devices) >= gpu_count:
            raise PlanError(
                f"{host.name} has {gpu_count} GPUs, and {host.slots} ranks are requested; give it at "
                f"most {gpu_count} slots"
            )
        if (
            device == "cpu"
            and launch_options.hostfile is not None
            and host.slots > machine.usable_core_count()
        ):
            raise PlanError(
                f"{host.name} has {machine.usable_core_count()} cores and no GPU, and the host file gives it "
                f"{host.slots} slots; lower them, or use --nproc-per-node without a host file to "
                "put more ranks than cores on this machine"
            )
