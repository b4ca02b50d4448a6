"""A summary of engine.json in a few lines: before step 1 the plan, at the end the outcome."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from ortlaunch.base.units import aligned_table_lines, count_with_noun, first_names_and_count_of_rest
from ortlaunch.run_folder.engine_report import (
    Binding,
    ChunkedLoss,
    EngineReport,
    OnnxRuntime,
    OptimizerGroup,
)
from ortlaunch.worker.data.mixture import streamed_sources_of_samples
from ortlaunch.worker.data_audit import (
    audit_training_and_evaluation_samples,
    refuse_severe_findings_not_allowed,
)
from ortlaunch.worker.run_length import run_length_line
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.module_copies import (
    copy_user_modules_into_run_folder_and_list_notes,
)
from ortlaunch.worker.supervision.progress import print_wrapped_to_terminal_width


def print_plan_and_copy_user_modules(session: Session) -> None:
    """Before step 1, print on rank 0 the plan, the data, and notes on copies of the user's code."""
    engine = session.engine
    start_checkpoint = session.checkpoint
    length = run_length_line(
        session.recipe,
        session.plan.batch,
        len(session.data.train),
        start_checkpoint.step if start_checkpoint else 0,
        start_checkpoint.samples if start_checkpoint else 0,
    )
    if session.group.rank == 0:
        data = [length, *session.data.class_lines()]
        streams = bool(session.data.train and streamed_sources_of_samples(session.data.train))
        data += [
            line
            for part in audit_training_and_evaluation_samples(session.data, audits_streams=streams)
            for line in part.summary_lines()
        ]
        lines = [
            *engine_plan_lines(engine.engine_report_so_far()),
            *engine.notes,
            *data,
            *copy_user_modules_into_run_folder_and_list_notes(session.run),
        ]
        print_wrapped_to_terminal_width(*lines)
        if streams:
            refuse_severe_findings_not_allowed(session.data, streams)


def print_outcome_and_copy_late_modules(
    session: Session, further_lines: Sequence[str] = ()
) -> None:
    """After the last step, print on rank 0 late notes, the outcome and further lines."""
    if session.group.rank == 0:
        report = session.engine.engine_report_so_far()
        late_and_outcome_lines = [
            *ort_notes_not_yet_shown(report, session.engine.notes),
            *engine_outcome_lines(report),
            *further_lines,
        ]
        print_wrapped_to_terminal_width(
            *late_and_outcome_lines,
            *copy_user_modules_into_run_folder_and_list_notes(session.run, keeps_existing=True),
        )


# Names, and ranks, that a line has at most.
_MOST_NAMES = 6
_MOST_RANKS = 8


def engine_plan_lines(engine_report: EngineReport) -> list[str]:
    """Return the plan of the run, with each part that replaces another."""
    engine = engine_report.engine
    optimizer = engine_report.optimizer
    fp16 = engine_report.fp16_optimizer
    quantized = engine_report.quantized_weights
    documents = engine_report.packed_documents
    all_are_trained = engine_report.trained_parameters == engine_report.parameters
    trained = "" if all_are_trained else f"{engine_report.trained_parameters:,} trained of "
    lines = [
        f"engine {engine.used} on {engine_report.device}, {engine_report.precision}, "
        f"{trained}{engine_report.parameters:,} parameters, "
        f"{count_with_noun(engine_report.ranks, 'rank')} x {count_with_noun(engine_report.threads_per_rank, 'thread')}"
        + ("" if engine_report.sharding == "none" else f", sharding: {engine_report.sharding}")
    ]
    if engine.fallback_reason:
        lines.append(
            f"FALLBACK: engine {engine.asked} was requested, {engine.used} runs: "
            f"{engine.fallback_reason}"
        )
    lines += [
        *_matmul_precision_lines(engine_report),
        *_chunked_loss_lines(engine_report.chunked_loss),
        *([f"quantized weights: {quantized}"] if quantized else []),
        *([f"packed documents: {documents}"] if documents else []),
        *_ort_setting_lines(engine_report.onnxruntime),
        *_binding_lines(engine_report.binding),
    ]
    if optimizer.why:
        lines.append(f"optimizer: {optimizer.used} in place of {optimizer.asked}: {optimizer.why}")
    lines += _parameter_group_table_lines(optimizer.groups)
    if fp16.applied:
        lines.append("FP16_Optimizer: overflow check and norm in one pass")
    elif engine_report.sharding.startswith("DeepSpeed"):
        lines.append(f"FP16_Optimizer: not applied: {fp16.why}")
    return lines


def _parameter_group_table_lines(groups: Sequence[OptimizerGroup]) -> list[str]:
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
            # A line has at most 100 columns.
            group.parameters[0]
            if len(group.parameters[0]) <= 48
            else f"...{group.parameters[0][-45:]}",
        )
        for group in groups
    ]
    return aligned_table_lines(rows)


def _matmul_precision_lines(engine_report: EngineReport) -> list[str]:
    precision_report = engine_report.matmul_precision
    if precision_report.onednn:
        return [
            "matmul in float32 by oneDNN, which is faster than MKL on this processor (engine.onednn)"
        ]
    if precision_report.asked == "highest":
        return []
    no_gain_reason = precision_report.gains_nothing
    # On a CPU the setting applies to torch's matmuls only, not to ONNX Runtime's own.
    graph = engine_report.onnxruntime and engine_report.onnxruntime.training_graph
    if (
        graph
        and engine_report.device == "cpu"
        and not any(graph.aten.get(name) for name in ("linear", "matmul", "tensordot"))
    ):
        no_gain_reason = (
            no_gain_reason
            or "torch computes no matmul of ONNX Runtime's graph, because every weight is "
            "smaller than 256 x 256"
        )
    result = (
        f"no effect: {no_gain_reason}"
        if no_gain_reason
        else f"matmul of float32 in {precision_report.format}"
    )
    return [f"matmul_precision {precision_report.asked}: {result}"]


def _binding_lines(binding_report: Binding | None) -> list[str]:
    """Return the cores of the ranks, if they are bound or a binding was requested."""
    if binding_report is None or (
        binding_report.used == "none" and binding_report.asked in ("auto", "none")
    ):
        return []
    if binding_report.used == "none":
        return [f"binding {binding_report.asked}: not bound: {binding_report.why}"]
    ranks = [f"rank {rank} on cores {cores}" for rank, cores in enumerate(binding_report.cores)]
    return [f"binding {binding_report.used}: {first_names_and_count_of_rest(ranks, _MOST_RANKS)}"]


def _chunked_loss_lines(chunked_loss: ChunkedLoss) -> list[str]:
    """Return whether head and loss run in chunks; nothing if neither requested nor used."""
    if chunked_loss.rows:
        return [
            f"chunked_loss {chunked_loss.asked}: output layer and loss in chunks of {chunked_loss.rows} "
            "labelled rows"
        ]
    return (
        []
        if chunked_loss.asked in ("auto", "off")
        else [f"chunked_loss {chunked_loss.asked}: not applied: {chunked_loss.why}"]
    )


def _ort_setting_lines(ort_report: OnnxRuntime | None) -> list[str]:
    """Return the settings of engine ort that differ from their defaults.

    They include the decision on the copy before the export, where the recipe leaves it open.
    """
    if ort_report is None:
        return []
    lines = []
    if ort_report.settings:
        lines.append(
            "settings: "
            + ", ".join(
                f"{name}: {json.dumps(value)}" for name, value in ort_report.settings.items()
            )
        )
    if ort_report.variables:
        lines.append(
            "from the environment: "
            + ", ".join(f"{key}={text}" for key, text in ort_report.variables.items())
        )
    return lines


def ort_notes_not_yet_shown(engine_report: EngineReport, shown_notes: Collection[str]) -> list[str]:
    """Return notes that were raised after step 1, such as one on another export."""
    return [
        note
        for note in (engine_report.onnxruntime.notes if engine_report.onnxruntime else ())
        if note not in shown_notes
    ]


def engine_outcome_lines(engine_report: EngineReport) -> list[str]:
    """Return lines on the engine that ran."""
    # ONNX Runtime counts the passes of its own module, of which there are none.
    if engine_report.engine.fallback:
        return [
            f"ran on engine {engine_report.engine.used}: {engine_report.engine.fallback}",
            f"optimizer {engine_report.optimizer.used}",
        ]
    ort_report = engine_report.onnxruntime
    if engine_report.inductor:
        return [
            f"ran on engine inductor: {engine_report.inductor.graphs} graphs compiled, "
            f"{engine_report.inductor.graph_breaks} graph breaks on rank 0"
        ]
    if not ort_report:
        return [f"ran on engine {engine_report.engine.used}"]
    passes = (
        f"{ort_report.forward_passes} forward, {ort_report.backward_passes} backward passes "
        "by ONNX Runtime on rank 0"
    )
    ran = f"ran on engine {engine_report.engine.used}: {passes}, {count_with_noun(ort_report.fallbacks, 'fallback')}"
    return [
        ran,
        *_training_graph_lines(ort_report),
        f"optimizer {engine_report.optimizer.used}",
        *_torch_in_graph_lines(ort_report),
    ]


def _torch_in_graph_lines(ort_report: OnnxRuntime) -> list[str]:
    """Return the torch calls inside the graph, with advice if they took most of the time."""
    if not ort_report.torch_calls:
        return []
    # The slowest first.
    slowest = sorted(ort_report.torch_calls.items(), key=lambda item: -item[1].seconds)
    names = [f"{name} ({calls.forward} calls)" for name, calls in slowest]
    advice = (
        "; another engine may be faster: try engine.name=auto"
        if ort_report.torch_share > 0.5
        else ""
    )
    return [
        f"torch inside the graph: {first_names_and_count_of_rest(names, _MOST_NAMES)}; "
        f"{ort_report.torch_share:.0%} of the passes' time{advice}"
    ]


def _training_graph_lines(ort_report: OnnxRuntime) -> list[str]:
    """Return the content of one forward and backward pass; nothing if no graph was built."""
    graph = ort_report.training_graph
    if graph is None:
        return []
    nodes = graph.forward_nodes + (graph.backward_nodes or 0)
    calls = ((graph.aten, "torch operators (ATen)"), (graph.python, "Python functions (PythonOp)"))
    inside = [
        *(
            f"{sum(count_by_operator.values())} {noun}"
            for count_by_operator, noun in calls
            if count_by_operator
        ),
        *(
            f"{n} nodes on {name}"
            for name, n in graph.nodes_by_provider.items()
            if name != graph.provider
        ),
    ]
    other_nodes_text = f", with {', '.join(inside)}" if inside else ""
    return [
        f"  {count_with_noun(ort_report.exports, 'export')}; the graph of a step has {nodes} nodes{other_nodes_text}"
    ]
