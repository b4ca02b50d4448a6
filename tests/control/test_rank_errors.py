"""Incomplete, contradicting and impossible sets of launcher variables are refused by name."""

from __future__ import annotations

import itertools

import pytest

from ortlaunch.base.errors import RankError
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none
from tests.control.environments import (
    DEEPSPEED,
    GFORKER,
    HYDRA,
    MASTER,
    MPICH,
    MVAPICH,
    OPEN_MPI,
    PALS,
    PMI_PORT,
    SLURM,
    TORCH,
    Env,
    but,
)


def error(env: Env) -> str:
    """Return the message of the RankError for ``env``; `detect` and `from_environ` agree."""
    with pytest.raises(RankError) as first:
        rank_and_launcher_name_or_none(env)
    with pytest.raises(RankError) as second:
        Rank.from_environ(env)
    assert str(first.value) == str(second.value)
    return str(first.value)


TORCH_MEND = "a launcher sets all of them; if no launcher started this process, type: unset"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"WORLD_SIZE": "4", **MASTER},
            "torchrun: WORLD_SIZE=4 set, but RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not: "
            f"{TORCH_MEND} WORLD_SIZE",
        ),
        (
            but(TORCH, LOCAL_WORLD_SIZE=None),
            "torchrun: RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 set, but LOCAL_WORLD_SIZE not: "
            f"{TORCH_MEND} RANK WORLD_SIZE LOCAL_RANK",
        ),
        (
            but(DEEPSPEED, LOCAL_RANK=None),
            "torchrun: RANK=0 WORLD_SIZE=1 set, but LOCAL_RANK, LOCAL_WORLD_SIZE not: Kubeflow "
            "PyTorchJob and Alibaba PAI set RANK and WORLD_SIZE to count nodes, not ranks; start "
            "torchrun on each node with --nnodes=$WORLD_SIZE --node-rank=$RANK, which sets all four",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", **MASTER},
            "torchrun: RANK=1 WORLD_SIZE=4 set, but LOCAL_RANK, LOCAL_WORLD_SIZE not: Kubeflow "
            "PyTorchJob and Alibaba "
            "PAI set RANK and WORLD_SIZE to count nodes, not ranks; start torchrun on each node "
            "with "
            "--nnodes=$WORLD_SIZE --node-rank=$RANK, which sets all four",
        ),
        (
            but(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_RANK=None, OMPI_COMM_WORLD_SIZE=None),
            "Open MPI: OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 set, but "
            "OMPI_COMM_WORLD_SIZE, "
            f"OMPI_COMM_WORLD_LOCAL_RANK not: {TORCH_MEND} OMPI_COMM_WORLD_RANK "
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (
            {"MV2_COMM_WORLD_LOCAL_RANK": "0"},
            "MVAPICH: MV2_COMM_WORLD_LOCAL_RANK=0 set, but MV2_COMM_WORLD_RANK, "
            "MV2_COMM_WORLD_SIZE, "
            f"MV2_COMM_WORLD_LOCAL_SIZE not: {TORCH_MEND} MV2_COMM_WORLD_LOCAL_RANK",
        ),
        # These launchers set no local rank or no global rank: see environments.py.
        (
            GFORKER,
            f"{MPICH}: PMI_RANK=1 PMI_SIZE=2 set, but MPI_LOCALRANKID, MPI_LOCALNRANKS not: "
            f"{TORCH_MEND} PMI_RANK PMI_SIZE",
        ),
        (
            PMI_PORT,
            f"{MPICH}: MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 set, but PMI_RANK, PMI_SIZE not: "
            f"{TORCH_MEND} MPI_LOCALRANKID MPI_LOCALNRANKS",
        ),
        (
            but(PALS, PMI_RANK=None, PMI_SIZE=None),
            f"{MPICH}: PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=12 set, but PMI_RANK, PMI_SIZE not: "
            f"{TORCH_MEND} PALS_LOCAL_RANKID PALS_LOCAL_SIZE",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
            "Slurm: SLURM_PROCID=0 SLURM_STEP_ID=0 set, but SLURM_STEP_NUM_TASKS, SLURM_LOCALID, "
            f"SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID not: {TORCH_MEND} SLURM_PROCID SLURM_STEP_ID",
        ),
        # Part of a set beside the complete set of another launcher.
        (
            {**OPEN_MPI, "RANK": "0"},
            "torchrun: RANK=0 set, but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not, beside the "
            "complete set of "
            "Open MPI (OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=3): these are left over or copied, so type: unset RANK",
        ),
        (
            {**HYDRA, "RANK": "2", "WORLD_SIZE": "4"},
            "torchrun: RANK=2 WORLD_SIZE=4 set, but LOCAL_RANK, LOCAL_WORLD_SIZE not, beside the "
            "complete set of "
            f"{MPICH} (PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2): these are "
            "left over or copied, "
            "so type: unset RANK WORLD_SIZE",
        ),
        (
            {**SLURM, "PMI_RANK": "0", "PMI_SIZE": "1"},
            f"{MPICH}: PMI_RANK=0 PMI_SIZE=1 set, but MPI_LOCALRANKID, MPI_LOCALNRANKS not, "
            "beside the complete set "
            "of Slurm (SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 "
            "SLURM_STEP_TASKS_PER_NODE=2(x3),1 "
            "SLURM_NODEID=2 SLURM_STEP_ID=0): these are left over or copied, so type: unset "
            "PMI_RANK PMI_SIZE",
        ),
        (
            {**PALS, "MPI_LOCALRANKID": "0"},
            f"{MPICH}: PMI_RANK=13 PMI_SIZE=24 MPI_LOCALRANKID=0 set, but MPI_LOCALNRANKS not, "
            "beside the "
            f"complete set of {MPICH} (PMI_RANK=13 PMI_SIZE=24 PALS_LOCAL_RANKID=1 "
            "PALS_LOCAL_SIZE=12): "
            "these are left over or copied, so type: unset MPI_LOCALRANKID",
        ),
        (
            {"RANK": "0", "MV2_COMM_WORLD_RANK": "0"},
            "MVAPICH: MV2_COMM_WORLD_RANK=0 set, but MV2_COMM_WORLD_SIZE, "
            "MV2_COMM_WORLD_LOCAL_RANK, "
            f"MV2_COMM_WORLD_LOCAL_SIZE not: {TORCH_MEND} MV2_COMM_WORLD_RANK\n"
            "torchrun: RANK=0 set, but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not: "
            f"{TORCH_MEND} RANK",
        ),
    ],
)
def test_partial_set(env: Env, message: str) -> None:
    """The error names the variables that are set, those that are missing, and the remedy."""
    assert error(env) == message


def test_pmi_must_agree_wholly() -> None:
    """A PMI set that agrees with the Slurm step in the rank only is refused."""
    assert "type: unset PMI_RANK PMI_SIZE" in error({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "1"})


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        tuple(f"OMPI_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        tuple(MVAPICH),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        tuple(
            f"SLURM_{field}"
            for field in ("STEP_ID", "PROCID", "NTASKS", "LOCALID", "NODEID", "TASKS_PER_NODE")
        ),
    ],
)
def test_every_partial_set_is_refused(names: tuple[str, ...]) -> None:
    """No proper subset of a launcher's variables gives a rank.

    Without SLURM_STEP_ID the Slurm variables are ignored.
    """
    whole = {
        name: "1" if "SIZE" in name or "NRANKS" in name or "TASKS" in name else "0"
        for name in names
    }
    assert Rank.from_environ(whole) == Rank(0, 1, 0, 1)
    assert rank_and_launcher_name_or_none(whole) is not None
    for count in range(1, len(names)):
        for chosen in itertools.combinations(names, count):
            part = {name: whole[name] for name in chosen}
            # Without a step id the variables may be those of a batch script, which is no rank.
            if "SLURM_STEP_ID" in names and "SLURM_STEP_ID" not in part:
                assert rank_and_launcher_name_or_none(part) is None
            else:
                said = error(part)
                assert all(f"{name}={value}" in said for name, value in part.items())


UNSET = "unset the variables of the one that did not start this process"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {**OPEN_MPI, **HYDRA},
            f"Open MPI and {MPICH} disagree: OMPI_COMM_WORLD_RANK=1 but PMI_RANK=2, "
            "OMPI_COMM_WORLD_SIZE=3 but "
            "PMI_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=2 but MPI_LOCALRANKID=0, "
            "OMPI_COMM_WORLD_LOCAL_SIZE=3 but "
            f"MPI_LOCALNRANKS=2; {UNSET}",
        ),
        (
            {
                **OPEN_MPI,
                "RANK": "1",
                "WORLD_SIZE": "3",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "3",
            },
            "Open MPI and torchrun disagree: OMPI_COMM_WORLD_LOCAL_RANK=2 but LOCAL_RANK=1; "
            f"{UNSET}",
        ),
        (
            {**SLURM, **TORCH},
            "Slurm and torchrun disagree: SLURM_STEP_NUM_TASKS=7 but WORLD_SIZE=8, "
            f"SLURM_STEP_TASKS_PER_NODE=2(x3),1 but LOCAL_WORLD_SIZE=4; {UNSET}",
        ),
        (
            {**HYDRA, **MVAPICH},
            f"MVAPICH and {MPICH} disagree: MV2_COMM_WORLD_RANK=3 but PMI_RANK=2, "
            "MV2_COMM_WORLD_LOCAL_RANK=1 but "
            f"MPI_LOCALRANKID=0; {UNSET}",
        ),
        (
            {**HYDRA, "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "4"},
            f"{MPICH} and {MPICH} disagree: MPI_LOCALNRANKS=2 but PALS_LOCAL_SIZE=4; {UNSET}",
        ),
    ],
)
def test_disagreement(env: Env, message: str) -> None:
    """The error for two contradicting sets names every pair of variables that differ."""
    assert error(env) == message


NOT_A_NUMBER = "is not a whole number of 0 or more; unset it or start again"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (but(TORCH, RANK="-1"), f"RANK='-1' {NOT_A_NUMBER}"),
        (but(TORCH, RANK=""), f"RANK='' {NOT_A_NUMBER}"),
        (but(TORCH, WORLD_SIZE="8.0"), f"WORLD_SIZE='8.0' {NOT_A_NUMBER}"),
        # Python's int() would accept an Arabic digit.
        (but(TORCH, WORLD_SIZE="٨"), f"WORLD_SIZE='٨' {NOT_A_NUMBER}"),
        (but(TORCH, WORLD_SIZE="9" * 11), f"WORLD_SIZE='99999999999' {NOT_A_NUMBER}"),
        (but(TORCH, LOCAL_RANK="one"), f"LOCAL_RANK='one' {NOT_A_NUMBER}"),
        (
            but(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE=" 3"),
            f"OMPI_COMM_WORLD_LOCAL_SIZE=' 3' {NOT_A_NUMBER}",
        ),
        (but(SLURM, SLURM_STEP_ID="batch"), f"SLURM_STEP_ID='batch' {NOT_A_NUMBER}"),
        (but(SLURM, SLURM_NODEID="x"), f"SLURM_NODEID='x' {NOT_A_NUMBER}"),
        ({**SLURM, "PMI_RANK": "x"}, f"PMI_RANK='x' {NOT_A_NUMBER}"),
        (
            but(TORCH, RANK="8"),
            "RANK=8 is not below WORLD_SIZE=8; ranks count from 0, so one of them is stale",
        ),
        (
            but(TORCH, WORLD_SIZE="0"),
            "RANK=5 is not below WORLD_SIZE=0; ranks count from 0, so one of them is stale",
        ),
        (
            but(TORCH, LOCAL_RANK="4"),
            "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4; ranks count from 0, so one of them is "
            "stale",
        ),
        (
            but(TORCH, LOCAL_WORLD_SIZE="16"),
            "LOCAL_WORLD_SIZE=16 is more than WORLD_SIZE=8, the ranks of all nodes; one of them "
            "is stale",
        ),
        (
            but(SLURM, SLURM_LOCALID="2"),
            "SLURM_LOCALID=2 is not below SLURM_STEP_TASKS_PER_NODE=2(x3),1; ranks count from 0, "
            "so one of them is "
            "stale",
        ),
        (
            but(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x3)"),
            "SLURM_STEP_TASKS_PER_NODE=2(x3) does not add up to SLURM_STEP_NUM_TASKS=7; one is "
            "stale",
        ),
        (
            but(SLURM, SLURM_NODEID="4"),
            "SLURM_NODEID=4 is not one of the 4 nodes of SLURM_STEP_TASKS_PER_NODE=2(x3),1",
        ),
        (
            but(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x3),"),
            "SLURM_STEP_TASKS_PER_NODE=2(x3), is not a layout; Slurm writes for example 2(x3),1",
        ),
    ],
)
def test_wrong_values(env: Env, message: str) -> None:
    """The error for an invalid or impossible value names the variable and the value."""
    assert error(env) == message
