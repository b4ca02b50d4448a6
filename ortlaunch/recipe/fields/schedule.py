"""The recipe's section `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortlaunch.recipe.fields.section import APPLIED, Decay, Fraction, Section

# 0 is valid: no warm-up.
Length = Annotated[int, Field(ge=0)]


class Schedule(Section, resume_rule=APPLIED):
    """Learning rate over the steps, after a warm-up."""

    name: Literal["linear", "cosine", "polynomial", "constant", "wsd"] = "linear"
    """Decay after the warm-up: `linear`, `cosine` and `polynomial` to 0 (or to `minimum_ratio`),
    which they reach after the last step, so that this step has an effect, too; `wsd` (warm-up,
    stable, decay) at the end alone, `constant` not at all."""
    warmup_steps: Length | None = None
    """Steps of the warm-up: the first has a rate of peak / steps, the last one the peak (one step
    ahead of transformers', whose first step has a rate of 0); alternatively give
    `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a share of all steps."""
    warmup_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the warm-up: 1 is linear, 2 quadratic."""
    minimum_ratio: Decay = 0.0
    """Final rate of `linear`, `cosine` and `wsd`, as a share of `optimizer.learning_rate`: 0.1 in
    Llama 2."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`: 0.5 in BERT-large's phase 1 and 2."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """The decay of `wsd` as a share of all steps."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Form of the decay of `wsd`."""
