"""Tests of the beginning of a run, and of the lines on every change since its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.api.submit import Submission
from ortlaunch.base.errors import DamagedFile, InputError, PlanError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe.rules import resume_rules
from ortlaunch.recipe.rules.resume_rules import (
    ALLOW_NAMES,
    OTHER_RULES,
    RULES,
    rule_of_field_or_nearest_parent,
)
from ortlaunch.resolve import provenance, resume
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import preview
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import (
    RunDir,
    write_json_atomically,
    write_text_atomically,
)
from tests.makers import CUSTOM

pytestmark = pytest.mark.usefixtures("workbench")
# The versions with which the runs of these tests resume.
HERE = {
    "ortlaunch": "1.0",
    "python": "3.11.9",
    "packages": {"torch": "2.13.0", "peft": "0.19", "six": "1", "tqdm": "4"},
}


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the list of installed packages."""
    # Reading it takes a third of a second.
    monkeypatch.setattr(provenance, "package_and_machine_versions_record", lambda: HERE)


def resolved(ranks: int = 1, **sections: Any) -> ResolvedRun:
    """Resolve a custom recipe with these sections, on so many ranks of this host."""
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump({**CUSTOM, **sections}))
    return load_and_resolve_recipe(path, (), LaunchOptions(None, ranks), {})


def save(run: RunDir, step: int, made: ResolvedRun | None = None, **changed: Any) -> Path:
    """Write a complete checkpoint of a training.

    Args:
        changed: parts of its origin that differ from this training.
    """
    folder = run.checkpoint_folder(step)
    told = {**resume.origin_record_of_resolved_run(made or resolved()), **changed}
    told["data"] = {"samples": 64, "fingerprint": "aa"}
    write_json_atomically(folder / origin.ORIGIN, told)
    write_json_atomically(folder / "manifest.json", {"step": step, "files": {}})
    write_text_atomically(folder / "COMPLETE", "")
    return folder


RUN = RunDir("mine")


def says(options: ResumeOptions | None = None, ranks: int = 1, **sections: Any) -> list[str]:
    """Return the lines on the beginning of the run."""
    return list(
        resume.choose_checkpoint_and_list_or_refuse_changes(
            RUN, resolved(ranks, **sections), None, options or ResumeOptions()
        ).text_lines
    )


# ---------------------------------------------------------------- the table


def test_the_words_of_allow() -> None:
    """The names for --allow are those of the rules."""
    both = [*RULES.items(), *OTHER_RULES.items()]
    assert sorted(
        {rule_of_field_or_nearest_parent(name, dict(both), "a", "b").allow_name for name, _ in both}
        - {""}
    ) == list(ALLOW_NAMES)
    with pytest.raises(
        InputError, match=r"^--allow: got modell; one of data, loss, model, optimizer, precision$"
    ):
        ResumeOptions("auto", ("modell",)).require_known_allow_names()


# ---------------------------------------------------------------- explanation

# The same global batch, in two passes.
BATCH = {"micro_size": 1, "accumulation_steps": 2}
# For each kind of change: new sections, parts of the old origin, and the printed lines.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "nothing": ({}, {}, ["  no settings have changed since"]),
    "learning rate and schedule": (
        {"optimizer": {"name": "sgd", "learning_rate": 0.2}, "schedule": {"name": "cosine"}}, {},
        ["  changed: optimizer.learning_rate: 0.1 -> 0.2: applied",
         "  changed: schedule.name: 'linear' -> 'cosine': applied"],
    ),
    "steps and clipping": (
        {"train": {"max_steps": 9, "max_grad_norm": 1.0}}, {},
        ["  changed: train.max_steps: 3 -> 9: applied (the schedule covers the new length)",
         "  changed: train.max_grad_norm: null -> 1.0: applied"],
    ),
    "micro size at equal global size": (
        {"batch": BATCH}, {},
        ["  changed: batch.micro_size: 2 -> 1: applied",
         "  changed: batch.accumulation_steps: 1 -> 2: applied",
         "  changed: world.micro_samples: 2 -> 1: applied",
         "  changed: world.accumulation_steps: 1 -> 2: applied"],
    ),
    "ranks, ZeRO and engine": (
        {"ranks": 2, "zero": {"stage": 1}, "engine": {"name": "inductor"}}, {},
        ["  changed: engine.name: 'eager' -> 'inductor': applied",
         "  changed: zero: null -> {stage: 1, fused_gradient_norm: true}: "
         "applied",
         "  changed: world.ranks: 1 -> 2: applied",
         "  changed: world.global_samples: 2 -> 4: applied (the next step uses the "
         "samples that follow)"],
    ),
    "logging, checkpoints and launch": (
        {"log": {"every_steps": 5}, "checkpoint": {"keep": 1}, "launch": {"env": {"NOTE": "x"}}}, {},
        ["  changed: checkpoint.keep: 3 -> 1: applied",
         "  changed: launch.env.NOTE: null -> 'x': applied",
         "  changed: log.every_steps: 10 -> 5: applied"],
    ),
    "the code and the packages": (
        {}, {"code": {"ortlaunch": "0.9", "python": "3.11.9", "commit": "ab12",
                      "dirty": False},
             "packages": {"torch": "2.4.0", "six": "0", "tqdm": "3"}},
        ["  changed: code.ortlaunch: '0.9' -> '1.0': applied",
         "  changed: code.commit: 'ab12' -> null: applied",
         "  changed: code.dirty: false -> null: applied",
         "  changed: packages.torch: '2.4.0' -> '2.13.0': applied",
         "  changed: packages.peft: null -> '0.19': applied",
         "  changed: packages, 2 others: 'old versions' -> 'new versions': applied"],
    ),
    "the model": (
        {"model": {"task": "custom", "factory": "mine:model", "arguments": {"width": 3}}}, {},
        ["  model.arguments.width: null -> 3: refused without --allow model"],
    ),
    "the data and their order": (
        {"data": {"train": {"format": "custom", "factory": "mine:data", "arguments": {"n": 1}}},
         "seed": 7}, {},
        ["  seed: 42 -> 7: refused without --allow data (it determines order, masking and "
            "dropout)",
         "  data.train.arguments.n: null -> 1: refused without --allow data"],
    ),
    "the optimizer's kind": (
        {"optimizer": {"name": "adamw", "learning_rate": 0.1}}, {},
        ["  optimizer.name: 'sgd' -> 'adamw': refused without --allow optimizer (its state "
            "is reset unless the checkpoint has it)"],
    ),
    "the precision": (
        {"precision": "bf16"}, {},
        ["  precision: 'fp32' -> 'bf16': refused without --allow precision (the weights are "
            "float32 in each, but the steps differ)"],
    ),
    "the loss": (
        {"train": {"max_steps": 3, "loss_weight": "mask"}}, {},
        ["  train.loss_weight: null -> 'mask': refused without --allow loss (the loss "
            "becomes a different mean)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_each_change_is_explained(kind: str) -> None:
    """Each change is listed: it is applied, or is refused until --allow names it."""
    sections, made, lines = CHANGES[kind]
    folder = save(RUN, 2, **made)
    head = f"continuing after step 2 from {folder}"
    if "refused" not in lines[0]:
        assert says(**sections) == [head, *lines]
        return
    with pytest.raises(PlanError) as caught:
        says(**sections)
    words = "--allow " + lines[0].partition("--allow ")[2].split()[0]
    assert str(caught.value).splitlines() == [
        f"{folder} belongs to a different training:", *lines,
        f"Use the recipe that it was trained with, {words} if this is intended, or a new --run-dir",
    ]  # fmt: skip
    allowed = says(ResumeOptions("auto", (words.split()[1],)), **sections)
    assert allowed == [
        head, *(f"  changed:{line[1:]}".replace("refused without", "applied, with")
                for line in lines)
    ]  # fmt: skip


def test_adamw_by_another_code_is_the_same_kind() -> None:
    """A change between adamw and fused_adam is allowed: their states are the same."""
    adam = {"name": "adamw", "learning_rate": 0.1}
    save(RUN, 2, resolved(optimizer=adam))
    assert says(optimizer={**adam, "name": "fused_adam"})[1:] == [
        "  changed: optimizer.name: 'adamw' -> 'fused_adam': applied (the same values "
        "from other code)"
    ]


def test_a_checkpoint_that_does_not_say_what_made_it() -> None:
    """A checkpoint without a readable record is not compared; the ranks verify its files."""
    folder = save(RUN, 2)
    (folder / origin.ORIGIN).write_text("{")
    assert says()[1:] == ["  its record of the recipe cannot be read, so nothing is compared"]


# ---------------------------------------------------------------- --resume


def leave_remains(run: RunDir) -> None:
    """Write the remains of a failing machine and of an earlier start."""
    for name in ("step_00000009.partial", "step_00000008", "step_00000007.broken"):
        (run.checkpoints / name).mkdir()


def test_auto_names_what_it_skips() -> None:
    """`auto` chooses the newest complete checkpoint, and gives the reasons against newer ones."""
    save(RUN, 2)
    save(RUN, 6)
    leave_remains(RUN)
    assert says()[:4] == [
        "  skipped: mine/checkpoints/step_00000007.broken: damaged (detected by an earlier start)",
        "  skipped: mine/checkpoints/step_00000008: incomplete: it has no COMPLETE",
        "  skipped: mine/checkpoints/step_00000009.partial: incomplete: the save was interrupted",
        "continuing after step 6 from mine/checkpoints/step_00000006",
    ]


def applied(choice: str, run: RunDir = RUN) -> dict[str, Any]:
    """Return the record of the beginning that is written for the ranks."""
    options = ResumeOptions(choice)
    run.path.mkdir(exist_ok=True)
    made = resolved()
    resume.set_files_aside_and_record_beginning(
        run,
        made.command,
        resume.choose_checkpoint_and_list_or_refuse_changes(run, made, None, options),
    )
    return dict(json.loads(run.resume.read_text()))


@pytest.mark.parametrize("damage", ["", "{", "\0" * 40, '{"source": 3}'])
def test_a_damaged_record_of_the_last_start(
    damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with a checkpoint goes on without the record; another one names the remedy."""
    write_text_atomically(RUN.resume, damage)
    with pytest.raises(
        DamagedFile, match=r"^mine/resume\.json: is damaged: .*; delete it, and give --resume again"
    ):
        says()
    save(RUN, 2)
    assert says()[0] == "continuing after step 2 from mine/checkpoints/step_00000002"
    assert "; it is written again" in capsys.readouterr().out


def test_never_keeps_what_was_there_aside() -> None:
    """`never` moves the checkpoints and records of the former training away."""
    save(RUN, 2)
    of_training = (RUN.bad_steps, RUN.saves, RUN.metrics)
    # Left-out batches, saves and metrics belong to that training, too.
    for path in of_training:
        path.write_text("{}\n")
    assert applied("never")["checkpoint"] is None
    assert [path.exists() for path in of_training] == [False] * 3
    assert RUN.metrics.with_name("metrics.jsonl.aside").read_text() == "{}\n"
    assert RUN.complete_checkpoints() == []
    assert (RUN.path / "checkpoints.aside/step_00000002/COMPLETE").exists()
    save(RUN, 4)
    # The name `checkpoints.aside` is in use.
    applied("never")
    assert (RUN.path / "checkpoints.aside1/step_00000004").exists()
    assert applied("never")["checkpoint"] is None


def test_a_step_of_this_run() -> None:
    """A given step becomes the newest checkpoint; the error for an absent one lists the others."""
    for step in (2, 4, 6):
        save(RUN, step)
    RUN.partial_checkpoint_folder(8).mkdir()
    RUN.summary.write_text("{}")
    written = applied("4")
    # With the summary, a start that is cut off before its export would count as finished.
    assert not RUN.summary.exists()
    assert (written["step"], written["exact"]) == (4, True)
    assert [step for step, _ in RUN.complete_checkpoints()] == [2, 4]
    assert (RUN.checkpoints / "step_00000006.aside/COMPLETE").exists()
    with pytest.raises(
        InputError,
        match=r"^--resume 6: no complete checkpoint of step 6; .* has steps 2, 4$",
    ):
        says(ResumeOptions("6"))
    own = str(RUN.checkpoint_folder(2))
    with pytest.raises(
        InputError, match=r"00002: belongs to this run folder itself; give its step: --resume 2$"
    ):
        resume.choose_checkpoint_to_resume(RUN, ResumeOptions(own))
    with pytest.raises(
        InputError,
        match=r"^--resume 6: no complete checkpoint of step 6; empty/checkpoints has none$",
    ):
        resume.choose_checkpoint_to_resume(RunDir("empty"), ResumeOptions("6"))


def test_another_runs_checkpoint() -> None:
    """Another run's checkpoint is recorded as the source, and own checkpoints precede it."""
    for step in (2, 4):
        save(RUN, step)
    new = RunDir("new")
    written = applied("mine", new)
    assert (written["step"], written["exact"], written["source"]) == (
        4,
        False,
        str(Path("mine").absolute()),
    )
    one = applied("mine/checkpoints/step_00000002", RunDir("second"))
    assert (one["step"], one["exact"]) == (2, True)
    again = resume.choose_checkpoint_to_resume(new, ResumeOptions())
    assert (again.step, again.source) == (4, Path("mine").absolute())
    own = save(new, 5)
    assert resume.choose_checkpoint_to_resume(new, ResumeOptions("mine")).folder == own
    assert resume.choose_checkpoint_to_resume(new, ResumeOptions()).folder == own


@pytest.mark.parametrize(
    ("name", "why"), [("none", "absent"), ("plain", "is no run folder with a complete checkpoint")]
)
def test_a_path_without_a_checkpoint(name: str, why: str) -> None:
    """A path without a checkpoint is refused, with the incomplete ones in it."""
    Path("plain/checkpoints/step_00000003.partial").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"--resume .*{name}: {why}") as caught:
        says(ResumeOptions(name))
    assert ("step_00000003.partial: incomplete" in str(caught.value)) is (name == "plain")


def test_a_misspelt_name_beside_checkpoints_of_its_own() -> None:
    """`--resume last` is refused also beside own checkpoints, a deleted path is not."""
    own = save(new := RunDir("new"), 5)
    with pytest.raises(
        InputError, match=r"--resume .*last: absent; give auto, never, a step or such a folder"
    ):
        resume.choose_checkpoint_to_resume(new, ResumeOptions("last"))
    assert resume.choose_checkpoint_to_resume(new, ResumeOptions("gone/by-now")).folder == own


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (["dev.jsonl"], ["new.jsonl"], "'dev.jsonl' -> 'new.jsonl'"),
        (["a"], ["a", "b"], "'a' -> [a, b]"),
        ([1], 2, "[1] -> 2"),
        (2, None, "2 -> null"),
        (False, True, "false -> true"),
        (
            {"format": "text", "path": ["a"], "name": None, "arguments": {}},
            "x",
            "{format: text, path: [a]} -> 'x'",
        ),
    ],
)
def test_values_are_printed_as_a_recipe_has_them(before: Any, after: Any, expected: str) -> None:
    """Values are printed as a recipe has them."""
    change = resume_rules.Change(
        "data.evaluation.path", before, after, resume_rules.ChangeRule(resume_rules.EFFECT)
    )
    assert change.summary_line().startswith(f"data.evaluation.path: {expected}: ")


def test_a_dry_run_shows_what_has_changed() -> None:
    """A dry run prints the changes since the checkpoint, and refuses those that `train` refuses."""
    save(RUN, 7)
    write_text_atomically(RUN.recipe, yaml.safe_dump(CUSTOM))
    lines, _ = preview.preview_lines_and_launch_command(
        resolved(train={"max_steps": 9}), RUN, ResumeOptions()
    )
    assert "continuing after step 7" in lines[1]
    assert any("train.max_steps" in line for line in lines)
    with pytest.raises(PlanError, match="seed: 42 -> 7: refused without --allow data"):
        preview.preview_lines_and_launch_command(resolved(seed=7), RUN, ResumeOptions())


def test_the_folder_of_a_command_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's paths are absolute, so that the same command continues it from any folder."""
    root = Path.cwd()
    for folder in ("ft", "data", "base"):
        Path(folder).mkdir()
    Path("data/a.txt").touch()
    Path("linked").symlink_to("data")
    text = {
        "model": {"task": "causal-lm", "pretrained": "../base"},
        "data": {
            "train": {"format": "text", "path": ["../data/*.txt"]},
            "tokenizer": "../base",
            "sequence_length": 8,
        },
        "optimizer": {"learning_rate": 1e-3},
        "batch": {"global_size": 2},
        "train": {"max_steps": 2},
    }
    Path("ft/ft.yaml").write_text(yaml.safe_dump({"name": "ft", **text}))
    given = {"ft": "ft.yaml", ".": "ft/ft.yaml", "data": f"{root}/ft/ft.yaml"}
    recipes = []
    for folder, path in given.items():
        monkeypatch.chdir(root / folder)
        file = load_and_resolve_recipe(Path(path), (), LaunchOptions(), {}).recipe_file
        # A link to the same folder is no change either.
        linked = file.copy_with_further_overrides(f"data.train.path={root}/linked/*.txt")
        recipes += [each.recipe.model_dump(mode="json") for each in (file, linked)]
    assert recipes[0]["model"]["pretrained"] == str(root / "base")
    assert [
        resume_rules.changed_leaves_with_rules(recipes[0], each, RULES) for each in recipes
    ] == [[]] * 6


def test_a_job_on_another_machine_keeps_paths_as_typed() -> None:
    """A pod has its own folders; only Slurm's nodes share those of this host."""
    Path("a.txt").touch()
    sections = {"train": {"format": "text", "path": "a.txt"}, "tokenizer": "gpt2"}
    Path("recipe.yaml").write_text(
        yaml.safe_dump(
            {
                **CUSTOM,
                "model": {"task": "causal-lm", "config": {"model_type": "gpt2"}},
                "data": {**sections, "sequence_length": 8},
                "submit": {"kubernetes": {"image": "i", "runs": "/r/x", "volumes": {"v": "/r"}}},
            }
        )
    )
    paths = {
        name: Submission.resolve_for_scheduler(
            "recipe.yaml", (), name, None
        ).resolved.recipe_file.recipe.data.train.path
        for name in ("slurm", "kubernetes")
    }
    assert paths == {"slurm": (str(Path.cwd() / "a.txt"),), "kubernetes": ("a.txt",)}
