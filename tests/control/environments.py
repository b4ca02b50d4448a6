"""The environment variables that each launcher sets for a rank.

Environments marked "seen" were recorded on this project's machines with Open MPI 5.0.11,
MPICH 5.0.2, Intel MPI (PyPI's impi-rt), torchrun 2.x and DeepSpeed 0.19. Only the variables about
ranks are kept.
"""

from __future__ import annotations

MPICH = "MPICH / Intel MPI / PALS"
Env = dict[str, str]

# Seen: rank 1 of `mpirun -n 3 --oversubscribe` on two cores. Open MPI maps by core, so the local
# rank differs from the rank.
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
PMI_PORT: Env = {
    "PMI_PORT": "vm:41669",
    "PMI_ID": "1",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
}
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
# Seen: rank 0 of `deepspeed --num_gpus 1`, which sets LOCAL_SIZE instead of LOCAL_WORLD_SIZE.
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
    """Return a copy of ``env`` with some variables changed; None removes a variable."""
    merged = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}
