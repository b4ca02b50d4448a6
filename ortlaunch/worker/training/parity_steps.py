"""Comparison of a run's first steps with plain PyTorch, on each rank's own batch.

All ranks stop together. This module writes parity.jsonl and the field `parity` of engine.json; the
comparison itself is in comparison.py.
"""

from __future__ import annotations

import gc
import time
from typing import Any, cast

from ortlaunch.base.errors import EngineError, ParityError
from ortlaunch.base.json_types import Json
from ortlaunch.recipe.rules.parity import ParityStepCount, parity_step_count_and_reason
from ortlaunch.run_folder.engine_report import Parity
from ortlaunch.run_folder.folder import (
    RunDir,
    json_text,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.run_folder.records import ParityLine, json_values_of_record
from ortlaunch.worker.allocator import trim_heap
from ortlaunch.worker.engine.comparison import (
    compare_passes_replaying_random_numbers_if_drawn,
    evaluation_losses_or_none,
    owner_name_and_ratio_of_active_dropouts,
)
from ortlaunch.worker.engine.differences import Comparison, Difference
from ortlaunch.worker.engine.divided_comparison import (
    ReferencePass,
    compare_pass_of_divided_model_on_rank_0,
)
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.engine.stepping import DeepSpeedStepper, ShardedStepper
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session

ParityRecord = Json
# Parameters that are named at most.
_MAX_NAMED = 5
# What a line of an earlier start must have, to count in the summary.
_REQUIRED_KEYS = ("step", "loss_difference", "gradient_difference", "worst", "passed")
_ADVICE = (
    "Training ends here. If the engine is wrong, use engine.name=inductor or eager; if this is "
    "rounding, raise engine.parity_tolerance"
)
_DIVISION_ADVICE = (
    "Training ends here. Look at parallel.tensor_plan: a layer between a colwise and a rowwise one, "
    "such as a norm of heads, is replicated_with_grad_allreduce; or use parallel.shard alone"
)
_SWITCH_OFF_ADVICE = "; engine.parity_steps=0 trains without a comparison"


class ParitySteps:
    """The compared steps of a run, from step 0 on; `with_table` also prints a table at the end."""

    def __init__(self, session: Session, first_step: int, with_table: bool = False) -> None:
        recipe = session.recipe
        engine = session.engine
        self.recipe = recipe
        self.run = session.run
        self.group = session.group
        self.engine = engine
        self.batches = session.batches
        self.with_table = with_table
        # `why` is set if the comparison was not requested, but chosen by `auto`.
        steps, self.automatic_reason = compared_step_count_and_reason(session)
        self.end_step = min(steps, recipe.train.steps)
        is_divided = self.group.mesh is not None
        reference = engine.reference_pass
        if is_divided and (reference is None or reference.is_compared):
            # A resumed run has no whole model of its step.
            self.end_step = 0
        self.tolerance = recipe.engine.parity_tolerance or recipe.format.tolerance
        self.dropouts = len(owner_name_and_ratio_of_active_dropouts(engine.plain))
        self.is_precision_lowered = recipe.engine.matmul_precision != "highest"
        self.comparison_module: Any = None
        self.replaying_module: Any = None
        self.records = _comparison_records_of_earlier_starts(session.run, first_step, session.group)
        if is_divided and self.automatic_reason and not reference and session.checkpoint is None:
            self._end_comparison_as_not_compared(
                f"{engine.record.parameters:,} parameters are many for the CPU of rank 0; "
                "engine.parity_steps=1 compares them"
            )
        # The requested engine fell back to eager, which the recipe allows.
        elif not is_divided and is_plain_pytorch(engine):
            self._end_comparison_as_not_compared("plain PyTorch itself runs")
        elif self.records:
            engine.record.parity = self._parity_summary_of_all_steps()

    def compare_and_record_step_if_due(self, step_index: int) -> None:
        """Compare the first micro batch of `step_index` (from 0), if the step is chosen (collective).

        Raises:
            ParityError: a rank is above the tolerance; every rank raises the same.
            EngineError: a rank could not compare.
        """
        if step_index >= self.end_step:
            return
        began = time.perf_counter()
        records = self.group.gather(
            self.compare_step_on_this_rank(step_index)
            if self.engine.reference_pass is None
            else self._compare_divided_model(self.engine.reference_pass)
        )
        failed = next((record for record in records if "error" in record), None)
        # An automatic comparison that fails does not end the run.
        if failed and self.automatic_reason:
            self._end_comparison_as_not_compared(failed["error"])
            return
        if failed:
            raise EngineError(
                f"engine.parity_steps: rank {failed['rank']} could not compare with plain PyTorch: "
                f"{failed['error']}"
                f"{'; leave engine.parity_steps out' if failed.get('random') else ''}"
            )
        record = {
            **_failed_or_most_different_record(records),
            "seconds": round(time.perf_counter() - began, 3),
        }
        self.records.append(record)
        self.engine.record.parity = self._parity_summary_of_all_steps()
        if self.group.rank == 0:
            # Rewritten whole: lines of steps after the resumed checkpoint disappear.
            write_text_atomically(
                self.run.parity,
                "".join(json_text(earlier_record) + "\n" for earlier_record in self.records),
            )
            write_json_atomically(self.run.engine, self.engine.engine_report_so_far().to_json())
        if not record["passed"]:
            raise ParityError(self._parity_failure_message(record))
        if record.get("not_judged"):
            line = f"parity, step {record['step']}: not judged: {record['not_judged']}"
        else:
            line = (
                f"parity: step 1 in plain PyTorch: loss within {record['loss_difference']:.2g}, "
                f"gradients within {record['gradient_difference']:.2g}; took "
                f"{record['seconds']:.1f} s, once{_rounding_and_random_number_lines(record)}"
                if self.automatic_reason
                else _parity_differences_line(record)
            )
        self.group.print_on_rank_0(line)
        if step_index + 1 == self.end_step:
            self._free_comparison_graphs()
            if not self.automatic_reason:
                self.group.print_on_rank_0(self._passed_text_or_refuse_unjudged())

    def _end_comparison_as_not_compared(self, reason: str) -> None:
        self.end_step = 0
        self._free_comparison_graphs()
        self.engine.record.parity = Parity("not compared", reason)
        self.group.print_on_rank_0(f"parity: not compared: {reason}")

    def _free_comparison_graphs(self) -> None:
        self.comparison_module = self.replaying_module = None
        # An ORTModule is part of reference cycles.
        gc.collect()
        trim_heap()

    def _compare_divided_model(self, reference: ReferencePass) -> ParityRecord:
        """Return rank 0's record of the first step, on all ranks (collective)."""
        if reference.error:
            return {"rank": 0, "error": reference.error}
        # An error on one rank ends the run: the others wait for its part.
        comparison = compare_pass_of_divided_model_on_rank_0(
            cast(ShardedStepper | DeepSpeedStepper, self.engine.stepper),
            reference,
            self.engine.to_device(reference.batch),
            self.recipe.precision,
        )
        record = comparison and self._json_record_of_comparison(1, comparison)
        return dict(self.group.gather(record)[0])

    def compare_step_on_this_rank(self, step_index: int) -> ParityRecord:
        """Return this rank's record of the step, or the error that prevented it."""
        engine = self.engine
        recipe = self.recipe
        try:
            batch = engine.to_device(
                self.batches.read_micro_batch_and_count_tokens(
                    step_index, 0, self.group.data_parallel.rank
                )
            )
            # The comparison's passes and compilations do not belong in the counts of engine.json.
            with engine.exclude_passes_from_counts(
                with_compilations=bool(self.dropouts) or self.is_precision_lowered
            ):
                comparison = compare_passes_replaying_random_numbers_if_drawn(
                    engine.plain,
                    self._engine_module_without_dropout(),
                    batch,
                    self._engine_module_replaying_random_numbers
                    if engine.record.engine.used == "ort"
                    else None,
                    precision=recipe.precision,
                    uses_autocast=recipe.zero is None,
                    tolerance=self.tolerance,
                )
                if step_index + 1 == self.end_step and self._compares_evaluation_loss():
                    dtype = narrow_dtype_or_none(recipe.precision) if recipe.zero is None else None
                    losses = evaluation_losses_or_none(
                        engine.plain, engine.eval_module, batch, dtype
                    )
                    if engine.evaluation_seconds_or_none is not None:
                        # The comparison has paid for the graph.
                        engine.evaluation_seconds_or_none.export = 0.0
                    comparison = comparison._replace(evaluation=losses)
        # Any exception is gathered, because the other ranks are waiting.
        except Exception as error:
            message = str(error) or type(error).__name__
            has_random_cause = isinstance(error, EngineError)
            return {"rank": self.group.rank, "error": message, "random": has_random_cause}
        return self._json_record_of_comparison(step_index + 1, comparison)

    def _compares_evaluation_loss(self) -> bool:
        """Return whether the run evaluates on the engine, in the precision of the comparison."""
        differs_in_evaluation = self.recipe.model.traits.wrapper or self.is_precision_lowered
        return self.recipe.data.evaluation is not None and not differs_in_evaluation

    def _engine_module_without_dropout(self) -> Any:
        """Return the engine's module without dropout.

        It is the run's own module if that has no dropout, else one that is exported for the
        comparison.
        """
        if self.comparison_module is None:
            self.comparison_module = self.engine.module_without_dropout_for_comparison()
        return self.comparison_module

    def _engine_module_replaying_random_numbers(self, model_with_given_random_numbers: Any) -> Any:
        if self.replaying_module is None:
            self.replaying_module = self.engine.wrap_another_model(model_with_given_random_numbers)
        return self.replaying_module

    def _json_record_of_comparison(self, step_number: int, comparison: Comparison) -> ParityRecord:
        line = ParityLine(
            step=step_number,
            rank=self.group.rank,
            loss=comparison.loss,
            reference_loss=comparison.reference_loss,
            loss_difference=comparison.loss_difference,
            gradient_difference=comparison.gradient_difference,
            state_difference=comparison.state_difference,
            evaluation_difference=comparison.evaluation_difference
            if comparison.evaluation
            else None,
            worst=[
                [_parameter_name(difference.name), *difference[1:4]]
                for difference in _state_then_gradient_differences(comparison, self.tolerance)
            ],
            rounding=[_parameter_name(name) for name in comparison.rounding] or None,
            draws=comparison.draws or None,
            not_judged=comparison.not_judged or None,
            parameters=len(comparison.gradients),
            tolerance=self.tolerance,
            passed=comparison.largest_difference <= self.tolerance,
        )
        return dict(json_values_of_record(line))

    def _parity_summary_of_all_steps(self) -> Parity:
        """Return the record for engine.json; its parameters are those of the worst step."""
        worst = _failed_or_most_different_record(self.records)
        return Parity(
            steps=[record["step"] for record in self.records],
            loss_difference=max(record["loss_difference"] for record in self.records),
            gradient_difference=max(record["gradient_difference"] for record in self.records),
            state_difference=max(record.get("state_difference", 0.0) for record in self.records),
            rounding=sorted(
                {name for record in self.records for name in record.get("rounding", ())}
            )
            or None,
            worst=[[name, value] for name, value, *_ in worst["worst"]],
            tolerance=self.tolerance,
            dropouts_switched_off=self.dropouts,
            matmul_precision="highest",
            seconds=round(sum(record.get("seconds", 0.0) for record in self.records), 3),
            why=self.automatic_reason or None,
            verdict="failed"
            if not all(record["passed"] for record in self.records)
            else "passed"
            if _judged_records(self.records)
            else "not compared",
        )

    def _parity_failure_message(self, record: ParityRecord) -> str:
        used = self.engine.record.engine.used
        return (
            f"engine {used} and plain PyTorch differ by more than {self.tolerance:g} "
            f"in step {record['step']}, on the same weights and batch (rank {record['rank']})\n"
            f"loss: {record['loss']:.6g} on {used}, {record['reference_loss']:.6g} in PyTorch\n"
            f"{_evaluation_difference_line_or_empty(record)}"
            f"{gradient_differences_table(record, used)}{_unjudged_reason_line_or_empty(record)}\n"
            f"{self._postprocess_suspicion_line_or_empty()}"
            f"{_ADVICE if self.engine.reference_pass is None else _DIVISION_ADVICE}"
            f"{_SWITCH_OFF_ADVICE if self.automatic_reason else ''}"
        )

    def _postprocess_suspicion_line_or_empty(self) -> str:
        """Return a line that names the user's function on the graph, if there is one."""
        function = self.recipe.engine.postprocess
        return (
            f"engine.postprocess={function} changed the graph that ran, and plain PyTorch has no "
            "such change; correct the function, or leave it out\n"
            if function
            else ""
        )

    def _passed_text_or_refuse_unjudged(self) -> str:
        """Return the last line of a passed comparison, after a table if requested."""
        worst = _failed_or_most_different_record(self.records)
        table_text = (
            f"{gradient_differences_table(worst, self.engine.record.engine.used)}\n"
            if self.with_table
            else ""
        )
        how = ", both compared at matmul_precision highest" if self.is_precision_lowered else ""
        judged = len(_judged_records(self.records))
        if not judged:
            text = f"parity: no step could be judged; see {self.run.parity}"
            if self.with_table:
                raise EngineError(text)
            return text
        return (
            f"{table_text}parity: passed: {judged} steps within {self.tolerance:g}{how}; "
            f"see {self.run.parity}"
        )


def is_plain_pytorch(engine: TrainingEngine) -> bool:
    """Return whether plain PyTorch itself runs, so that there is nothing to compare."""
    return (
        engine.record.engine.used == "eager"
        and not engine.record.chunked_loss.rows
        and engine.reference_pass is None
    )


def create_parity_steps_or_note_why_not(session: Session, first_step: int) -> ParitySteps | None:
    """Return the comparison of a training's first steps, or None.

    engine.json has the reason if `auto` leaves the comparison out.
    """
    step_count, reason = compared_step_count_and_reason(session)
    if step_count:
        return ParitySteps(session, first_step)
    if reason:
        session.engine.record.parity = Parity("not compared", reason)
    return None


def compared_step_count_and_reason(session: Session) -> ParityStepCount:
    """Return how many steps are compared, by the recipe and the built model's own config."""
    config = getattr(getattr(session.engine.plain, "model", None), "config", None)
    return parity_step_count_and_reason(session.recipe, getattr(config, "model_type", None))


def gradient_differences_table(record: ParityRecord, engine_name: str) -> str:
    """Return lines with the gradients that differ most."""
    width = max((len(name) for name, *_ in record["worst"]), default=0)
    return "\n".join(
        [
            f"step {record['step']}: largest relative differences of {record['parameters']} gradients:",
            *(
                f"  {name:<{width}}  {value:.2g}  (norm {norm:.4g} on {engine_name}, {reference:.4g} in PyTorch)"
                for name, value, norm, reference in record["worst"]
            ),
        ]
    )


def _parity_differences_line(record: ParityRecord) -> str:
    name = record["worst"][0][0] if record["worst"] else "none"
    return (
        f"parity, step {record['step']}: loss within {record['loss_difference']:.2g}, "
        f"gradients within {record['gradient_difference']:.2g} ({name}); "
        f"tolerance {record['tolerance']:g}{_rounding_and_random_number_lines(record)}"
    )


def _failed_or_most_different_record(records: list[ParityRecord]) -> ParityRecord:
    def badness(record: ParityRecord) -> tuple[bool, float]:
        differences = (
            record["loss_difference"],
            record["gradient_difference"],
            record.get("state_difference", 0.0),
            record.get("evaluation_difference") or 0.0,
        )
        # A failed comparison is worse than any passed one, whatever its differences are.
        return not record["passed"], max(map(float, differences))

    return max(records, key=badness)


def _state_then_gradient_differences(comparison: Comparison, tolerance: float) -> list[Difference]:
    """Return the gradients that differ most.

    Weights and buffers that a pass changed come first, if the difference is no rounding.
    """
    changed_state = [
        difference._replace(name=f"{difference.name} (changed by the pass)")
        for difference in comparison.state
        if difference.value > tolerance and not difference.rounding
    ]
    return [
        *changed_state[:_MAX_NAMED],
        *(difference for difference in comparison.gradients if not difference.rounding),
    ][:_MAX_NAMED]


def _evaluation_difference_line_or_empty(record: ParityRecord) -> str:
    difference = record.get("evaluation_difference")
    if difference is None:
        return ""
    return f"loss in evaluation: a relative difference of {float(difference):.2g}\n"


def _judged_records(records: list[ParityRecord]) -> list[ParityRecord]:
    return [record for record in records if not record.get("not_judged")]


def _rounding_and_random_number_lines(record: ParityRecord) -> str:
    names = record.get("rounding")
    draws = record.get("draws")
    judged = f"\n  rounding, as float64 shows: {', '.join(names[:_MAX_NAMED])}" if names else ""
    return judged + (
        "\n  both were given the same random numbers, which training draws itself" if draws else ""
    )


def _unjudged_reason_line_or_empty(record: ParityRecord) -> str:
    reason = record.get("not_judged")
    return f"\nfloat64 could not show whether this is rounding: {reason}" if reason else ""


def _parameter_name(prefixed_name: str) -> str:
    # LossModule adds the prefix; the rest is the model's own name.
    return prefixed_name.removeprefix("model.")


def _comparison_records_of_earlier_starts(
    run: RunDir, resumed_step: int, group: DistributedContext
) -> list[ParityRecord]:
    lines = read_json_lines_with_keys(run.parity, *_REQUIRED_KEYS)
    group.print_on_rank_0(*lines.unreadable)
    return [record for record in lines.values if record["step"] <= resumed_step]
