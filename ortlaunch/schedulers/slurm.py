"""Slurm: a batch script as a person would write it, sent by sbatch; its job seen by squeue, scontrol and sacct."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortlaunch.errors import LaunchError, MissingDependency
from ortlaunch.launch import JobState, Request
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.run_folder.folder import write_text
from ortlaunch.schedulers import QueuedRun, QueueState, ask

__all__ = ["cancel", "request", "state", "submit"]

_WHAT = "submit and ask on a host of the cluster"
_PLAIN = ("partition", "account", "qos", "reservation", "time", "cpus_per_task", "constraint", "nodelist", "exclude",
          "dependency", "begin", "mail_user", "mail_type")  # fmt: skip
_STATES = {
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


def request(job: QueuedRun) -> Request:
    """sbatch and its script, which lies in the run folder."""
    return Request(
        ("sbatch", "--parsable", str(job.run.job_script)),
        files=((str(job.run.job_script), script(job)),),
    )


def script(job: QueuedRun) -> str:
    """The batch script."""
    head = "\n".join(f"#SBATCH {option}" for option in _options(job))
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.variables)
    setup = "".join(f"{line}\n" for line in job.options["setup"])
    return f"""\
#!/bin/bash
{head}

{job.headline}
cd {shlex.quote(job.folder)} || exit
{exports}export {JOB_VARIABLE}=slurm:$SLURM_JOB_ID
touch {shlex.quote(str(job.run.job_script))}  # what is older in the run folder is of an earlier turn
{setup}
status=0
{_ranks(job)} || status=$?

# Which rank failed and why; the status is that rank's, where srun's may be an echo.
{_conclusion(job)} "$status"
status=$?
{_requeue(job)}exit "$status"
"""


def _options(job: QueuedRun) -> Iterator[str]:
    options = job.options
    plan = job.plan
    yield f"--job-name={plan.name}"
    yield f"--nodes={len(plan.nodes)}"
    yield f"--ntasks-per-node={plan.nodes[0].slots}"
    for name in _PLAIN:
        if options[name] is not None:
            yield f"--{name.replace('_', '-')}={options[name]}"
    if options["memory"] is not None:
        yield f"--mem={options['memory']}"
    if plan.device == "cuda":
        yield _gpus(options, plan.nodes[0].slots)
    if options["exclusive"]:
        yield "--exclusive"
    yield f"--output={shlex.quote(str(job.run.logs).replace('%', '%%') + '/slurm-%j.out')}"
    yield "--open-mode=append"
    yield "--requeue" if options["requeue"] else "--no-requeue"
    yield f"--signal=USR1@{options['signal_seconds']}"
    yield from options["options"]


def _gpus(options: Any, count: int) -> str:
    kind = f"{options['gpu_type']}:" if options["gpu_type"] else ""
    return (
        f"--gres=gpu:{kind}{count}"
        if options["gpus"] == "gres"
        else f"--gpus-per-node={kind}{count}"
    )


def _ranks(job: QueuedRun) -> str:
    """The step of ranks: in blocks, as the plan counts them; one that fails ends the others."""
    options = ["srun --kill-on-bad-exit=1 --distribution=block --mpi=none"]
    if job.options["cpus_per_task"] is not None:
        options.append(
            f"--cpus-per-task={job.options['cpus_per_task']}"
        )  # since 22.05 a step does not inherit it
    return _inside(job, " ".join(options), job.train)


def _conclusion(job: QueuedRun) -> str:
    """Run where ortlaunch is: here, or in the image, which a step of one task starts."""
    if job.options["container"] is None:
        return shlex.join(job.conclude)
    return _inside(job, "srun --nodes=1 --ntasks=1 --mpi=none", job.conclude)


def _inside(job: QueuedRun, step: str, command: tuple[str, ...]) -> str:
    """A step that runs a command in the container, if there is one."""
    container = job.options["container"]
    if container is None:
        return f"{step} \\\n    {shlex.join(command)}"
    mounts = [
        *(f"{path}:{path}" for path in dict.fromkeys((job.folder, str(job.run)))),
        *container["mounts"],
    ]
    folder = shlex.quote(job.folder)
    image = shlex.quote(container["image"])
    if container["runtime"] == "pyxis":
        into = f"--container-image={image} --container-mounts={shlex.quote(','.join(mounts))} "
        return f"{step} {into}--container-workdir={folder} \\\n    {shlex.join(command)}"
    binds = " ".join(f"--bind {shlex.quote(mount)}" for mount in mounts)
    return f"{step} \\\n    apptainer exec --nv {binds} --pwd {folder} {image} \\\n    {shlex.join(command)}"


def _requeue(job: QueuedRun) -> str:
    if not job.options["requeue"]:
        return ""
    return f"""\
# The command above leaves this file where the run continues in another turn.
if rm {shlex.quote(str(job.run.requeue_request))} 2> /dev/null; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def submit(request: Request) -> str:
    """Write the script and queue it."""
    if shutil.which("sbatch") is None:
        raise MissingDependency(
            "no sbatch here: submit on a host of the cluster; --dry-run prints the script anywhere"
        )
    for path, text in request.files:
        write_text(Path(path), text)
    ended = ask(*request.argv, what=_WHAT)
    if ended.returncode:
        raise LaunchError(f"sbatch refused the job: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout.strip().partition(";")[0]


def state(job: str) -> QueueState | None:
    """By squeue, else scontrol, which knows jobs that have ended for some minutes, else sacct."""
    for look in (_by_squeue, _by_scontrol, _by_sacct):
        found = look(job)
        if found is not None:
            return found
    return None


def cancel(job: str) -> None:
    """scancel: ranks get SIGTERM and have the cluster's KillWait to save."""
    ended = ask("scancel", job, what=_WHAT)
    if ended.returncode:
        raise LaunchError(f"scancel {job}: {ended.stderr.strip()}")


def seen_in_lines(text: str) -> QueueState | None:
    """The first line of `squeue -o '%T|%r'`, or of `sacct -P -o State`."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    said, _, reason = lines[0].partition("|")
    return _seen([said.split()[0].rstrip("+")], reason)


def seen_in_record(text: str) -> QueueState | None:
    """`scontrol show job`."""
    said = re.search(r"\bJobState=(\S+)", text)
    reason = re.search(r"\bReason=(\S+)", text)
    return _seen([said[1]], reason[1] if reason else "") if said else None


def _seen(words: list[str], reason: str) -> QueueState | None:
    """Of several words the one that says where it goes: a job that was requeued is pending, whatever it was before."""
    known = [word for word in words if word in _STATES]
    if not known:
        raise LaunchError(f"Slurm says {' '.join(words)} of the job, which ortlaunch does not know")
    first = next((word for word in known if _STATES[word] is JobState.PENDING), known[0])
    why = f" ({reason})" if reason not in ("", "None", "(null)") else ""
    return QueueState(_STATES[first], f"{' '.join(words)}{why}")


def _by_squeue(job: str) -> QueueState | None:
    ended = ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T|%r", what=_WHAT)
    return seen_in_lines(ended.stdout) if _is_known(ended) else None


def _by_scontrol(job: str) -> QueueState | None:
    ended = ask("scontrol", "show", "job", job, what=_WHAT)
    return seen_in_record(ended.stdout) if _is_known(ended) else None


def _is_known(ended: subprocess.CompletedProcess[str]) -> bool:
    """Whether the controller knows the job; one that does not answer says nothing about it."""
    if ended.returncode and "invalid job id" not in ended.stderr.lower():
        said = ended.stderr.strip() or f"status {ended.returncode}"
        raise LaunchError(f"{ended.args[0]} cannot say how the job goes: {said}")
    return ended.returncode == 0


def _by_sacct(job: str) -> QueueState | None:
    if shutil.which("sacct") is None:
        return None
    ended = ask("sacct", "-n", "-P", "-X", "-j", job, "-o", "State", what=_WHAT)
    return seen_in_lines(ended.stdout) if ended.returncode == 0 else None
