"""Choose the checkpoint from which a run continues, and compare the run with that checkpoint.

The result is printed before anything is started. This is the control side: it reads names and small
files only. Whether a checkpoint is complete and undamaged, the ranks detect when they read it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ortlaunch.errors import DamagedFile, InputError, PlanError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.resume_rules import NAMES, Change, leaves
from ortlaunch.resolve import provenance
from ortlaunch.resolve.resolve import Command, ResolvedRun
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import COMPLETE, MANIFEST, RunDir, read_own_json
from ortlaunch.run_folder.resume_record import ResumeRecord

# Values of `--resume`; any other value is a step or a path.
AUTO = "auto"
NEVER = "never"


class ResumeOptions(NamedTuple):
    """The options `--resume` and `--allow` as typed."""

    choice: str = AUTO
    allow: tuple[str, ...] = ()

    @property
    def begins_earlier(self) -> bool:
        """Whether the run repeats completed steps."""
        return self.choice == NEVER or self.choice.isdecimal()

    def checked(self) -> ResumeOptions:
        """Return the options themselves.

        Raises:
            InputError: `--allow` has a name of no rule.
        """
        for name in self.allow:
            if name not in NAMES:
                raise InputError(f"--allow: got {name}; one of {', '.join(NAMES)}")
        return self


AUTOMATIC = ResumeOptions()


class Chosen(NamedTuple):
    """The beginning of a run."""

    folder: Path | None
    """The checkpoint; None: the run begins at step 0."""
    step: int = 0
    source: Path | None = None
    """Origin of the run folder's first checkpoint, if that was another folder."""
    exact: bool = False
    """Whether exactly this step was requested, so that no earlier one may replace it."""
    skipped: tuple[str, ...] = ()
    """Checkpoints that are not used, with the reasons."""
    aside: tuple[Path, ...] = ()
    """Files to move away first; else they would count as the newest at the next start."""


def choose(run: RunDir, options: ResumeOptions) -> Chosen:
    """Choose the checkpoint by `--resume` and the existing checkpoints.

    Raises:
        InputError: the requested checkpoint does not exist.
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
        # Without this error, the path would name the origin of a new folder.
        step = _number(Path(options.choice))
        raise InputError(
            f"--resume {options.choice}: belongs to this run folder itself; give its step: "
            f"--resume {step}"
        )
    source = Path(options.choice) if options.choice != AUTO else _source(run)
    # A name without a separator that does not exist is a misspelled `auto` or `never`.
    is_typo = (
        options.choice != AUTO
        and os.sep not in options.choice
        and not os.path.exists(options.choice)
    )
    # A path whose folder has been deleted stays valid: queues start the same command again.
    if own and not is_typo:
        return Chosen(own[-1][1], own[-1][0], source, skipped=skipped)
    return Chosen(None, skipped=skipped) if source is None else _elsewhere(source)


def _of_training(run: RunDir) -> Iterator[Path]:
    """Yield files that a training from step 0 must not use as its own: checkpoints and records."""
    if run.checkpoints.exists() and any(run.checkpoints.iterdir()):
        yield run.checkpoints
    records = (run.bad_steps, run.saves, run.metrics, run.tensorboard, run.trackers, run.summary)
    yield from (path for path in records if path.exists())


def incomplete(folder: Path) -> Iterator[str]:
    """Yield a line for each unusable checkpoint in a folder, with the reason."""
    for path in sorted(folder.glob("step_*")):
        if path.suffix == ".partial":
            yield f"{path}: incomplete: the save was interrupted"
        elif path.suffix.startswith(".broken"):
            yield f"{path}: damaged (detected by an earlier start)"
        elif not path.suffix and not (path / COMPLETE).exists():
            yield f"{path}: incomplete: it has no {COMPLETE}"


def _source(run: RunDir) -> Path | None:
    """Return the origin of this folder's run, as its first start recorded it.

    Raises:
        DamagedFile: the record cannot be read, and no checkpoint stands for it.
    """
    try:
        found = ResumeRecord.read(run).source
    except DamagedFile as error:
        if run.complete_checkpoints():
            print(f"{error}; it is written again", flush=True)
            return None
        raise DamagedFile(
            f"{error}; delete it, and give --resume again if the run began from another one"
        ) from None
    return Path(found) if found else None


def _step(run: RunDir, step: int, own: list[tuple[int, Path]]) -> Chosen:
    if step not in dict(own):
        there = f"has steps {', '.join(str(each) for each, _ in own)}" if own else "has none"
        raise InputError(
            f"--resume {step}: no complete checkpoint of step {step}; {run.checkpoints} {there}"
        )
    # The newest checkpoint would be chosen again at the next start.
    newer = [path for path in run.checkpoints.glob("step_*") if _number(path) > step]
    # The summary marks the training as complete.
    told = [run.summary] if run.summary.exists() else []
    return Chosen(dict(own)[step], step, exact=True, aside=(*sorted(newer), *told))


def _number(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 for a name that was set aside."""
    digits = path.name[len("step_") :].partition(".partial")[0]
    return int(digits) if digits.isdecimal() else -1


def _elsewhere(source: Path) -> Chosen:
    """Choose the newest checkpoint of another run's folder, or the one that `source` itself is."""
    source = Path(os.path.abspath(source))
    # With this mark the folder is itself a checkpoint, else it is a run's.
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
    # The folder may have any name, so the step comes from the manifest.
    try:
        step = read_own_json(folder / MANIFEST)["step"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--resume {folder}: its {MANIFEST} cannot be read: {error}") from None
    return int(step)


class Beginning(NamedTuple):
    """The beginning of a run, with all lines to print about it."""

    chosen: Chosen
    options: ResumeOptions
    lines: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def after(self, said: list[str]) -> Beginning:
        """Return the same beginning with further lines before its own."""
        return self._replace(lines=(*said, *self.lines))


def beginning(
    run: RunDir, resolved: ResolvedRun, before: Recipe | None, options: ResumeOptions
) -> Beginning:
    """Return the beginning of the run, with a line for each change since the checkpoint.

    Args:
        before: the recipe of this folder's earlier start, for checkpoints without a record of it.

    Raises:
        InputError: the requested checkpoint does not exist.
        PlanError: a change would make it a different training, and the user has not allowed it.
    """
    chosen = choose(run, options)
    lines = [f"  skipped: {line}" for line in chosen.skipped]
    lines += [f"  set aside: {path}" for path in chosen.aside]
    if chosen.folder is None:
        return Beginning(chosen, options, (*lines, *_since(before, resolved)))
    made = origin.read_checkpoint_origin(chosen.folder)
    # A checkpoint of this folder without a record was written with the folder's own recipe.
    if made is None and before is not None and run.checkpoints in chosen.folder.parents:
        made = {"recipe": before.model_dump(mode="json")}
    trains = not resolved.traits.evaluates
    lines.append(
        f"{'continuing' if trains else 'evaluating'} after step {chosen.step} from {chosen.folder}"
    )
    if made is None:
        return Beginning(
            chosen, options, (*lines, "  it has no record of its recipe, so nothing is compared")
        )
    found = origin.origin_changes(made, today(resolved))
    # Changes of fields that only a training uses do not matter to an evaluation.
    if not trains:
        found = origin.changes_affecting_evaluation(chosen.folder, found)
    require(found, options.allow, f"{chosen.folder} belongs to a different training")
    return Beginning(chosen, options, (*lines, *change_lines(found, options.allow)), tuple(found))


def _since(before: Recipe | None, resolved: ResolvedRun) -> Iterator[str]:
    """Yield the changes of the recipe for a run that has no checkpoint, and begins again."""
    if before is not None:
        now = resolved.file.recipe.model_dump(mode="json")
        for path, old, new in leaves(before.model_dump(mode="json"), now):
            yield f"  changed: {path}: {old!r} -> {new!r}"


def today(resolved: ResolvedRun) -> dict[str, object]:
    """Return the record that a checkpoint of this run would have of its origin."""
    git = provenance.commit(resolved.command.path.parent)
    world = resolved.world
    environment = provenance.environment()
    return origin.checkpoint_origin(
        resolved.file.recipe, resolved.work.batch, len(world.hosts), world.device, environment, git
    )


def change_lines(found: list[Change], allow: tuple[str, ...]) -> list[str]:
    """Return a line for each change, or one that there is none."""
    return [f"  changed: {change.line(allow)}" for change in found] or [
        "  no settings have changed since"
    ]


def require(found: list[Change], allow: tuple[str, ...], what: str) -> None:
    """Check that all changes are allowed.

    Raises:
        PlanError: some are not allowed.
    """
    if refused := [change for change in found if change.is_refused(allow)]:
        words = " ".join(
            f"--allow {name}" for name in sorted({change.rule.allow for change in refused}) if name
        )
        mend = f", {words} if this is intended, or a new --run-dir" if words else ""
        lines = "".join(f"\n  {change.line(allow)}" for change in refused)
        raise PlanError(f"{what}:{lines}\nUse the recipe that it was trained with{mend}")


def apply(run: RunDir, command: Command, begun: Beginning) -> None:
    """Record the command and the beginning of this start for the ranks.

    Files that must not count as the newest are moved away.
    """
    chosen, options, _, changes = begun
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
        changes=tuple(change.line(options.allow) for change in changes),
    ).write(run)
    provenance.record(run, command.path, command.options.typed)


def _free(path: Path) -> Path:
    # An earlier start may have set aside a file of the same name.
    names = (path.with_name(f"{path.name}.aside{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())
