"""Tests of hints about other tools' names and typing errors, and of shell completion."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortlaunch import cli
from ortlaunch.cli.summaries import SUMMARIES
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs import registry
from tests.control.typed import Run

# Verbs that are groups of verbs; they are no members of cli.VERBS.
FAMILIES = {"recipes", "data", "device", "sweep"}


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (
            "--num-gpus 4",
            "--num-gpus; give a key of the recipe without dashes: launch.processes_per_node=VALUE",
        ),
        (
            "--resume_from_checkpoint x",
            "Hugging Face's resume_from_checkpoint; use the command line option "
            "--run-dir with the folder",
        ),
        (
            "--max_steps=5",
            "--max_steps; give a key of the recipe without dashes: train.max_steps=VALUE",
        ),
        (
            "--max-steps 5",
            "--max-steps; give a key of the recipe without dashes: train.max_steps=VALUE",
        ),
        (
            "--train.max_steps=VALUE",
            "--train.max_steps; give a key of the recipe without dashes: train.max_steps=VALUE",
        ),
        (
            "--learning-rate 0.1",
            "give a key of the recipe without dashes: optimizer.learning_rate=VALUE",
        ),
        ("--lr 1", "give a key of the recipe without dashes: optimizer.learning_rate=VALUE"),
        ("--max_stps=5", "give a key of the recipe without dashes: train.max_steps=VALUE"),
        ("--seed 4", "give a key of the recipe without dashes: seed=VALUE"),
        ("--bf16", "--bf16; Hugging Face's bf16; use precision: bf16"),
        (
            "--config x.yaml",
            "give the recipe without an option",
        ),
        ("--partition gpu", "give a key of the recipe without dashes: submit.partition=VALUE"),
    ],
)
def test_an_option_of_another_tool_gets_a_hint(typed: str, hint: str, ortlaunch: Run) -> None:
    """An option of another tool ends the command with one line that has the right option or key."""
    ended = ortlaunch("train", "good.yaml", *typed.split())
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("ortlaunch: no such option: --")
    assert hint in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("--nproc-per-nod", "--nproc-per-node"),
        ("--nproc_per_node", "--nproc-per-node"),
        ("--zork", ""),
        ("--out", ""),
        ("-n", ""),
    ],
)
def test_a_mistyped_option_names_the_nearest_one(typed: str, options: str, ortlaunch: Run) -> None:
    """Typer answers a misspelt option with the nearest ones, and an unknown one without."""
    ended = ortlaunch("plan", "good.yaml", typed)
    assert (ended.status, ended.out) == (2, "")
    assert f"No such option: {typed}" in ended.err
    assert options in ended.err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("eval runs/x", "No such command 'eval'. Did you mean 'evaluate'?"),
        ("trian good.yaml", "No such command 'trian'. Did you mean 'train'"),
        ("vlaidate good.yaml", "No such command 'vlaidate'. Did you mean 'validate'"),
        ("recipes lst", "No such command 'lst'. Did you mean 'list'?"),
        ("zzz", "No such command 'zzz'."),
    ],
)
def test_a_mistyped_verb_names_the_nearest_one(typed: str, hint: str, ortlaunch: Run) -> None:
    """Typer answers a misspelt verb with the nearest ones."""
    ended = ortlaunch(*typed.split())
    assert (ended.status, ended.out) == (2, "")
    assert hint in ended.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ortlaunch tra", "train"),
        ("ortlaunch recipes sh", "show"),
        ("ortlaunch plan bert-large/ti", "bert-large/tiny"),
        ("ortlaunch train good.yaml --host", "--hostfile"),
    ],
)
def test_the_shell_completes(
    words: str, offered: str, ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell completes verbs, options and names of shipped recipes."""
    # The variables that bash's completion function sets.
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    monkeypatch.setenv("_ORTLAUNCH_COMPLETE", "complete_bash")
    assert ortlaunch().out.split() == [offered]


def test_the_verbs_are_grouped(ortlaunch: Run) -> None:
    """Every verb is in a group of --help, with a summary that fits 80 columns."""
    shown = ortlaunch("--help").out
    assert (
        set(SUMMARIES)
        == {cli.NAMES.get(verb.__name__, verb.__name__) for verb in cli.VERBS} | FAMILIES
    )
    # typer shortens a summary that is too long.
    assert "..." not in shown.partition("Train:")[2]
    for verb, summary in SUMMARIES.items():
        assert f"  {verb} " in shown
        assert summary.text in shown


@pytest.mark.parametrize("verb", ["train", "bench", "status", "recipes"])
def test_help_has_an_example(verb: str, ortlaunch: Run) -> None:
    """The help of a verb has an example."""
    assert f"Example: ortlaunch {verb}" in ortlaunch(verb, "--help").out


def test_a_run_by_its_name(ortlaunch: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`latest`, a recipe's name and one run's beginning give a run; paths and other names stay."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    for age, name in enumerate(("a-20260101-000000", "a-20260102-000000-2", "a-b-20260103-000000")):
        run = RunDir(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.job.write_text("{}")
        # Distinct ages: the last run is the newest.
        os.utime(run.job, (age, age))
        registry.register_run_or_print_error(run)
    for given, expected in {
        "latest": "a-b-20260103-000000",
        "a": "a-20260102-000000-2",
        "a-b": "a-b-20260103-000000",
        "a-20260102": "a-20260102-000000-2",
    }.items():
        assert registry.run_folder_by_name_or_path(Path(given)).name == expected
    for given in ("runs/a", "b", "a-2026"):
        assert registry.run_folder_by_name_or_path(Path(given)) == Path(given)
    assert "b: is neither a folder nor the name of a run" in ortlaunch("status", "b").err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (
            "train good.yaml --launcher slurm",
            "that is a scheduler: ortlaunch submit RECIPE --scheduler NAME",
        ),
        ("train good.yaml --nproc-per-node", "'--nproc-per-node' requires an argument"),
        ("train good.yaml --nproc-per-node=auto", "'--nproc-per-node'"),
        ("parity good.yaml --steps 0", "'--steps'"),
        ("report x --out y.html", "No such option: --out (Possible options: --to)"),
        ("validate good_yaml", "no such file; did you mean good.yaml?"),
        ("validate good.yml", "no such file; did you mean good.yaml?"),
        ("validate good", "good: no such file; did you mean good.yaml?"),
        (
            # A section cannot be a name alone.
            "validate good.yaml engine=eager",
            "as {name: ort}; on the command line: engine.name=eager",
        ),
        ("validate good.yaml train={max_steps:1,000}", "a comma inside { } separates keys"),
        (
            "validate good.yaml log.tensorboard=true",
            "log.tensorboard: unknown key; write log.trackers: [tensorboard]",
        ),
        (
            "validate blank.yaml",
            "blank.yaml:2:10: is not YAML: a no-break space follows this colon",
        ),
    ],
)
def test_a_slip_is_named_with_what_to_write(typed: str, hint: str, ortlaunch: Run) -> None:
    """A wrong value, file name, key or character ends with status 2 and the remedy."""
    # A no-break space after the colon.
    Path("blank.yaml").write_text("name: x\nprecision:\xa0fp32\n", encoding="utf-8")
    # The table splits at blanks; YAML needs one after the colon.
    ended = ortlaunch(*(word.replace("max_steps:", "max_steps: ") for word in typed.split()))
    assert ended.status == 2
    assert hint in " ".join(ended.err.split())


def test_a_place_for_anchors(ortlaunch: Run) -> None:
    """Top-level keys that begin with `x-` or a dot are ignored, and their anchors can be merged."""
    text = Path("good.yaml").read_text()
    Path("anchors.yaml").write_text(
        f"x-defaults: &d {{every_steps: 7}}\n.seed: &s 5\n{text}log: *d\nseed: *s\n"
    )
    assert ortlaunch("validate", "anchors.yaml").out == "anchors.yaml: valid (made)\n"
