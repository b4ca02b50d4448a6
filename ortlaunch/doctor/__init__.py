"""Check that this machine has everything that a recipe needs; each result ends with a command.

Never imports torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import ortmodule
from ortlaunch.base import machine
from ortlaunch.base.errors import MissingDependency
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.tables.launchers import launcher_row


def require_packages_and_extensions_installed(recipe: Recipe, world: World) -> None:
    """Check that this host has everything that the run needs.

    Raises:
        MissingDependency: something is missing; one line for each item.
    """
    if item_texts := [
        ": ".join(filter(None, item_and_remedy))
        for item_and_remedy in missing_item_and_remedy_pairs(recipe, world)
    ]:
        raise MissingDependency("\n".join(item_texts))


def missing_item_and_remedy_pairs(recipe: Recipe, world: World) -> Iterator[tuple[str, str]]:
    """Yield (missing item, remedy) for a recipe; the remedy is "" if the item's text has it."""
    if recipe.zero is not None and not _is_installed("deepspeed"):
        yield (
            "zero: DeepSpeed is not installed",
            'pip install "ortlaunch[deepspeed]", or set zero=null',
        )
    if recipe.model.lora is not None and not _is_installed("peft"):
        yield "model.lora: peft is not installed", 'pip install "ortlaunch[lora]"'
    for package in ("bitsandbytes", "accelerate"):
        if recipe.model.quantize is not None and not _is_installed(package):
            yield f"model.quantize: {package} is not installed", 'pip install "ortlaunch[qlora]"'
    for tracker in recipe.log.trackers:
        if not _is_installed(tracker):
            yield f"log.trackers: {tracker} is not installed", f'pip install "ortlaunch[{tracker}]"'
    package = launcher_row(world.launcher).package
    # On one host no launcher needs its package: ranks meet through a file.
    if package and len(world.hosts) > 1 and not _is_installed(package):
        missing_item = (
            f"launcher {world.launcher} on more than one host: {package} is not installed"
        )
        yield missing_item, f'pip install "ortlaunch[{world.launcher}]"'
    if recipe.engine.name == "ort":
        # Without a GPU here the run is planned for another host, so CUDA is not checked.
        is_on_gpu = world.device == "cuda" and machine.visible_gpu_count(os.environ) > 0
        yield from (
            (
                f"engine ort: {missing.problem}",
                missing.command or "engines eager and inductor do not need it",
            )
            for missing in ortmodule.check(is_on_gpu)
        )


def _is_installed(package_name: str) -> bool:
    return importlib.util.find_spec(package_name) is not None
