"""`log.profile_steps` and `bench --profile`: where the time of a step goes.

Every other step is profiled, on all ranks, so that none of them waits for a slower rank 0. The
steps between them measure what the profiler itself costs.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.run_folder.profile_record import OperatorCost, Profile, profile_text_lines
from ortlaunch.worker.session import Session
from ortmodule.loops import NodeRun, ProfiledOrtSessions

_SHOWN_OPERATORS = 10


class StepProfiler:
    """Profiles the steps of `log.profile_steps`; without them it does nothing."""

    def __init__(self, session: Session, next_step: int) -> None:
        """Choose the steps, from the next one on, which is counted from 1."""
        self.session = session
        self._engine_name = session.engine.record.engine.used
        end = session.recipe.train.steps if session.group.device.type == "cpu" else 0
        first_profiled_step, last_profiled_step = session.recipe.log.profile_steps or (0, 0)
        self.steps = range(max(first_profiled_step, next_step), min(last_profiled_step, end) + 1)
        if first_profiled_step and not self.steps:
            session.group.print_on_rank_0(
                f"log.profile_steps: no step is profiled: the profile is of steps {first_profiled_step} to "
                f"{last_profiled_step} on cpu, and this run has steps {next_step} to {session.recipe.train.steps} on "
                f"{session.group.device.type}"
            )
        # By whether the step was profiled, and by its number.
        self._seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
        self._torch_profiles = list[torch.profiler.profile]()
        self._ort = (
            ProfiledOrtSessions(
                session.engine.eval_module, session.engine.witness.exclude_passes_from_counts
            )
            if self.steps and session.engine.witness and self._engine_name == "ort"
            else None
        )

    @contextlib.contextmanager
    def time_or_profile_step(self, step_number: int) -> Iterator[None]:
        """Measure a step if it is one of the profiler's, and profile every other one.

        After the last one, `write_profile_or_say_why_not_once`.
        """
        profiled = step_number in self.steps[::2]
        with self._profile_step() if profiled else contextlib.nullcontext():
            began = time.perf_counter()
            yield
            if step_number in self.steps:
                self._seconds[profiled][step_number] = time.perf_counter() - began
        if step_number == max(self.steps, default=0):
            self.write_profile_or_say_why_not_once()

    def write_profile_or_say_why_not_once(self) -> None:
        """Print the table and write profile.json and the trace, unless that is done.

        A training may end before the last of the profiler's steps.
        """
        if self.steps and self._seconds[True]:
            with self.session.progress.show_activity_during("writing the profile"):
                if self.session.group.rank == 0:
                    self._write_and_print_profile()
        elif self.steps:
            self.session.group.print_on_rank_0(
                f"log.profile_steps: the training ended before step {self.steps[0]}"
            )
        self.steps = range(0)

    @contextlib.contextmanager
    def _profile_step(self) -> Iterator[None]:
        # torch's profiler reports each start and stop on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            self._ort.use_profiled_sessions() if self._ort else contextlib.nullcontext(),
            torch.profiler.profile(activities=activities) as torch_profile,
            torch.profiler.record_function("step"),
        ):
            yield
        self._torch_profiles.append(torch_profile)

    def _write_and_print_profile(self) -> None:
        run = self.session.run
        node_runs = [*self._ort.end_profiles_and_read_node_runs()] if self._ort else []
        step_seconds = statistics.median(self._seconds[True].values())
        measured = asdict(
            Profile(
                engine=self._engine_name,
                steps=list(self._seconds[True]),
                seconds=step_seconds,
                seconds_without=statistics.median(self._seconds[False].values() or [0]) or None,
                operators=operator_costs(self._torch_profiles, node_runs, step_seconds),
            )
        )
        write_json_atomically(run.profile, measured)
        events = chrome_trace_events(self._torch_profiles, node_runs)
        run.trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        print(*profile_text_lines(measured), f"timeline: {run.trace}", sep="\n", flush=True)


def operator_costs(
    torch_profiles: Sequence[torch.profiler.profile],
    node_runs: Sequence[NodeRun],
    step_seconds: float,
) -> list[OperatorCost]:
    """Return the costs of the operators that take longest, the longest first.

    Args:
        torch_profiles: one of each profiled step.
        node_runs: all runs of ONNX Runtime's nodes in these steps.
        step_seconds: the duration of a step.
    """
    calls = collections.defaultdict[tuple[str, str], int](int)
    seconds = collections.defaultdict[tuple[str, str], float](float)
    for row in (row for profile in torch_profiles for row in profile.key_averages()):
        calls["torch", row.key] += row.count
        seconds["torch", row.key] += row.self_cpu_time_total / 1e6
    for node_run in node_runs:
        calls["ONNX Runtime", node_run.operator] += 1
        seconds["ONNX Runtime", node_run.operator] += node_run.duration_ns / 1e9
    step_count = len(torch_profiles)
    return [
        OperatorCost(
            *key, calls[key] / step_count, total / step_count, total / step_count / step_seconds
        )
        for key, total in sorted(seconds.items(), key=lambda item: -item[1])[:_SHOWN_OPERATORS]
    ]


def chrome_trace_events(
    torch_profiles: Sequence[torch.profiler.profile], node_runs: Sequence[NodeRun]
) -> list[dict[str, object]]:
    """Return torch's events of all steps in Chrome's trace format, and ONNX Runtime's nodes."""
    events = list[dict[str, object]]()
    base_ns = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        for profile in torch_profiles:
            profile.export_chrome_trace(str(path))
            torch_trace = json.loads(path.read_text(encoding="utf-8"))
            events += torch_trace["traceEvents"]
            base_ns = torch_trace.get("baseTimeNanoseconds", 0)
    if node_runs:
        events.append(
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "ONNX Runtime"}}
        )
    return events + [
        {
            "ph": "X", "pid": 0, "tid": 0, "name": run.operator, "args": {"node": run.node_name},
            "ts": (run.start_ns - base_ns) / 1e3, "dur": run.duration_ns / 1e3,
        }
        for run in node_runs
    ]  # fmt: skip
