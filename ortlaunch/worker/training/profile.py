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
    profile_lines,
)
from ortlaunch.worker.engine.flops import measured_peak_flops
from ortlaunch.worker.engine.spans import LineMarks, ProfiledSessions, Span, torch_spans
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision import pulse

# The phase of a stage that a rank shows.
_PHASES = {
    pulse.PASSING: "forward",
    pulse.FORWARD: "forward",
    pulse.BACKWARD: "backward",
    pulse.STEPPING: "optimizer",
}
# Names by which torch's profiler records collectives in the threads of their backends.
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")
# Prefixes of names; operators that compute have all others.
_PREFIXES: dict[str, str | tuple[str, ...]] = {
    READING: READING,
    PYTHON: PYTHON,
    COPYING: ("aten::copy_", "Memcpy"),
    COMMUNICATION: ("c10d::", *_BACKENDS),
    COMPUTING: "",
}


class StepProfiler:
    """Profiles the steps of `log.profile_steps`; without them it does nothing."""

    def __init__(self, session: Session, step: int) -> None:
        """Choose the steps, from the next one on, which is counted from 1."""
        self.session = session
        self._runs = session.engine.record.engine.used
        end = session.recipe.train.steps if session.group.device.type == "cpu" else 0
        first, last = session.recipe.log.profile_steps or (0, 0)
        self.steps = range(max(first, step), min(last, end) + 1)
        if first and not self.steps:
            session.group.print_once(
                f"log.profile_steps: no step is profiled: the profile is of steps {first} to "
                f"{last} on cpu, and this run has steps {step} to {session.recipe.train.steps} on "
                f"{session.group.device.type}"
            )
        # By whether the step was profiled, and by its number.
        self._seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
        self._spans = list[Span]()
        self._ort = (
            ProfiledSessions(session.engine.eval_module, session.engine.witness.uncounted)
            if self.steps and session.engine.witness and self._runs == "ort"
            else None
        )

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure a step if it is one of the profiler's, and profile every other one.

        After the last one, `finish`.
        """
        profiled = number in self.steps[::2]
        with self._profiled() if profiled else contextlib.nullcontext():
            began = time.perf_counter()
            yield
            if number in self.steps:
                self._seconds[profiled][number] = time.perf_counter() - began
        if number == max(self.steps, default=0):
            self.finish()

    def finish(self) -> None:
        """Print the table and write profile.json and the trace, unless that is done.

        A training may end before the last of the profiler's steps.
        """
        if self.steps and self._seconds[True]:
            with self.session.progress.during("writing the profile"):
                self._write(self.session)
        elif self.steps:
            self.session.group.print_once(
                f"log.profile_steps: the training ended before step {self.steps[0]}"
            )
        self.steps = range(0)

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        stages = list[tuple[int, int]]()

        def at(stage: int, show: Callable[[int], None] = self.session.progress.pulse.at) -> None:
            stages.append((time.time_ns(), stage))
            show(stage)

        # torch's profiler reports each start and stop on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # Marks of lines would make torch.compile compile again.
        marks = (
            contextlib.nullcontext()
            if self._runs == "inductor"
            else LineMarks(self.session.model.model).used()
        )
        with (
            self._ort.used() if self._ort else contextlib.nullcontext(),
            marks,
            mock.patch.object(self.session.progress.pulse, "at", at),
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
                _PHASES.get(stage, ""),
                track="stages",
            )
            for (start, stage), (end, _) in zip(stages, stages[1:])
        ]
        self._spans += torch_spans(profiler.profiler.kineto_results.experimental_event_tree())

    def _write(self, session: Session) -> None:
        spans = assign([*self._spans, *(self._ort.read() if self._ort else ())])
        rate = measured_peak_flops(session.group.device, dtype_of(session.recipe.precision))
        # 256 MiB each: larger than the caches.
        pair = torch.ones(2, 2**26)
        copying = min(timeit.repeat(lambda: pair[0].copy_(pair[1]), number=1))
        found = costs(spans, len(self._seconds[True]), rate, pair.nbytes / copying)
        kinds = {
            kind: sum(cost["share"] for cost in found if cost["kind"] == kind) for kind in KINDS
        }
        # A collective takes longest on the rank that waits most for the others.
        least = min(session.group.gather(kinds[COMMUNICATION]))
        kinds |= {COMMUNICATION: least, WAITING: kinds[COMMUNICATION] - least}
        if session.group.rank > 0:
            return
        measured = Profile(
            engine=self._runs,
            steps=list(self._seconds[True]),
            seconds=statistics.median(self._seconds[True].values()),
            seconds_without=statistics.median(self._seconds[False].values() or [0]) or None,
            matrix_rate=rate,
            bandwidth=pair.nbytes / copying,
            kinds=kinds,
            costs=found[:10],
        )
        write_json_atomically(session.run.profile, vars(measured))
        write_bytes = session.run.trace.write_bytes
        write_bytes(gzip.compress(json.dumps({"traceEvents": timeline(spans)}).encode()))
        print(
            *profile_lines(vars(measured)), f"timeline: {session.run.trace}", sep="\n", flush=True
        )


def timeline(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the spans as events of Chrome's trace format, from time 0 on."""
    # Perfetto drops an event that begins inside another one of its track and ends after it. Numbers
    # of JSON are exact to 0.25 us only for times since 1970.
    tracks = sorted({span.track for span in spans})
    first = min((span.start for span in spans), default=0)
    named = [
        {"ph": "M", "pid": 0, "tid": place, "name": "thread_name", "args": {"name": track}}
        for place, track in enumerate(tracks)
    ]
    return named + [
        {
            "ph": "X", "pid": 0, "tid": tracks.index(span.track), "name": span.name,
            "cat": span.kind, "ts": (span.start - first) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            "args": {"phase": span.phase, "module": span.module, "source": span.source},
        }
        for span in spans
    ]  # fmt: skip


def assign(spans: list[Span]) -> list[Span]:
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
    for (now, starts, _, span), (until, *_) in zip(edges, edges[1:]):
        if starts:
            _inherit(span, running, callers)
            running.append(span)
        else:
            running.remove(span)
        if running:
            max(running, key=_precedence).alone += until - now
    return spans


def _precedence(span: Span) -> tuple[object, ...]:
    return span.name != PYTHON, not span.name.startswith(_BACKENDS), span.start, -span.end


def _inherit(span: Span, running: Sequence[Span], callers: dict[int, Span]) -> None:
    """Set a span's kind, phase, layer and line by its name and by the spans around it."""
    span.kind = next(kind for kind, names in _PREFIXES.items() if span.name.startswith(names))
    around = [each for each in running if not each.name.startswith(_BACKENDS)]
    if span.name.startswith(_BACKENDS) or not around:
        return
    # An operator of a reader or of a collective is a part of it.
    span.kind = around[-1].kind if around[-1].kind in (READING, COMMUNICATION) else span.kind
    if span.name.startswith("autograd::engine::evaluate_function: "):
        caller = callers.get(span.sequence, span)
        span.phase, span.module, span.source = "backward", caller.module, caller.source
    elif span.sequence >= 0:
        # The last operator with a number is the one that is differentiated.
        callers[span.sequence] = span
    for name in ("phase", "module", "source"):
        setattr(span, name, getattr(span, name) or getattr(around[-1], name))


def costs(
    spans: Sequence[Span], steps: int, matrix_rate: float, bandwidth: float
) -> list[dict[str, Any]]:
    """Return the costs by phase, operator, layer and source line, the largest first.

    Args:
        spans: of all profiled steps.
        steps: their number.
        matrix_rate: operations per second of a large matmul.
        bandwidth: bytes per second of a large copy.
    """
    groups = dict[tuple[str, str, str, str, str], list[Span]]()
    for span in spans:
        # Layers of one kind are one row: the numbers in their paths are left out.
        module = ".".join("*" if name.isdigit() else name for name in span.module.split("."))
        key = span.phase, span.name, module or "unknown", span.source or "unknown", span.kind
        groups.setdefault(key, []).append(span)
    whole = sum(span.alone for span in spans)
    found = list[dict[str, Any]]()
    for key, group in groups.items():
        alone = sum(span.alone for span in group)
        # The operations of an operator that only calls others are theirs.
        own = [span for span in group if 2 * span.alone >= span.end - span.start]
        busy = sum(span.alone for span in own) / 1e9 or 1.0
        found.append({
            **dict(zip(("phase", "operator", "module", "source", "kind"), key)),
            "calls": round(len(group) / steps, 2),
            "seconds": alone / 1e9 / steps,
            "share": alone / whole,
            "matrix_share": sum(span.flops for span in own) / busy / matrix_rate or None,
            "bandwidth_share": sum(span.bytes for span in own) / busy / bandwidth or None,
        })  # fmt: skip
    return sorted(found, key=lambda cost: -float(cost["seconds"]))
