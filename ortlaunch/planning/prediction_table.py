"""The table of predicted engines that a plan prints."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.base.units import aligned_table_lines, human_bytes
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.cached_prediction import read_cached_prediction_or_none


def engine_prediction_table_lines(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield a table of the predictions of every engine, or the reason why there is none."""
    prediction = read_cached_prediction_or_none(recipe, plan)
    if prediction is None:
        yield "seconds a step: not predicted for this model and batch on this machine yet (plan --predict)"
        return
    rows = [("engine", "seconds a step", "memory a rank")]
    rows += [
        (
            f"{'->' if engine_name == recipe.engine.name else '':2} {engine_name}",
            f"{prediction.measured_or_corrected_step_seconds(engine_name):.3g}"
            f"{' (of a run)' if engine_name in prediction.measured else ''}",
            human_bytes(engine_prediction["memory"]),
        )
        for engine_name, engine_prediction in prediction.engines.items()
    ]
    yield "predicted, from rates of this machine" + (
        ", without communication:" if plan.world_size > 1 else ":"
    )
    yield from aligned_table_lines(rows)
    if prediction.reason_seconds_are_doubtful:
        yield f"  the seconds are in doubt: {prediction.reason_seconds_are_doubtful}; measure again: plan --predict"
        yield from (f"    {other}" for other in prediction.others)
