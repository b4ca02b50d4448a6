"""Recipe, hosts and this machine decided into one value: what a command runs. Each file is read once, here.

What a choice finds later (`engine: auto`, `micro_size: auto`) goes into the loaded recipe. Starts and writes nothing.
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
from ortlaunch.plan import Plan
from ortlaunch.planning.capacity import crowded
from ortlaunch.planning.hosts import hostfile_text
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.workload import Workload, workload
from ortlaunch.planning.world import LaunchOptions, World, resolve_world
from ortlaunch.recipe import Recipe, RecipeFile
from ortlaunch.recipe.fields.ort_variables import contradictions, seen
from ortlaunch.recipe.rules.rules import device_rules, task_rules
from ortlaunch.resolve import inputs, shipped
from ortlaunch.run_folder.engine_report import Choice
from ortlaunch.tasks import TASKS, Task

# The folder of the recipe that `ortlaunch submit` wrote into the run folder.
MODULES_VARIABLE = "ORTLAUNCH_MODULES"


class Command(NamedTuple):
    """What was typed, and where: the recipe as named and as found, options, the shell's environment."""

    given: Path
    path: Path
    options: LaunchOptions
    environ: Mapping[str, str]

    @property
    def modules(self) -> Path:
        """Folder of the recipe, where the user's own modules may lie; a queued one was written elsewhere."""
        return Path(self.environ.get(MODULES_VARIABLE) or self.path.parent)


@dataclass(frozen=True)
class ResolvedRun:
    """A valid recipe with its world and all choices that are made so far, and notes on them for the user."""

    file: RecipeFile
    world: World
    work: Workload
    notes: tuple[str, ...]
    command: Command
    choice: Choice | None = None
    """How engine.name: auto was decided."""
    choice_note: tuple[str, ...] = ()
    """A line on that, the last of the notes."""

    @property
    def task(self) -> str:
        """What the ranks do: the verb that was typed."""
        return self.command.options.task

    @property
    def traits(self) -> Task:
        """The row of the task."""
        return TASKS[self.task]

    @cached_property
    def plan(self) -> Plan:
        """The plan of the start; made when it is first used, which is once nothing is left to choose."""
        return make_plan(
            self.file.recipe,
            self.world,
            self.work,
            task=self.task,
            modules=str(self.command.modules),
            worker=start.command("ortlaunch.worker"),
        )

    def with_overrides(self, *overrides: str) -> ResolvedRun:
        """The same command with further overrides; no file is read again."""
        return _resolved(self.file.with_overrides(*overrides), None, self.command)

    def with_task(self, task: str) -> ResolvedRun:
        """The same for ranks that do something else."""
        return replace(
            self, command=self.command._replace(options=self.command.options._replace(task=task))
        )

    def with_choice(self, *overrides: str) -> ResolvedRun:
        """The same with what `auto` was found to be; hosts, ranks and device stay."""
        return self._again(self.file.with_overrides(*overrides), self.world)

    def with_engine(self, choice: Choice, note: str, *overrides: str) -> ResolvedRun:
        """The same with the engine that was chosen; the note says which and why."""
        return replace(self, choice=choice, choice_note=(note,)).with_choice(*overrides)

    def on_hosts(self, names: Collection[str]) -> ResolvedRun:
        """The same run on some of its hosts, in their order."""
        hosts = tuple(host for host in self.world.hosts if host.name in names)
        return (
            self
            if hosts == self.world.hosts
            else self._again(self.file, self.world._replace(hosts=hosts))
        )

    def _again(self, file: RecipeFile, world: World) -> ResolvedRun:
        """With the engine that was chosen."""
        made = _resolved(file, world, self.command)
        notes = (*made.notes, *self.choice_note)
        return replace(made, notes=notes, choice=self.choice, choice_note=self.choice_note)


def resolve(
    path: Path, overrides: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> ResolvedRun:
    """Recipe -> world -> what follows from both; pure but for reading files and looking at this machine.

    Raises:
        InputError: the recipe, the hosts or both together are wrong.
    """
    found = shipped.locate(path)
    file = recipe.load(found, overrides)
    if options.hostfile is not None and options.hosts_text is None:
        options = options._replace(hosts_text=hostfile_text(options.hostfile))
    return _resolved(file, None, Command(path, found, options, environ))


def _resolved(file: RecipeFile, world: World | None, command: Command) -> ResolvedRun:
    given, path, options, environ = command
    world = world or resolve_world(file.recipe, options, environ)
    _require_rules(file, world, options)
    notes = [f"recipe: {path}"] if path != given else []
    notes += [
        *world.notes,
        *_absent(file, world, command),
        *_engine_notes(file.recipe, world.device, environ),
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
    """Notes on what the recipe reads and is not here: it may lie on the other hosts, or come before the run.

    Raises:
        RecipeError: all hosts are this one, and functions are missing, or files for a run that would start now.
    """
    here = all(host.is_here for host in world.hosts)
    doubtful = inputs.doubtful(file.recipe)
    missing = inputs.missing_files(file.recipe, command.options.task, command.path.parent)
    unknown = inputs.unknown_type(file.recipe)
    broken = inputs.broken_factories(file.recipe, command.modules)
    files = [file.explain(problem) for problem in missing]
    functions = [file.explain(problem) for problem in (*broken, *unknown)]
    if here and (functions or (files and not command.options.planned_only)):
        raise RecipeError([*files, *functions])
    return [*files, *functions, *map(file.explain, doubtful)]


def _engine_notes(recipe: Recipe, device: str, environ: Mapping[str, str]) -> Iterator[str]:
    """The engine's settings that differ from their defaults, and ORTModule's variables in the user's environment.

    Raises:
        PlanError: a variable contradicts the recipe.
    """
    engine = recipe.engine
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
        yield f"matmul_precision {engine.matmul_precision}: {machine.matmul_effect(engine.matmul_precision, device)}"
    found = seen(environ)
    if found:
        effect = (
            "as the recipe says" if engine.name == "ort" else f"nothing with engine {engine.name}"
        )
        yield (
            "in your environment: "
            + ", ".join(f"{name}={value}" for name, value in found.items())
            + f" ({effect})"
        )
