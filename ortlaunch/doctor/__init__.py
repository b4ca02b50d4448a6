"""Check that this machine has everything that a recipe needs; each result ends with a command.

Never imports torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from ortlaunch import machine, start
from ortlaunch.errors import MissingDependency
from ortlaunch.launchers import launcher_row
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe


def require(recipe: Recipe, world: World) -> None:
    """Check that this host has everything that the run needs.

    Raises:
        MissingDependency: something is missing; one line for each item.
    """
    if missing := [": ".join(filter(None, words)) for words in lacking(recipe, world)]:
        raise MissingDependency("\n".join(missing))


def lacking(recipe: Recipe, world: World) -> Iterator[tuple[str, str]]:
    """Yield (missing item, remedy) for a recipe; the remedy is "" if the item's text has it."""
    if recipe.zero is not None and not _installed("deepspeed"):
        yield (
            "zero: DeepSpeed is not installed",
            'pip install "ortlaunch[deepspeed]", or set zero=null',
        )
    if recipe.model.lora is not None and not _installed("peft"):
        yield "model.lora: peft is not installed", 'pip install "ortlaunch[lora]"'
    for tracker in recipe.log.trackers:
        if not _installed(tracker):
            yield f"log.trackers: {tracker} is not installed", f'pip install "ortlaunch[{tracker}]"'
    package = launcher_row(world.launcher).package
    # On one host no launcher needs its package: ranks meet through a file.
    if package and len(world.hosts) > 1 and not _installed(package):
        what = f"launcher {world.launcher} on more than one host: {package} is not installed"
        yield what, f'pip install "ortlaunch[{world.launcher}]"'
    if recipe.engine.name == "ort":
        # Without a GPU here the run is planned for another host, so CUDA is not checked.
        on_gpu = world.device == "cuda" and machine.visible_gpu_count(os.environ) > 0
        yield from ((f"engine ort: {what}", mend) for what, mend in lacking_for_ort(on_gpu))


def lacking_for_ort(on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yield (missing item, remedy) for engine ort, as `lacking` does."""
    # Imported here: most commands never need it.
    from ortlaunch.ortmodule.build import cuda_libraries, extensions

    try:
        extensions.ort_package_name()
        absent = extensions.missing_extensions()
    except MissingDependency as error:
        what, _, mend = str(error).partition(" Type: ")
        yield what.rstrip("."), mend or "engines eager and inductor do not need it"
        return
    if on_gpu and extensions.ort_package_name() == "onnxruntime-training-cpu":
        yield (
            "onnxruntime-training-cpu has no CUDA",
            'pip install "ortlaunch[ort-cuda]", in an environment without it',
        )
    elif on_gpu and (libraries := cuda_libraries.missing_libraries()):
        names = ", ".join(library.name for library in libraries)
        yield (
            f"CUDA libraries of onnxruntime-training are not installed ({names})",
            cuda_libraries.install_command_text(libraries),
        )
    if absent:
        why = "; ".join([", ".join(absent), *extensions.damage_descriptions()])
        yield (
            f"its torch extensions are not built for this torch ({why})",
            "run `ortlaunch setup` once",
        )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def set_up() -> int:
    """Build the missing extensions of engine ort; return the exit status.

    The build runs in a process of its own, which may import torch.
    """
    return start.run_module("ortlaunch.ortmodule.build.extensions")
