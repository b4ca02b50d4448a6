"""Rules of the section `submit`: (paths involved, message) for each broken rule."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortlaunch.errors import CONTROL
from ortlaunch.recipe.text.place import SECRET, Problem

if TYPE_CHECKING:
    from ortlaunch.recipe.fields.recipe import Recipe
    from ortlaunch.recipe.fields.submit import Kubernetes

# Fields of a pod and of a job that decide how ranks start and how an end counts.
_POD = {"restartPolicy", "subdomain", "hostname", "terminationGracePeriodSeconds"}
_JOB = {"completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template",
        "trainer", "runtimeRef", "runtimePatches"}  # fmt: skip
# Folders of a pod that have a volume of ortlaunch's.
_TAKEN = ("/dev/shm", "/etc/ortlaunch")
# A number of Kubernetes, and its unit.
_QUANTITY = re.compile(r"^([0-9.]+(?:[eE][-+]?[0-9]+)?)(.*)$")
_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
# A shell line that sets a variable: `X=1`, `export X=1` or `declare -x X=1`.
_EXPORT = re.compile(r"\s*(?:export\s+|declare\s+-x\s+)?([A-Za-z_][A-Za-z0-9_]*)=")


def submit_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of secrets, of invalid options, and of a GPU type without GPUs."""
    submit = recipe.submit
    # Any of these texts may become part of one line of a script; lines of `setup` are checked below.
    for path, value in _texts(submit.model_dump(exclude={"setup"}), "submit"):
        if found := CONTROL.search(value) or re.search(r"[\t\r\n]", value):
            told = (
                f"has {found[0]!r}, a control character, which would end a line of the job's script"
            )
            yield (path,), f"{told}; write it on one line, without such characters"
    for line in submit.setup:
        name = _EXPORT.match(line)
        if name and SECRET.search(name[1]):
            yield (
                ("submit.setup",),
                f"sets {name[1]}, which looks like a secret, and the run folder stores the "
                "recipe; export it in your shell, whose variables the job inherits",
            )
    for option in submit.options:
        if not option.startswith("-"):
            yield (
                ("submit.options",),
                f"got {option!r}; write one option of sbatch, as --switches=1",
            )
        elif re.match(r"--ar(r(a(y)?)?)?\b|-a", option):
            what = (
                "would start several tasks in one run folder; submit each with a --run-dir of "
                "its own"
            )
            yield ("submit.options",), f"got {option!r}, which {what}"
    if submit.gpu_type is not None and recipe.launch.device == "cpu":
        yield (
            ("submit.gpu_type", "launch.device"),
            "requests GPUs, and launch.device is cpu; leave one of them out",
        )
    yield from _of_pods(recipe)
    if submit.scheduler == "azureml" and recipe.launch.forward:
        yield (
            ("launch.forward",),
            "is not supported with Azure ML, which shows a job's variables to all readers of "
            "the workspace; have the job read its secrets from Key Vault, or leave it out",
        )


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield each text below a value, with its dotted path.

    Keys of mappings are texts, too; items of a list have the path of the list.
    """
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from _texts(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner, path)


def _of_paths(pods: Kubernetes) -> Iterator[Problem]:
    """Yield the problems of paths in the pods: `..`, and two volumes at one place."""
    taken: dict[str, str] = dict.fromkeys(_TAKEN, "which ortlaunch uses itself")
    for name, path in pods.volumes.items():
        where = posixpath.normpath(path)
        if where in taken:
            yield ("submit.kubernetes.volumes",), f"{name}: got {path}, {taken[where]}"
        taken[where] = f"where {name} is mounted"
    for field in ("runs", "workdir", "volumes"):
        value = getattr(pods, field)
        paths = value.values() if field == "volumes" else [value]
        if found := [path for path in paths if ".." in path.split("/")]:
            yield (f"submit.kubernetes.{field}",), f"got {found[0]}; write it without `..`"


def _bytes(quantity: str) -> float:
    """Return the bytes of a quantity of Kubernetes, such as 1.5Gi, 100M, 1e9 or 128000m."""
    number, unit = _QUANTITY.findall(quantity)[0]
    return float(number) * _UNITS[unit]


def _of_pods(recipe: Recipe) -> Iterator[Problem]:
    submit = recipe.submit
    forward = recipe.launch.forward
    if submit.scheduler in ("kubernetes", "azureml") and getattr(submit, submit.scheduler) is None:
        needs = (
            "image, runs and volumes"
            if submit.scheduler == "kubernetes"
            else "compute and environment"
        )
        yield (
            ("submit.scheduler",),
            f"is {submit.scheduler}, which needs submit.{submit.scheduler} with {needs}",
        )
    pods = submit.kubernetes
    if pods is None:
        return
    # The run folders must outlive the pods.
    if not any(
        f"{pods.runs}/".startswith(f"{path.rstrip('/')}/") for path in pods.volumes.values()
    ):
        paths = ", ".join(pods.volumes.values())
        yield (
            ("submit.kubernetes.runs",),
            f"got {pods.runs}, which is on none of the volumes ({paths}): lost with its pod",
        )
    yield from _of_paths(pods)
    if _bytes(pods.shared_memory) > (_bytes(pods.memory) if pods.memory else math.inf):
        yield (
            ("submit.kubernetes.shared_memory", "submit.kubernetes.memory"),
            f"{pods.shared_memory} of /dev/shm count as memory, of which the pod has {pods.memory}",
        )
    for field, owned in (("pod", _POD), ("job", _JOB)):
        for key in sorted(owned & set(getattr(pods, field))):
            yield (f"submit.kubernetes.{field}",), f"got {key}, which ortlaunch sets itself"
    if submit.scheduler == "kubernetes" and forward and pods.secret is None:
        yield (
            ("launch.forward",),
            "needs submit.kubernetes.secret: pods get variables from a Secret, not from your "
            f"shell, as of kubectl create secret generic NAME --from-literal={forward[0]}=...",
        )
