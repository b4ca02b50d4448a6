"""Tests of submission to Slurm: the script, and the states of a queue for a run."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.api.submit import (
    Submission,
)
from ortlaunch.base.errors import InputError, LaunchError, MissingDependency, PlanError, RecipeError
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.schedulers import QueueState, slurm
from ortlaunch.started_runs import ended, listing, queued, registry
from ortlaunch.started_runs.cancel import cancel_run_and_wait_for_its_end
from ortlaunch.started_runs.logs import iterate_rank_output_text
from ortlaunch.started_runs.requests import request_stop_and_wait_if_asked
from ortlaunch.started_runs.runs_table import runs_table_text
from ortlaunch.started_runs.status import read_status
from tests.makers import BERT, CUSTOM, WORDS

pytestmark = pytest.mark.usefixtures("workbench")
GOLDEN = Path(__file__).with_name("job.sh")
WHERE = "/runs/x"
LARGE = {
    "launch": {"nodes": 1024, "processes_per_node": 8, "device": "cuda", "env": {"NCCL_DEBUG": "WARN"}},
    "submit": {"partition": "gpu", "account": "me", "time": "4:00:00", "cpus_per_task": 12, "exclusive": True,
               "mail_user": "me@example.org", "mail_type": "END,FAIL", "setup": ["module load cuda/12.4"],
               "options": ["--switches=1"]},
}  # fmt: skip
# For a scheduler: the hosts are those that the recipe declares.
OPTIONS = LaunchOptions(planned_only=True, declared=True)


def resolved(*overrides: str, **sections: Any) -> ResolvedRun:
    """Resolve a recipe of a custom model in the current folder, for a scheduler."""
    Path("recipe.yaml").write_text(yaml.safe_dump({**CUSTOM, **sections}))
    return load_and_resolve_recipe(
        Path("recipe.yaml"), overrides, OPTIONS, {"PATH": "/bin", "WANDB_API_KEY": "s3cret"}
    )


def script(*overrides: str, **sections: Any) -> str:
    """Return the batch script."""
    return (
        Submission(resolved(*overrides, **sections), RunDir(WHERE), None)
        .scheduler_request()
        .files[0][1]
    )


def test_a_thousand_nodes() -> None:
    """The script for 1,024 nodes is as expected, made in a second, and has no secret."""
    began = time.process_time()
    request = Submission(resolved(**LARGE), RunDir(WHERE), None).scheduler_request()
    # Work for each rank of 8,192 would take longer.
    assert time.process_time() - began < 1
    text = request.files[0][1].replace(str(Path.cwd()), "/here")
    text = re.sub(r"\S+/python \S+/ortlaunch/base/module_start\.py", "python start.py", text)
    assert text == GOLDEN.read_text(encoding="utf-8")
    assert request.argv == ("sbatch", "--parsable", f"{WHERE}/job.sh")
    # A Linux process accepts single arguments of up to 128 KiB.
    assert len(str(request)) < 1 << 17
    assert "s3cret" not in str(request)


@pytest.mark.parametrize(
    ("launch", "options", "lines"),
    [
        ({}, {}, ["--nodes=1", "--ntasks-per-node=1", "--requeue", "--signal=USR1@120"]),
        # Both ways in which clusters count GPUs.
        ({"nodes": 2, "processes_per_node": 4, "device": "cuda"}, {"gpus": "gres", "gpu_type": "a100"},
         ["--nodes=2", "--ntasks-per-node=4", "--gres=gpu:a100:4"]),
        ({"processes_per_node": 2, "device": "cuda"}, {"gpu_type": "h200"}, ["--gpus-per-node=h200:2"]),
        ({}, {"requeue": False, "memory": "0", "dependency": "afterok:7"},
         ["--no-requeue", "--mem=0", "--dependency=afterok:7"]),
        ({}, {"qos": "long", "constraint": "a&b", "nodelist": "n[1-2]", "exclude": "n9", "begin": "now+1hour"},
         ["--qos=long", "--constraint=a&b", "--nodelist=n[1-2]", "--exclude=n9", "--begin=now+1hour"]),
    ],
)  # fmt: skip
def test_options(launch: dict[str, Any], options: dict[str, Any], lines: list[str]) -> None:
    """Each field is a line of #SBATCH; without requeue nothing is queued again."""
    text = script(launch=launch, submit=options)
    assert set(lines) <= {line.removeprefix("#SBATCH ") for line in text.splitlines()}
    assert ("scontrol requeue" in text) == options.get("requeue", True)


@pytest.mark.parametrize(
    ("container", "found"),
    [
        ({"image": "nv#a/b:1"}, "--container-image='nv#a/b:1' --container-mounts={here}:{here},/runs/x:/runs/x"),
        ({"image": "/i.sif", "runtime": "apptainer", "mounts": ["/data:/data"]},
         "apptainer exec --nv --bind {here}:{here} --bind /runs/x:/runs/x --bind /data:/data --pwd {here} /i.sif"),
    ],
)  # fmt: skip
def test_containers(container: dict[str, Any], found: str) -> None:
    """The ranks and the verdict run in the image, with the image's ortlaunch."""
    text = script(submit={"container": container})
    assert text.count(found.format(here=Path.cwd())) == 2
    assert "    ortlaunch train /runs/x/submitted.yaml --run-dir /runs/x" in text


def test_gpus_that_nobody_counted() -> None:
    """A recipe without a number of GPUs is refused: a login node has none to count."""
    with pytest.raises(PlanError, match=r"give launch\.processes_per_node"):
        resolved(launch={"device": "cuda"})


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("PENDING|Priority\n", JobState.PENDING, "PENDING (Priority)"),
        ("RUNNING|None\n", JobState.RUNNING, "RUNNING"),
        ("COMPLETING|None\n", JobState.RUNNING, "COMPLETING"),
        ("CANCELLED by 0\nCANCELLED\n", JobState.CANCELLED, "CANCELLED"),
        ("TIMEOUT|TimeLimit", JobState.FAILED, "TIMEOUT (TimeLimit)"),
        # sacct may shorten a name to a width.
        ("OUT_OF_ME+", None, ""),
    ],
)
def test_what_squeue_and_sacct_say(text: str, state: JobState | None, words: str) -> None:
    """States are read in short and long form; an unknown one is an error."""
    if state is None:
        with pytest.raises(
            LaunchError,
            match="Slurm says OUT_OF_ME as the job's state, which ortlaunch does not know",
        ):
            slurm.state_in_squeue_or_sacct_output(text)
    else:
        assert slurm.state_in_squeue_or_sacct_output(text) == QueueState(state, words)


def test_what_scontrol_says() -> None:
    """The state and the reason are read from the text of Slurm 22.05."""
    text = (
        "JobId=2 JobName=bert\n   UserId=root(0)\n   "
        "JobState=PENDING Reason=BeginTime Dependency=(null)\n"
    )
    assert slurm.state_in_scontrol_output(text) == QueueState(
        JobState.PENDING, "PENDING (BeginTime)"
    )
    assert slurm.state_in_scontrol_output("") is None


# When the turn of a job began; this is later than any turn of the tests.
BEGAN = str(1 << 40)


class Queue:
    """A scheduler with a state that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: QueueState | None = QueueState(JobState.PENDING, "PENDING (Priority)")
        for module in (queued, __import__("ortlaunch.api.submit", fromlist=["submit"])):
            monkeypatch.setattr(module, "load_scheduler", lambda name: self)

    def submission_request_of_job(self, job: Any) -> Any:
        return slurm.submission_request_of_job(job)

    def write_files_and_queue_job(self, request: Any) -> str:
        for path, text in request.files:
            write_text_atomically(Path(path), text)
        return "12"

    def queue_state_by_id_of_user_jobs(self) -> dict[str, QueueState]:
        return {} if self.seen is None else {"12": self.seen}

    def queue_state_or_none(self, job: str) -> QueueState | None:
        return self.seen

    def request_end_of_job(self, job: str) -> None:
        self.seen = QueueState(JobState.CANCELLED, "CANCELLED")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The scheduler in place of Slurm."""
    return Queue(monkeypatch)


def test_a_run_folder_with_a_blank() -> None:
    """A run folder's path with special characters is escaped in the script."""
    # sbatch splits its options at blanks, reads # as a comment and % as a pattern.
    text = Submission(resolved(), RunDir("/my runs/50%#1"), None).scheduler_request().files[0][1]
    assert "#SBATCH --output='/my runs/50%%#1/logs/slurm-%j.out'\n" in text


def put(queue: Queue) -> RunDir:
    """Submit a run."""
    run = RunDir("one")
    assert Submission(resolved(), run, run.path).queue_job().job_id == "12"
    return run


def test_a_run_in_a_queue(queue: Queue) -> None:
    """A queued run is listed, has logs, is refused a second time, and can be cancelled."""
    run = put(queue)
    assert str(read_status(run)).splitlines()[1:] == ["queued: PENDING (Priority)"]
    assert "job 12 of slurm" in str(read_status(run))
    assert (
        runs_table_text(listing.newest_statuses_that_match(None), 80)
        .split("\n")[1]
        .startswith("pending ")
    )
    with pytest.raises(PlanError, match="its run has not ended, or is queued"):
        Submission(resolved(), run, run.path).queue_job()
    write_text_atomically(run.logs / "slurm-12.out", "hello\n")
    assert "".join(iterate_rank_output_text(run, 0, follows_until_end=False)) == "hello\n"
    assert cancel_run_and_wait_for_its_end(run).startswith("cancelled\n")
    # The queue forgets its jobs after some time; job.json has the end.
    queue.seen = None
    assert (read_status(run).state, read_status(run).job.exit_status) == (JobState.CANCELLED, 1)
    assert cancel_run_and_wait_for_its_end(run).startswith("nothing to cancel")


def test_a_job_that_saved_when_it_was_cancelled(queue: Queue) -> None:
    """A job that saved when it was cancelled has SIGTERM's exit status and its saved step."""
    # 85 would request another start.
    run = put(queue)
    for path in (run.plan, run.request):
        write_text_atomically(path, "")
    write_json_atomically(run.stopped, {"step": 7, "steps": 9, "by": "SIGTERM", "exit_status": 85})
    queue.request_end_of_job("12")
    status = read_status(run)
    assert (status.state, status.job.exit_status) == (JobState.CANCELLED, 143)
    assert "saved after step 7 of 9" in str(status)


@pytest.mark.parametrize(
    ("seen", "state", "verdict"),
    [
        (QueueState(JobState.RUNNING, "RUNNING"), JobState.RUNNING, None),
        (
            QueueState(JobState.FAILED, "TIMEOUT (TimeLimit)"),
            JobState.FAILED,
            "slurm says: TIMEOUT (TimeLimit)",
        ),
        (None, JobState.FAILED, "slurm says: unknown to the scheduler"),
    ],
)
def test_what_the_queue_says_of_a_run(
    queue: Queue, seen: QueueState | None, state: JobState, verdict: str | None
) -> None:
    """An end that no script recorded has the scheduler's state, and is recorded."""
    run = put(queue)
    queue.seen = seen
    job = read_status(run).job
    assert (job.state, job.queue_state) == (state, verdict)


def test_a_saved_run_waits_in_the_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saved is pending while the queue has its job again."""
    run = put(queue)
    monkeypatch.setenv(JOB_VARIABLE, "slurm:12")
    monkeypatch.setattr("sys.argv", ["ended", str(run), "0", "85", BEGAN])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == 85
    record = JobRecord.read_or_none_refusing_damaged(run)
    assert record is not None
    assert (record.backend, record.id, record.state) == ("slurm", "12", JobState.PREEMPTED)
    queue.seen = QueueState(JobState.PENDING, "PENDING (BeginTime)")
    assert read_status(run).state is JobState.PENDING
    queue.seen = None
    assert read_status(run).state is JobState.PREEMPTED
    # Cancelled while it waited for its next start.
    queue.seen = QueueState(JobState.CANCELLED, "CANCELLED")
    assert read_status(run).state is JobState.CANCELLED


STOPPED = {"cause": "stopped", "signal": 10, "exit_status": 85, "secondary": False, "time": 1.0, "traceback": "",
           "rank": 0, "summary": "rank 0 was stopped by SIGUSR1"}  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "status", "state"), [("0", 85, JobState.PREEMPTED), ("1", 1, JobState.FAILED)]
)
def test_a_turn_without_a_step(
    turn: str, status: int, state: JobState, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose time limit is too short for one step is not queued for ever."""
    # The first start may have been shorter by chance; the second one is the last.
    run = put(queue)
    write_text_atomically(run.plan, resolved().plan.to_json())
    for path in (run.request, run.rank_log_path(0, "err")):
        write_text_atomically(path, "")
    write_json_atomically(run.rank_error_path(0), STOPPED)
    monkeypatch.setenv("SLURM_RESTART_COUNT", turn)
    monkeypatch.setattr("sys.argv", ["ended", str(run), "0", "85", BEGAN])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == status
    record = JobRecord.read_or_none_refusing_damaged(run)
    assert record is not None
    assert (record.state, "not requeued" in str(record.verdict)) == (state, turn == "1")


def test_restarts_of_a_queued_run_are_counted(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed attempts of a queued job are counted, up to launch.max_restarts."""
    run = put(queue)
    queue.seen = QueueState(JobState.PENDING, "PENDING (BeginTime)")
    monkeypatch.setenv(JOB_VARIABLE, "slurm:12")
    # Status 137 is that of SIGKILL, which may repeat without being deterministic.
    for turn, status, requeued in ((1, 137, True), (2, 137, True), (3, 137, False)):
        monkeypatch.setattr("sys.argv", ["ended", str(run), "2", str(status), BEGAN])
        assert ended.record_and_print_end_and_request_requeue_if_saved() == status
        record = JobRecord.read_or_none_refusing_damaged(run)
        assert record is not None
        assert [one.number for one in record.attempts] == list(range(1, turn + 1))
        assert run.requeue_request.exists() == requeued
        assert read_status(run).state is (JobState.PENDING if requeued else JobState.FAILED)
        run.requeue_request.unlink(missing_ok=True)
    assert record.verdict is not None
    assert record.verdict.notes[-1].endswith("2 restarts without progress (launch.max_restarts: 2)")


def test_a_turn_that_never_began_is_no_earlier_ones_end(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start of the job in which srun fails does not end as the saved start before it."""
    run = put(queue)
    write_text_atomically(run.plan, resolved().plan.to_json())
    write_text_atomically(run.request, "")
    write_json_atomically(run.stopped, {"step": 3, "steps": 9, "by": "SIGUSR1", "exit_status": 85})
    monkeypatch.setattr("sys.argv", ["ended", str(run), "0", "85", BEGAN])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == 85
    # As the script does with `touch`, when a start begins.
    os.utime(run.job_script, (later := time.time() + 1, later))
    monkeypatch.setattr("sys.argv", ["ended", str(run), "0", "1", BEGAN])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == 1
    assert read_status(run).state is JobState.FAILED


@pytest.mark.parametrize(
    ("status", "stop", "restarts", "requeued"),
    [
        (85, None, 0, True),
        (85, "`ortlaunch stop` of me on host here", 0, False),
        # The command of a job with one rank records the signal that it received.
        (85, "SIGUSR1", 0, True),
        (137, None, 0, False),
        (137, None, 1, True),
        (2, None, 1, False),
    ],
)
def test_what_goes_back_into_the_queue(
    status: int, stop: str | None, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    """The script requeues a saved run, unless a person stopped it, and a fault with restarts."""
    # srun and scontrol are replaced, the script is the real one.
    run = RunDir(tmp_path / "my run")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in (("srun", f"exit {status}"), ("scontrol", f"echo $* > {tools}/asked")):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    text = (
        Submission(resolved(f"launch.max_restarts={restarts}"), run, None)
        .scheduler_request()
        .files[0][1]
    )
    write_text_atomically(run.job_script, text)
    if stop:
        write_json_atomically(run.stop_request, {"by": stop})
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        ["bash", str(run.job_script)], env=environ, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert (tools / "asked").exists() == requeued
    assert not run.requeue_request.exists()
    assert f"#SBATCH --output='{run.logs}/slurm-%j.out'" in text


def test_a_turn_whose_node_was_taken_for_dead(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A turn that ends after the next one has begun records nothing, and asks for no requeue."""
    run = put(queue)
    record = run.job.read_text()
    began = int(run.job_script.stat().st_mtime)
    os.utime(run.job_script, (began + 60, began + 60))
    monkeypatch.setattr("sys.argv", ["ended", str(run), "2", "85", str(began)])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == 85
    assert "a later turn of this job has the run" in capsys.readouterr().err
    assert (run.job.read_text(), run.requeue_request.exists()) == (record, False)


def _controller(folder: Path, body: str) -> None:
    """Put a scontrol and a srun that fails, and a `sleep` that takes no time, into a folder."""
    for name, text in (("srun", "exit 137"), ("scontrol", body), ("sleep", ":")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("body", "calls", "refused"),
    [
        # slurmctld is started again: the third call is answered.
        ('echo . >> {0}/calls; test $(wc -l < {0}/calls) -gt 2 || { echo "Unexpected message '
         'received for job 12" >&2; exit 1; }', 3, False),
        ('echo . >> {0}/calls; echo "Requested operation is presently disabled for job 12" >&2; '
         "exit 1", 1, True),
        ('echo . >> {0}/calls; echo "Unable to contact slurm controller" >&2; exit 1', 30, True),
    ],
)  # fmt: skip
def test_a_requeue_that_is_not_answered(
    body: str,
    calls: int,
    refused: bool,
    tmp_path: Path,
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A requeue is asked for until the controller answers, and a refusal is in the run's status."""
    run = RunDir(tmp_path / "run")
    Submission(resolved("launch.max_restarts=1"), run, run.path).queue_job()
    _controller(tmp_path, body.replace("{0}", str(tmp_path)))
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        ["bash", str(run.job_script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, len((tmp_path / "calls").read_text().split())) == (137, calls)
    assert run.requeue_request.exists() == ("was not requeued" in done.stderr) == refused
    queue.seen = QueueState(JobState.FAILED, "FAILED (NonZeroExitCode)")
    assert ("was not requeued" in str(read_status(run))) == refused


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (["ortlaunch: --run-dir r: trains there", "srun: error: n1: task 0: Exited with exit code 2",
          "srun: error: n2: task 1: Exited with exit code 143"], 2, "ortlaunch: --run-dir r: trains there"),
        (["srun: error: Unable to create step for job 12: Invalid node count"], 143,
         "its output says no more"),
    ],
)  # fmt: skip
def test_an_end_before_rank_0_prepared(
    lines: list[str], status: int, said: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict quotes the reason, and has the first task's status."""
    run = put(queue)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    turn = ["an earlier turn failed", f"{slurm.TURN_PREFIX}n1, turn 2", *lines]
    write_text_atomically(run.logs / "slurm-12.out", "\n".join(turn))
    monkeypatch.setattr("sys.argv", ["ended", str(run), "0", "143", BEGAN])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == status
    record = JobRecord.read_or_none_refusing_damaged(run)
    assert record is not None
    assert record.verdict is not None
    assert record.verdict.message.endswith(f"before rank 0 prepared {run}: {said}")


def test_a_step_that_slurm_ended(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that Slurm could not do is no lack of memory."""
    run = put(queue)
    write_text_atomically(run.plan, resolved().plan.to_json())
    for path in (run.request, run.rank_log_path(0, "err")):
        write_text_atomically(path, "")
    line = "srun: error: Task launch for StepId=35.0 failed on node cn5: Communication failure"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    write_text_atomically(run.logs / "slurm-12.out", f"{slurm.TURN_PREFIX}n1, turn 1\n{line}\n")
    monkeypatch.setattr("sys.argv", ["ended", str(run), "0", "137", BEGAN])
    assert ended.record_and_print_end_and_request_requeue_if_saved() == 137
    record = JobRecord.read_or_none_refusing_damaged(run)
    assert record is not None
    assert f"Slurm ended the ranks: {line}" in str(record.verdict)
    assert "of memory" not in str(record.verdict)


def test_many_runs_ask_the_queue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of runs asks for all jobs at once, and no more after a controller is away."""
    jobs = [JobRecord("slurm", str(n), "h", "", "", "now", JobState.RUNNING) for n in range(20)]
    jobs.append(replace(jobs[0], id="99", state=JobState.PREEMPTED))
    asked: list[tuple[str, ...]] = []
    answer = "".join(f"{n}|RUNNING|None\n" for n in range(20))

    def squeue(*argv: str, missing_command_advice: str) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        return subprocess.CompletedProcess(argv, int(not answer), answer, "Unable to contact")

    monkeypatch.setattr(slurm, "run_scheduler_command", squeue)
    shared = queued.SharedQueue()
    states = [shared(job) for job in jobs]
    assert [found and found.state for found in states] == [JobState.RUNNING] * 20 + [None]
    answer = ""
    shared = queued.SharedQueue()
    for job in jobs:
        with pytest.raises(LaunchError, match="Unable to contact"):
            shared(job)
    assert [argv[0] for argv in asked] == ["squeue", "squeue"]


def test_a_node_without_the_folder_starts_no_rank(tmp_path: Path) -> None:
    """A node without the working folder starts no rank."""
    # In another folder the ranks would read other data or modules.
    run = RunDir(tmp_path / "run")
    home = Path.cwd() / "gone"
    home.mkdir()
    os.chdir(home)
    write_text_atomically(
        run.job_script, Submission(resolved(), run, None).scheduler_request().files[0][1]
    )
    os.chdir(tmp_path)
    (home / "recipe.yaml").unlink()
    home.rmdir()
    (tmp_path / "srun").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "srun").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        ["bash", str(run.job_script)], env=environ, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert b"No such file or directory" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_controller_that_is_away(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that does not answer leaves the job's state unknown."""
    away = "Unable to contact slurm controller (connect failure)"
    gone = "Invalid job id specified"
    for words in (away, gone):
        failed = subprocess.CompletedProcess(["squeue"], 1, "", f"slurm_load_jobs error: {words}\n")
        monkeypatch.setattr(
            slurm,
            "run_scheduler_command",
            lambda *argv, missing_command_advice, failed=failed: failed,
        )
        monkeypatch.setattr(slurm, "_ask_sacct_for_state_or_none", lambda job: None)
        if words is gone:
            assert slurm.queue_state_or_none("12") is None
        else:
            with pytest.raises(
                LaunchError,
                match="squeue cannot report the job's state: slurm_load_jobs error: Unable",
            ):
                slurm.queue_state_or_none("12")


def test_a_queue_that_does_not_answer(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that does not answer is reported, beside the state in the run folder."""
    run = put(queue)
    write_text_atomically(run.metrics, '{"step": 7, "loss": 2.5}\n')

    def away(job: str) -> None:
        raise LaunchError("squeue cannot report the job's state: slurm_load_jobs error")

    monkeypatch.setattr(queue, "queue_state_or_none", away)
    said = str(read_status(run)).splitlines()
    assert said[1].startswith("step 7, loss 2.5000")
    assert said[2] == "squeue cannot report the job's state: slurm_load_jobs error"


def test_a_missing_file_is_not_queued(queue: Queue) -> None:
    """A recipe with a missing file is not queued, unless it runs in a container."""
    # The job would fail after its wait; in a container the path may be another one.
    sections = {
        "model": {"task": "masked-lm", "config": BERT},
        "data": {**WORDS, "train": {"format": "text", "path": "gone.txt"}},
    }
    with pytest.raises(
        RecipeError, match=r"data\.train\.path: got gone\.txt, which matches no file here"
    ):
        Submission(resolved(**sections), RunDir("one"), Path("one")).queue_job()
    assert not Path("one").exists()
    inside = resolved("submit.container={image: a/b}", **sections)
    assert Submission(inside, RunDir("one"), Path("one")).queue_job().job_id == "12"


def test_a_stop_of_a_run_that_waits(queue: Queue) -> None:
    """A stop of a waiting run is refused, with the step that is saved."""
    run = put(queue)
    with pytest.raises(InputError, match="is queued, and it has no checkpoint"):
        request_stop_and_wait_if_asked(run)
    write_text_atomically(run.checkpoint_folder(86) / "COMPLETE", "")
    with pytest.raises(
        InputError, match="is queued, and its last checkpoint is of step 86; `ortlaunch cancel`"
    ):
        request_stop_and_wait_if_asked(run)


def test_no_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submission without sbatch is refused."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        MissingDependency,
        match="sbatch not found: submit on a host of the cluster; --dry-run prints",
    ):
        Submission(resolved(), RunDir("one"), Path("one")).queue_job()


def test_forgotten_folders_leave_the_list(queue: Queue) -> None:
    """A run whose folder was moved or deleted leaves the list."""
    run = put(queue)
    assert [str(one) for one in registry.list_runs_and_remove_stale_entries()] == [
        str(run.path.resolve())
    ]
    run.path.rename("elsewhere")
    assert registry.list_runs_and_remove_stale_entries() == []
