"""The rank of a process from the variables of one or several launchers, and `explain`."""

from __future__ import annotations

import pytest

from ortlaunch.rank import (
    VARIABLES,
    Rank,
    rank_and_launcher_name_or_none,
    rank_variables_explanation_text,
)
from tests.control.environments import (
    AZURE,
    DEEPSPEED,
    GFORKER,
    HYDRA,
    INTEL,
    MASTER,
    MPICH,
    MVAPICH,
    OPEN_MPI,
    PALS,
    SLURM,
    SLURM_AROUND,
    TORCH,
    TORCHRUN,
    Env,
    but,
)

SLURM_RANK = Rank(5, 7, 1, 2)  # of the environment SLURM


@pytest.mark.parametrize(
    ("env", "rank", "launcher"),
    [
        (OPEN_MPI, Rank(1, 3, 2, 3), "Open MPI"),
        (HYDRA, Rank(2, 4, 0, 2), MPICH),
        (INTEL, Rank(1, 2, 0, 1), MPICH),
        (PALS, Rank(13, 24, 1, 12), MPICH),
        (MVAPICH, Rank(3, 4, 1, 2), "MVAPICH"),
        (TORCHRUN, Rank(0, 1, 0, 1), "torchrun"),
        (TORCH, Rank(5, 8, 1, 4), "torchrun"),
        (SLURM, SLURM_RANK, "Slurm"),
        ({**OPEN_MPI, **AZURE, **MASTER}, Rank(1, 3, 2, 3), "Open MPI"),
        ({**INTEL, **AZURE}, Rank(1, 2, 0, 1), MPICH),
    ],
)
def test_one_launcher(env: Env, rank: Rank, launcher: str) -> None:
    """Each launcher's set gives its rank and its name."""
    assert rank_and_launcher_name_or_none(env) == (rank, launcher)
    assert Rank.from_environ(env) == rank


@pytest.mark.parametrize(
    "env",
    [
        {},
        MASTER,
        AZURE,
        {"PMIX_RANK": "3"},
        {"PALS_RANKID": "3", "PMI_FD": "4"},
        {"GROUP_RANK": "1", "NODE_RANK": "1", "NNODES": "2", "LOCAL_SIZE": "8"},
        but(SLURM, SLURM_STEP_ID=None),
        but(SLURM, SLURM_STEP_ID="4294967290"),
        but(SLURM, SLURM_STEP_ID="4294967291"),
        but(SLURM, SLURM_STEP_ID="4294967292"),
    ],
)
def test_no_launcher(env: Env) -> None:
    """Addresses, node numbers, batch scripts and interactive steps give a world of one rank."""
    assert rank_and_launcher_name_or_none(env) is None
    assert Rank.from_environ(env) == Rank(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, Rank(0, 7, 0, 2)),
        ({"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}, Rank(6, 7, 0, 1)),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2,4"}, Rank(5, 7, 1, 4)),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),3"}, Rank(5, 7, 1, 3)),
        ({"SLURM_STEP_ID": "4294967280"}, SLURM_RANK),
        ({"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_TASKS_PER_NODE": None}, SLURM_RANK),
        ({"SLURM_NTASKS": "56", "SLURM_TASKS_PER_NODE": "8(x7)"}, SLURM_RANK),
    ],
)
def test_slurm_layouts(changes: dict[str, str | None], rank: Rank) -> None:
    """The local size comes from this node's entry of the layout; step variables win."""
    assert rank_and_launcher_name_or_none(but(SLURM, **changes)) == (rank, "Slurm")


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({**SLURM_AROUND, **OPEN_MPI}, "Open MPI"),
        ({**SLURM_AROUND, **HYDRA}, MPICH),
        ({**SLURM_AROUND, **PALS}, MPICH),
        ({**SLURM_AROUND, **MVAPICH}, "MVAPICH"),
        ({**SLURM_AROUND, **TORCHRUN}, "torchrun"),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun"),
        ({**SLURM_AROUND, **HYDRA, **TORCHRUN}, "torchrun"),
        ({**but(SLURM, SLURM_LOCALID=None), **OPEN_MPI}, "Open MPI"),
        ({**but(SLURM, SLURM_STEP_TASKS_PER_NODE="8"), **TORCHRUN}, "torchrun"),
        ({**but(SLURM, SLURM_LOCALID=None), **TORCHRUN}, "torchrun"),
    ],
)
def test_nested_launchers(env: Env, launcher: str) -> None:
    """The innermost launcher wins: torchrun before MPI, and MPI before the Slurm step."""
    inner = {"Open MPI": OPEN_MPI, "torchrun": TORCHRUN, "MVAPICH": MVAPICH}
    own = inner.get(launcher, PALS if "PALS_RANKID" in env else HYDRA)
    assert rank_and_launcher_name_or_none(env) == (Rank.from_environ(own), launcher)


@pytest.mark.parametrize(
    ("outer", "launcher"),
    [(OPEN_MPI, "Open MPI"), (HYDRA, MPICH), (MVAPICH, "MVAPICH"), (SLURM, "Slurm")],
)
def test_copied_into_torch(outer: Env, launcher: str) -> None:
    """Copies of a launcher's set in torch's variables change neither rank nor launcher name."""
    rank = Rank.from_environ(outer)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert rank_and_launcher_name_or_none({**outer, **dict(zip(names, map(str, rank)))}) == (
        rank,
        launcher,
    )


@pytest.mark.parametrize(
    ("env", "rank", "launcher"),
    [
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, SLURM_RANK, "Slurm"),
        ({**SLURM, "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}, SLURM_RANK, "Slurm"),
        ({**MVAPICH, "PMI_RANK": "3", "PMI_SIZE": "4"}, Rank(3, 4, 1, 2), "MVAPICH"),
        (
            {**SLURM_AROUND, **TORCHRUN, "PMI_RANK": "1", "PMI_SIZE": "2"},
            Rank(0, 1, 0, 1),
            "torchrun",
        ),
    ],
)
def test_pmi_beside_a_complete_set(env: Env, rank: Rank, launcher: str) -> None:
    """An incomplete PMI set is ignored if it agrees with a complete set.

    `srun --mpi=pmi2` leaves such a set.
    """
    assert rank_and_launcher_name_or_none(env) == (rank, launcher)


READ_OPEN_MPI = (
    "read OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 "
    "OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3"
)


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({}, ["used: none; this process is rank 0 of 1"]),
        (
            SLURM,
            [
                "Slurm: rank 5 of 7, local rank 1 of 2; read SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 "
                "SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_NODEID=2 SLURM_STEP_ID=0",
                "used: Slurm",
            ],
        ),
        (
            OPEN_MPI,
            [f"Open MPI: rank 1 of 3, local rank 2 of 3; {READ_OPEN_MPI}", "used: Open MPI"],
        ),
        (
            {**OPEN_MPI, **TORCHRUN},
            [
                f"Open MPI: rank 1 of 3, local rank 2 of 3; {READ_OPEN_MPI}",
                "torchrun: rank 0 of 1, local rank 0 of 1; read RANK=0 WORLD_SIZE=1 "
                "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1",
                "used: torchrun",
            ],
        ),
        (
            # Slurm numbers special steps, such as interactive ones, from the top of 32 bits.
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
            [
                "Slurm: not a step of ranks: SLURM_STEP_ID is 4294967290",
                "used: none; this process is rank 0 of 1",
            ],
        ),
        (
            {"SLURM_PROCID": "0"},
            [
                "Slurm: not a step of ranks: SLURM_STEP_ID is not set",
                "used: none; this process is rank 0 of 1",
            ],
        ),
        (
            {"WORLD_SIZE": "4"},
            [
                "torchrun: incomplete, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not set; "
                "read WORLD_SIZE=4",
                "error: torchrun: WORLD_SIZE=4 set, but RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not: "
                "a launcher sets all "
                "of them; if no launcher started this process, type: unset WORLD_SIZE",
            ],
        ),
    ],
)
def test_explain(env: Env, lines: list[str]) -> None:
    """`explain` prints a line for each launcher, then the used launcher or the error."""
    assert rank_variables_explanation_text(env).split("\n") == lines


def test_explain_wrong_value() -> None:
    """`explain` prints an invalid value instead of raising, because it is used to find it."""
    wrong = "OMPI_COMM_WORLD_RANK='x' is not a whole number of 0 or more; unset it or start again"
    read = READ_OPEN_MPI.replace("WORLD_RANK=1", "WORLD_RANK=x")
    lines = rank_variables_explanation_text(but(OPEN_MPI, OMPI_COMM_WORLD_RANK="x")).split("\n")
    assert lines == [f"Open MPI: unusable, {wrong}; {read}", f"error: {wrong}"]


@pytest.mark.parametrize(
    "env", [OPEN_MPI, HYDRA, PALS, MVAPICH, TORCHRUN, SLURM, DEEPSPEED, GFORKER]
)
def test_variables_are_all_that_is_read(env: Env) -> None:
    """No launcher is detected without VARIABLES, so removing them gives a clean environment."""
    assert (
        rank_and_launcher_name_or_none(
            {name: value for name, value in env.items() if name not in VARIABLES}
        )
        is None
    )


def test_deepspeeds_launcher_counts_by_another_name() -> None:
    """DeepSpeed's launcher has LOCAL_SIZE in place of LOCAL_WORLD_SIZE, which wins if it is set."""
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert rank_and_launcher_name_or_none(env) == (Rank(3, 4, 1, 2), "torchrun")
    assert rank_and_launcher_name_or_none({**env, "LOCAL_SIZE": "9", "LOCAL_WORLD_SIZE": "2"}) == (
        Rank(3, 4, 1, 2),
        "torchrun",
    )
