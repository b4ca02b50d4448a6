"""Resolve a recipe, the hosts and this machine into one value, from which a command runs.

Each file is read once, here. Choices that are made later (`engine: auto`, `micro_size: auto`) are
added to the loaded recipe. Starts and writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ortlaunch import machine, start
from ortlaunch.errors import RecipeError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.capacity import crowded
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.process_memory import process_memory
from ortlaunch.planning.workload import Workload, workload
from ortlaunch.planning.world import LaunchOptions, World, resolve_world
from ortlaunch.recipe import RecipeFile, inputs, load
from ortlaunch.recipe.fields.ort_variables import environment_lines
from ortlaunch.recipe.rules.rules import device_rules, task_rules
from ortlaunch.resolve import shipped
from ortlaunch.run_folder.engine_report import Choice
from ortlaunch.tasks import TASKS, Task
from ortlaunch.user_modules import factory_folders, unloadable_factories

# The folder of the recipe that `ortlaunch submit` wrote into the run folder.
MODULES_VARIABLE = "ORTLAUNCH_MODULES"


class Command(NamedTuple):
    """The command line: the recipe as typed and as located, the options, the environment."""

    given: Path
    path: Path
    options: LaunchOptions
    environ: Mapping[str, str]

    @property
    def modules(self) -> Path:
        """Folder of the recipe, which may have the user's own modules."""
        # The recipe of a queued run was written into the run folder, without the modules.
        return Path(self.environ.get(MODULES_VARIABLE) or self.path.parent).absolute()


@dataclass(frozen=True)
class ResolvedRun:
    """A valid recipe with its world, all choices made so far, and notes on them for the user."""

    file: RecipeFile
    world: World
    work: Workload
    notes: tuple[str, ...]
    command: Command
    choice: Choice | None = None
    """The decision for `engine.name: auto`."""
    choice_note: tuple[str, ...] = ()
    """A line on that decision, the last of the notes."""

    @property
    def task(self) -> str:
        """The task of the ranks, named by the typed command."""
        return self.command.options.task

    @property
    def typed(self) -> tuple[str, ...]:
        """The typed arguments of the command, without the program; none without a command."""
        return self.command.options.typed[1:]

    @property
    def traits(self) -> Task:
        """The properties of the task."""
        return TASKS[self.task]

    @cached_property
    def plan(self) -> Plan:
        """The plan of the start, made on first use, when all choices have been made."""
        return make_plan(
            self.file.recipe,
            self.world,
            self.work,
            task=self.task,
            # Also a later command in another folder finds modules of the current one.
            modules=next(
                factory_folders(self.file.recipe, self.command.modules), str(self.command.modules)
            ),
            worker=start.module_command("ortlaunch.worker"),
        )

    def with_overrides(self, *overrides: str) -> ResolvedRun:
        """Return the run with further overrides; no file is read again."""
        return resolve_file(self.file.with_overrides(*overrides), self.command)

    def with_task(self, task: str) -> ResolvedRun:
        """Return the run for ranks with another task."""
        return replace(
            self, command=self.command._replace(options=self.command.options._replace(task=task))
        )

    def with_choice(self, *overrides: str) -> ResolvedRun:
        """Return the run with the results of `auto`; hosts, ranks and device stay the same."""
        return self._again(self.file.with_overrides(*overrides), self.world)

    def with_engine(self, choice: Choice, note: str, *overrides: str) -> ResolvedRun:
        """Return the run with the chosen engine; the note gives the engine and the reason."""
        return replace(self, choice=choice, choice_note=(note,)).with_choice(*overrides)

    def on_hosts(self, names: Collection[str]) -> ResolvedRun:
        """Return the run on some of its hosts, in their order."""
        hosts = tuple(host for host in self.world.hosts if host.name in names)
        return (
            self
            if hosts == self.world.hosts
            else self._again(self.file, self.world._replace(hosts=hosts))
        )

    def _again(self, file: RecipeFile, world: World) -> ResolvedRun:
        """Resolve again with this recipe and world, and keep the chosen engine."""
        made = resolve_file(file, self.command, world)
        notes = (*made.notes, *self.choice_note)
        return replace(made, notes=notes, choice=self.choice, choice_note=self.choice_note)


def resolve(
    path: Path, overrides: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> ResolvedRun:
    """Resolve a command: load the recipe, detect the world, and compute the workload.

    It reads files and the state of this machine, and has no other effects.

    Raises:
        InputError: the recipe or the hosts are wrong, or do not fit each other.
    """
    found = shipped.locate(path)
    return resolve_file(load(found, overrides), Command(path, found, options, environ))


def resolve_file(file: RecipeFile, command: Command, world: World | None = None) -> ResolvedRun:
    """Resolve a recipe that is loaded already; effects and errors are those of `resolve`.

    Args:
        world: the world of the run, where it is resolved already.
    """
    # Another machine has its own folders, and may have the same relative paths.
    file = file if command.options.elsewhere else file.with_absolute_paths()
    recipe = file.recipe
    # The text is kept, so that a later change of the file cannot change the run.
    command = command._replace(options=command.options.with_hosts_text())
    given, path, options, environ = command
    world = world or resolve_world(recipe, options, environ)
    work = workload(recipe, world, process_memory(recipe))
    tight = crowded(world, work, options.planned_only) if world.inside is None else ()
    broken = unloadable_factories(recipe, command.modules)
    named = f"those of {options.hostfile}" if options.hostfile else "the run's hosts"
    file.require((*device_rules(recipe, world.device, named), *task_rules(recipe, options.task)))
    # Inputs that are absent here may be on the other hosts, or be created before the run.
    of_data = (inputs.missing_files, inputs.wrong_contents)
    files = [file.explain(each) for check in of_data for each in check(recipe, options.task)]
    functions = [file.explain(each) for each in (*broken, *inputs.unknown_type(recipe))]
    # With other hosts, an absent file or function gives a note only.
    here = all(host.is_here for host in world.hosts)
    if here and (functions or (files and not options.planned_only)):
        raise RecipeError([*files, *functions])
    environment = environment_lines(recipe.engine, environ)
    notes = [f"recipe: {path}"] if path != given else []
    notes += [*file.notes, *world.notes, *files, *functions]
    notes += [*map(file.explain, inputs.doubtful(recipe)), *recipe.engine.lines()]
    if recipe.engine.matmul_precision != "highest":
        effect = machine.matmul_precision_effect(recipe.engine.matmul_precision, world.device)
        notes.append(f"matmul_precision {recipe.engine.matmul_precision}: {effect}")
    notes += [*environment, *recipe.sweep_lines(), *tight]
    return ResolvedRun(file, world, work, tuple(notes), command)
