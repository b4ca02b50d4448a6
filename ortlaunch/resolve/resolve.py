"""Resolve a recipe, the hosts and this machine into one value, from which a command runs.

Each file is read once, here. Choices that are made later (`engine: auto`, `micro_size: auto`) are
added to the loaded recipe. Starts and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ortlaunch import machine, recipe, start
from ortlaunch.errors import PlanError, RecipeError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.capacity import crowded
from ortlaunch.planning.hosts import hostfile_text
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.workload import Workload, workload
from ortlaunch.planning.world import LaunchOptions, World, resolve_world
from ortlaunch.recipe import Recipe, RecipeFile
from ortlaunch.recipe.fields.ort_variables import contradictions, variables_in
from ortlaunch.recipe.rules.rules import device_rules, task_rules
from ortlaunch.resolve import inputs, shipped
from ortlaunch.run_folder.engine_report import Choice
from ortlaunch.tasks import TASKS, Task

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
        return Path(self.environ.get(MODULES_VARIABLE) or self.path.parent)


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
            modules=str(self.command.modules),
            worker=start.command("ortlaunch.worker"),
        )

    def with_overrides(self, *overrides: str) -> ResolvedRun:
        """Return the run with further overrides; no file is read again."""
        return _resolved(self.file.with_overrides(*overrides), None, self.command)

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
        made = _resolved(file, world, self.command)
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
    file = recipe.load(found, overrides)
    return resolve_file(file, Command(path, found, options, environ))


def resolve_file(file: RecipeFile, command: Command) -> ResolvedRun:
    """Resolve a recipe that is loaded already; effects and errors are those of `resolve`."""
    options = command.options
    # The text is kept, so that a later change of the file cannot change the run.
    if options.hostfile is not None and options.hosts_text is None:
        options = options._replace(hosts_text=hostfile_text(options.hostfile))
    return _resolved(file, None, command._replace(options=options))


def _resolved(file: RecipeFile, world: World | None, command: Command) -> ResolvedRun:
    given, path, options, environ = command
    world = world or resolve_world(file.recipe, options, environ)
    _require_rules(file, world, options)
    notes = [f"recipe: {path}"] if path != given else []
    notes += [
        *file.notes,
        *world.notes,
        *_absent(file, world, command),
        *_engine_notes(file.recipe, world.device, environ),
        *file.recipe.sweep_lines(),
    ]
    work = workload(file.recipe, world)
    if world.inside is None:
        notes += crowded(world, work.memory, options.planned_only)
    return ResolvedRun(file, world, work, tuple(notes), command)


def _require_rules(file: RecipeFile, world: World, options: LaunchOptions) -> None:
    named = f"those of {options.hostfile}" if options.hostfile else "the run's hosts"
    rules = (
        *device_rules(file.recipe, world.device, named),
        *task_rules(file.recipe, options.task),
    )
    broken = [file.explain(problem) for problem in rules]
    if broken:
        raise RecipeError(broken)


def _absent(file: RecipeFile, world: World, command: Command) -> list[str]:
    """Return notes on files and functions of the recipe that are absent on this host.

    They may be on the other hosts, or be created before the run.

    Raises:
        RecipeError: the run uses this host alone, and functions are missing, or files for a run
            that would start now.
    """
    # With other hosts, an absent file or function gives a note only.
    here = all(host.is_here for host in world.hosts)
    doubtful = inputs.doubtful(file.recipe)
    missing = inputs.missing_files(file.recipe, command.options.task)
    unknown = inputs.unknown_type(file.recipe)
    broken = inputs.broken_factories(file.recipe, command.modules)
    files = [file.explain(problem) for problem in missing]
    functions = [file.explain(problem) for problem in (*broken, *unknown)]
    if here and (functions or (files and not command.options.planned_only)):
        raise RecipeError([*files, *functions])
    return [*files, *functions, *map(file.explain, doubtful)]


def _engine_notes(recipe: Recipe, device: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield notes on settings other than the defaults, and on ORTModule variables of the user.

    Raises:
        PlanError: a variable contradicts the recipe.
    """
    engine = recipe.engine
    # The variables have no effect with other engines.
    if engine.name == "ort":
        wrong = [
            f"{name}={environ[name]} in your environment {why}"
            for name, why in contradictions(engine, environ)
        ]
        if wrong:
            raise PlanError("\n".join(wrong))
    chosen = engine.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    if chosen:
        yield f"engine {engine.name}: " + ", ".join(
            f"{name}: {json.dumps(value)}" for name, value in chosen.items()
        )
    if engine.matmul_precision != "highest":
        yield (
            f"matmul_precision {engine.matmul_precision}: "
            f"{machine.matmul_effect(engine.matmul_precision, device)}"
        )
    found = variables_in(environ)
    if found:
        effect = (
            "from the recipe" if engine.name == "ort" else f"no effect with engine {engine.name}"
        )
        yield (
            "from your environment: "
            + ", ".join(f"{name}={value}" for name, value in found.items())
            + f" ({effect})"
        )
