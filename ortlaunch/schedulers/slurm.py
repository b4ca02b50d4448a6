"""Slurm: a batch script as a person would write it, and the job's state in the queue.

sbatch queues the script; squeue, scontrol and sacct give the state.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from ortlaunch.base.errors import LaunchError, MissingDependency
from ortlaunch.base.process import user_name_or_number
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.schedulers import QueuedRun, QueueState, run_scheduler_command

_HOST_ADVICE = "use a host of the cluster"
# The first words of each turn of a job in its output, to which all turns append.
TURN_PREFIX = "ortlaunch: the job begins on "
# Five minutes, in which a controller is started again or another takes over.
_REQUEUE_TRIES = 30
_REQUEUE_SECONDS = 10
# Options of sbatch that the recipe has under the same name, with underscores.
_PLAIN_OPTIONS = (
    "partition",
    "account",
    "qos",
    "reservation",
    "time",
    "cpus_per_task",
    "constraint",
    "nodelist",
    "exclude",
    "dependency",
    "begin",
    "mail_user",
    "mail_type",
)
# Slurm's states and state flags.
_STATE_BY_WORD = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                     "SPECIAL_EXIT"), JobState.PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING"),
                    JobState.RUNNING),
    "COMPLETED": JobState.SUCCEEDED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "PREEMPTED": JobState.PREEMPTED,
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED"),
                    JobState.FAILED),
}  # fmt: skip


def submission_request_of_job(job: QueuedRun) -> LaunchRequest:
    """Return the sbatch command, with the script in the run folder."""
    return LaunchRequest(
        ("sbatch", "--parsable", str(job.run.job_script)),
        files=((str(job.run.job_script), batch_script_text(job)),),
    )


def batch_script_text(job: QueuedRun) -> str:
    """Return the batch script."""
    directives = "\n".join(f"#SBATCH {option}" for option in _sbatch_directive_options(job))
    export_lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.variables)
    setup_lines = "".join(f"{line}\n" for line in job.options["setup"])
    return f"""\
#!/bin/bash
{directives}

{job.headline}
cd {shlex.quote(job.folder)} || exit
{export_lines}export {JOB_VARIABLE}=slurm:$SLURM_JOB_ID
touch {shlex.quote(str(job.run.job_script))}  # what is older in the run folder is of an earlier turn
began=$(stat -c %Y {shlex.quote(str(job.run.job_script))})
rm -f {shlex.quote(str(job.run.requeue_request))}
echo "{TURN_PREFIX}$(hostname), turn $((${{SLURM_RESTART_COUNT:-0}} + 1))"
{setup_lines}
status=0
{_srun_command_of_ranks(job)} || status=$?

# Which rank failed and why; the status is that rank's, where srun's may be an echo.
{_command_that_records_job_end(job)} "$status" "$began"
status=$?
{_requeue_script_lines_or_empty(job)}exit "$status"
"""


def _sbatch_directive_options(job: QueuedRun) -> Iterator[str]:
    options = job.options
    plan = job.plan
    yield f"--job-name={plan.name}"
    yield f"--nodes={len(plan.nodes)}"
    yield f"--ntasks-per-node={plan.nodes[0].slots}"
    for name in _PLAIN_OPTIONS:
        if options[name] is not None:
            yield f"--{name.replace('_', '-')}={options[name]}"
    if options["memory"] is not None:
        yield f"--mem={options['memory']}"
    if plan.device == "cuda":
        yield _gpu_request_option(options, plan.nodes[0].slots)
    if options["exclusive"]:
        yield "--exclusive"
    # Slurm reads % as the beginning of a field such as %j.
    yield f"--output={shlex.quote(str(job.run.logs).replace('%', '%%') + '/slurm-%j.out')}"
    # A requeued job must not overwrite the output of its earlier start.
    yield "--open-mode=append"
    yield "--requeue" if options["requeue"] else "--no-requeue"
    # To the ranks' steps, which save then, some time before the time limit.
    yield f"--signal=USR1@{options['signal_seconds']}"
    yield from options["options"]


def _gpu_request_option(submit_options: Any, gpu_count: int) -> str:
    type_prefix = f"{submit_options['gpu_type']}:" if submit_options["gpu_type"] else ""
    return (
        f"--gres=gpu:{type_prefix}{gpu_count}"
        if submit_options["gpus"] == "gres"
        else f"--gpus-per-node={type_prefix}{gpu_count}"
    )


def _srun_command_of_ranks(job: QueuedRun) -> str:
    # --distribution=block numbers the ranks as the plan does, host by host. Ranks find each other
    # without MPI, hence --mpi=none. --export=ALL, because some sites set SLURM_EXPORT_ENV=NONE for
    # whole jobs, and ranks need the variables of this script.
    # Since Slurm 22.05 a step does not inherit --cpus-per-task from the job.
    cpus = job.options["cpus_per_task"]
    step_command = "srun --export=ALL --kill-on-bad-exit=1 --distribution=block --mpi=none" + (
        "" if cpus is None else f" --cpus-per-task={cpus}"
    )
    return _srun_step_in_container_if_set(job, step_command, job.train)


def _command_that_records_job_end(job: QueuedRun) -> str:
    """Return the command that prints the verdict, run where ortlaunch is installed."""
    # That is this host, or the image, which a step of one task starts.
    if job.options["container"] is None:
        return shlex.join(job.conclude)
    return _srun_step_in_container_if_set(
        job, "srun --export=ALL --nodes=1 --ntasks=1 --mpi=none", job.conclude
    )


def _srun_step_in_container_if_set(
    job: QueuedRun, srun_command: str, step_argv: tuple[str, ...]
) -> str:
    container = job.options["container"]
    if container is None:
        return f"{srun_command} \\\n    {shlex.join(step_argv)}"
    # The same paths inside as outside: the plan and the command have those of this host.
    mounts = [
        *(f"{path}:{path}" for path in dict.fromkeys((job.folder, str(job.run)))),
        *container["mounts"],
    ]
    folder = shlex.quote(job.folder)
    image = shlex.quote(container["image"])
    if container["runtime"] == "pyxis":
        container_options = (
            f"--container-image={image} --container-mounts={shlex.quote(','.join(mounts))} "
        )
        return f"{srun_command} {container_options}--container-workdir={folder} \\\n    {shlex.join(step_argv)}"
    bind_options = " ".join(f"--bind {shlex.quote(mount)}" for mount in mounts)
    return (
        f"{srun_command} \\\n    apptainer exec --nv {bind_options} --pwd {folder} {image} "
        f"\\\n    {shlex.join(step_argv)}"
    )


def _requeue_script_lines_or_empty(job: QueuedRun) -> str:
    if not job.options["requeue"]:
        return ""
    request, script = (
        shlex.quote(str(path)) for path in (job.run.requeue_request, job.run.job_script)
    )
    return f"""\
# The command above leaves this file where the run continues in another turn.
if test -e {request} && test "$(stat -c %Y {script})" = "$began"; then
    # A controller that is started again, or replaced, answers after some minutes.
    for _ in $(seq {_REQUEUE_TRIES}); do
        said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && rm {request} && exit "$status"
        echo "$said" >&2
        case "$said" in *disabled*|*denied*|*nvalid*) break ;; esac
        sleep {_REQUEUE_SECONDS}
    done
    echo "ortlaunch: the job was not requeued: $said" | tee {request} >&2
fi
"""


def require_sbatch() -> None:
    """Raise MissingDependency on a host that has no Slurm."""
    if shutil.which("sbatch") is None:
        raise MissingDependency(
            "sbatch not found: submit on a host of the cluster; --dry-run prints the script "
            "anywhere"
        )


def write_files_and_queue_job(request: LaunchRequest) -> str:
    """Write the script, queue it and return the job's id."""
    require_sbatch()
    request.write_files()
    completed = run_scheduler_command(*request.argv, missing_command_advice=_HOST_ADVICE)
    if completed.returncode:
        raise LaunchError(
            f"sbatch refused the job: {completed.stderr.strip() or completed.stdout.strip()}"
        )
    # --parsable prints the id, and after a semicolon the name of the cluster.
    return completed.stdout.strip().partition(";")[0]


def queue_state_by_id_of_user_jobs() -> dict[str, QueueState]:
    """Return the states of this user's jobs that the queue still has, by their ids."""
    user_option = f"--user={user_name_or_number()}"
    completed = run_scheduler_command(
        "squeue",
        "--noheader",
        "--states=all",
        user_option,
        "-o",
        "%i|%T|%r",
        missing_command_advice=_HOST_ADVICE,
    )
    lines = completed.stdout.splitlines() if _knows_job_or_raise_if_unreachable(completed) else []
    fields_by_job = [line.split("|", 1) for line in lines if "|" in line]
    return {
        job: queue_state
        for job, state_line in fields_by_job
        if (queue_state := state_in_squeue_or_sacct_output(state_line)) is not None
    }


def queue_state_or_none(job_id: str) -> QueueState | None:
    """Return the state from the first command that knows the job."""
    # squeue, then scontrol, which knows jobs for some minutes after their end, then sacct.
    for read_state in (
        _ask_squeue_for_state_or_none,
        _ask_scontrol_for_state_or_none,
        _ask_sacct_for_state_or_none,
    ):
        queue_state = read_state(job_id)
        if queue_state is not None:
            return queue_state
    return None


def request_end_of_job(job_id: str) -> None:
    """Cancel the job: ranks get SIGTERM, and the cluster's KillWait to save."""
    completed = run_scheduler_command("scancel", job_id, missing_command_advice=_HOST_ADVICE)
    if completed.returncode:
        raise LaunchError(f"scancel {job_id}: {completed.stderr.strip()}")


def state_in_squeue_or_sacct_output(output_text: str) -> QueueState | None:
    """Return the state from the first line of `squeue -o '%T|%r'` or `sacct -P -o State`."""
    lines = [line for line in output_text.splitlines() if line.strip()]
    if not lines:
        return None
    state_words, _, reason = lines[0].partition("|")
    # sacct appends the user to CANCELLED, and a + to a shortened name.
    return _queue_state_of_slurm_words([state_words.split()[0].rstrip("+")], reason)


def state_in_scontrol_output(scontrol_output: str) -> QueueState | None:
    """Return the state from the output of `scontrol show job`."""
    state_match = re.search(r"\bJobState=(\S+)", scontrol_output)
    reason_match = re.search(r"\bReason=(\S+)", scontrol_output)
    return (
        _queue_state_of_slurm_words([state_match[1]], reason_match[1] if reason_match else "")
        if state_match
        else None
    )


def _queue_state_of_slurm_words(state_words: list[str], reason: str) -> QueueState | None:
    # A requeued job has its last state as well, but is pending.
    known_words = [state_word for state_word in state_words if state_word in _STATE_BY_WORD]
    if not known_words:
        raise LaunchError(
            f"Slurm says {' '.join(state_words)} as the job's state, which ortlaunch does not know"
        )
    decisive_word = next(
        (
            state_word
            for state_word in known_words
            if _STATE_BY_WORD[state_word] is JobState.PENDING
        ),
        known_words[0],
    )
    reason_text = f" ({reason})" if reason not in ("", "None", "(null)") else ""
    return QueueState(_STATE_BY_WORD[decisive_word], f"{' '.join(state_words)}{reason_text}")


def _ask_squeue_for_state_or_none(job_id: str) -> QueueState | None:
    completed = run_scheduler_command(
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={job_id}",
        "-o",
        "%T|%r",
        missing_command_advice=_HOST_ADVICE,
    )
    return (
        state_in_squeue_or_sacct_output(completed.stdout)
        if _knows_job_or_raise_if_unreachable(completed)
        else None
    )


def _ask_scontrol_for_state_or_none(job_id: str) -> QueueState | None:
    completed = run_scheduler_command(
        "scontrol", "show", "job", job_id, missing_command_advice=_HOST_ADVICE
    )
    return (
        state_in_scontrol_output(completed.stdout)
        if _knows_job_or_raise_if_unreachable(completed)
        else None
    )


def _knows_job_or_raise_if_unreachable(completed: subprocess.CompletedProcess[str]) -> bool:
    """Whether the controller knows the job.

    Raises:
        LaunchError: the controller does not answer, so that nothing is known.
    """
    if completed.returncode and "invalid job id" not in completed.stderr.lower():
        message = completed.stderr.strip() or f"status {completed.returncode}"
        raise LaunchError(f"{completed.args[0]} cannot report the job's state: {message}")
    return completed.returncode == 0


def _ask_sacct_for_state_or_none(job_id: str) -> QueueState | None:
    if shutil.which("sacct") is None:
        return None
    completed = run_scheduler_command(
        "sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State", missing_command_advice=_HOST_ADVICE
    )
    return state_in_squeue_or_sacct_output(completed.stdout) if completed.returncode == 0 else None
