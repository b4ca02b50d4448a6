"""A process that has imported the libraries of a sweep's trials, and forks their commands.

`python ortlaunch/base/module_start.py ortlaunch.worker.prepared` reads requests as lines of JSON: to
import, to fork a command, and to return its exit status. Each gets one line in reply. It never runs a
trial itself, so that a trial inherits nothing of another one.

A forked command forks its rank, too, unless the rank needs other variables, libraries or a launcher.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ortlaunch.base import forked_process, module_start
from ortlaunch.base.die_with_parent import end_with_parent_and_set_pid_variable
from ortlaunch.base.forked_process import ForkedProcess, exit_status_of_child_or_none
from ortlaunch.base.process import process_space
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import LAUNCHER_VARIABLE, Rank
from ortlaunch.recipe import Recipe, parse_resolved_recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.user_modules import key_and_factory_pairs
from ortlaunch.worker.__main__ import set_up_process_and_import_engine
from ortlaunch.worker.allocator import remember_mapped_pages_of_files
from ortlaunch.worker.engine.garbage import raise_garbage_threshold

# No import depends on these: they are ortlaunch's own and torchrun's, and CUDA's until its start.
_VARIABLES_UNREAD_BY_IMPORTS = ("ORTLAUNCH_", "PET_", "CUDA_VISIBLE_DEVICES")


class _Libraries:
    """The libraries that this process has imported, and its state before that."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.cpus = os.sched_getaffinity(0)
        self.settings: tuple[object, ...] = ()

    def import_libraries_and_return_reason_against_forks_or_empty(
        self, recipe: str, plan: str, modules: Sequence[str]
    ) -> str:
        """Import what a rank of this recipe and plan does, and further modules.

        Returns:
            Why a fork of this process could not train; "" if it can.
        """
        raise_garbage_threshold()
        run_recipe, run_plan = parse_resolved_recipe(recipe), Plan.from_plan_json_text(plan)
        self.settings = _settings_of_libraries(run_recipe, run_plan)
        set_up_process_and_import_engine(run_recipe, run_plan, Rank.from_environ(os.environ))
        for module_name in ("ortlaunch.worker.session", run_plan.traits.module, *modules):
            importlib.import_module(module_name)
        # A module of the user may come before others, and change what they read.
        if not any(key_and_factory_pairs(run_recipe)):
            _import_transformers_model(run_recipe)
        # Forks share the pages of objects that no collection visits.
        gc.collect()
        gc.freeze()
        remember_mapped_pages_of_files()
        # OpenBLAS ends its threads before a fork and starts them again on use. Other threads would
        # be absent from a fork, while their locks are held.
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if (thread_count := len(os.listdir("/proc/self/task"))) > 1:
            return f"the imports have started {thread_count - 1} threads"
        paths = [
            os.path.realpath(path) for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2
        ]
        # The start of CUDA opens the GPU. Pipes have no path of their own.
        opened = [path for path in paths if not path.startswith("/proc/")]
        return f"the imports have opened {', '.join(opened)}" if opened else ""

    def run_command_and_exit(
        self, parent_pid: int, argv: Sequence[str], environ: Mapping[str, str], folder: str,
        output: str,
    ) -> NoReturn:  # fmt: skip
        """Become a command, in a fork of `parent_pid`."""
        os.setsid()
        os.sched_setaffinity(0, self.cpus)
        os.chdir(folder)
        output_file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(output_file, 1)
        os.dup2(output_file, 2)
        os.close(output_file)
        command_pid = os.getpid()
        read_end, write_end = os.pipe()
        # Now, so that the rank inherits nothing of the command.
        rank_pid = os.fork()
        if rank_pid != 0:
            forked_process.start_by_fork = partial(
                self._start_forked_rank_or_print_reason, rank_pid, write_end
            )
            _run_module_and_exit(parent_pid, argv, environ)
        os.close(write_end)
        # A signal to the command's group does not reach the rank.
        os.setpgid(0, 0)
        with os.fdopen(read_end) as pipe:
            text = pipe.read()
        # The command has ended, or executes its rank.
        if not text:
            os._exit(0)
        rank_argv, rank_environ = json.loads(text)
        _run_module_and_exit(command_pid, rank_argv[2:], rank_environ)

    def _start_forked_rank_or_print_reason(
        self, pid: int, write_end: int, argv: Sequence[str], environ: Mapping[str, str]
    ) -> ForkedProcess | None:
        """Let the fork that waits become this command; None if the command is to be executed."""
        # A restart is executed.
        forked_process.start_by_fork = None
        if reason := self._reason_against_fork_or_empty(argv, environ):
            print(f"not forked from the sweep's prepared process: {reason}", flush=True)
            os.close(write_end)
            return None
        with os.fdopen(write_end, "w") as pipe:
            json.dump([argv, environ], pipe)
        return ForkedProcess(pid, exit_status_of_child_or_none)

    def _reason_against_fork_or_empty(self, argv: Sequence[str], environ: Mapping[str, str]) -> str:
        if tuple(argv[:-1]) != module_start.module_command("ortlaunch.worker"):
            return "another launcher starts the ranks"
        changed_names = {name for name, _ in {*environ.items()} ^ {*self.environ.items()}}
        names = [
            name
            for name in sorted(changed_names)
            if not name.startswith(_VARIABLES_UNREAD_BY_IMPORTS)
        ]
        if names:
            return f"the environment has another {', '.join(names)}"
        run = RunDir(argv[-1])
        recipe = parse_resolved_recipe(run.recipe.read_text(encoding="utf-8"))
        if _settings_of_libraries(recipe, Plan.read(run.plan)) != self.settings:
            return "engine, launch.binding, device, threads or hosts are not the first trial's"
        return ""


def serve_requests_and_run_command_in_each_fork() -> None:
    """Import, fork commands and return their exit statuses until the input ends."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # What an import prints is no reply.
    null_file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_file, 0)
    os.close(null_file)
    os.dup2(2, 1)
    imported = _Libraries()
    server_pid = os.getpid()
    for line in requests:
        request_id, request = json.loads(line)
        result: Any
        if "modules" in request:
            result = imported.import_libraries_and_return_reason_against_forks_or_empty(**request)
        elif "pid" in request:
            result = exit_status_of_child_or_none(request["pid"])
        elif (result := os.fork()) == 0:
            requests.close()
            replies.close()
            imported.run_command_and_exit(server_pid, **request)
        print(json.dumps([request_id, result]), file=replies, flush=True)


def _settings_of_libraries(recipe: Recipe, plan: Plan) -> tuple[object, ...]:
    """Return what `set_up_process_and_import_engine` depends on, beside the environment."""
    ort_engine = recipe.engine if recipe.engine.name == "ort" else None
    return ort_engine, recipe.launch.binding, plan.device, plan.nodes, plan.threads


def _import_transformers_model(recipe: Recipe) -> None:
    """Import the tokenizers and the module of a model of transformers that is on this host."""
    import transformers

    _, auto = (getattr(transformers, n) for n in ("AutoTokenizer", recipe.model.traits.auto_class))
    # The rank names what is wrong with a model, and downloads what is absent.
    with contextlib.suppress(OSError, ValueError, KeyError):
        config = (
            transformers.AutoConfig.from_pretrained(
                recipe.model.pretrained, local_files_only=True, trust_remote_code=False
            )
            if recipe.model.pretrained is not None
            else transformers.AutoConfig.for_model((recipe.model.config or {}).get("model_type"))
        )
        auto._model_mapping[type(config)]


def _run_module_and_exit(
    parent_pid: int, argv: Sequence[str], environ: Mapping[str, str]
) -> NoReturn:
    """Run a module as `module_start.py` does, in a process that ends with its parent."""
    os.environ.clear()
    os.environ.update(environ)
    end_with_parent_and_set_pid_variable(parent_pid, LAUNCHER_VARIABLE, process_space())
    importlib.invalidate_caches()
    sys.argv = [*argv]
    status = 0
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's end would take 0.3 s to free what was imported.
    os._exit(status)


if __name__ == "__main__":
    serve_requests_and_run_command_in_each_fork()
