"""What each launcher leaves in the environment, alone, nested, stale or broken.

The environments marked "seen" are what the launchers really set on this project's machines: Open MPI 5.0.11,
MPICH 5.0.2, Intel MPI (PyPI's impi-rt), torchrun 2.x and DeepSpeed 0.19, cut to the variables about ranks.
"""

from __future__ import annotations

import itertools

import pytest

from ortlaunch.errors import RankError
from ortlaunch.rank import VARIABLES, Rank, detect, explain

MPICH = "MPICH / Intel MPI / PALS"
Env = dict[str, str]

# Seen: rank 1 of `mpirun -n 3 --oversubscribe` on two cores: it maps by core, which mixes the local ranks.
OPEN_MPI: Env = {
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-3307@1",
    "PMIX_HOSTNAME": "vm",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_WORLD_SIZE": "3",
    "OMPI_WORLD_LOCAL_SIZE": "3",
}
# Seen: rank 2 of `mpiexec -hosts localhost,127.0.0.1 -ppn 2 -n 4` of MPICH.
HYDRA: Env = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_FD": "7",
    "PMI_HOSTNAME": "127.0.0.1",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}
# Seen: rank 1 of `mpiexec.hydra -hosts localhost,127.0.0.1 -ppn 1 -n 2` of Intel MPI.
INTEL: Env = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
}
# Seen: rank 1 of `mpiexec.gforker -n 2` of MPICH, which sets nothing local.
GFORKER: Env = {
    "PMI_FD": "12",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_APPNUM": "0",
    "MPI_UNIVERSE_SIZE": "-1",
}
# Seen: rank 1 of `mpiexec -pmi-port -n 2` of MPICH, which replaces PMI_RANK and PMI_SIZE.
PMI_PORT: Env = {"PMI_PORT": "vm:41669", "PMI_ID": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
# Seen: rank 0 of `torchrun --standalone --nproc-per-node 1`.
TORCHRUN: Env = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "44123",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "acaaddb9-c3e1-4f79-97fb-afe8ffce509a",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# Seen: rank 0 of `deepspeed --num_gpus 1`, which has LOCAL_SIZE where torchrun has LOCAL_WORLD_SIZE.
DEEPSPEED: Env = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
}
# From the manuals, not seen.
TORCH: Env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MVAPICH: Env = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS: Env = {
    "PMI_RANK": "13",
    "PMI_SIZE": "24",
    "PMIX_RANK": "13",
    "PALS_RANKID": "13",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "12",
}
SLURM: Env = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
SLURM_RANK = Rank(5, 7, 1, 2)
# A step of one task on each of two nodes, as srun starts torchrun's agents and mpirun's daemons.
SLURM_AROUND: Env = {
    **SLURM,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# Azure ML on top of its MPI: names of Azure Batch and Azure ML, ranks of MPI alone.
AZURE: Env = {
    "AZUREML_EXPERIMENT_ID": "0f1e",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4",
    "AZ_BATCH_NODE_LIST": "10.0.0.4;10.0.0.5",
}
MASTER: Env = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}


def but(env: Env, **changes: str | None) -> Env:
    """``env`` with some variables changed; None removes one."""
    merged = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def error(env: Env) -> str:
    """The message of the RankError that ``env`` raises, the same from both entrances."""
    with pytest.raises(RankError) as first:
        detect(env)
    with pytest.raises(RankError) as second:
        Rank.from_environ(env)
    assert str(first.value) == str(second.value)
    return str(first.value)


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
    assert detect(env) == (rank, launcher)
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
    """Addresses, node numbers, batch scripts and interactive steps are not ranks: the world is one."""
    assert detect(env) is None
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
    """The local size is read from the layout for this node; the step's variables win over the job's."""
    assert detect(but(SLURM, **changes)) == (rank, "Slurm")


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
    """torchrun wins over MPI and Slurm around it, MPI over a Slurm step around it, whatever those say."""
    inner = {"Open MPI": OPEN_MPI, "torchrun": TORCHRUN, "MVAPICH": MVAPICH}
    own = inner.get(launcher, PALS if "PALS_RANKID" in env else HYDRA)
    assert detect(env) == (Rank.from_environ(own), launcher)


@pytest.mark.parametrize(
    ("outer", "launcher"),
    [(OPEN_MPI, "Open MPI"), (HYDRA, MPICH), (MVAPICH, "MVAPICH"), (SLURM, "Slurm")],
)
def test_copied_into_torch(outer: Env, launcher: str) -> None:
    """A wrapper that copies a launcher's set into torch's variables changes nothing, not even the name."""
    rank = Rank.from_environ(outer)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert detect({**outer, **dict(zip(names, map(str, rank)))}) == (rank, launcher)


@pytest.mark.parametrize(
    ("env", "rank", "launcher"),
    [
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, SLURM_RANK, "Slurm"),
        ({**SLURM, "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}, SLURM_RANK, "Slurm"),
        ({**MVAPICH, "PMI_RANK": "3", "PMI_SIZE": "4"}, Rank(3, 4, 1, 2), "MVAPICH"),
        ({**SLURM_AROUND, **TORCHRUN, "PMI_RANK": "1", "PMI_SIZE": "2"}, Rank(0, 1, 0, 1), "torchrun"),
    ],
)
def test_pmi_beside_a_complete_set(env: Env, rank: Rank, launcher: str) -> None:
    """PMI variables of srun --mpi=pmi2 and its like are no partial MPI while they agree with a complete "
    "set."""
    assert detect(env) == (rank, launcher)


TORCH_MEND = "a launcher sets all of them; if no launcher started this process, type: unset"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"WORLD_SIZE": "4", **MASTER},
            f"torchrun: WORLD_SIZE=4 set, but RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not: {TORCH_MEND} WORLD_SIZE",
        ),
        (
            but(TORCH, LOCAL_WORLD_SIZE=None),
            "torchrun: RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 set, but LOCAL_WORLD_SIZE not: "
            f"{TORCH_MEND} RANK WORLD_SIZE LOCAL_RANK",
        ),
        (
            DEEPSPEED,
            "torchrun: RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 set, but LOCAL_WORLD_SIZE not: DeepSpeed's "
            "launcher calls it "
            "LOCAL_SIZE; type: export LOCAL_WORLD_SIZE=$LOCAL_SIZE",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", **MASTER},
            "torchrun: RANK=1 WORLD_SIZE=4 set, but LOCAL_RANK, LOCAL_WORLD_SIZE not: Kubeflow PyTorchJob "
            "and Alibaba "
            "PAI set RANK and WORLD_SIZE to count nodes, not ranks; start torchrun on each node with "
            "--nnodes=$WORLD_SIZE --node-rank=$RANK, which sets all four",
        ),
        (
            but(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_RANK=None, OMPI_COMM_WORLD_SIZE=None),
            "Open MPI: OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 set, but OMPI_COMM_WORLD_SIZE, "
            f"OMPI_COMM_WORLD_LOCAL_RANK not: {TORCH_MEND} OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (
            {"MV2_COMM_WORLD_LOCAL_RANK": "0"},
            "MVAPICH: MV2_COMM_WORLD_LOCAL_RANK=0 set, but MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE, "
            f"MV2_COMM_WORLD_LOCAL_SIZE not: {TORCH_MEND} MV2_COMM_WORLD_LOCAL_RANK",
        ),
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
        (
            {**OPEN_MPI, "RANK": "0"},
            "torchrun: RANK=0 set, but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not, beside the complete "
            "set of "
            "Open MPI (OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=3): these are left over or copied, so type: unset RANK",
        ),
        (
            {**HYDRA, "RANK": "2", "WORLD_SIZE": "4"},
            "torchrun: RANK=2 WORLD_SIZE=4 set, but LOCAL_RANK, LOCAL_WORLD_SIZE not, beside the complete "
            "set of "
            f"{MPICH} (PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2): these are left over or "
            "copied, "
            "so type: unset RANK WORLD_SIZE",
        ),
        (
            {**SLURM, "PMI_RANK": "0", "PMI_SIZE": "1"},
            f"{MPICH}: PMI_RANK=0 PMI_SIZE=1 set, but MPI_LOCALRANKID, MPI_LOCALNRANKS not, beside the "
            "complete set "
            "of Slurm (SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 "
            "SLURM_STEP_TASKS_PER_NODE=2(x3),1 "
            "SLURM_NODEID=2 SLURM_STEP_ID=0): these are left over or copied, so type: unset PMI_RANK "
            "PMI_SIZE",
        ),
        (
            {**PALS, "MPI_LOCALRANKID": "0"},
            f"{MPICH}: PMI_RANK=13 PMI_SIZE=24 MPI_LOCALRANKID=0 set, but MPI_LOCALNRANKS not, beside the "
            f"complete set of {MPICH} (PMI_RANK=13 PMI_SIZE=24 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=12): "
            "these are left over or copied, so type: unset MPI_LOCALRANKID",
        ),
        (
            {"RANK": "0", "MV2_COMM_WORLD_RANK": "0"},
            "MVAPICH: MV2_COMM_WORLD_RANK=0 set, but MV2_COMM_WORLD_SIZE, MV2_COMM_WORLD_LOCAL_RANK, "
            f"MV2_COMM_WORLD_LOCAL_SIZE not: {TORCH_MEND} MV2_COMM_WORLD_RANK\n"
            f"torchrun: RANK=0 set, but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not: {TORCH_MEND} RANK",
        ),
    ],
)
def test_partial_set(env: Env, message: str) -> None:
    """A partial set names what is set, what is missing and what to type."""
    assert error(env) == message


def test_pmi_must_agree_wholly() -> None:
    """A PMI set that shares only its rank with the Slurm step is refused."""
    assert "type: unset PMI_RANK PMI_SIZE" in error({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "1"})


FAMILIES = [
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    tuple(f"OMPI_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(MVAPICH),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    (
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_TASKS_PER_NODE",
    ),
]


@pytest.mark.parametrize("names", FAMILIES)
def test_every_partial_set_is_refused(names: tuple[str, ...]) -> None:
    """No proper part of any launcher's set is ever taken for a rank; without its step, Slurm's is no set "
    "at all."""
    whole = {name: "1" if "SIZE" in name or "NRANKS" in name or "TASKS" in name else "0" for name in names}
    assert Rank.from_environ(whole) == Rank(0, 1, 0, 1)
    assert detect(whole) is not None
    for count in range(1, len(names)):
        for part in itertools.combinations(names, count):
            if names[0] != "SLURM_STEP_ID" or "SLURM_STEP_ID" in part:
                assert all(f"{name}={whole[name]}" in error({name: whole[name] for name in part}) for name in part)


UNSET = "unset the variables of the one that did not start this process"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {**OPEN_MPI, **HYDRA},
            f"Open MPI and {MPICH} disagree: OMPI_COMM_WORLD_RANK=1 but PMI_RANK=2, OMPI_COMM_WORLD_SIZE=3 "
            "but "
            "PMI_SIZE=4, OMPI_COMM_WORLD_LOCAL_RANK=2 but MPI_LOCALRANKID=0, OMPI_COMM_WORLD_LOCAL_SIZE=3 "
            "but "
            f"MPI_LOCALNRANKS=2; {UNSET}",
        ),
        (
            {**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
            f"Open MPI and torchrun disagree: OMPI_COMM_WORLD_LOCAL_RANK=2 but LOCAL_RANK=1; {UNSET}",
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
    """Two complete sets that disagree name every pair of variables that differ."""
    assert error(env) == message


NOT_A_NUMBER = "is not a whole number of 0 or more; unset it or start again"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (but(TORCH, RANK="-1"), f"RANK='-1' {NOT_A_NUMBER}"),
        (but(TORCH, RANK=""), f"RANK='' {NOT_A_NUMBER}"),
        (but(TORCH, WORLD_SIZE="8.0"), f"WORLD_SIZE='8.0' {NOT_A_NUMBER}"),
        (but(TORCH, WORLD_SIZE="٨"), f"WORLD_SIZE='٨' {NOT_A_NUMBER}"),
        (but(TORCH, WORLD_SIZE="9" * 11), f"WORLD_SIZE='99999999999' {NOT_A_NUMBER}"),
        (but(TORCH, LOCAL_RANK="one"), f"LOCAL_RANK='one' {NOT_A_NUMBER}"),
        (but(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE=" 3"), f"OMPI_COMM_WORLD_LOCAL_SIZE=' 3' {NOT_A_NUMBER}"),
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
            "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4; ranks count from 0, so one of them is stale",
        ),
        (
            but(TORCH, LOCAL_WORLD_SIZE="16"),
            "LOCAL_WORLD_SIZE=16 is more than WORLD_SIZE=8, the ranks of all nodes; one of them is stale",
        ),
        (
            but(SLURM, SLURM_LOCALID="2"),
            "SLURM_LOCALID=2 is not below SLURM_STEP_TASKS_PER_NODE=2(x3),1; ranks count from 0, so one of "
            "them is "
            "stale",
        ),
        (
            but(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x3)"),
            "SLURM_STEP_TASKS_PER_NODE=2(x3) does not add up to SLURM_STEP_NUM_TASKS=7; one is stale",
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
    """Values that are no numbers or cannot be one process's place name the variable and the value."""
    assert error(env) == message


READ_OPEN_MPI = (
    "read OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3"
)


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({}, ["used: none, so this is rank 0 of 1"]),
        (
            SLURM,
            [
                "Slurm: rank 5 of 7, local rank 1 of 2; read SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 "
                "SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_NODEID=2 SLURM_STEP_ID=0",
                "used: Slurm",
            ],
        ),
        (OPEN_MPI, [f"Open MPI: rank 1 of 3, local rank 2 of 3; {READ_OPEN_MPI}", "used: Open MPI"]),
        (
            {**OPEN_MPI, **TORCHRUN},
            [
                f"Open MPI: rank 1 of 3, local rank 2 of 3; {READ_OPEN_MPI}",
                "torchrun: rank 0 of 1, local rank 0 of 1; read RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1",
                "used: torchrun",
            ],
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
            [
                "Slurm: not a step of ranks: SLURM_STEP_ID is 4294967290",
                "used: none, so this is rank 0 of 1",
            ],
        ),
        (
            {"SLURM_PROCID": "0"},
            ["Slurm: not a step of ranks: SLURM_STEP_ID is not set", "used: none, so this is rank 0 of 1"],
        ),
        (
            {"WORLD_SIZE": "4"},
            [
                "torchrun: incomplete, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not set; read WORLD_SIZE=4",
                "error: torchrun: WORLD_SIZE=4 set, but RANK, LOCAL_RANK, LOCAL_WORLD_SIZE not: "
                f"{TORCH_MEND} WORLD_SIZE",
            ],
        ),
    ],
)
def test_explain(env: Env, lines: list[str]) -> None:
    """One line per launcher found, then the one that is used, or the error."""
    assert explain(env).split("\n") == lines


def test_explain_wrong_value() -> None:
    """A value that is no number is told, not raised: with it, explain is how to find out."""
    wrong = f"OMPI_COMM_WORLD_RANK='x' {NOT_A_NUMBER}"
    read = READ_OPEN_MPI.replace("WORLD_RANK=1", "WORLD_RANK=x")
    lines = explain(but(OPEN_MPI, OMPI_COMM_WORLD_RANK="x")).split("\n")
    assert lines == [f"Open MPI: unusable, {wrong}; {read}", f"error: {wrong}"]


@pytest.mark.parametrize("env", [OPEN_MPI, HYDRA, PALS, MVAPICH, TORCHRUN, SLURM, DEEPSPEED, GFORKER])
def test_variables_are_all_that_is_read(env: Env) -> None:
    """Without VARIABLES no launcher is left, so a launcher that removes them starts from nothing."""
    assert detect({name: value for name, value in env.items() if name not in VARIABLES}) is None
