"""Rules of the section `submit`: (paths involved, message) for each broken rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortlaunch.errors import CONTROL
from ortlaunch.recipe.text.place import SECRET, Problem

if TYPE_CHECKING:
    from ortlaunch.recipe.fields.recipe import Recipe

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
        elif re.match(r"--array\b|-a", option):
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
    if submit.scheduler == "kubernetes" and forward and pods.secret is None:
        yield (
            ("launch.forward",),
            "needs submit.kubernetes.secret: pods get variables from a Secret, not from your "
            f"shell, as of kubectl create secret generic NAME --from-literal={forward[0]}=...",
        )
