"""`log.profile_steps` and `bench --profile`: where the time of a step goes.

Every other step is profiled, on all ranks, so that none of them waits for a slower rank 0. The
steps between them measure what the profiler itself costs.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.run_folder.profile_record import (
    COMMUNICATION,
    COMPUTING,
    COPYING,
    KINDS,
    PYTHON,
    READING,
    WAITING,
    Profile,
    profile_text_lines,
)
from ortlaunch.worker.engine.flops import measure_peak_flops_per_second
from ortlaunch.worker.engine.spans import (
    ProfiledOrtSessions,
    Span,
    TorchCallMarker,
    spans_of_torch_events,
)
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision import pulse

# The phase of a stage that a rank shows.
_PHASE_BY_STAGE = {
    pulse.PASSING: "forward",
    pulse.FORWARD: "forward",
    pulse.BACKWARD: "backward",
    pulse.STEPPING: "optimizer",
}
# Names by which torch's profiler records collectives in the threads of their backends.
_COLLECTIVE_PREFIXES = ("gloo:", "nccl:", "mpi:", "ucc:")
# Prefixes of names; operators that compute have all others.
_PREFIXES_BY_KIND: dict[str, str | tuple[str, ...]] = {
    READING: READING,
    PYTHON: PYTHON,
    COPYING: ("aten::copy_", "Memcpy"),
    COMMUNICATION: ("c10d::", *_COLLECTIVE_PREFIXES),
    COMPUTING: "",
}


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
        self._spans = list[Span]()
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

        After the last one, `finish`.
        """
        profiled = step_number in self.steps[::2]
        with self._profile_and_collect_spans() if profiled else contextlib.nullcontext():
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
                self._write_and_print_profile(self.session)
        elif self.steps:
            self.session.group.print_on_rank_0(
                f"log.profile_steps: the training ended before step {self.steps[0]}"
            )
        self.steps = range(0)

    @contextlib.contextmanager
    def _profile_and_collect_spans(self) -> Iterator[None]:
        stages = list[tuple[int, int]]()

        def begin_and_note_stage(
            stage: int,
            begin_stage: Callable[[int], None] = self.session.progress.shared_progress.begin_stage,
        ) -> None:
            stages.append((time.time_ns(), stage))
            begin_stage(stage)

        # torch's profiler reports each start and stop on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # Marks of lines would make torch.compile compile again.
        marks = (
            contextlib.nullcontext()
            if self._engine_name == "inductor"
            else TorchCallMarker(self.session.model.model).mark_torch_calls_with_layer_and_line()
        )
        with (
            self._ort.use_profiled_sessions() if self._ort else contextlib.nullcontext(),
            marks,
            mock.patch.object(
                self.session.progress.shared_progress, "begin_stage", begin_and_note_stage
            ),
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                record_shapes=True,
                profile_memory=True,
            ) as profiler,
        ):
            stages.append((time.time_ns(), 0))
            yield
            stages.append((time.time_ns(), 0))
        self._spans += [
            Span(
                start,
                end,
                READING if stage == pulse.READING else PYTHON,
                _PHASE_BY_STAGE.get(stage, ""),
                track="stages",
            )
            for (start, stage), (end, _) in zip(stages, stages[1:])
        ]
        self._spans += spans_of_torch_events(
            profiler.profiler.kineto_results.experimental_event_tree()
        )

    def _write_and_print_profile(self, session: Session) -> None:
        spans = classify_spans_and_set_exclusive_time(
            [*self._spans, *(self._ort.end_profiles_and_read_node_spans() if self._ort else ())]
        )
        peak_flops_per_second = measure_peak_flops_per_second(
            session.group.device, dtype_of(session.recipe.precision)
        )
        # 256 MiB each: larger than the caches.
        pair = torch.ones(2, 2**26)
        copying = min(timeit.repeat(lambda: pair[0].copy_(pair[1]), number=1))
        operator_costs = operator_cost_rows(
            spans, len(self._seconds[True]), peak_flops_per_second, pair.nbytes / copying
        )
        share_by_kind = {
            cost_kind: sum(cost["share"] for cost in operator_costs if cost["kind"] == cost_kind)
            for cost_kind in KINDS
        }
        # A collective takes longest on the rank that waits most for the others.
        least_share = min(session.group.gather(share_by_kind[COMMUNICATION]))
        share_by_kind |= {
            COMMUNICATION: least_share,
            WAITING: share_by_kind[COMMUNICATION] - least_share,
        }
        if session.group.rank > 0:
            return
        measured = Profile(
            engine=self._engine_name,
            steps=list(self._seconds[True]),
            seconds=statistics.median(self._seconds[True].values()),
            seconds_without=statistics.median(self._seconds[False].values() or [0]) or None,
            matrix_rate=peak_flops_per_second,
            bandwidth=pair.nbytes / copying,
            kinds=share_by_kind,
            costs=operator_costs[:10],
        )
        write_json_atomically(session.run.profile, vars(measured))
        write_bytes = session.run.trace.write_bytes
        write_bytes(gzip.compress(json.dumps({"traceEvents": chrome_trace_events(spans)}).encode()))
        print(
            *profile_text_lines(vars(measured)),
            f"timeline: {session.run.trace}",
            sep="\n",
            flush=True,
        )


def chrome_trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the spans as events of Chrome's trace format, from time 0 on."""
    # Perfetto drops an event that begins inside another one of its track and ends after it. Numbers
    # of JSON are exact to 0.25 us only for times since 1970.
    tracks = sorted({span.track for span in spans})
    start_ns = min((span.start for span in spans), default=0)
    track_names = [
        {"ph": "M", "pid": 0, "tid": track_index, "name": "thread_name", "args": {"name": track}}
        for track_index, track in enumerate(tracks)
    ]
    return track_names + [
        {
            "ph": "X", "pid": 0, "tid": tracks.index(span.track), "name": span.name,
            "cat": span.cost_kind, "ts": (span.start - start_ns) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            "args": {"phase": span.phase, "module": span.module, "source": span.source},
        }
        for span in spans
    ]  # fmt: skip


def classify_spans_and_set_exclusive_time(spans: list[Span]) -> list[Span]:
    """Set kind, phase, layer, line and time alone of a step's spans, and return them.

    Each moment counts for the innermost operator that runs; if none does, for a collective of
    another thread, for which the step then waits, or else for Python.
    """
    # At the same time ends come before starts, and outer spans start before inner ones.
    edges = sorted(
        [(span.start, 1, -span.end, span) for span in spans]
        + [(max(span.end, span.start + 1), 0, 0, span) for span in spans],
        key=lambda edge: edge[:3],
    )
    running = list[Span]()
    callers = dict[int, Span]()
    for (time_ns, starts, _, span), (next_time_ns, *_) in zip(edges, edges[1:]):
        if starts:
            _classify_span(span, running, callers)
            running.append(span)
        else:
            running.remove(span)
        if running:
            max(running, key=_innermost_operator_sort_key).own_ns += next_time_ns - time_ns
    return spans


def _innermost_operator_sort_key(span: Span) -> tuple[object, ...]:
    return (
        span.name != PYTHON,
        not span.name.startswith(_COLLECTIVE_PREFIXES),
        span.start,
        -span.end,
    )


def _classify_span(
    span: Span, running_spans: Sequence[Span], forward_span_by_sequence: dict[int, Span]
) -> None:
    """Set a span's kind, phase, layer and line by its name and by the spans around it."""
    span.cost_kind = next(
        span_kind for span_kind, names in _PREFIXES_BY_KIND.items() if span.name.startswith(names)
    )
    outer_spans = [
        running_span
        for running_span in running_spans
        if not running_span.name.startswith(_COLLECTIVE_PREFIXES)
    ]
    if span.name.startswith(_COLLECTIVE_PREFIXES) or not outer_spans:
        return
    # An operator of a reader or of a collective is a part of it.
    span.cost_kind = (
        outer_spans[-1].cost_kind
        if outer_spans[-1].cost_kind in (READING, COMMUNICATION)
        else span.cost_kind
    )
    if span.name.startswith("autograd::engine::evaluate_function: "):
        caller = forward_span_by_sequence.get(span.sequence, span)
        span.phase, span.module, span.source = "backward", caller.module, caller.source
    elif span.sequence >= 0:
        # The last operator with a number is the one that is differentiated.
        forward_span_by_sequence[span.sequence] = span
    for name in ("phase", "module", "source"):
        setattr(span, name, getattr(span, name) or getattr(outer_spans[-1], name))


def operator_cost_rows(
    spans: Sequence[Span],
    step_count: int,
    peak_flops_per_second: float,
    peak_bytes_per_second: float,
) -> list[dict[str, Any]]:
    """Return the costs by phase, operator, layer and source line, the largest first.

    Args:
        spans: of all profiled steps.
        step_count: their number.
        peak_flops_per_second: operations per second of a large matmul.
        peak_bytes_per_second: bytes per second of a large copy.
    """
    groups = dict[tuple[str, str, str, str, str], list[Span]]()
    for span in spans:
        # Layers of one kind are one row: the numbers in their paths are left out.
        module = ".".join("*" if name.isdigit() else name for name in span.module.split("."))
        key = span.phase, span.name, module or "unknown", span.source or "unknown", span.cost_kind
        groups.setdefault(key, []).append(span)
    total_ns = sum(span.own_ns for span in spans)
    operator_costs = list[dict[str, Any]]()
    for key, group in groups.items():
        own_ns = sum(span.own_ns for span in group)
        # The operations of an operator that only calls others are theirs.
        computing_spans = [span for span in group if 2 * span.own_ns >= span.end - span.start]
        busy = sum(span.own_ns for span in computing_spans) / 1e9 or 1.0
        operator_costs.append({
            **dict(zip(("phase", "operator", "module", "source", "kind"), key)),
            "calls": round(len(group) / step_count, 2),
            "seconds": own_ns / 1e9 / step_count,
            "share": own_ns / total_ns,
            "matrix_share": sum(span.flops for span in computing_spans) / busy / peak_flops_per_second or None,
            "bandwidth_share": sum(span.bytes for span in computing_spans) / busy / peak_bytes_per_second or None,
        })  # fmt: skip
    return sorted(operator_costs, key=lambda cost: -float(cost["seconds"]))
