"""Rules of the section `submit`: (paths involved, message) for each broken rule."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortlaunch.base.errors import CONTROL
from ortlaunch.recipe.text.source_location import SECRET_NAME, Problem

if TYPE_CHECKING:
    from ortlaunch.recipe.fields.recipe import Recipe
    from ortlaunch.recipe.fields.submit import Kubernetes

# Fields of a pod and of a job that decide how ranks start and how an end counts.
_OWNED_POD_FIELDS = {"restartPolicy", "subdomain", "hostname", "terminationGracePeriodSeconds"}
_OWNED_JOB_FIELDS = {"completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template",
        "trainer", "runtimeRef", "runtimePatches"}  # fmt: skip
# Folders of a pod that have a volume of ortlaunch's.
_OWNED_FOLDERS = ("/dev/shm", "/etc/ortlaunch")
# A number of Kubernetes, and its unit.
_QUANTITY = re.compile(r"^([0-9.]+(?:[eE][-+]?[0-9]+)?)(.*)$")
_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
# A shell line that sets a variable: `X=1`, `export X=1` or `declare -x X=1`.
_EXPORT = re.compile(r"\s*(?:export\s+|declare\s+-x\s+)?([A-Za-z_][A-Za-z0-9_]*)=")


def submit_text_and_option_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of secrets, of invalid options, and of a GPU type without GPUs."""
    submit = recipe.submit
    # Any of these texts may become part of one line of a script; lines of `setup` are checked below.
    for key_name, text in _path_and_text_pairs(submit.model_dump(exclude={"setup"}), "submit"):
        if control_character := CONTROL.search(text) or re.search(r"[\t\r\n]", text):
            message = f"has {control_character[0]!r}, a control character, which would end a line of the job's script"
            yield (key_name,), f"{message}; write it on one line, without such characters"
    for line in submit.setup:
        name = _EXPORT.match(line)
        if name and SECRET_NAME.search(name[1]):
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
            consequence = (
                "would start several tasks in one run folder; submit each with a --run-dir of "
                "its own"
            )
            yield ("submit.options",), f"got {option!r}, which {consequence}"
    if submit.gpu_type is not None and recipe.launch.device == "cpu":
        yield (
            ("submit.gpu_type", "launch.device"),
            "requests GPUs, and launch.device is cpu; leave one of them out",
        )
    yield from _scheduler_section_and_pod_rules(recipe)
    if submit.scheduler == "azureml" and recipe.launch.forward:
        yield (
            ("launch.forward",),
            "is not supported with Azure ML, which shows a job's variables to all readers of "
            "the workspace; have the job read its secrets from Key Vault, or leave it out",
        )


def _path_and_text_pairs(value: object, dotted_path: str) -> Iterator[tuple[str, str]]:
    """Yield each text below a value, with its dotted path.

    Keys of mappings are texts, too; items of a list have the path of the list.
    """
    if isinstance(value, str):
        yield dotted_path, value
    elif isinstance(value, dict):
        for key, inner_value in value.items():
            yield dotted_path, key
            yield from _path_and_text_pairs(inner_value, f"{dotted_path}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner_value in value:
            yield from _path_and_text_pairs(inner_value, dotted_path)


def _pod_path_rules(pod_settings: Kubernetes) -> Iterator[Problem]:
    """Yield the problems of paths in the pods: `..`, and two volumes at one place."""
    reason_by_folder: dict[str, str] = dict.fromkeys(_OWNED_FOLDERS, "which ortlaunch uses itself")
    for name, path in pod_settings.volumes.items():
        mount_folder = posixpath.normpath(path)
        if mount_folder in reason_by_folder:
            yield (
                ("submit.kubernetes.volumes",),
                f"{name}: got {path}, {reason_by_folder[mount_folder]}",
            )
        reason_by_folder[mount_folder] = f"where {name} is mounted"
    for field in ("runs", "workdir", "volumes"):
        value = getattr(pod_settings, field)
        paths = value.values() if field == "volumes" else [value]
        if paths_upwards := [path for path in paths if ".." in path.split("/")]:
            yield (f"submit.kubernetes.{field}",), f"got {paths_upwards[0]}; write it without `..`"


def _quantity_bytes(quantity: str) -> float:
    """Return the bytes of a quantity of Kubernetes, such as 1.5Gi, 100M, 1e9 or 128000m."""
    amount_text, unit = _QUANTITY.findall(quantity)[0]
    return float(amount_text) * _UNITS[unit]


def _scheduler_section_and_pod_rules(recipe: Recipe) -> Iterator[Problem]:
    submit = recipe.submit
    forward = recipe.launch.forward
    if submit.scheduler in ("kubernetes", "azureml") and getattr(submit, submit.scheduler) is None:
        needed_fields = (
            "image, runs and volumes"
            if submit.scheduler == "kubernetes"
            else "compute and environment"
        )
        yield (
            ("submit.scheduler",),
            f"is {submit.scheduler}, which needs submit.{submit.scheduler} with {needed_fields}",
        )
    pod_settings = submit.kubernetes
    if pod_settings is None:
        return
    # The run folders must outlive the pods.
    if not any(
        f"{pod_settings.runs}/".startswith(f"{path.rstrip('/')}/")
        for path in pod_settings.volumes.values()
    ):
        paths = ", ".join(pod_settings.volumes.values())
        yield (
            ("submit.kubernetes.runs",),
            f"got {pod_settings.runs}, which is on none of the volumes ({paths}): lost with its pod",
        )
    yield from _pod_path_rules(pod_settings)
    if _quantity_bytes(pod_settings.shared_memory) > (
        _quantity_bytes(pod_settings.memory) if pod_settings.memory else math.inf
    ):
        yield (
            ("submit.kubernetes.shared_memory", "submit.kubernetes.memory"),
            f"{pod_settings.shared_memory} of /dev/shm count as memory, of which the pod has {pod_settings.memory}",
        )
    for field, owned_fields in (("pod", _OWNED_POD_FIELDS), ("job", _OWNED_JOB_FIELDS)):
        for key in sorted(owned_fields & set(getattr(pod_settings, field))):
            yield (f"submit.kubernetes.{field}",), f"got {key}, which ortlaunch sets itself"
    if submit.scheduler == "kubernetes" and forward and pod_settings.secret is None:
        yield (
            ("launch.forward",),
            "needs submit.kubernetes.secret: pods get variables from a Secret, not from your "
            f"shell, as of kubectl create secret generic NAME --from-literal={forward[0]}=...",
        )
