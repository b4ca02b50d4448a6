"""A summary of engine.json in a few lines: before step 1 the plan, at the end the outcome."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from ortlaunch.run_folder.engine_report import (
    Binding,
    ChunkedLoss,
    EngineReport,
    GraphReport,
    OnnxRuntime,
    OptimizerGroup,
)
from ortlaunch.units import align_columns, count_with_noun
from ortlaunch.worker.data.mixture import streams_of
from ortlaunch.worker.data_audit import audits, require_sound
from ortlaunch.worker.length import length_line
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.module_copies import copy_modules
from ortlaunch.worker.supervision.progress import print_wrapped


def announce(session: Session) -> None:
    """Before step 1, print on rank 0 the plan, the data, and notes on copies of the user's code."""
    engine = session.engine
    done = session.checkpoint
    length = length_line(
        session.recipe,
        session.plan.batch,
        len(session.data.train),
        done.step if done else 0,
        done.samples if done else 0,
    )
    if session.group.rank == 0:
        data = [length, *session.data.class_lines()]
        streams = bool(session.data.train and streams_of(session.data.train))
        data += [line for part in audits(session.data, streams=streams) for line in part.lines()]
        lines = [*plan_lines(engine.report()), *engine.notes, *data, *copy_modules(session.run)]
        print_wrapped(*lines)
        if streams:
            require_sound(session.data, streams)


def print_outcome(session: Session, lines: Sequence[str] = ()) -> None:
    """After the last step, print on rank 0 late notes, the outcome and further lines."""
    if session.group.rank == 0:
        report = session.engine.report()
        said = [*late_notes(report, session.engine.notes), *outcome_lines(report), *lines]
        print_wrapped(*said, *copy_modules(session.run, again=True))


# Names, and ranks, that a line has at most.
_MOST_NAMES = 6
_MOST_RANKS = 8


def plan_lines(report: EngineReport) -> list[str]:
    """Return the plan of the run, with each part that replaces another."""
    engine = report.engine
    optimizer = report.optimizer
    fp16 = report.fp16_optimizer
    whole = report.trained_parameters == report.parameters
    trained = "" if whole else f"{report.trained_parameters:,} trained of "
    lines = [
        f"engine {engine.used} on {report.device}, {report.precision}, "
        f"{trained}{report.parameters:,} parameters, "
        f"{count_with_noun(report.ranks, 'rank')} x {count_with_noun(report.threads_per_rank, 'thread')}"
        + ("" if report.sharding == "none" else f", sharding: {report.sharding}")
    ]
    if engine.fallback_reason:
        lines.append(
            f"FALLBACK: engine {engine.asked} was requested, {engine.used} runs: "
            f"{engine.fallback_reason}"
        )
    lines += [
        *_matmul_precision(report),
        *_chunked_loss(report.chunked_loss),
        *_settings(report.onnxruntime),
    ]
    lines += _binding(report.binding)
    if optimizer.why:
        lines.append(f"optimizer: {optimizer.used} in place of {optimizer.asked}: {optimizer.why}")
    lines += _groups(optimizer.groups)
    if fp16.applied:
        why = f" ({fp16.why})" if fp16.why else ""
        lines.append(f"FP16_Optimizer: {fp16.by}'s, overflow check and norm in one pass{why}")
    elif report.sharding.startswith("DeepSpeed"):
        lines.append(f"FP16_Optimizer: not applied: {fp16.why}")
    return lines


def _short(name: str) -> str:
    # A line has at most 100 columns.
    return name if len(name) <= 48 else f"...{name[-45:]}"


def _groups(groups: Sequence[OptimizerGroup]) -> list[str]:
    """Return a table of the parameter groups, if the trained ones differ in more than decay."""
    kinds = {(group.optimizer, group.learning_rate) for group in groups if group.optimizer}
    if len(kinds) < 2:
        return []
    rows = [("optimizer", "rate", "decay", "tensors", "values", "first parameter")]
    rows += [
        (
            group.optimizer or "frozen",
            f"{group.learning_rate:.3g}" if group.optimizer else "",
            f"{group.weight_decay:g}" if group.optimizer else "",
            f"{len(group.parameters):,}",
            f"{group.values:,}",
            _short(group.parameters[0]),
        )
        for group in groups
    ]
    return align_columns(rows)


def _matmul_precision(report: EngineReport) -> list[str]:
    """Return the format of float32 matmuls, if one was chosen."""
    found = report.matmul_precision
    if found.onednn:
        return [
            "matmul in float32 by oneDNN, which is faster than MKL on this processor (engine.onednn)"
        ]
    if found.asked == "highest":
        return []
    nothing = found.gains_nothing
    # On a CPU the setting applies to torch's matmuls only, not to ONNX Runtime's own.
    graph = report.onnxruntime and report.onnxruntime.training_graph
    if graph and report.device == "cpu" and not products_called(graph):
        nothing = (
            nothing
            or "torch computes no matmul of ONNX Runtime's graph, because every weight is "
            "smaller than 256 x 256"
        )
    result = f"no effect: {nothing}" if nothing else f"matmul of float32 in {found.format}"
    return [f"matmul_precision {found.asked}: {result}"]


def _binding(found: Binding | None) -> list[str]:
    """Return the cores of the ranks, if they are bound or a binding was requested."""
    if found is None or (found.used == "none" and found.asked in ("auto", "none")):
        return []
    if found.used == "none":
        return [f"binding {found.asked}: not bound: {found.why}"]
    ranks = ", ".join(
        f"rank {rank} on cores {cores}" for rank, cores in enumerate(found.cores[:_MOST_RANKS])
    )
    more = f" and {len(found.cores) - _MOST_RANKS} more" if len(found.cores) > _MOST_RANKS else ""
    return [f"binding {found.used}: {ranks}{more}"]


def _chunked_loss(found: ChunkedLoss) -> list[str]:
    """Return whether head and loss run in chunks; nothing if neither requested nor used."""
    if found.rows:
        return [
            f"chunked_loss {found.asked}: output layer and loss in chunks of {found.rows} "
            "labelled rows"
        ]
    return (
        []
        if found.asked in ("auto", "off")
        else [f"chunked_loss {found.asked}: not applied: {found.why}"]
    )


def products_called(graph: GraphReport) -> int:
    """Return the number of matmuls for which ONNX Runtime's graph calls torch."""
    return sum(graph.aten.get(name, 0) for name in ("linear", "matmul", "tensordot"))


def _settings(ort: OnnxRuntime | None) -> list[str]:
    """Return the settings of engine ort that differ from their defaults.

    They include the decision on the copy before the export, where the recipe leaves it open.
    """
    if ort is None:
        return []
    lines = []
    if ort.settings:
        lines.append(
            "settings: "
            + ", ".join(f"{name}: {json.dumps(value)}" for name, value in ort.settings.items())
        )
    copy = ort.deepcopy_before_export
    if copy and not copy.used and "deepcopy_before_export" not in ort.settings:
        lines.append(
            f"deepcopy_before_export: off, for twice the parameters ({copy.parameter_bytes:,} "
            f"bytes) would not fit into the free memory ({copy.free_bytes:,} bytes, by "
            f"{copy.limit}); forward passes of the export may change buffers"
        )
    if ort.variables:
        lines.append(
            "from the environment: "
            + ", ".join(f"{key}={text}" for key, text in ort.variables.items())
        )
    return lines


def late_notes(report: EngineReport, told: Collection[str]) -> list[str]:
    """Return notes that were raised after step 1, such as one on another export."""
    return [
        note
        for note in (report.onnxruntime.notes if report.onnxruntime else ())
        if note not in told
    ]


def outcome_lines(report: EngineReport) -> list[str]:
    """Return lines on the engine that ran."""
    # ONNX Runtime counts the passes of its own module, of which there are none.
    if report.engine.fallback:
        optimizer = f"optimizer {report.optimizer.used}"
        return [f"ran on engine {report.engine.used}: {report.engine.fallback}", optimizer]
    ort = report.onnxruntime
    if report.inductor:
        graphs = report.inductor.graphs
        breaks = report.inductor.graph_breaks
        return [
            f"ran on engine inductor: {graphs} graphs compiled, {breaks} graph breaks on rank 0"
        ]
    if not ort:
        return [f"ran on engine {report.engine.used}"]
    passes = (
        f"{ort.forward_passes} forward, {ort.backward_passes} backward passes "
        "by ONNX Runtime on rank 0"
    )
    ran = f"ran on engine {report.engine.used}: {passes}, {count_with_noun(ort.fallbacks, 'fallback')}"
    return [ran, *_graph(ort), f"optimizer {report.optimizer.used}", *_torch(ort)]


def _torch(ort: OnnxRuntime) -> list[str]:
    """Return the torch calls inside the graph, with advice if they took most of the time."""
    if not ort.torch_calls:
        return []
    # The slowest first.
    slowest = sorted(ort.torch_calls.items(), key=lambda item: -item[1].seconds)
    names = ", ".join(f"{name} ({calls.forward} calls)" for name, calls in slowest[:_MOST_NAMES])
    more = f" and {len(slowest) - _MOST_NAMES} more" if len(slowest) > _MOST_NAMES else ""
    advice = "; another engine may be faster: try engine.name=auto" if ort.torch_share > 0.5 else ""
    return [
        f"torch inside the graph: {names}{more}; {ort.torch_share:.0%} of the passes' time{advice}"
    ]


def _graph(ort: OnnxRuntime) -> list[str]:
    """Return the content of one forward and backward pass; nothing if no graph was built."""
    graph = ort.training_graph
    if graph is None:
        return []
    nodes = graph.forward_nodes + (graph.backward_nodes or 0)
    calls = ((graph.aten, "torch operators (ATen)"), (graph.python, "Python functions (PythonOp)"))
    inside = [f"{sum(found.values())} {noun}" for found, noun in calls if found]
    inside += [
        f"{n} nodes on {name}"
        for name, n in graph.nodes_by_provider.items()
        if name != graph.provider
    ]
    amid = f", with {', '.join(inside)}" if inside else ""
    return [
        f"  {count_with_noun(ort.exports, 'export')}; the graph of a step has {nodes} nodes{amid}"
    ]
