"""Rules of the section `launch`: (paths involved, message) for each broken rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortlaunch.recipe.text.source_location import SECRET_NAME, Problem
from ortlaunch.tables.launchers import LAUNCHERS

if TYPE_CHECKING:
    from ortlaunch.recipe.fields.recipe import Recipe

# Variables that the launcher itself sets for every rank.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def launch_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the processes, of variables' names, and of an elastic run."""
    yield from _single_process_launcher_rules(recipe)
    yield from _environment_variable_rules(recipe)
    if recipe.launch.elastic is not None:
        yield from _elastic_rules(recipe)


def _single_process_launcher_rules(recipe: Recipe) -> Iterator[Problem]:
    launch = recipe.launch
    processes_per_node = launch.processes_per_node or 1
    # The largest number of hosts that an elastic run may have; 1 where the recipe leaves it open.
    max_nodes = max(launch.node_counts, default=1)
    # `auto` is no row of the table: it is resolved later.
    launcher = LAUNCHERS.get(launch.launcher)
    if launcher and launcher.single and processes_per_node * max_nodes > 1:
        yield (
            ("launch.launcher", "launch.processes_per_node", "launch.nodes"),
            f"got {launch.launcher}, which runs one process, for {max_nodes * processes_per_node} processes; "
            "use torchrun, mpi or auto",
        )


def _environment_variable_rules(recipe: Recipe) -> Iterator[Problem]:
    launch = recipe.launch
    for name in launch.env:
        if not _VARIABLE_NAME.fullmatch(name):
            yield (f"launch.env.{name}",), "is not a variable's name: use letters, digits and `_`"
        elif name in _RANK_VARIABLES:
            yield (f"launch.env.{name}",), "is set by the launcher for each rank; leave it out"
        elif SECRET_NAME.search(name):
            yield (
                (f"launch.env.{name}",),
                "looks like a secret, and the run folder stores the recipe; export it in your "
                "shell and list it in launch.forward",
            )
        elif name in launch.forward:
            yield (
                ("launch.forward", f"launch.env.{name}"),
                f"got {name}, which launch.env sets; keep one",
            )
    for name in launch.forward:
        if not _VARIABLE_NAME.fullmatch(name):
            yield (
                ("launch.forward",),
                f"got {name}; give the name of a variable only, without its value",
            )


def _elastic_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of an elastic run.

    It keeps the global batch for any number of hosts, and needs restarts to continue after a lost
    host.
    """
    launch = recipe.launch
    batch = recipe.batch
    node_range = launch.elastic
    assert node_range is not None
    if node_range.min > node_range.max:
        yield (
            ("launch.nodes.min", "launch.nodes.max"),
            f"got {node_range.min}, which is over max ({node_range.max})",
        )
    launcher = LAUNCHERS.get(launch.launcher)
    if launcher and not launcher.sees_lost_hosts:
        yield (
            ("launch.launcher", "launch.nodes"),
            f"got {launch.launcher} with launch.nodes {{min, max}}: only launcher torchrun "
            "detects a lost host; use torchrun or auto",
        )
    if not launch.max_restarts:
        yield (
            ("launch.max_restarts", "launch.nodes"),
            "got 0 with launch.nodes {min, max}, which continues by restarts; set max_restarts: 3",
        )
    if not launch.preflight:
        yield (
            ("launch.preflight", "launch.nodes"),
            "got false with launch.nodes {min, max}, which uses it to find the available "
            "hosts; leave it out",
        )
    if (
        batch.global_size is None
        or not isinstance(batch.micro_size, int)
        or batch.accumulation_steps is not None
    ):
        yield (
            (
                "batch",
                "batch.global_size",
                "batch.micro_size",
                "batch.accumulation_steps",
                "launch.nodes",
            ),
            "with launch.nodes {min, max} the global batch is kept by accumulation: give "
            "global_size and micro_size as "
            "numbers, and leave accumulation_steps out",
        )
