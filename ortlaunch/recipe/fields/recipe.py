"""A recipe: one frozen model for each section, in the file of its name.

The docstring under each field is the manual; error messages and `ortlaunch schema` read it on
demand (`field_lookup.docstring_by_section_and_field`), not pydantic at every start. Imports pydantic only, so that
`--help`, `validate` and `plan` stay fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PrivateAttr

from ortlaunch.recipe.fields.checkpoint import Checkpoint
from ortlaunch.recipe.fields.data import Data
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.launch import Launch
from ortlaunch.recipe.fields.log import Log
from ortlaunch.recipe.fields.model import Model
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.recipe.fields.schedule import Schedule
from ortlaunch.recipe.fields.section import (
    APPLIED,
    REFUSED,
    ChangeRule,
    NameIn,
    Positive,
    PositiveOrAuto,
    Section,
)
from ortlaunch.recipe.fields.submit import Submit
from ortlaunch.recipe.fields.sweep import SWEEP_ALONE, Search
from ortlaunch.recipe.fields.train import Train
from ortlaunch.recipe.fields.zero import Zero
from ortlaunch.tables.precisions import PRECISIONS, Precision


class Batch(Section, resume_rule=APPLIED):
    """global_size = micro_size x accumulation_steps x data-parallel ranks."""

    global_size: Positive | None = None
    """Samples of an optimizer step, over all ranks. Give two of the three fields, or global_size
    alone (accumulation_steps is 1 then)."""
    micro_size: PositiveOrAuto | None = None
    """Samples of one forward and backward pass of a rank. `auto`: the largest number that fits into
    memory, measured before the run (seconds for each try); `global_size` is kept by accumulation,
    so give it, and no accumulation_steps. The result is in the run folder's recipe.yaml, the tries
    are in its micro_size.json."""
    accumulation_steps: Positive | None = None
    """Forward and backward passes of each rank before an optimizer step."""


class Recipe(Section):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100), APPLIED]
    """Name of the run: at most 100 letters, digits, `.`, `_` and `-`."""
    seed: Annotated[
        int,
        Field(ge=0, lt=2**31),
        ChangeRule(REFUSED, "data", "it determines order, masking and dropout"),
    ] = 42
    """Seeds weights, masking, order and dropout."""
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    # Weights in a checkpoint are float32 in every precision: loading works, but the steps differ.
    precision: Annotated[
        str,
        NameIn(PRECISIONS),
        ChangeRule(REFUSED, "precision", "the weights are float32 in each, but the steps differ"),
    ] = "fp32"
    """Number format of the passes; weights keep a float32 copy."""
    engine: Engine = Engine()
    zero: Annotated[Zero | None, APPLIED] = None
    parallel: Annotated[Parallel | None, APPLIED] = None
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    launch: Launch = Launch()
    submit: Submit = Submit()
    log: Log = Log()
    sweep: Annotated[Search | None, SWEEP_ALONE] = None
    """A search over fields of this recipe, for `ortlaunch sweep`; null: none."""
    # Folder of the file from which the Python API loaded it: the user's own modules are there.
    _folder: str = PrivateAttr("")

    def sweep_lines(self) -> list[str]:
        """Return the sweep as lines for a person; none without one."""
        return [] if self.sweep is None else self.sweep.sweep_summary_lines(self.train.max_steps)

    def name_and_epochs_of_intervals(self) -> Iterator[tuple[str, float]]:
        """Yield the intervals that are given in epochs, by their names in steps.json."""
        for name, interval_epochs in (
            ("evaluated_every", self.train.evaluate_every_epochs),
            ("saved_every", self.checkpoint.every_epochs),
        ):
            if interval_epochs is not None:
                yield name, interval_epochs

    @property
    def has_fsdp2(self) -> bool:
        """Whether FSDP2 divides the model."""
        return self.parallel is not None and self.zero is None

    @property
    def autotp_rank_count(self) -> int:
        """Ranks that compute a layer together by DeepSpeed's AutoTP; 1 without it."""
        return self.parallel.tensor if self.parallel and self.zero else 1

    @property
    def output_layer_sharding(self) -> str:
        """The name of what divides the weight of the output layer in its passes; "" if nothing does."""
        if self.parallel and self.parallel.tensor > 1:
            return "parallel.tensor"
        return "ZeRO 3" if self.zero and self.zero.stage == 3 else ""

    @property
    def format(self) -> Precision:
        """The precision's row in the table of precisions."""
        return PRECISIONS[self.precision]
