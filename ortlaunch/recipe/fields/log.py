"""The section `log` of a recipe: output, trackers and profiles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from ortlaunch.recipe.fields.section import APPLIED, Positive, Section, convert_list_to_tuple


class Log(Section, resume_rule=APPLIED):
    """Output during training."""

    every_steps: Positive = 10
    """Steps between printed and recorded metrics."""
    ranks: Literal["first", "all"] = "first"
    """Ranks whose output the terminal shows during the run: rank 0, or all, with every line after
    `HOST rank N: `. Each rank has its own logs in the run folder, and the error of any rank is
    shown at the end."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...],
        BeforeValidator(convert_list_to_tuple),
    ] = ()
    """Destinations of metrics in addition to metrics.jsonl; each needs the extra of its name. W&B
    and MLflow read account and server from their own variables (`WANDB_*`, `MLFLOW_*`;
    `WANDB_MODE=offline` works). A tracker that fails never ends a run."""
    project: str | None = None
    """W&B's project, MLflow's experiment; null: the recipe's name."""
    profile_steps: (
        Annotated[tuple[Positive, Positive], BeforeValidator(convert_list_to_tuple)] | None
    ) = None
    """The first and the last step to profile, as `[4, 9]`: the ten operators that take
    longest are printed and written to profile.json and `ortlaunch report`, and a timeline for
    chrome://tracing and Perfetto to trace.json.gz. Every other step is profiled; those between them
    measure the profiler's own cost. Costs, with ort, the memory of a second session. The first
    steps also compile and fill caches: begin at 4 or later. On a CPU only."""
