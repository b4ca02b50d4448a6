"""Determine the rank of this process from the complete variables of one launcher, or raise an
error.

Launchers set variables for their processes, shells keep old ones, and one launcher may start
another. So nothing is guessed: an incomplete set is refused, and two sets that disagree are refused,
except if one launcher is known to have started the other. Shared by the control side and the
worker; imports only the standard library and errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ortlaunch.base.errors import RankError

_TORCH = "torchrun"
_SLURM = "Slurm"
_ELASTIC = "TORCHELASTIC_RUN_ID"
_STEP = "SLURM_STEP_ID"

_MPI = "MPICH / Intel MPI / PALS"
_HYDRA_LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS_LOCAL = ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
# In the order of Rank's fields. Hydra and PALS share the names of the PMI protocol, but not those
# of the local rank.
_OPEN_MPI_NAMES = tuple(
    f"OMPI_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
_MVAPICH_NAMES = tuple(
    f"MV2_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
_HYDRA_NAMES = ("PMI_RANK", "PMI_SIZE", *_HYDRA_LOCAL)
_PALS_NAMES = ("PMI_RANK", "PMI_SIZE", *_PALS_LOCAL)
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# DeepSpeed's launcher is torchrun's otherwise.
_DEEPSPEED_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# If Slurm has two names, the step's comes first: the other one may describe the whole job.
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_SLURM_LAYOUTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_SLURM_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")

# Every variable read here: a launcher that starts ranks itself removes them first, then sets its
# own.
VARIABLES = frozenset(
    _OPEN_MPI_NAMES + _MVAPICH_NAMES + _HYDRA_NAMES + _PALS_NAMES + _TORCH_NAMES
).union(_SLURM_NAMES, _SLURM_SIZES, _SLURM_LAYOUTS, (_STEP, _ELASTIC))

# Slurm numbers its batch, interactive and extern steps from the top of 32 bits down; none of them
# consists of ranks.
_LAST_REAL_STEP = 0xFFFFFFF0


# Seconds from SIGTERM to SIGKILL for a rank that has nothing to save, whoever sends them.
GRACE_SECONDS = 8.0
# Exit status of a run that was stopped on request: all is saved, and it can be run again.
EXIT_SAVED = 85
# Statuses after which a restart is useless or unwanted: input error, saved, stopped by SIGHUP,
# SIGINT or SIGTERM.
NO_FAULT = (2, EXIT_SAVED, 129, 130, 143)
# Set for the ranks of a job that `ortlaunch submit` queued: SCHEDULER:ID.
JOB_VARIABLE = "ORTLAUNCH_JOB"
# Set by ortlaunch's own launchers for their processes on this host: process.process_space() and the
# launcher's process id.
LAUNCHER_VARIABLE = "ORTLAUNCH_LAUNCHER"


class Rank(NamedTuple):
    """A process's rank in the world (0 <= rank < world_size), and its local rank on its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environ(cls, env: Mapping[str, str]) -> Rank:
        """Return the rank that ``env`` describes; rank 0 of 1 without variables of a launcher."""
        rank_and_launcher = rank_and_launcher_name_or_none(env)
        return rank_and_launcher[0] if rank_and_launcher else cls(0, 1, 0, 1)


class _LauncherVariables(NamedTuple):
    """The variables of one launcher: its names, the first four in the order of Rank, and values."""

    launcher: str
    names: tuple[str, ...]
    values: dict[str, str]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if name not in self.values]

    @property
    def shown(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def rank_and_launcher_name_or_none(env: Mapping[str, str]) -> tuple[Rank, str] | None:
    """Return the rank and the name of its launcher; None without variables of a launcher.

    The launchers are "torchrun", "Open MPI", "MPICH / Intel MPI / PALS", "MVAPICH" and "Slurm".

    Raises:
        RankError: the variables in ``env`` are incomplete or contradict each other.
    """
    chosen_set = _choose_innermost_or_refuse_conflict(_present_variables_of_each_launcher(env), env)
    return (
        (_rank_from_complete_variables_or_refuse(chosen_set), chosen_set.launcher)
        if chosen_set
        else None
    )


def rank_variables_explanation_text(env: Mapping[str, str]) -> str:
    """Return a line for each launcher with its variables, and the launcher used or the error."""
    sets = _present_variables_of_each_launcher(env)
    lines = [
        f"{variable_set.launcher}: {_rank_or_problem_text(variable_set)}" for variable_set in sets
    ]
    if "SLURM_PROCID" in env and not any(variable_set.launcher == _SLURM for variable_set in sets):
        lines.append(f"{_SLURM}: not a step of ranks: {_STEP} is {env.get(_STEP, 'not set')}")
    try:
        rank_and_launcher = rank_and_launcher_name_or_none(env)
    except RankError as error:
        return "\n".join([*lines, f"error: {error}"])
    return "\n".join(
        [
            *lines,
            f"used: {rank_and_launcher[1]}"
            if rank_and_launcher
            else "used: none; this process is rank 0 of 1",
        ]
    )


def _rank_or_problem_text(launcher_variables: _LauncherVariables) -> str:
    if launcher_variables.missing:
        return f"incomplete, {', '.join(launcher_variables.missing)} not set; read {launcher_variables.shown}"
    try:
        rank = _rank_from_complete_variables_or_refuse(launcher_variables)
    except RankError as error:
        return f"unusable, {error}; read {launcher_variables.shown}"
    rank_text = (
        f"rank {rank.rank} of {rank.world_size}, local rank {rank.local_rank} of "
        f"{rank.local_world_size}"
    )
    return f"{rank_text}; read {launcher_variables.shown}"


def _present_variables_of_each_launcher(env: Mapping[str, str]) -> list[_LauncherVariables]:
    """Return the variables of each launcher, complete or not."""
    # torchrun's come last, because wrappers copy those of another launcher to its names.
    pals = any(name in env for name in _PALS_LOCAL)
    hydra = not pals or any(name in env for name in _HYDRA_LOCAL)
    is_deepspeed = "LOCAL_WORLD_SIZE" not in env and env.keys() >= {*_DEEPSPEED_NAMES}
    sets = (
        _pick_launcher_variables("Open MPI", _OPEN_MPI_NAMES, env),
        _pick_launcher_variables("MVAPICH", _MVAPICH_NAMES, env),
        _pick_launcher_variables(_MPI, _HYDRA_NAMES, env) if hydra else None,
        _pick_launcher_variables(_MPI, _PALS_NAMES, env) if pals else None,
        _slurm_step_variables_or_none(env),
        _pick_launcher_variables(_TORCH, _DEEPSPEED_NAMES if is_deepspeed else _TORCH_NAMES, env),
    )
    return [variable_set for variable_set in sets if variable_set]


def _pick_launcher_variables(
    launcher: str, names: tuple[str, ...], env: Mapping[str, str]
) -> _LauncherVariables | None:
    values = {name: env[name] for name in names if name in env}
    return _LauncherVariables(launcher, names, values) if values else None


def _slurm_step_variables_or_none(env: Mapping[str, str]) -> _LauncherVariables | None:
    step = env.get(_STEP)
    if step is None or (re.fullmatch("[0-9]{10}", step) and int(step) > _LAST_REAL_STEP):
        return None
    procid, localid, nodeid = _SLURM_NAMES
    size = _first_present_name(_SLURM_SIZES, env)
    layout = _first_present_name(_SLURM_LAYOUTS, env)
    return _pick_launcher_variables(_SLURM, (procid, size, localid, layout, nodeid, _STEP), env)


def _first_present_name(names: Sequence[str], env: Mapping[str, str]) -> str:
    return next((name for name in names if name in env), names[0])


def _choose_innermost_or_refuse_conflict(
    variable_sets: Sequence[_LauncherVariables], env: Mapping[str, str]
) -> _LauncherVariables | None:
    """Return the set of the launcher that started this process: the innermost one."""
    complete = [variable_set for variable_set in variable_sets if not variable_set.missing]
    elastic = [
        variable_set
        for variable_set in complete
        if variable_set.launcher == _TORCH and _ELASTIC in env
    ]
    nested = elastic or [
        variable_set for variable_set in complete if variable_set.launcher not in (_TORCH, _SLURM)
    ]
    # A Slurm step around mpirun or torchrun starts their daemons, so its tasks are not the ranks.
    level = [
        variable_set
        for variable_set in variable_sets
        if not (nested and variable_set.launcher == _SLURM)
    ]
    if partial := [
        variable_set
        for variable_set in level
        if variable_set.missing and not _is_pmi_set_repeating_a_complete_set(variable_set, complete)
    ]:
        raise RankError(
            "\n".join(
                _incomplete_variables_error_text(variable_set, complete, env)
                for variable_set in partial
            )
        )
    rivals = elastic or [variable_set for variable_set in level if not variable_set.missing]
    for other in rivals[1:]:
        _refuse_if_ranks_disagree(rivals[0], other)
    return rivals[0] if rivals else None


def _is_pmi_set_repeating_a_complete_set(
    partial_set: _LauncherVariables, complete_sets: Sequence[_LauncherVariables]
) -> bool:
    """Return whether incomplete PMI variables only repeat a complete set of another launcher."""
    # srun uses the PMI protocol, too, but sets none of Hydra's local names.
    if partial_set.launcher != _MPI:
        return False
    partial_values = [
        (field, _parse_whole_number(name, partial_set.values[name]))
        for field, name in enumerate(partial_set.names[:4])
        if name in partial_set.values
    ]
    return any(
        all(
            _rank_from_complete_variables_or_refuse(complete_set)[field] == value
            for field, value in partial_values
        )
        for complete_set in complete_sets
    )


def _incomplete_variables_error_text(
    variable_set: _LauncherVariables,
    complete_sets: Sequence[_LauncherVariables],
    env: Mapping[str, str],
) -> str:
    names = " ".join(
        name
        for name in variable_set.values
        if not any(name in complete_set.names for complete_set in complete_sets)
    )
    head = f"{variable_set.launcher}: {variable_set.shown} set, but {', '.join(variable_set.missing)} not"
    if complete_sets:
        beside = (
            f"beside the complete set of {complete_sets[0].launcher} ({complete_sets[0].shown})"
        )
        return f"{head}, {beside}: these are left over or copied, so type: unset {names}"
    if variable_set.launcher == _TORCH and set(variable_set.values) == {"RANK", "WORLD_SIZE"}:
        nodes = (
            "Kubeflow PyTorchJob and Alibaba PAI set RANK and WORLD_SIZE to count nodes, not ranks"
        )
        advice = (
            "start torchrun on each node with --nnodes=$WORLD_SIZE --node-rank=$RANK, "
            "which sets all four"
        )
        return f"{head}: {nodes}; {advice}"
    return (
        f"{head}: a launcher sets all of them; if no launcher started this process, "
        f"type: unset {names}"
    )


def _refuse_if_ranks_disagree(
    chosen_set: _LauncherVariables, other_set: _LauncherVariables
) -> None:
    pairs = zip(
        chosen_set.names,
        other_set.names,
        _rank_from_complete_variables_or_refuse(chosen_set),
        _rank_from_complete_variables_or_refuse(other_set),
    )
    differ = [
        f"{a}={chosen_set.values[a]} but {b}={other_set.values[b]}"
        for a, b, x, y in pairs
        if x != y
    ]
    if differ:
        advice = "unset the variables of the one that did not start this process"
        raise RankError(
            f"{chosen_set.launcher} and {other_set.launcher} disagree: {', '.join(differ)}; {advice}"
        )


def _rank_from_complete_variables_or_refuse(launcher_variables: _LauncherVariables) -> Rank:
    """Return the rank of a complete set.

    Raises:
        RankError: its values are not numbers or contradict each other.
    """
    texts = [launcher_variables.values[name] for name in launcher_variables.names]
    if launcher_variables.launcher == _SLURM:
        texts[3] = str(_slurm_task_count_on_this_node_or_refuse(launcher_variables))
    rank = Rank(
        *(
            _parse_whole_number(name, text)
            for name, text in zip(launcher_variables.names[:4], texts)
        )
    )
    shown = [f"{name}={launcher_variables.values[name]}" for name in launcher_variables.names]
    if rank.rank >= rank.world_size:
        raise RankError(
            f"{shown[0]} is not below {shown[1]}; ranks count from 0, so one of them is stale"
        )
    if rank.local_rank >= rank.local_world_size:
        raise RankError(
            f"{shown[2]} is not below {shown[3]}; ranks count from 0, so one of them is stale"
        )
    if rank.local_world_size > rank.world_size:
        raise RankError(
            f"{shown[3]} is more than {shown[1]}, the ranks of all nodes; one of them is stale"
        )
    return rank


def _slurm_task_count_on_this_node_or_refuse(variable_set: _LauncherVariables) -> int:
    """Return the number of tasks on this node, by Slurm's layout of all nodes."""
    # Such as ``2(x3),1``: two tasks on each of three nodes, then one task on one node.
    _, size, _, layout, node, step = variable_set.names
    _parse_whole_number(step, variable_set.values[step])
    text = variable_set.values[layout]
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in text.split(",")]
    runs = [(int(part[1]), int(part[2] or 1)) for part in parts if part]
    if len(runs) < len(parts):
        raise RankError(f"{layout}={text} is not a layout; Slurm writes for example 2(x3),1")
    if sum(tasks * nodes for tasks, nodes in runs) != _parse_whole_number(
        size, variable_set.values[size]
    ):
        raise RankError(
            f"{layout}={text} does not add up to {size}={variable_set.values[size]}; one is stale"
        )
    last = -1
    for tasks, nodes in runs:
        last += nodes
        if _parse_whole_number(node, variable_set.values[node]) <= last:
            return tasks
    raise RankError(
        f"{node}={variable_set.values[node]} is not one of the {last + 1} nodes of {layout}={text}"
    )


def _parse_whole_number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise RankError(
            f"{name}={text!r} is not a whole number of 0 or more; unset it or start again"
        )
    return int(text)
