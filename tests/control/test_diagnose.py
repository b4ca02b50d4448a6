"""What `ortlaunch diagnose` says of recorded run folders: the verdict, what it rests on, and what to try."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.cli import app
from ortlaunch.diagnose.report import diagnose, with_verdict
from ortlaunch.errors import InputError
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.recipe import to_yaml
from ortlaunch.run_folder.folder import RunDir, write_json, write_text
from tests.makers import bert, host, plan, recipe

GiB = 1 << 30
FIRST = "ortlaunch: rank 1 failed; log: x"


def made(folder: Path, made_recipe: Any = None, **ranks: Any) -> RunDir:
    """A run folder of 2 ranks, one of which, 1, left this account; and the job of a command that has ended."""
    run, chosen = RunDir(folder / "run"), made_recipe or recipe()
    write_text(run.plan, plan(chosen, [host("a", 2)], "torchrun").to_json())
    write_text(run.recipe, to_yaml(chosen))
    write_text(run.request, "")
    for rank in range(2):
        write_text(run.log(rank, "err"), "first\nlast words\n")
    text = ranks.pop("text", FIRST)
    if ranks:
        account = {"rank": 1, "host": "a", "exit_status": 1, "signal": None, "type": "Signal", "message": "",
                   "traceback": "", "summary": "rank 1 on host a failed", "secondary": False, "time": 2.0}  # fmt: skip
        write_json(run.error(1), {**account, **ranks})
        write_json(run.error(0), {**account, "rank": 0, "secondary": True, "time": 1.0, "type": "RuntimeError"})
    ended(run, text, ranks.get("exit_status", 1))
    return run


def ended(run: RunDir, text: str, status: int = 1, state: JobState = JobState.FAILED) -> None:
    job = JobRecord.of_this_process("torchrun", JobState.RUNNING).at_end(state, status, text)
    job.write(run)


KILLED = {"type": "Signal", "signal": 9, "exit_status": 137}
NAN = "step 3: the loss is nan on rank 1, samples 4, 5 of x\nthe first parameter whose gradient is not finite: w"
ACCOUNTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "exit 7": ({"type": "SystemExit", "exit_status": 7}, "left-early", "left by itself with exit status 7"),
    "os._exit": ({"type": "Exit"}, "left-early", "left by itself with exit status 1 before the end"),
    "host": ({"type": "LostHost", "message": "ssh to b ended with status 255: x"}, "host-lost", "ssh to b ended with"),
    "raise": ({"type": "ValueError", "message": "planted"}, "raised", "rank 1 on host a raised ValueError: planted"),
    "bad data": ({"type": "DataError", "exit_status": 2, "message": "a.jsonl:3: x"}, "bad-input", "a.jsonl:3: x"),
    "segfault": ({"signal": 11, "exit_status": 139}, "crash", "crashed in native code (SIGSEGV, invalid memory"),
    "abort": ({"signal": 6, "traceback": "x\nterminate called after 'y'\n"}, "crash", "SIGABRT, an assertion"),
    "killed": (KILLED, "killed", "rank 1 on host a was killed (SIGKILL), and not for memory"),
    "killed for memory": (
        {**KILLED, "summary": "rank 1: the kernel's out-of-memory killer ended 2 of its control group meanwhile"},
        "out-of-memory", "out of memory: the kernel ended rank 1 on host a (SIGKILL)",
    ),
    "torch's allocator": (
        {"type": "RuntimeError", "traceback": "T\n  x\nRuntimeError: DefaultCPUAllocator: can't allocate memory"},
        "out-of-memory", "could not allocate: RuntimeError: DefaultCPUAllocator",
    ),
    "CUDA": (
        {"type": "OutOfMemoryError", "traceback": "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"},
        "out-of-memory", "CUDA out of memory. Tried 2 GiB",
    ),
    "MemoryError": ({"type": "MemoryError", "traceback": "Traceback\nMemoryError"}, "out-of-memory", "out of memory"),
    "nan": ({"type": "NonFiniteError", "message": NAN}, "not-finite", "samples 4, 5 of x; the first parameter"),
    "spike": ({"type": "LossSpikeError", "message": "step 9: the loss jumped"}, "loss-spike", "the loss jumped"),
    "full disk": (
        {"type": "OSError", "summary": "rank 1 failed with OSError: no space left on device (run/x)"},
        "disk-full", "no space left on device (run/x)",
    ),
    "missing file": (
        {"type": "FileNotFoundError", "traceback": "T\nFileNotFoundError: [Errno 2] No such file: 'a.bin'"},
        "missing-file", "'a.bin'",
    ),
    "unreadable": (
        {"type": "PermissionError", "traceback": "T\nPermissionError: [Errno 13] Permission denied: 'b'"},
        "unreadable-file", "Permission denied: 'b'",
    ),
    "no cache folder": (
        {"type": "FileError", "exit_status": 2, "message": "c: cannot be made: Permission denied: c; X names another"},
        "bad-input", "c: cannot be made: Permission denied: c; X names another",
    ),
    "missing module": (
        {"type": "ModuleNotFoundError", "traceback": "T\nModuleNotFoundError: No module named 'nowhere'"},
        "missing-module", "No module named 'nowhere'",
    ),
    "port": ({"type": "OSError", "traceback": "T\nOSError: [Errno 98] Address already in use"}, "port-taken", "in use"),
    "label": ({"type": "IndexError", "traceback": "T\nIndexError: Target 7 is out of bounds."}, "index-out-of-range",
              "Target 7"),
    "no GPU": ({"type": "LaunchError", "message": "the plan trains on cuda, and this torch sees no GPU on a"}, "no-gpu",
               "sees no GPU"),
    "world": ({"type": "LaunchError", "message": "the plan has 2 ranks, the launcher started 3; nothing"},
              "other-world", "the plan has 2 ranks, the launcher started 3"),
    "stall": ({"type": "Stall", "message": "the run has stood still for 9 s: rank 1 on host a"}, "hang",
              "the run has stood still for 9 s: rank 1 on host a"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCOUNTS)
def test_the_account_of_a_rank(name: str, tmp_path: Path) -> None:
    """The cause of the first failure is named, and not that of the ranks that lost it."""
    account, kind, said = ACCOUNTS[name]
    found = diagnose(made(tmp_path, **account))
    assert (found.kind, said in found.verdict) == (kind, True), found.verdict
    assert "    | last words" in found.evidence
    assert "  rank 0 ended after that: 1 in all" in found.evidence


ENDS = {
    "ortlaunch: mpirun was ended by SIGKILL, and the ranks with it; none of them had failed": "launcher-killed",
    "ortlaunch: torchrun failed with DistError: flock: No locks available, and ended the ranks; its": "no-locks",
    "ortlaunch: torchrun failed with EOFError: Ran out of input, and ended the ranks; its": "launcher-failed",
    "ortlaunch: the command (process 7 on host a) disappeared without an error record (usually": "command-killed",
    "ortlaunch: rank 1 on host a vanished without a word, as a process killed by SIGKILL does": "rank-vanished",
    "ortlaunch: rank 1 on host a vanished without a word; the kernel's out-of-memory killer ended 1": "out-of-memory",
    "ortlaunch: no rank began (rank 0 on host a), and the launcher ended with status 213": "never-began",
    "ortlaunch: no space left on device (run), where no rank could write how it ended": "disk-full",
    "ortlaunch: rank 1 on host a was ended by SIGTERM, sent to it from outside this run": "signalled",
    "ortlaunch: stopped by SIGTERM; the newest checkpoint is after step 4": "stopped",
    "ortlaunch: something new": "unknown",
}


@pytest.mark.parametrize("text", ENDS)
def test_ends_of_which_no_rank_tells(text: str, tmp_path: Path) -> None:
    """What the command saw is the verdict, in its own words."""
    found = diagnose(made(tmp_path, text=text))
    assert found.kind == ENDS[text]
    assert found.kind == "out-of-memory" or found.verdict.endswith(text.removeprefix("ortlaunch: "))


def test_out_of_memory_says_what_would_fit(tmp_path: Path) -> None:
    """The plan's table, and settings that take less, beside the limit where the rank died."""
    big = {"batch": {"global_size": 64, "micro_size": 32}}
    limit = {"memory_limit": {"name": "control group", "bytes": 2 * (224 << 20)}}
    found = diagnose(made(tmp_path, bert(**big, zero=None), type="MemoryError", message="x", **limit))
    rows = [line.strip() for line in found.evidence]
    assert any(line.startswith("->DDP") for line in rows)
    head = "what would fit, by the plan with its process (200.0 MiB): 224.0 MiB a rank is the limit there"
    assert head in rows
    fits = {line.partition("  ")[0]: line.rpartition(", ")[2] for line in rows if line.endswith(("fit", "fits"))}
    assert fits["as it is"] == "does not fit"
    assert fits["batch.micro_size: 1"] == "fits"
    assert "model.gradient_checkpointing: true" in fits
    assert "zero.stage: 3" not in fits  # of so small a model its buckets take more


def test_out_of_memory_never_says_that_it_fits(tmp_path: Path) -> None:
    """Where the plan is below the limit that the run reached, it is scaled to it."""
    limit = {"memory_limit": {"name": "control group", "bytes": 2 * (1 << 30)}}
    asked = bert(batch={"global_size": 64, "micro_size": 32})
    rows = [line.strip() for line in diagnose(made(tmp_path, asked, type="MemoryError", message="x", **limit)).evidence]
    assert any(re.search(r"\d\.\d\d times as much, for it reached the limit: 1.0 GiB a rank is", line) for line in rows)
    assert next(line for line in rows if line.startswith("as it is")).endswith("1.0 GiB, does not fit")
    assert any(line.startswith("batch.micro_size: 1 ") and line.endswith(", fits") for line in rows)


def test_train_says_the_verdict_before_its_last_line(tmp_path: Path) -> None:
    """The last line stays what it was; an end that nobody has to explain gets none."""
    run = made(tmp_path, type="IndexError", traceback="T\nIndexError: Target 7 is out of bounds.")
    lines = with_verdict(run, 1, f"Traceback\nIndexError: Target 7\n\n{FIRST}").splitlines()
    assert lines[0] == "Traceback"
    assert lines[2].startswith("verdict: rank 1 on host a met a label, token or position that the model has not: Index")
    assert lines[3].startswith("try: compare the labels")
    assert lines[-1] == FIRST
    stopped = made(tmp_path / "other", text="x")
    assert with_verdict(stopped, 143, "ortlaunch: stopped by SIGTERM") == "ortlaunch: stopped by SIGTERM"


@pytest.mark.parametrize("kind", ["NonFiniteError", "LossSpikeError"])
def test_a_message_is_printed_once(kind: str, tmp_path: Path) -> None:
    """Of a non-finite loss and of a loss spike the command prints each sentence and each advice once."""
    message = f"{NAN}\nThe run ends here."
    lines = with_verdict(made(tmp_path, type=kind, message=message), 1, f"{message}\n\n{FIRST}").splitlines()
    assert lines[0] == f"verdict: {NAN.splitlines()[0]}"
    assert lines[1:3] == message.splitlines()[1:]
    assert [line.partition(" ")[0] for line in lines[3:]] == ["try:", "try:", "try:", "ortlaunch:"]


def test_numbers_beside_the_verdict(tmp_path: Path) -> None:
    """Last step, bad steps, failed saves, NCCL's recorder, and an fp16 loss scale that finds no place."""
    run = made(tmp_path, type="ValueError", message="x")
    lines = [{"step": step, "loss": 2.0, "skipped_steps": step} for step in (1, 5, 9)]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "lo')
    write_text(run.bad_steps, json.dumps({"step": 4, "action": "skip", "message": "step 4: the loss is nan\nw"}) + "\n")
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
    run = made(tmp_path, signal=int(signal.SIGSEGV))
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            app(["diagnose", str(run), *arguments])
        assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("verdict: rank 1 on host a crashed in native code (SIGSEGV")
    assert json.loads(said[said.index("\n{") :])["kind"] == "crash"


def test_a_stop_is_the_cause_where_the_command_says_so(tmp_path: Path) -> None:
    """Before its first step a rank stops at once, also where its launcher asked because it had lost another one."""
    account = {"type": "Stopped", "signal": 15, "exit_status": 85, "message": "was stopped by SIGTERM before its first"}
    text = "ortlaunch: rank 1 on host a failed"  # as the account's summary
    run = made(tmp_path, text=text, **account)
    assert (diagnose(run).kind, diagnose(run).verdict) == ("stopped", f"rank 1 on host a {account['message']}")
    assert with_verdict(run, 85, text) == text
    ended(run, "ortlaunch: rank 0 on host a vanished without a word, as a process killed by SIGKILL does", 137)
    assert diagnose(run).kind == "rank-vanished"
