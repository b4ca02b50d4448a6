"""Check that this machine has everything that a recipe needs; each result ends with a command.

Never imports torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from ortlaunch.base import machine, module_start
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
            (f"engine ort: {missing_item}", remedy)
            for missing_item, remedy in missing_ort_item_and_remedy_pairs(is_on_gpu)
        )


def missing_ort_item_and_remedy_pairs(is_on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yield (missing item, remedy) for engine ort, as `lacking` does."""
    # Imported here: most commands never need it.
    from ortlaunch.ortmodule.native import cuda_libraries, extensions

    try:
        extensions.installed_ort_package_name_or_refuse()
        missing_extensions = extensions.missing_or_damaged_buildable_extension_names()
    except MissingDependency as error:
        missing_item, _, remedy = str(error).partition(" Type: ")
        yield missing_item.rstrip("."), remedy or "engines eager and inductor do not need it"
        return
    if (
        is_on_gpu
        and extensions.installed_ort_package_name_or_refuse() == "onnxruntime-training-cpu"
    ):
        yield (
            "onnxruntime-training-cpu has no CUDA",
            'pip install "ortlaunch[ort-cuda]", in an environment without it',
        )
    elif is_on_gpu and (libraries := cuda_libraries.missing_cuda_libraries()):
        library_names = ", ".join(library.name for library in libraries)
        yield (
            f"CUDA libraries of onnxruntime-training are not installed ({library_names})",
            cuda_libraries.cuda_install_command_text(libraries),
        )
    if missing_extensions:
        reason = "; ".join(
            [
                ", ".join(missing_extensions),
                *extensions.descriptions_of_extensions_changed_since_build(),
            ]
        )
        yield (
            f"its torch extensions are not built for this torch ({reason})",
            "run `ortlaunch setup` once",
        )


def _is_installed(package_name: str) -> bool:
    return importlib.util.find_spec(package_name) is not None


def build_ort_extensions() -> int:
    """Build the missing extensions of engine ort; return the exit status.

    The build runs in a process of its own, which may import torch.
    """
    return module_start.run_module("ortlaunch.ortmodule.native.extensions")
