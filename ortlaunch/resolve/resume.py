"""Choose the checkpoint from which a run continues, and compare the run with that checkpoint.

The result is printed before anything is started. This is the control side: it reads names and small
files only. Whether a checkpoint is complete and undamaged, the ranks detect when they read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.errors import DamagedFile, InputError, PlanError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.resume_rules import ALLOW_NAMES, Change, changed_leaves
from ortlaunch.resolve import provenance
from ortlaunch.resolve.resolve import Command, ResolvedRun
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import (
    COMPLETE,
    MANIFEST,
    RunDir,
    first_absent_path,
    read_json_or_raise_damaged,
)
from ortlaunch.run_folder.resume_record import ResumeRecord

# Values of `--resume`; any other value is a step or a path.
AUTO_CHOICE = "auto"
NEVER_RESUME = "never"


class ResumeOptions(NamedTuple):
    """The options `--resume` and `--allow` as typed."""

    choice: str = AUTO_CHOICE
    allow: tuple[str, ...] = ()

    @property
    def begins_earlier(self) -> bool:
        """Whether the run repeats completed steps."""
        return self.choice == NEVER_RESUME or self.choice.isdecimal()

    def require_known_allow_names(self) -> ResumeOptions:
        """Return the options themselves.

        Raises:
            InputError: `--allow` has a name of no rule.
        """
        for name in self.allow:
            if name not in ALLOW_NAMES:
                raise InputError(f"--allow: got {name}; one of {', '.join(ALLOW_NAMES)}")
        return self


AUTOMATIC_RESUME = ResumeOptions()


class ChosenCheckpoint(NamedTuple):
    """The beginning of a run."""

    folder: Path | None
    """The checkpoint; None: the run begins at step 0."""
    step: int = 0
    source: Path | None = None
    """Origin of the run folder's first checkpoint, if that was another folder."""
    is_exact: bool = False
    """Whether exactly this step was requested, so that no earlier one may replace it."""
    skipped: tuple[str, ...] = ()
    """Checkpoints that are not used, with the reasons."""
    paths_to_set_aside: tuple[Path, ...] = ()
    """Files to move away first; else they would count as the newest at the next start."""


def choose_checkpoint_to_resume(run: RunDir, resume_options: ResumeOptions) -> ChosenCheckpoint:
    """Choose the checkpoint by `--resume` and the existing checkpoints.

    Raises:
        InputError: the requested checkpoint does not exist.
    """
    own_checkpoints = run.complete_checkpoints()
    skipped = tuple(unusable_checkpoint_lines(run.checkpoints))
    if resume_options.choice == NEVER_RESUME:
        return ChosenCheckpoint(
            None, skipped=skipped, paths_to_set_aside=tuple(_files_of_training(run))
        )
    if resume_options.choice.isdecimal():
        return _own_checkpoint_of_step_or_refuse(
            run, int(resume_options.choice), own_checkpoints
        )._replace(skipped=skipped)
    if resume_options.choice != AUTO_CHOICE and os.path.realpath(
        Path(resume_options.choice).parent
    ) == os.path.realpath(run.checkpoints):
        # Without this error, the path would name the origin of a new folder.
        requested_step = _step_in_name(Path(resume_options.choice))
        raise InputError(
            f"--resume {resume_options.choice}: belongs to this run folder itself; give its step: "
            f"--resume {requested_step}"
        )
    source_path = (
        Path(resume_options.choice)
        if resume_options.choice != AUTO_CHOICE
        else _read_recorded_resume_source_or_none(run)
    )
    # A name without a separator that does not exist is a misspelled `auto` or `never`.
    is_typo = (
        resume_options.choice != AUTO_CHOICE
        and os.sep not in resume_options.choice
        and not os.path.exists(resume_options.choice)
    )
    # A path whose folder has been deleted stays valid: queues start the same command again.
    if own_checkpoints and not is_typo:
        return ChosenCheckpoint(
            own_checkpoints[-1][1], own_checkpoints[-1][0], source_path, skipped=skipped
        )
    return (
        ChosenCheckpoint(None, skipped=skipped)
        if source_path is None
        else _given_or_newest_checkpoint_of_other_folder(source_path)
    )


def _files_of_training(run: RunDir) -> Iterator[Path]:
    """Yield files that a training from step 0 must not use as its own: checkpoints and records."""
    if run.checkpoints.exists() and any(run.checkpoints.iterdir()):
        yield run.checkpoints
    records = (run.bad_steps, run.saves, run.metrics, run.tensorboard, run.trackers, run.summary)
    yield from (path for path in records if path.exists())


def unusable_checkpoint_lines(checkpoints_folder: Path) -> Iterator[str]:
    """Yield a line for each unusable checkpoint in a folder, with the reason."""
    for path in sorted(checkpoints_folder.glob("step_*")):
        if path.suffix == ".partial":
            yield f"{path}: incomplete: the save was interrupted"
        elif path.suffix.startswith(".broken"):
            yield f"{path}: damaged (detected by an earlier start)"
        elif not path.suffix and not (path / COMPLETE).exists():
            yield f"{path}: incomplete: it has no {COMPLETE}"


def _read_recorded_resume_source_or_none(run: RunDir) -> Path | None:
    """Return the origin of this folder's run, as its first start recorded it.

    Raises:
        DamagedFile: the record cannot be read, and no checkpoint stands for it.
    """
    try:
        recorded_source = ResumeRecord.read_or_from_the_beginning(run).source
    except DamagedFile as error:
        if run.complete_checkpoints():
            print(f"{error}; it is written again", flush=True)
            return None
        raise DamagedFile(
            f"{error}; delete it, and give --resume again if the run began from another one"
        ) from None
    return Path(recorded_source) if recorded_source else None


def _own_checkpoint_of_step_or_refuse(
    run: RunDir, requested_step: int, own_checkpoints: list[tuple[int, Path]]
) -> ChosenCheckpoint:
    if requested_step not in dict(own_checkpoints):
        steps_text = (
            f"has steps {', '.join(str(own_step) for own_step, _ in own_checkpoints)}"
            if own_checkpoints
            else "has none"
        )
        raise InputError(
            f"--resume {requested_step}: no complete checkpoint of step {requested_step}; "
            f"{run.checkpoints} {steps_text}"
        )
    # The newest checkpoint would be chosen again at the next start.
    newer_checkpoints = [
        path for path in run.checkpoints.glob("step_*") if _step_in_name(path) > requested_step
    ]
    # The summary marks the training as complete.
    finished_records = [run.summary] if run.summary.exists() else []
    return ChosenCheckpoint(
        dict(own_checkpoints)[requested_step],
        requested_step,
        is_exact=True,
        paths_to_set_aside=(*sorted(newer_checkpoints), *finished_records),
    )


def _step_in_name(checkpoint_path: Path) -> int:
    """Return the step in a checkpoint's name; -1 for a name that was set aside."""
    digits = checkpoint_path.name[len("step_") :].partition(".partial")[0]
    return int(digits) if digits.isdecimal() else -1


def _given_or_newest_checkpoint_of_other_folder(source_path: Path) -> ChosenCheckpoint:
    """Choose the newest checkpoint of another run's folder, or the one that `source_path` itself is."""
    source_path = Path(os.path.abspath(source_path))
    # With this mark the folder is itself a checkpoint, else it is a run's.
    if (source_path / COMPLETE).exists():
        # The folder may have any name, so the step comes from the manifest.
        step = int(read_json_or_raise_damaged(source_path / MANIFEST)["step"])
        return ChosenCheckpoint(source_path, step, source_path, is_exact=True)
    other_run = RunDir(source_path)
    complete_checkpoints = other_run.complete_checkpoints()
    skipped_lines = tuple(unusable_checkpoint_lines(other_run.checkpoints))
    if not complete_checkpoints:
        reason = (
            "is no run folder with a complete checkpoint, and no complete checkpoint"
            if source_path.exists()
            else "absent"
        )
        raise InputError(
            "\n".join(
                [
                    f"--resume {source_path}: {reason}; give auto, never, a step or such a folder",
                    *skipped_lines,
                ]
            )
        )
    return ChosenCheckpoint(
        complete_checkpoints[-1][1], complete_checkpoints[-1][0], source_path, skipped=skipped_lines
    )


class RunBeginning(NamedTuple):
    """The beginning of a run, with all lines to print about it."""

    checkpoint: ChosenCheckpoint
    options: ResumeOptions
    text_lines: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def prepend_lines(self, earlier_lines: list[str]) -> RunBeginning:
        """Return the same beginning with further lines before its own."""
        return self._replace(text_lines=(*earlier_lines, *self.text_lines))


def choose_checkpoint_and_list_or_refuse_changes(
    run: RunDir,
    resolved_run: ResolvedRun,
    earlier_recipe: Recipe | None,
    resume_options: ResumeOptions,
) -> RunBeginning:
    """Return the beginning of the run, with a line for each change since the checkpoint.

    Args:
        earlier_recipe: the recipe of this folder's earlier start, for checkpoints without a record of it.

    Raises:
        InputError: the requested checkpoint does not exist.
        PlanError: a change would make it a different training, and the user has not allowed it.
    """
    checkpoint = choose_checkpoint_to_resume(run, resume_options)
    text_lines = [
        *(f"  skipped: {line}" for line in checkpoint.skipped),
        *(f"  set aside: {path}" for path in checkpoint.paths_to_set_aside),
    ]
    if checkpoint.folder is None:
        return RunBeginning(
            checkpoint,
            resume_options,
            (*text_lines, *_recipe_change_lines_without_checkpoint(earlier_recipe, resolved_run)),
        )
    checkpoint_origin = origin.read_checkpoint_origin_or_none(checkpoint.folder)
    is_training = not resolved_run.traits.evaluates
    text_lines.append(
        f"{'continuing' if is_training else 'evaluating'} after step {checkpoint.step} from {checkpoint.folder}"
    )
    if checkpoint_origin is None:
        return RunBeginning(
            checkpoint,
            resume_options,
            (*text_lines, "  its record of the recipe cannot be read, so nothing is compared"),
        )
    origin_differences = origin.recipe_data_and_package_changes_between_origins(
        checkpoint_origin, origin_record_of_resolved_run(resolved_run)
    )
    # Changes of fields that only a training uses do not matter to an evaluation.
    if not is_training:
        origin_differences = origin.changes_affecting_evaluation(
            checkpoint.folder, origin_differences
        )
    refuse_changes_not_allowed(
        origin_differences,
        resume_options.allow,
        f"{checkpoint.folder} belongs to a different training",
    )
    return RunBeginning(
        checkpoint,
        resume_options,
        (
            *text_lines,
            *(
                f"  changed: {change.summary_line(resume_options.allow)}"
                for change in origin_differences
            ),
            *(() if origin_differences else ("  no settings have changed since",)),
        ),
        tuple(origin_differences),
    )


def _recipe_change_lines_without_checkpoint(
    earlier_recipe: Recipe | None, resolved_run: ResolvedRun
) -> Iterator[str]:
    if earlier_recipe is not None:
        recipe_values = resolved_run.recipe_file.recipe.model_dump(mode="json")
        for leaf in changed_leaves(earlier_recipe.model_dump(mode="json"), recipe_values):
            yield f"  changed: {leaf.path}: {leaf.old_value!r} -> {leaf.new_value!r}"


def origin_record_of_resolved_run(resolved_run: ResolvedRun) -> dict[str, object]:
    """Return the record that a checkpoint of this run would have of its origin."""
    git = provenance.git_commit_and_dirty_or_none(resolved_run.command.recipe_path.parent)
    world = resolved_run.world
    environment = provenance.package_and_machine_versions_record()
    return origin.origin_of_run_to_start(
        resolved_run.recipe_file.recipe,
        resolved_run.workload.batch,
        len(world.hosts),
        world.device,
        environment,
        git,
    )


def refuse_changes_not_allowed(
    changes: list[Change], allowed_names: tuple[str, ...], subject: str
) -> None:
    """Check that all changes are allowed.

    Raises:
        PlanError: some are not allowed.
    """
    if refused_changes := [change for change in changes if change.is_refused(allowed_names)]:
        allow_options = " ".join(
            f"--allow {name}"
            for name in sorted({change.rule.allow_name for change in refused_changes})
            if name
        )
        remedy = (
            f", {allow_options} if this is intended, or a new --run-dir" if allow_options else ""
        )
        change_text = "".join(
            f"\n  {change.summary_line(allowed_names)}" for change in refused_changes
        )
        raise PlanError(f"{subject}:{change_text}\nUse the recipe that it was trained with{remedy}")


def set_files_aside_and_record_beginning(
    run: RunDir, command: Command, run_beginning: RunBeginning
) -> None:
    """Record the command and the beginning of this start for the ranks.

    Files that must not count as the newest are moved away.
    """
    checkpoint, options, _, changes = run_beginning
    for path in checkpoint.paths_to_set_aside:
        # An earlier start may have set aside a file of the same name.
        os.replace(path, first_absent_path(path.with_name(f"{path.name}.aside")))
    ResumeRecord(
        choice=options.choice,
        allow=options.allow,
        checkpoint=None if checkpoint.folder is None else os.path.abspath(checkpoint.folder),
        step=checkpoint.step,
        exact=checkpoint.is_exact,
        source=None if checkpoint.source is None else os.path.abspath(checkpoint.source),
        skipped=checkpoint.skipped,
        changes=tuple(change.summary_line(options.allow) for change in changes),
    ).write(run)
    provenance.append_start_to_command_log(run, command.recipe_path, command.options.typed)
