"""The command line: every command with its standard output, standard error and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch import __version__
from ortlaunch.base import machine, module_start
from ortlaunch.base.errors import RunError
from ortlaunch.cli import _print_error_and_return_exit_status
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.manual.reference import recipe_manual_page_markdown
from ortlaunch.recipe.manual.schema import editor_schema_json_text
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run import control
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.verdict import Verdict
from tests.control.typed import Ended, Run
from tests.makers import CUSTOM, WORDS

ROOT = Path(__file__).parents[2]
# Command -> text that its help must contain.
VERBS = {
    "validate": "Check a recipe",
    "plan": "Show ranks, batch, memory",
    "train": "Train a recipe.",
    "bench": "Measure engines and options",
    "parity": "Compare a recipe's engine with plain PyTorch",
    "status": "Show a run: state",
    "cancel": "End a run with all its processes",
    "export": "Write a checkpoint of a run as a model",
    "generate": "Continue a prompt with a causal model",
    "setup": "Build the torch extensions",
    "schema": "Print the recipe's JSON schema",
    "constraints": "Print a tested set of versions",
    "ranks": "Show which rank this process is",
    "hostfile": "Print an example of a host file",
    "recipes": "The shipped recipes",
    "data": "Prepare and inspect the data of a training",
    "evaluate": "Compute loss and metrics of a run's checkpoint, or of a model",
    "device": "Train on a device, and average",
    "device train": "Train a checkpoint on data.train",
    "device evaluate": "Measure a checkpoint on data.evaluation, as",
    "device export": "Write a checkpoint as model.onnx",
    "device import": "Write a device's or an average's weights as a checkpoint",
    "device average": "Average the weights of clients' checkpoints",
    "data prepare": "Read and tokenize a recipe's data into the cache",
    "data show": "Show samples as the model will see them, and audit the data",
    "recipes list": "List the shipped recipes: model, method, memory.",
    "recipes show": "Print a shipped recipe.",
    "recipes copy": "Copy a shipped recipe",
}


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, flag: str, ortlaunch: Run) -> None:
    """The help of each command is on stdout and contains its first sentence."""
    ended = ortlaunch(*verb.split(), flag)
    assert (ended.status, ended.err) == (0, "")
    assert f"Usage: ortlaunch {verb}" in ended.out
    assert VERBS[verb] in ended.out
    # Typer cuts long summaries and appends "...".
    assert "..." not in ended.out.partition("Commands:")[2]


def test_help_names_every_verb(ortlaunch: Run) -> None:
    """The front page lists exactly the existing commands; it is also shown without arguments."""
    ended = ortlaunch("--help")
    listed = [
        line.split()[0]
        for line in ended.out.partition("Train:")[2].splitlines()
        if line.startswith("  ")
    ]
    assert set(listed) & set(VERBS) == {verb for verb in VERBS if " " not in verb}
    assert "ONNX Runtime" in ended.out
    assert ended.out.strip() in {ortlaunch().out.strip(), ortlaunch().err.strip()}


def test_version(ortlaunch: Run) -> None:
    """--version prints only the version of the package."""
    assert ortlaunch("--version") == Ended(0, f"{__version__}\n", "")


def test_schema(ortlaunch: Run) -> None:
    """`schema` prints only the schema.

    tests/control/recipe/test_shipped_recipes.py compares recipes/schema.json with it.
    """
    assert ortlaunch("schema") == Ended(0, editor_schema_json_text(), "")
    assert json.loads(editor_schema_json_text())["title"] == "ortlaunch recipe"
    assert ortlaunch("schema", "--markdown") == Ended(0, recipe_manual_page_markdown(), "")


def test_validate(ortlaunch: Run) -> None:
    """`validate` prints one line on stdout for a valid recipe."""
    assert ortlaunch("validate", "good.yaml") == Ended(0, "good.yaml: valid (made)\n", "")
    assert ortlaunch("validate", "good.yaml", "name=other") == Ended(
        0, "good.yaml: valid (other)\n", ""
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "bad.yaml"],
        ["plan", "bad.yaml"],
        ["plan", "bad.yaml", "--json"],
        ["train", "bad.yaml"],
        ["train", "bad.yaml", "--dry-run"],
    ],
    ids=" ".join,
)
def test_a_bad_recipe(arguments: list[str], ortlaunch: Run) -> None:
    """A command that reads a bad recipe prints all errors on stderr, and starts nothing.

    It prints nothing on stdout and ends with status 2.
    """
    ended = ortlaunch(*arguments)
    assert (ended.status, ended.out) == (2, "")
    lines = ended.err.splitlines()
    assert all(line.startswith("bad.yaml:") for line in lines)
    assert [
        word
        for word in ("presicion", "precision", "seed", "train.max_steps")
        if word not in ended.err
    ] == []
    assert len(lines) == 3
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validate", "absent.yaml"], "absent.yaml"),
        (["validate", "good.yaml", "trian.max_steps=1"], "train"),
        (["validate", "good.yaml", "train.max_steps"], "train.max_steps"),
        (["plan", "good.yaml", "--hostfile", "/nope"], "/nope: cannot be read"),
        (
            ["plan", "good.yaml", "--include", "a"],
            "ortlaunch: --include and --exclude need a host file",
        ),
        *(
            (
                [verb, "good.yaml", "--launcher", "srun"],
                "got srun; one of auto, local, torchrun, mpi",
            )
            for verb in ("plan", "train", "parity", "bench")
        ),
        (["plan", "good.yaml", "--nproc-per-node", "0"], "--nproc-per-node"),
        (
            ["plan", "good.yaml", "--launcher", "local", "--nproc-per-node", "2"],
            "ortlaunch: launcher local runs one process",
        ),
        (
            ["train", "good.yaml", "launch.forward=[NOT_SET]"],
            "ortlaunch: launch.forward: NOT_SET is not set",
        ),
        (
            ["train", "good.yaml", "--run-dir", "good.yaml"],
            "ortlaunch: --run-dir good.yaml: is a file",
        ),
        (["train"], "Missing argument"),
        (
            ["status", "absent"],
            "ortlaunch: absent: is neither a folder nor the name of a run; `ortlaunch list` prints",
        ),
        (
            ["cancel", "."],
            "ortlaunch: .: has no job.json, so no run was started there",
        ),
        (["trian"], "No such command 'trian'. Did you mean 'train', 'ranks'?"),
        (["recipes", "show", "bert-large/tinny"], "did you mean bert-large/tiny?"),
        (["recipes", "copy", "nothing-like-it"], "ortlaunch: no shipped recipe 'nothing-like-it'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_got_wrong(arguments: list[str], said: str, ortlaunch: Run) -> None:
    """A user error ends with status 2 and a reason on stderr, without a traceback."""
    ended = ortlaunch(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_plan(ortlaunch: Run) -> None:
    """The readable plan ends with the command that `train` would run."""
    ended = ortlaunch("plan", "bert.yaml", "--nproc-per-node", "2")
    assert (ended.status, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == "bert: 2 ranks on 1 host, cpu, launcher torchrun"
    assert any(line.startswith("batch: 4 samples = 2 micro") for line in lines)
    assert any(line.startswith("memory: ") for line in lines)
    assert "micro_size: auto" not in ended.out
    assert lines[-1].startswith("command: OMP_NUM_THREADS=1 ")
    assert lines[-1].endswith(f"{module_start.__file__} ortlaunch.worker runs/bert-TIME")
    assert not Path("runs").exists()


@pytest.mark.parametrize("hosts", [None, "a slots=2\nb slots=1\n"])
def test_plan_json_is_json_only(hosts: str | None, ortlaunch: Run) -> None:
    """`plan --json` prints only the plan, also where there are notes, and it can be read back."""
    more = []
    if hosts:
        Path("hosts").write_text(hosts)
        more = ["--hostfile", "hosts"]
    ended = ortlaunch("plan", "bert.yaml", "--json", *more)
    assert (ended.status, ended.err) == (0, "")
    assert json.loads(ended.out)["world_size"] == (3 if hosts else 1)
    assert Plan.from_plan_json_text(ended.out).to_json() + "\n" == ended.out


# Recipes with precision fp16, which needs a GPU.
BIG = ("bert-large/phase1", "llama2-7b/pretrain", "llama2-7b/finetune", "llama2-7b/lora")


@pytest.mark.parametrize("name", BIG)
def test_a_big_recipe_on_a_login_node(
    name: str, ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a local GPU the error suggests launch.device=cuda, and with it the plan succeeds."""
    monkeypatch.setattr(machine, "visible_gpu_count", lambda environ: 0)
    path = str(ROOT / "recipes" / f"{name}.yaml")
    assert (
        "use launch.device=cuda if the run's hosts have GPUs, else " in ortlaunch("plan", path).err
    )
    ended = ortlaunch("plan", path, "launch.device=cuda")
    assert (ended.status, ended.err) == (0, "")
    assert "has no GPU that CUDA_VISIBLE_DEVICES shows: planned as if it had 1" in " ".join(
        ended.out.split()
    )
    Path("hosts").write_text("a slots=8\nb slots=8\n")
    assert (
        "launch.device=cuda if those of hosts have GPUs"
        in ortlaunch("plan", path, "--hostfile", "hosts").err
    )
    assert ortlaunch("plan", path, "--hostfile", "hosts", "launch.device=cuda").status == 0


PLANNED = ("llama2-7b/finetune", "launch.device=cuda")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["good.yaml"], "memory: unknown: your factory builds the model; a training records its "
         "memory in memory.json"),
        ([*PLANNED, "model.pretrained=meta-llama/Llama-2-13b-hf", "model.config=null"],
         "memory: unknown: the config of meta-llama/Llama-2-13b-hf is not on this host, and a plan does not contact "
         "the hub; give a local folder, or download it once: hf"),
        (["bert.yaml", "model.config={model_type: xlnet}"], "memory: unknown: models of type xlnet have no"),
        ([*PLANNED, "model.pretrained=here", "model.config={vocab_size: 32000}"], "memory: 6,738,415,616 parameters"),
    ],
)  # fmt: skip
def test_plan_says_why_there_is_no_memory_table(
    arguments: list[str], said: str, ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan gives the reason for a missing memory table.

    A copy of the model's config is enough for the table, also in the cache of the hub.
    """
    monkeypatch.setenv("HF_HOME", str(Path("hub").resolve()))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    Path("here").mkdir()
    config = {
        "model_type": "llama",
        "torch_dtype": "float16",
        "vocab_size": 32000,
        "hidden_size": 4096,
    }
    Path("here/config.json").write_text(json.dumps(config))
    ended = ortlaunch("plan", *arguments)
    assert ended.status == 0, ended.err
    assert said in " ".join(ended.out.split())
    # The layout of the cache of huggingface_hub.
    model = Path("hub/hub/models--meta-llama--Llama-2-13b-hf")
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("abc123")
    (model / "snapshots").mkdir()
    Path("here").rename(model / "snapshots/abc123")
    if "config=null" in arguments[-1]:
        assert "memory: 6,738,415,616 parameters" in ortlaunch("plan", *arguments).out
        (model / "refs/v2").write_text("abc123")
        for revision in ("v2", "abc123"):
            pinned = f"model.pretrained=meta-llama/Llama-2-13b-hf@{revision}"
            assert "memory: 6,738,415,616 p" in ortlaunch("plan", *arguments, pinned).out
        unknown = ortlaunch("plan", *arguments, "model.pretrained=meta-llama/Llama-2-7b-hf@v3").out
        command = "hf download meta-llama/Llama-2-7b-hf config.json --revision v3"
        assert command in " ".join(unknown.split())


def test_plan_tells_how_a_host_file_was_read(ortlaunch: Run) -> None:
    """The notes about a host file are printed first."""
    Path("hosts").write_text("localhost slots=1\n")
    assert ortlaunch("plan", "good.yaml", "--hostfile", "hosts").out.startswith(
        "hosts: read as DeepSpeed / Open MPI"
    )


def test_ten_thousand_hosts(ortlaunch: Run) -> None:
    """A plan of 80,000 ranks is made, printed and read back; benchmarks/startup.py times it."""
    Path("hosts").write_text("".join(f"node{number} slots=8\n" for number in range(10_000)))
    ended = ortlaunch("plan", "good.yaml", "--hostfile", "hosts", "--json")
    plan = Plan.from_plan_json_text(ended.out)
    assert (plan.world_size, plan.ranks[-1].rank) == (80_000, 79_999)
    assert plan.to_json() + "\n" == ended.out


def test_dry_run(ortlaunch: Run) -> None:
    """A dry run prints only the command on stdout, the plan on stderr, and writes nothing."""
    ended = ortlaunch("train", "good.yaml", "--dry-run", "--run-dir", "here")
    assert ended[:2] == (0, f"{sys.executable} {module_start.__file__} ortlaunch.worker here\n")
    assert "1 rank" in ended.err
    assert not Path("here").exists()


def test_a_dry_run_refuses_what_a_run_refuses(
    ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run refuses missing data, unknown checkpoints, bad --allow and read-only folders."""
    missing = {**CUSTOM, "model": {"task": "causal-lm", "config": {"model_type": "llama"}},
               "data": {**WORDS, "train": {"format": "text", "path": "none.txt"}}}  # fmt: skip
    Path("missing.yaml").write_text(json.dumps(missing))
    ended = ortlaunch("train", "missing.yaml", "--dry-run")
    assert (ended.status, ended.out) == (2, "")
    assert "data.train.path: got none.txt, which matches no file here" in ended.err
    dry = ("train", "good.yaml", "--dry-run", "--run-dir", "runs/here")
    assert "--resume" in ortlaunch(*dry, "--resume=last").err
    assert "--allow: got x" in ortlaunch(*dry, "--allow=x").err
    # Tests may run as root, who can write to any folder.
    monkeypatch.setattr(os, "access", lambda _, mode: mode == os.R_OK)
    ended = ortlaunch(*dry)
    assert (ended.status, ended.out) == (2, "")
    assert "no permission to write" in ended.err


def test_steps_to_profile(ortlaunch: Run) -> None:
    """`train --profile-steps A:B` sets log.profile_steps; other text is refused with its key."""
    dry = ("train", "good.yaml", "--dry-run", "--profile-steps")
    assert ortlaunch(*dry, "1:2").status == 0
    refused = ortlaunch(*dry, "2:1")
    assert refused.status == 2
    assert "got 2:1; the first step is at most the last" in refused.err
    refused = ortlaunch(*dry, "2:x")
    assert refused.status == 2
    assert "log.profile_steps" in refused.err
    for value, shown in (("4", "[4]"), (":9", "[9]"), ("", "[]"), ("4:9:12", "[4, 9, 12]")):
        refused = ortlaunch(*dry, value)
        assert refused.status == 2
        assert f"log.profile_steps: got {shown}; write it as [4, 9]" in refused.err


def test_parity_is_a_task_of_its_own(ortlaunch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`parity` sets only the number of steps, by default 3, and refuses engines eager and auto."""
    asked: list[ResolvedRun] = []
    monkeypatch.setattr(
        control, "lock_folder_and_run_training", lambda resolved, *_: asked.append(resolved) or 0
    )
    for arguments, steps in (([], 3), (["--steps", "5"], 5)):
        assert ortlaunch("parity", "good.yaml", "engine.name=inductor", *arguments) == Ended(
            0, "", ""
        )
        engine = {"name": "inductor", "parity_steps": steps}
        assert asked[-1].recipe_file.recipe == Recipe.model_validate({**CUSTOM, "engine": engine})
        assert asked[-1].plan.task == "parity"
    ended = ortlaunch("parity", "good.yaml")
    assert (ended.status, ended.out) == (2, "")
    assert "engine.parity_steps: has no effect with engine eager" in ended.err
    ended = ortlaunch("parity", "good.yaml", "engine.name=auto")
    assert (ended.status, ended.out) == (2, "")
    assert (
        "engine.name: got auto, but the comparison with plain PyTorch needs a fixed engine; use ort"
        in ended.err
    )


@pytest.mark.parametrize(
    ("options", "status"), [([], 0), (["--json"], 0), (["--wait"], 7), (["--wait", "--json"], 7)]
)
def test_status_of_a_run_that_failed(options: list[str], status: int, ortlaunch: Run) -> None:
    """`status` prints the verdict of train, or JSON; only --wait returns the run's exit status."""
    with JobFile(RunDir("run"), "local") as file:
        file.record_end_or_print_disk_error(Verdict(7, "rank 0 failed"))
    ended = ortlaunch("status", "run", *options)
    assert (ended.status, ended.err) == (status, "")
    if "--json" in options:
        assert json.loads(ended.out)["job"]["verdict"]["message"] == "rank 0 failed"
    else:
        # Any number of seconds, because a new second may begin during the test.
        assert re.match(r"run: failed after 0:\d\d, exit status 7 \(started ", ended.out)
        assert ended.out.endswith("\nortlaunch: rank 0 failed\n")


def test_recipes_list(ortlaunch: Run) -> None:
    """`recipes list` prints a line for every shipped recipe, with model, method and memory."""
    ended = ortlaunch("recipes", "list")
    rows = [line.split() for line in ended.out.splitlines()[1:-1]]
    names = [row[0] for row in rows]
    assert [
        "models/llama3-8b-lora",
        "meta-llama/Llama-3.1-8B",
        "LoRA",
        "ort",
        "23.4",
        "23.3",
    ] in rows
    assert max(map(len, ended.out.splitlines())) <= 100
    assert {"bert-large/phase1", "bert-large/phase2", "bert-large/tiny", "llama2-7b/tiny"} <= {
        *names
    }
    assert len(names) == len(list((ROOT / "recipes").rglob("*.yaml")))


def test_recipes_show(ortlaunch: Run) -> None:
    """`recipes show` prints the file unchanged."""
    text = (ROOT / "recipes" / "bert-large" / "phase2.yaml").read_text(encoding="utf-8")
    assert ortlaunch("recipes", "show", "bert-large/phase2") == Ended(0, text, "")


def test_recipes_copy(ortlaunch: Run) -> None:
    """A recipe is copied with those that it extends; a second copy overwrites nothing.

    A recipe that this host cannot train says why.
    """
    ended = ortlaunch("recipes", "copy", "bert-large/phase2", "mine")
    assert (ended.status, ended.out) == (0, "mine/phase2.yaml\nmine/phase1.yaml\n")
    note = "a training on this host ends with: mine/phase1.yaml:40:1: precision: got fp16 with"
    assert note in " ".join(ended.err.split())
    assert "precision: got fp16" in ortlaunch("validate", "mine/phase2.yaml", "--elsewhere").out
    Path("mine/phase2.yaml").unlink()
    ended = ortlaunch("recipes", "copy", "bert-large/phase2", "mine")
    assert ended == Ended(
        2, "", "ortlaunch: mine/phase1.yaml exists already; choose another name\n"
    )
    assert not Path("mine/phase2.yaml").exists()
    assert ortlaunch("recipes", "copy", "bert-large/tiny", "own.yaml").status == 0
    assert ortlaunch("validate", "own.yaml").status == 0


@pytest.mark.parametrize("status", [0, 2])
def test_setup_returns_the_status_of_the_build(
    ortlaunch: Run, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """`setup` builds what ORTModule needs, and returns the status of the build."""
    monkeypatch.setattr("ortmodule.setup", lambda: status, raising=False)
    assert ortlaunch("setup") == Ended(status, "", "")


def test_the_installed_command(tmp_path: Path) -> None:
    """The installed command has the same exit statuses and streams."""
    (tmp_path / "bad.yaml").write_text("name: [\n")
    command = str(Path(sys.executable).with_name("ortlaunch"))
    good = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout, good.stderr) == (0, f"{__version__}\n", "")
    bad = subprocess.run(
        [command, "validate", "bad.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (bad.returncode, bad.stdout, bad.stderr.startswith("bad.yaml:")) == (2, "", True)
    # runpy warns where the module that it runs was imported already.
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    for name in ("ortlaunch", "ortlaunch.cli"):
        module = [sys.executable, "-m", name, "--version"]
        assert (
            subprocess.run(module, env=env, capture_output=True, text=True, check=False).stdout
            == good.stdout
        )


def test_an_error_that_is_printed_already_adds_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --predict` shows the message of its process, and has none of its own."""
    assert _print_error_and_return_exit_status("ortlaunch: ", RunError("", 3)) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [("--local_rank=0", "validate", "good.yaml"), ("validate", "--local-rank=0", "good.yaml")],
)
def test_the_local_rank_of_a_launcher(
    words: tuple[str, ...], ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option that DeepSpeed's launcher adds is left out where its variable says the same."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ortlaunch(*words).status == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ortlaunch(*words).status == 2
    assert (
        "local_rank is not needed here: the launcher sets it"
        in ortlaunch("validate", "--local_rank=0", "good.yaml").err
    )
