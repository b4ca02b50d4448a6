"""From which checkpoint a run goes on, and what has changed since it was written; said before anything is started.

The control side: it reads names and small files only. That a checkpoint is whole, ranks find out when they read it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ortlaunch.errors import InputError, PlanError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.resume_rules import NAMES, Change, leaves
from ortlaunch.resolve import provenance
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import COMPLETE, MANIFEST, RunDir, read_json
from ortlaunch.run_folder.resume_record import ResumeRecord

AUTO = "auto"
NEVER = "never"


class ResumeOptions(NamedTuple):
    """What was typed: `--resume` and each `--allow`."""

    choice: str = AUTO
    allow: tuple[str, ...] = ()

    @property
    def begins_earlier(self) -> bool:
        """Whether steps that were done are to be done again."""
        return self.choice == NEVER or self.choice.isdecimal()

    def checked(self) -> ResumeOptions:
        """Itself.

        Raises:
            InputError: a name that no rule has.
        """
        for name in self.allow:
            if name not in NAMES:
                raise InputError(f"--allow: got {name}; one of {', '.join(NAMES)}")
        return self


AUTOMATIC = ResumeOptions()


class Chosen(NamedTuple):
    """Where a run begins."""

    folder: Path | None
    """The checkpoint; None: at step 0."""
    step: int = 0
    source: Path | None = None
    """Where the run folder's first checkpoint came from, if that was another folder."""
    exact: bool = False
    """This step and no earlier one was asked for."""
    skipped: tuple[str, ...] = ()
    """What lies there and is not taken, with the reason."""
    aside: tuple[Path, ...] = ()
    """What must be moved away first, for it would be the newest next time."""


def choose(run: RunDir, options: ResumeOptions) -> Chosen:
    """By `--resume` and by what lies there.

    Raises:
        InputError: there is no such checkpoint.
    """
    own = run.complete_checkpoints()
    skipped = tuple(incomplete(run.checkpoints))
    if options.choice == NEVER:
        return Chosen(None, skipped=skipped, aside=tuple(_of_training(run)))
    if options.choice.isdecimal():
        return _step(run, int(options.choice), own)._replace(skipped=skipped)
    if options.choice != AUTO and os.path.realpath(Path(options.choice).parent) == os.path.realpath(
        run.checkpoints
    ):
        step = _number(
            Path(options.choice)
        )  # which would be taken for the place to begin a new folder from
        raise InputError(
            f"--resume {options.choice}: is of this run folder itself; give its step: --resume {step}"
        )
    source = Path(options.choice) if options.choice != AUTO else _source(run)
    is_typo = (
        options.choice != AUTO
        and os.sep not in options.choice
        and not os.path.exists(options.choice)
    )
    if (
        own and not is_typo
    ):  # a path whose folder is gone by now stays valid: queues start the same command again
        return Chosen(own[-1][1], own[-1][0], source, skipped=skipped)
    return Chosen(None, skipped=skipped) if source is None else _elsewhere(source)


def _of_training(run: RunDir) -> Iterator[Path]:
    """What a training that begins anew must not take for its own: checkpoints, batches left out, records."""
    if run.checkpoints.exists() and any(run.checkpoints.iterdir()):
        yield run.checkpoints
    records = (run.bad_steps, run.saves, run.metrics, run.tensorboard, run.trackers, run.summary)
    yield from (path for path in records if path.exists())


def incomplete(folder: Path) -> Iterator[str]:
    """Checkpoints in a folder that are none, and why."""
    for path in sorted(folder.glob("step_*")):
        if path.suffix == ".partial":
            yield f"{path}: incomplete: its writing was cut off"
        elif path.suffix.startswith(".broken"):
            yield f"{path}: damaged, as an earlier start found"
        elif not path.suffix and not (path / COMPLETE).exists():
            yield f"{path}: incomplete: it has no {COMPLETE}"


def _source(run: RunDir) -> Path | None:
    """Where this folder's run came from, as its first start wrote down."""
    found = ResumeRecord.read(run).source
    return Path(found) if found else None


def _step(run: RunDir, step: int, own: list[tuple[int, Path]]) -> Chosen:
    if step not in dict(own):
        there = (
            f"has those of steps {', '.join(str(each) for each, _ in own)}" if own else "has none"
        )
        raise InputError(
            f"--resume {step}: no complete checkpoint of step {step}; {run.checkpoints} {there}"
        )
    newer = [path for path in run.checkpoints.glob("step_*") if _number(path) > step]
    told = [run.summary] if run.summary.exists() else []  # that all was done
    return Chosen(dict(own)[step], step, exact=True, aside=(*sorted(newer), *told))


def _number(path: Path) -> int:
    """The step in a checkpoint's name; -1 where it is set aside, and nobody takes it."""
    digits = path.name[len("step_") :].partition(".partial")[0]
    return int(digits) if digits.isdecimal() else -1


def _elsewhere(source: Path) -> Chosen:
    """The newest of another run's folder, or one checkpoint."""
    source = Path(os.path.abspath(source))
    if (source / COMPLETE).exists():
        return Chosen(source, _step_of(source), source, exact=True)
    other = RunDir(source)
    found = other.complete_checkpoints()
    skipped = tuple(incomplete(other.checkpoints))
    if not found:
        why = (
            "is no run folder with a complete checkpoint, and no complete checkpoint"
            if source.exists()
            else "absent"
        )
        raise InputError(
            "\n".join(
                [f"--resume {source}: {why}; give auto, never, a step or such a folder", *skipped]
            )
        )
    return Chosen(found[-1][1], found[-1][0], source, skipped=skipped)


def _step_of(folder: Path) -> int:
    try:
        step = read_json(folder / MANIFEST)["step"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--resume {folder}: its {MANIFEST} cannot be read: {error}") from None
    return int(step)


class Beginning(NamedTuple):
    """Where a run begins, with all that there is to say about it."""

    chosen: Chosen
    lines: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def after(self, said: list[str]) -> Beginning:
        """The same with words before."""
        return self._replace(lines=(*said, *self.lines))


def beginning(
    run: RunDir, resolved: ResolvedRun, before: Recipe | None, options: ResumeOptions
) -> Beginning:
    """Where the run begins and each change since, for a person.

    Args:
        before: the recipe of this folder's earlier start, for checkpoints that do not say what made them.

    Raises:
        InputError: there is no such checkpoint.
        PlanError: a change would make it another training, and nobody has allowed it.
    """
    chosen = choose(run, options)
    lines = [f"  skipped: {line}" for line in chosen.skipped]
    lines += [f"  set aside: {path}" for path in chosen.aside]
    if chosen.folder is None:
        return Beginning(chosen, (*lines, *_since(before, resolved)))
    made = origin.read(chosen.folder)
    if made is None and before is not None and run.checkpoints in chosen.folder.parents:
        made = {"recipe": before.model_dump(mode="json")}
    trains = not resolved.traits.evaluates
    lines.append(
        f"{'going on' if trains else 'evaluating'} after step {chosen.step} from {chosen.folder}"
    )
    if made is None:
        return Beginning(
            chosen, (*lines, "  it does not say what made it: nothing could be compared")
        )
    now = today(resolved)
    found = origin.differences(made, now)
    if not trains:
        found = origin.of_evaluation(chosen.folder, found)
    require(found, options.allow, f"{chosen.folder} was written by another training")
    return Beginning(chosen, (*lines, *told(found, options.allow)), tuple(found))


def _since(before: Recipe | None, resolved: ResolvedRun) -> Iterator[str]:
    """What a run that saved nothing is begun with instead."""
    if before is not None:
        now = resolved.file.recipe.model_dump(mode="json")
        for path, old, new in leaves(before.model_dump(mode="json"), now):
            yield f"  changed: {path}: {old!r} -> {new!r}"


def today(resolved: ResolvedRun) -> dict[str, object]:
    """What a checkpoint of this run would say."""
    git = provenance.commit(resolved.command.path.parent)
    world = resolved.world
    environment = provenance.environment()
    return origin.origin(
        resolved.file.recipe, resolved.work.batch, len(world.hosts), world.device, environment, git
    )


def told(found: list[Change], allow: tuple[str, ...]) -> list[str]:
    """A line for each change."""
    return [f"  changed: {change.line(allow)}" for change in found] or [
        "  nothing has changed since"
    ]


def require(found: list[Change], allow: tuple[str, ...], what: str) -> None:
    """All changes are allowed.

    Raises:
        PlanError: some are not.
    """
    refused = [change for change in found if change.is_refused(allow)]
    if refused:
        words = " ".join(
            f"--allow {name}" for name in sorted({change.rule.allow for change in refused}) if name
        )
        mend = f", {words} if this is meant, or a new --run-dir" if words else ""
        lines = "".join(f"\n  {change.line(allow)}" for change in refused)
        raise PlanError(f"{what}:{lines}\nGive the recipe that it was trained with{mend}")


def apply(run: RunDir, begun: Beginning, options: ResumeOptions) -> None:
    """Move away what must not be the newest any more, and write down for the ranks where they begin."""
    chosen = begun.chosen
    for path in chosen.aside:
        os.replace(path, _free(path))
    ResumeRecord(
        choice=options.choice,
        allow=options.allow,
        checkpoint=None if chosen.folder is None else os.path.abspath(chosen.folder),
        step=chosen.step,
        exact=chosen.exact,
        source=None if chosen.source is None else os.path.abspath(chosen.source),
        skipped=chosen.skipped,
        changes=tuple(change.line(options.allow) for change in begun.changes),
    ).write(run)


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.aside{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())
