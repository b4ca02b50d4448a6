"""The caller's side of worker/prepared.py: a process with the libraries of ranks, which forks commands."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortlaunch.base import module_start
from ortlaunch.base.forked_process import ForkedProcess
from ortlaunch.launch.processes import command_prefix_to_end_with_parent
from ortlaunch.launch_plan import Plan

# What `ortlaunch train` imports.
_COMMAND_MODULES = ("ortlaunch.cli", "ortlaunch.api.train", "ortlaunch.run.control")


class PreparedProcess:
    """A process that imports the libraries of the first trial's rank, and forks commands.

    It ends with this process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._request_ids = itertools.count()
        self._refusal: str | None = None

    def start_unless_running(
        self, environ: Mapping[str, str], recipe_text: str, plan: Plan
    ) -> None:
        """Start it and wait for its imports, if it does not run and the plan's rank can be forked.

        Args:
            environ: the variables of the rank.
            recipe_text: its resolved recipe, as in a run folder.
            plan: its plan.
        """
        if self._process is not None and (self._refusal != "" or self._process.poll() is None):
            return
        self._refusal = f"launcher {plan.launcher}"
        if plan.launcher == "local":
            argv = module_start.module_command("ortlaunch.worker.prepared")
            self._process = subprocess.Popen(
                [*command_prefix_to_end_with_parent(), argv[0], *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(environ),
                start_new_session=True,
                text=True,
            )
            self._refusal = self._request_or_none_if_ended(
                recipe=recipe_text, plan=plan.to_json(), modules=_COMMAND_MODULES
            )
            if self._refusal != "":
                self.end()

    def _request_or_none_if_ended(self, **request: object) -> Any:
        assert self._process and self._process.stdin and self._process.stdout  # noqa: PT018
        request_id = next(self._request_ids)
        try:
            print(json.dumps([request_id, request]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        # An interrupt may have left the reply to an earlier request unread.
        replies = map(json.loads, self._process.stdout)
        return next((result for reply_id, result in replies if reply_id == request_id), None)

    def fork_command_or_record_refusal(
        self, argv: Sequence[str], environ: Mapping[str, str], output_path: Path
    ) -> ForkedProcess | None:
        """Fork a command in the current folder; None if it is to be started in another way.

        Args:
            argv: a module and its arguments.
            environ: all variables of the command.
            output_path: the file to which its output, or the reason against it, is appended.
        """
        with output_path.open("a") as output:
            if self._refusal == "":
                pid = self._request_or_none_if_ended(
                    argv=argv, environ=environ, folder=os.getcwd(), output=str(output_path)
                )
                if pid is not None:
                    return ForkedProcess(pid, self._exit_status_of_fork_or_none)
            reason = self._refusal or "it has ended"
            print(f"not forked from the sweep's prepared process: {reason}", file=output)
        return None

    def _exit_status_of_fork_or_none(self, pid: int) -> int | None:
        exit_status: int | None = self._request_or_none_if_ended(pid=pid)
        # The forks get SIGTERM with it.
        has_ended = self._process is not None and self._process.poll() is not None
        return -signal.SIGTERM if exit_status is None and has_ended else exit_status

    def end(self) -> None:
        """End it, after its forks."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
