"""What `ortlaunch diagnose` says of recorded run folders: the verdict, what it rests on, and what to try."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.cause import Cause, Failure
from ortlaunch.cli import app
from ortlaunch.diagnose.report import diagnose, with_verdict
from ortlaunch.errors import InputError
from ortlaunch.launch import JobState
from ortlaunch.launch.failure import End
from ortlaunch.launch.record import JobRecord
from ortlaunch.recipe import to_yaml
from ortlaunch.run_folder.cause_text import OURS, sentence
from ortlaunch.run_folder.folder import RunDir, write_json, write_text
from tests.makers import bert, host, plan, recipe

GiB = 1 << 30
FIRST = "ortlaunch: rank 1 failed; log: x"


def made(folder: Path, made_recipe: Any = None, **ranks: Any) -> RunDir:
    """A run folder of 2 ranks, one of which, 1, left this account; and the job of a command that has ended."""
    run = RunDir(folder / "run")
    chosen = made_recipe or recipe()
    write_text(run.plan, plan(chosen, [host("a", 2)], "torchrun").to_json())
    write_text(run.recipe, to_yaml(chosen))
    write_text(run.request, "")
    for rank in range(2):
        write_text(run.log(rank, "err"), "first\nlast words\n")
    text = ranks.pop("text", FIRST)
    if ranks:
        account = {"rank": 1, "host": "a", "exit_status": 1, "signal": None, "type": "Signal", "message": "",
                   "traceback": "", "summary": "rank 1 on host a failed", "secondary": False, "time": 2.0,
                   "cause": "raised", "detail": "x"}  # fmt: skip
        write_json(run.error(1), {**account, **ranks})
        write_json(
            run.error(0),
            {**account, "rank": 0, "secondary": True, "time": 1.0, "type": "RuntimeError"},
        )
    ended(run, text, ranks.get("exit_status", 1))
    return run


def ended(
    run: RunDir,
    text: str,
    status: int = 1,
    state: JobState = JobState.FAILED,
    failure: Failure | None = None,
) -> None:
    job = JobRecord.of_this_process("torchrun", JobState.RUNNING).at_end(
        state, status, text, failure
    )
    job.write(run)


KILLED = {"type": "Signal", "signal": 9, "exit_status": 137}
NAN = "step 3: the loss is nan on rank 1, samples 4, 5 of x"
RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "left-early": (
        {"exit_status": 7},
        "rank 1 on host a left by itself with exit status 7 before the end",
    ),
    "host-lost": (
        {"detail": "ssh to b ended with status 255: x"},
        "ssh to b ended with status 255: x",
    ),
    "raised": ({"detail": "ValueError: planted"}, "rank 1 on host a raised ValueError: planted"),
    "bad-input": (
        {"exit_status": 2, "detail": "a.jsonl:3: x", "raised_at": "b.py:1"},
        "a.jsonl:3: x, at b.py:1",
    ),
    "crash": (
        {"signal": 11, "exit_status": 139, "detail": "what(): y"},
        "rank 1 on host a crashed in native code (SIGSEGV, invalid memory access): what(): y",
    ),
    "killed": (
        KILLED,
        "rank 1 on host a was killed (SIGKILL), and not for memory as far as its control group counts",
    ),
    "out-of-memory": (
        {"detail": "RuntimeError: can't allocate"},
        "out of memory: rank 1 on host a could not allocate: RuntimeError: can't allocate",
    ),
    "not-finite": ({"detail": NAN}, NAN),
    "loss-spike": ({"detail": "step 9: the loss jumped"}, "step 9: the loss jumped"),
    "disk-full": (
        {"detail": "OSError: x"},
        "the disk is full, met by rank 1 on host a: OSError: x",
    ),
    "missing-file": ({"detail": "'a.bin'"}, "rank 1 on host a lacks a file: 'a.bin'"),
    "no-gpu": ({"detail": "x"}, "rank 1 on host a has no GPU to train on: x"),
    "hang": ({"detail": "the run has stood still for 9 s"}, "the run has stood still for 9 s"),
}


@pytest.mark.parametrize("kind", RANKS)
def test_the_account_of_a_rank(kind: str, tmp_path: Path) -> None:
    """The cause of the first failure is named, and not that of the ranks that lost it."""
    account, said = RANKS[kind]
    found = diagnose(made(tmp_path, cause=kind, **account))
    assert (found.kind, found.verdict) == (kind, said)
    assert "    | last words" in found.evidence
    assert "  rank 0 ended after that: 1 in all" in found.evidence


def test_a_rank_that_the_kernel_ended(tmp_path: Path) -> None:
    """Its record says so; the verdict names the kernel."""
    found = diagnose(made(tmp_path, **KILLED, cause="out-of-memory", memory_kills=1))
    assert (found.kind, found.verdict) == (
        "out-of-memory",
        "out of memory: the kernel ended rank 1 on host a (SIGKILL)",
    )


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp16", "loss-scale-collapse"), ("fp32", "not-finite")]
)
def test_a_gradient_that_is_not_finite(precision: str, kind: str, tmp_path: Path) -> None:
    """Beside finite losses it is fp16's loss scale, where that is the precision."""
    chosen = recipe(engine={"name": "eager"}, precision=precision, launch={"device": "cuda"})
    assert diagnose(made(tmp_path, chosen, cause="gradient-not-finite", detail="x")).kind == kind


WHO = "rank 1 on host a"
ENDS = {
    "launcher-killed": Failure(Cause.LAUNCHER_KILLED, who="mpirun", signal=9),
    "no-locks": Failure(Cause.NO_LOCKS, "DistError: flock: No locks available", who="torchrun"),
    "launcher-failed": Failure(Cause.LAUNCHER_FAILED, "EOFError: Ran out of input", who="torchrun"),
    "command-killed": Failure(Cause.COMMAND_KILLED, who="process 7 on host a"),
    "rank-vanished": Failure(Cause.RANK_VANISHED, who=WHO, memory_kills=0),
    "never-began": Failure(Cause.NEVER_BEGAN, who=WHO, status=213),
    "disk-full": Failure(Cause.DISK_FULL, "run"),
    "signalled": Failure(Cause.SIGNALLED, who=WHO, signal=15),
    "stopped": Failure(Cause.STOPPED, "stopped by SIGTERM; the newest checkpoint is after step 4"),
    "unknown": Failure(Cause.UNKNOWN, "something new"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_ends_of_which_no_rank_tells(kind: str, tmp_path: Path) -> None:
    """What the command recorded is the verdict, in the words that it printed."""
    run = made(tmp_path)
    ended(run, "x", failure=ENDS[kind])
    assert (diagnose(run).kind, diagnose(run).verdict) == (kind, sentence(ENDS[kind]))


def test_processes_that_the_kernel_ended(tmp_path: Path) -> None:
    """Where nothing but its count tells why a rank is gone, memory is the cause."""
    run = made(tmp_path)
    ended(run, "x", failure=Failure(Cause.RANK_VANISHED, who=WHO, memory_kills=1))
    assert diagnose(run).kind == "out-of-memory"
    assert (
        diagnose(run).verdict
        == "out of memory: the kernel's out-of-memory killer ended 1 of this run's processes"
    )


def test_out_of_memory_says_what_would_fit(tmp_path: Path) -> None:
    """The plan's table, and settings that take less, beside the limit where the rank died."""
    big = {"batch": {"global_size": 64, "micro_size": 32}}
    limit = {"memory_limit": {"name": "control group", "bytes": 2 * (224 << 20)}}
    found = diagnose(made(tmp_path, bert(**big, zero=None), cause="out-of-memory", **limit))
    rows = [line.strip() for line in found.evidence]
    assert any(line.startswith("->DDP") for line in rows)
    head = "what would fit, by the plan with its process (200.0 MiB): 224.0 MiB a rank is the limit there"
    assert head in rows
    fits = {
        line.partition("  ")[0]: line.rpartition(", ")[2]
        for line in rows
        if line.endswith(("fit", "fits"))
    }
    assert fits["as it is"] == "does not fit"
    assert fits["batch.micro_size: 1"] == "fits"
    assert "model.gradient_checkpointing: true" in fits
    assert "zero.stage: 3" not in fits  # of so small a model its buckets take more


def test_out_of_memory_never_says_that_it_fits(tmp_path: Path) -> None:
    """Where the plan is below the limit that the run reached, it is scaled to it."""
    limit = {"memory_limit": {"name": "control group", "bytes": 2 * (1 << 30)}}
    asked = bert(batch={"global_size": 64, "micro_size": 32})
    rows = [
        line.strip()
        for line in diagnose(made(tmp_path, asked, cause="out-of-memory", **limit)).evidence
    ]
    assert any(
        re.search(r"\d\.\d\d times as much, for it reached the limit: 1.0 GiB a rank is", line)
        for line in rows
    )
    assert next(line for line in rows if line.startswith("as it is")).endswith(
        "1.0 GiB, does not fit"
    )
    assert any(line.startswith("batch.micro_size: 1 ") and line.endswith(", fits") for line in rows)


def test_train_says_the_verdict_before_its_last_line(tmp_path: Path) -> None:
    """The last line stays what it was; an end that nobody has to explain gets none."""
    run = made(
        tmp_path, cause="index-out-of-range", detail="IndexError: Target 7 is out of bounds."
    )
    end = End(
        1,
        FIRST.removeprefix(OURS),
        Failure(Cause.INDEX_OUT_OF_RANGE),
        "Traceback\nIndexError: Target 7\n\n",
    )
    lines = with_verdict(run, end).splitlines()
    assert lines[0] == "Traceback"
    assert lines[2].startswith(
        "verdict: rank 1 on host a met a label, token or position that the model has not: Index"
    )
    assert lines[3].startswith("try: compare the labels")
    assert lines[-1] == FIRST
    stopped = made(tmp_path / "other", text="x")
    by_signal = End.of(143, Failure(Cause.STOPPED, "stopped by SIGTERM"))
    assert with_verdict(stopped, by_signal) == "ortlaunch: stopped by SIGTERM"


@pytest.mark.parametrize("kind", ["not-finite", "loss-spike"])
def test_a_message_is_printed_once(kind: str, tmp_path: Path) -> None:
    """Of a non-finite loss and of a loss spike the command prints each sentence and each advice once."""
    message = f"{NAN}\nThe run ends here."
    run = made(tmp_path, cause=kind, detail=NAN)
    lines = with_verdict(
        run, End(1, "rank 1 failed", Failure(Cause(kind)), f"{message}\n\n")
    ).splitlines()
    assert lines[0] == f"verdict: {NAN}"
    assert lines[1:2] == message.splitlines()[1:]
    assert [line.partition(" ")[0] for line in lines[2:]] == ["try:", "try:", "try:", "ortlaunch:"]


def test_numbers_beside_the_verdict(tmp_path: Path) -> None:
    """Last step, bad steps, failed saves, NCCL's recorder, and an fp16 loss scale that finds no place."""
    run = made(tmp_path, type="ValueError", message="x")
    lines = [{"step": step, "loss": 2.0, "skipped_steps": step} for step in (1, 5, 9)]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "lo')
    write_text(
        run.bad_steps,
        json.dumps({"step": 4, "action": "skip", "message": "step 4: the loss is nan\nw"}) + "\n",
    )
    write_text(run.saves, json.dumps({"step": 8, "seconds": 1.0, "error": "full"}) + "\n")
    write_text(run.errors / "nccl_trace_rank_0", "x")
    said = "\n".join(diagnose(run).evidence)
    assert "the last logged step is 9, loss 2" in said
    assert "fp16 skipped 8 of the last 8 steps" in said
    assert "bad step 4 (skip): step 4: the loss is nan" in said
    assert "the save after step 8 failed: full" in said
    assert "NCCL's flight recorder: 1 files" in said


def test_a_run_that_goes_on_and_one_that_ended_well(tmp_path: Path) -> None:
    """There is nothing to explain; a folder that is none is refused."""
    run = RunDir(tmp_path)
    ended(run, "done: run, in 0:09\nto continue: ortlaunch train x.yaml", 0, JobState.SUCCEEDED)
    assert diagnose(run).kind == "ended-well"
    assert "  the command said: done: run, in 0:09" in diagnose(run).evidence
    replace(JobRecord.of_this_process("torchrun", JobState.RUNNING)).write(run)
    assert diagnose(run).kind == "running"
    with pytest.raises(InputError):
        diagnose(RunDir(tmp_path / "nothing"))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict first; --json has all of it."""
    run = made(tmp_path, cause="crash", signal=int(signal.SIGSEGV))
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            app(["diagnose", str(run), *arguments])
        assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("verdict: rank 1 on host a crashed in native code (SIGSEGV")
    assert json.loads(said[said.index("\n{") :])["kind"] == "crash"


def test_a_stop_is_the_cause_where_the_command_says_so(tmp_path: Path) -> None:
    """Before its first step a rank stops at once, also where its launcher asked because it had lost another one."""
    detail = "was stopped by SIGTERM before its first"
    run = made(tmp_path, cause="stopped", signal=15, exit_status=85, detail=detail)
    stop = Failure(Cause.STOPPED, detail, 1, "a")
    ended(run, "x", 85, failure=stop)
    assert (diagnose(run).kind, diagnose(run).verdict) == ("stopped", f"rank 1 on host a {detail}")
    assert with_verdict(run, End(85, "rank 1 failed", stop)) == "ortlaunch: rank 1 failed"
    ended(run, "x", 137, failure=Failure(Cause.RANK_VANISHED, who="rank 0 on host a"))
    assert diagnose(run).kind == "rank-vanished"
