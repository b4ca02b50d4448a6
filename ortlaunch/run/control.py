"""The control side of a run: recipe -> plan -> run folder -> processes -> verdict.

Everything that `ortlaunch train` does before and after the ranks live. Never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch import doctor, machine, recipe, start
from ortlaunch.errors import LaunchError, PlanError, RecipeError
from ortlaunch.launch import JobState, Request, backend, store_file
from ortlaunch.launch.failure import explain_end
from ortlaunch.launch.record import JobRecord
from ortlaunch.output import terminal_width
from ortlaunch.plan import Plan
from ortlaunch.planning.capacity import crowded
from ortlaunch.planning.describe import describe
from ortlaunch.planning.make_plan import make_plan, replan
from ortlaunch.planning.world import LaunchOptions, World, is_this_host, resolve_world
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe, RecipeFile
from ortlaunch.recipe.ort_variables import contradictions, seen
from ortlaunch.recipe.rules import device_rules, task_rules
from ortlaunch.run import inputs, micro_size, provenance, shipped
from ortlaunch.run.finished import nothing_left, with_next
from ortlaunch.run.folder import PROGRESS_VARIABLE, RunDir, write_json, write_text
from ortlaunch.run.job_file import JobFile
from ortlaunch.run.lock import RunLock
from ortlaunch.units import duration

_JOIN_SECONDS = 120


class ResolvedRun(NamedTuple):
    """A valid recipe with its world and plan."""

    file: RecipeFile
    world: World
    plan: Plan
    path: Path = Path()
    overrides: tuple[str, ...] = ()
    options: LaunchOptions = LaunchOptions()
    choice: dict[str, Any] | None = None  # how engine.name: auto was decided

    def with_overrides(self, *overrides: str) -> ResolvedRun:
        """The same with further overrides."""
        return resolve(self.path, (*self.overrides, *overrides), self.options, os.environ)


def resolve(path: Path, overrides: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]) -> ResolvedRun:
    """Recipe -> world -> plan; pure but for reading files and looking at this machine."""
    given, path = path, shipped.locate(path)
    loaded = recipe.load(path, overrides)
    world = resolve_world(loaded.recipe, options, environ)
    named = f"those of {options.hostfile}" if options.hostfile else "the run's hosts"
    rules = (*device_rules(loaded.recipe, world.device, named), *task_rules(loaded.recipe, options.task))
    broken = [loaded.explain(problem) for problem in rules]
    if broken:
        raise RecipeError(broken)
    notes = (*((f"recipe: {path}",) if path != given else ()), *world.notes, *_absent(loaded, path, world, options))
    world = world._replace(notes=(*notes, *_engine_notes(loaded.recipe, world.device, environ)))
    plan = make_plan(
        loaded.recipe,
        world,
        task=options.task,
        modules=str(path.parent),
        worker=start.command("ortlaunch.worker"),
        environ=environ,
    )
    if world.inside is None:
        world = world._replace(notes=(*world.notes, *crowded(plan, options.planned_only)))
    return ResolvedRun(loaded, world, plan, path, tuple(overrides), options)


def _absent(loaded: RecipeFile, path: Path, world: World, options: LaunchOptions) -> list[str]:
    """Notes on what the recipe reads and is not here: it may lie on the other hosts, or come before the run.

    Raises:
        RecipeError: all hosts are this one, and functions are missing, or files for a run that would start now.
    """
    here = all(is_this_host(host.name) for host in world.hosts)
    files = [loaded.explain(problem) for problem in inputs.missing_files(loaded.recipe)]
    functions = [loaded.explain(problem) for problem in inputs.broken_factories(loaded.recipe, path.parent)]
    if here and (functions or (files and not options.planned_only)):
        raise RecipeError([*files, *functions])
    return [*files, *functions]


def _engine_notes(recipe: Recipe, device: str, environ: Mapping[str, str]) -> Iterator[str]:
    """The engine's settings that differ from their defaults, and ORTModule's variables in the user's environment.

    Raises:
        PlanError: a variable contradicts the recipe.
    """
    engine = recipe.engine
    if engine.name == "ort":
        wrong = [f"{name}={environ[name]} in your environment {why}" for name, why in contradictions(engine, environ)]
        if wrong:
            raise PlanError("\n".join(wrong))
    chosen = engine.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    if chosen:
        yield f"engine {engine.name}: " + ", ".join(f"{name}: {json.dumps(value)}" for name, value in chosen.items())
    if engine.matmul_precision != "highest":
        yield f"matmul_precision {engine.matmul_precision}: {machine.matmul_effect(engine.matmul_precision, device)}"
    found = seen(environ)
    if found:
        effect = "as the recipe says" if engine.name == "ort" else f"nothing with engine {engine.name}"
        yield "in your environment: " + ", ".join(f"{name}={value}" for name, value in found.items()) + f" ({effect})"


def run_folder(chosen: Path | None, resolved: ResolvedRun, environ: Mapping[str, str]) -> RunDir:
    """The folder of a new run: `--run-dir`, else runs/<name>-<timestamp>; ranks of one launcher find the same one."""
    name, rank = resolved.plan.name, resolved.world.inside
    if chosen is not None:
        return RunDir(chosen)
    if rank is None or rank.world_size == 1:
        return RunDir(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    launch = _launch_id(rank, environ)
    if launch is None:
        raise PlanError(
            "the ranks' launcher gives no name that they could agree on; add --run-dir, the same for all ranks"
        )
    return RunDir(Path("runs") / f"{name}-{launch}")


def _launch_id(rank: Rank, environ: Mapping[str, str]) -> str | None:
    """What all ranks of this launch share and no other launch has, or None where the launcher gives no such thing."""
    if rank.local_world_size == rank.world_size:
        parent = os.getppid()
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{parent}-{started}"
    if environ.get("SLURM_STEP_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    for name in ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PALS_APID"):
        if environ.get(name) and environ[name] != "none":
            return "".join(c if c.isalnum() else "-" for c in environ[name])
    return None


def dry_run(resolved: ResolvedRun, run: RunDir) -> str:
    """Exactly what a real run would send."""
    return str(_request(resolved.plan, run))


def _request(plan: Plan, run: RunDir) -> Request:
    if plan.launcher == "inside":
        return Request((*plan.argv, str(run)), plan.env, store_file(plan, run))
    return backend(plan.launcher).request(plan, run)


def train(resolved: ResolvedRun, chosen: Path | None) -> int:
    """Prepare the folder, start the ranks, wait, say how it ended; returns the exit status."""
    with RunLock() as lock:
        return _train(resolved, chosen, lock)


def _train(resolved: ResolvedRun, chosen: Path | None, lock: RunLock) -> int:
    started, run = time.monotonic(), run_folder(chosen, resolved, os.environ)
    if run.recipe.exists() and resolved.world.inside is None:
        lock.take(run)  # before anything is measured
    resolved = _with_engine(_with_known_size(resolved, run), run)
    if _says_that_nothing_is_left(resolved, run):
        return 0
    if resolved.world.inside is not None:
        return _be_a_rank(resolved, run, resolved.world.inside, lock)
    _check_means(resolved, run)
    run = _claimed(run) if chosen is None else run
    lock.take(run)
    with JobFile(run, resolved.plan.launcher) as file:
        if micro_size.is_asked(resolved.file.recipe):
            resolved = _with_size(resolved, micro_size.find(resolved.file.recipe, resolved.plan, run))
        request = _prepare(resolved, run)
        os.environ[PROGRESS_VARIABLE] = width = str(terminal_width() or "")
        launcher = backend(resolved.plan.launcher)
        file.starts()
        job = launcher.submit(request)
        end = explain_end(run, launcher.wait(job), job.signal, job.ended_by, job.oom_kills, shown=True)
        print(end="\r\x1b[K" if width else "", flush=True)  # the live line of a rank that was killed
        took = f", in {duration(time.monotonic() - started)}"
        text = end.text if end.status else with_next(end.text + took, sys.argv[1:], resolved.file.recipe, run)
        file.end(end.status, text, stopped=job.signal is not None)
    print(text, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status


def _says_that_nothing_is_left(resolved: ResolvedRun, run: RunDir) -> bool:
    """A finished run is left as it is, down to the last file."""
    left = nothing_left(resolved.file.recipe, run)
    if left is None or (resolved.world.inside is not None and resolved.world.inside.rank > 0):
        return left is not None
    _check_folder(run, resolved)
    print(with_next(left, sys.argv[1:], resolved.file.recipe, run), flush=True)
    return True


def _with_known_size(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """`micro_size: auto` with the number that an earlier start in this run folder found."""
    if not micro_size.is_asked(resolved.file.recipe):
        return resolved
    found = micro_size.known(resolved.file.recipe, resolved.plan, run)
    if found is None and resolved.world.inside is not None:
        micro_size.refuse_inside()
    return resolved if found is None else _with_size(resolved, found)


def _with_size(resolved: ResolvedRun, size: int) -> ResolvedRun:
    file = resolved.file.with_micro_size(size)
    return resolved._replace(file=file, plan=replan(file.recipe, resolved.plan))


def _with_engine(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """Engine auto decided; a rank above 0 starts what rank 0 has decided."""
    inside = resolved.world.inside
    if resolved.file.recipe.engine.name != "auto" or (inside is not None and inside.rank > 0):
        return resolved
    from ortlaunch.bench import auto

    return auto.choose(resolved, run, check=lambda: _check_means(resolved, run))


def preview(resolved: ResolvedRun) -> ResolvedRun:
    """For showing a plan: engine auto as it would be decided now, without measuring."""
    if resolved.file.recipe.engine.name != "auto":
        return resolved
    from ortlaunch.bench import auto

    return auto.preview(resolved)


def _be_a_rank(resolved: ResolvedRun, run: RunDir, rank: Rank, lock: RunLock) -> int:
    """This process is a rank already: rank 0 prepares the folder, then each becomes the worker."""
    mark = run.ready / (_launch_id(rank, os.environ) or "launch")
    if rank.rank == 0:
        mark.unlink(missing_ok=True)
        _check_means(resolved, run)
        lock.take(run, keep=True)
        JobRecord.of_this_process("inside", JobState.RUNNING).write(run)
        _prepare(resolved, run)
        for path, text in _request(resolved.plan, run).files:
            write_text(Path(path), text)
        write_text(mark, "")
    deadline = time.monotonic() + _JOIN_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank 0 did not prepare {run} within {_JOIN_SECONDS} s; is it on a disk that all hosts share?"
            )
        time.sleep(0.05)
    argv = _request(resolved.plan, run).argv
    os.execve(argv[0], argv, {**os.environ, **dict(resolved.plan.env)})


def _check_means(resolved: ResolvedRun, run: RunDir) -> None:
    """What the run takes is there, or an error says what to type; nothing has been written yet."""
    doctor.require(resolved.file.recipe, resolved.plan)
    _request(resolved.plan, run)
    _check_folder(run, resolved)


def _claimed(run: RunDir) -> RunDir:
    """The folder, new and this run's own: runs that start in the same second must not share one."""
    for path in (run.path, *(Path(f"{run}-{number}") for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return RunDir(path)
    raise LaunchError(f"there are a thousand folders {run}-*")


def _prepare(resolved: ResolvedRun, run: RunDir) -> Request:
    """Write the run folder, say what will run."""
    request = write_run(resolved, run)
    provenance.record(run, resolved.path)
    for note in resolved.world.notes:
        print(note, flush=True)
    print(f"{describe(resolved.plan, resolved.file.recipe)}\nrun folder: {run}", flush=True)
    return request


def write_run(resolved: ResolvedRun, run: RunDir) -> Request:
    """Write what the ranks read; returns what starts them."""
    plan, request = resolved.plan, _request(resolved.plan, run)
    write_text(run.recipe, recipe.to_yaml(resolved.file.recipe))
    write_text(run.plan, plan.to_json())
    if plan.deepspeed is not None:
        write_json(run.deepspeed, plan.deepspeed)
    variables = {**seen(os.environ), **seen(resolved.file.recipe.launch.env)}
    write_json(run.environment, {**provenance.environment(), "ortmodule_variables": variables})
    write_text(run.request, f"{request}\n")
    if resolved.choice is not None:
        write_json(run.choice, resolved.choice)
    else:
        run.choice.unlink(missing_ok=True)
    for old in run.errors.glob("*"):
        old.unlink()
    return request


def _check_folder(run: RunDir, resolved: ResolvedRun) -> None:
    """A folder with something else in it is refused; one of an earlier run of this recipe is continued."""
    if run.path.exists() and not run.path.is_dir():
        raise PlanError(f"--run-dir {run}: is a file; give a folder")
    if (
        run.path.exists()
        and not run.recipe.exists()
        and any(path not in (run.ready, run.trials, run.lock) for path in run.path.iterdir())
    ):
        raise PlanError(f"--run-dir {run}: is not empty and not a run folder; give a new one")
    if not run.recipe.exists():
        return
    before, current = recipe.load(run.recipe).recipe, resolved.file.recipe
    changed = list(differences(before.model_dump(mode="json"), current.model_dump(mode="json")))
    if resolved.plan.task == "parity" and run.complete_checkpoints():
        raise PlanError(
            f"--run-dir {run}: holds the checkpoints of a training, whose records this would overwrite; give a new one"
        )
    other = [
        line
        for line in changed
        if line.split(".")[0].split(":")[0] in ("model", "data", "seed", "batch", "optimizer")
        and not line.startswith("model.gradient_checkpointing:")  # the same numbers in less memory
    ]
    if other and run.complete_checkpoints():
        raise PlanError(
            f"--run-dir {run}: holds checkpoints of another training; these differ:\n  " + "\n  ".join(other) + "\n"
            "Give a new --run-dir, or the recipe that it was trained with"
        )
    print("\n".join([f"continuing {run}", *(f"  changed: {line}" for line in changed)]), flush=True)


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """`key.path: old -> new` for every leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield f"{path}: {before!r} -> {after!r}"
