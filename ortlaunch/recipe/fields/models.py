"""The recipe's fields: one frozen model for each section, named after the module that uses it.

Large sections have files of their own. The docstring under each field is the manual; error messages
and `ortlaunch schema` read it on demand (`fields.manual`), not pydantic at every start. Imports
pydantic only, so that `--help`, `validate` and `plan` stay fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from ortlaunch.model_tasks import MODEL_TASKS, ModelTask
from ortlaunch.precisions import PRECISIONS, Precision
from ortlaunch.recipe.fields.best import KeepBest, StopAfter
from ortlaunch.recipe.fields.data import Data
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.launch import Launch
from ortlaunch.recipe.fields.optimizer import Optimizer
from ortlaunch.recipe.fields.schedule import Schedule
from ortlaunch.recipe.fields.section import (
    Decay,
    NameIn,
    OneOrMore,
    Positive,
    PositiveOrAuto,
    SecondsOrAuto,
    Section,
    Text,
    Words,
    tuple_of,
)
from ortlaunch.recipe.fields.submit import Submit
from ortlaunch.recipe.fields.sweep import Search

# Shared by `train.on_nonfinite` and `train.on_spike`.
BadStepAction = Literal["stop", "skip", "rollback"]


class Lora(Section):
    """Low-rank adapters (peft): the base weights stay frozen."""

    r: Positive = 8
    """Rank of the update matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale: the update is multiplied by alpha / r."""
    dropout: Decay = 0.0
    """Dropout before the adapters."""
    target_modules: OneOrMore = ("q_proj", "v_proj")
    """Names of the linear layers that get an adapter; `all-linear`: all but the head."""
    target_parameters: Words = ()
    """More weights that get an adapter, by the end of their names, for experts that a model has in
    one tensor, as `experts.gate_up_proj`. Not with engine ort, and with `dropout` 0."""
    modules_to_save: Words = ()
    """Modules that are trained whole beside the adapters, as [embed_tokens, lm_head], and saved
    and exported with them."""
    merge: bool = True
    """Export the whole model with the adapters merged into its weights; false: only the adapters,
    in peft's format. Checkpoints contain only the adapters in any case."""


class Model(Section):
    """Model that is trained."""

    task: Annotated[str, NameIn(MODEL_TASKS)]
    """`pretraining` is BERT's: masked words and next sentence. `sequence-classification`: a class
    for a text; `sequence-regression`: a number; `token-classification`: a class for each word.
    `image-classification` and `speech-seq2seq` are for custom data, whose samples have
    `pixel_values` or `input_features`, and `labels`.
    `custom` and `lightning` (a LightningModule) require `factory`."""
    pretrained: Text | None = None
    """Local folder or hub id of a transformers model to start from, with a commit, a tag or a branch
    as `owner/name@revision`; null: random weights from `config`."""
    config: dict[str, Any] | None = None
    """Fields of the transformers config, `model_type` first. With `pretrained`: fields to change;
    its vocabulary is resized to another `vocab_size`, with new words initialized near the mean of
    the others."""
    allow_partial: bool = False
    """Start from `pretrained` even if some of its weights have no counterpart in the model, or if
    some of the model's weights are missing in it and start at random. False: only a head that is
    new for the task, or has another number of labels, may start at random or be left out."""
    factory: Text | None = None
    """`package.module:function` that returns the model when task is custom; its forward accepts a
    batch's keys and returns the loss (or an object, mapping or tuple that contains it). For task
    lightning it returns a LightningModule, or is its class: its training_step and validation_step
    run (docs/lightning.md). The module may be in the recipe's folder."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `factory`."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Attention implementation in transformers. `auto`: sdpa for the models that have it, but eager
    with `engine.efficient_attention` or `engine.flash_attention`, which replace attention that the
    model computes step by step."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass, on every
    engine: transformers' own, not reentrant, on eager and inductor; ONNX Runtime's recomputation
    (`engine.memory_optimization: 1`) on ort. Saves most of the activations, costs about a forward
    pass, a quarter to a third of a step; for models that do not fit otherwise. A custom model must
    have a method `gradient_checkpointing_enable`, which is called."""
    offload_activations: bool = False
    """Keep the tensors that wait for the backward pass in host memory: less GPU memory, for the
    time of two copies. With `gradient_checkpointing` these are the inputs of the layers. For engine
    eager on GPUs; the values are the same."""
    freeze: OneOrMore | None = None
    """Patterns of parameter names, in which `*` matches any text, as `*.embeddings.*`: these
    parameters are not trained. A pattern that begins with `!` makes an exception to those before
    it: `["*", "!classifier.*"]` trains the classifier alone. A pattern that matches no parameter is
    an error."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights (needs the extra `lora`)."""

    @property
    def traits(self) -> ModelTask:
        """The task's row in the table of tasks."""
        return MODEL_TASKS[self.task]


class Batch(Section):
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


class Offload(Section):
    """Optimizer state and weights that DeepSpeed keeps outside GPU memory."""

    optimizer: Literal["cpu", "nvme"] | None = None
    """Location of master weights, optimizer state and the optimizer step: host memory, or files
    below `nvme_path` (stage 3 only). Stages 1 to 3. The step is torch's AdamW on the CPU."""
    parameters: Literal["cpu", "nvme"] | None = None
    """Location of weights that no layer uses at the moment: host memory, or files below
    `nvme_path`. Stage 3."""
    # Required with nvme, refused without it: deepspeed_keys.py.
    nvme_path: Text | None = None
    """Folder on a fast local disk of every host, for `nvme`."""
    pin_memory: bool = False
    """Use host memory that the GPU reads directly: faster copies, but such memory cannot be swapped
    out."""


class Zero(Section):
    """DeepSpeed ZeRO. null instead of this section: no DeepSpeed, DistributedDataParallel."""

    # Not a Literal, which would accept true for 1 and 2.0 for 2.
    stage: Annotated[int, Field(ge=0, le=3)] = 1
    """Shard over the ranks: 1 optimizer state, 2 also gradients, 3 also weights (not with engine
    ort)."""
    fused_gradient_norm: bool = True
    """Stages 1 and 2: compute the overflow check and the gradient norm in one pass over the
    gradients, instead of DeepSpeed's several, by ONNX Runtime's FP16_Optimizer where possible, else
    by ortlaunch. Several times faster, equal to double precision within 1e-6, no memory.
    engine.json records which one runs, and why. False: DeepSpeed's own."""
    offload: Offload | None = None
    """Keep optimizer state or weights in host memory or on a disk; null: everything is on the
    GPU."""
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed settings, merged last; keys that the recipe owns are refused."""


class Spike(Section):
    """Definition of a jump of the loss, and the response to it."""

    action: BadStepAction = "stop"
    """As `train.on_nonfinite`: `stop`, `skip` or `rollback`."""
    deviations: Annotated[float, Field(gt=0)] | None = 10.0
    """A step's loss has jumped if it is above the median of the last `window` losses by more than
    this many of their standard deviations (robust: 1.4826 x their median distance from the median;
    at least 1 % of the median); null: by `limit` alone."""
    limit: float | None = None
    """A loss above this has jumped, too, whatever the earlier ones are; null: no limit."""
    patience: Positive = 1
    """Number of successive steps with a loss above `limit` after which the last is judged."""
    window: Annotated[int, Field(ge=8, le=10_000)] = 100
    """Number of losses to compare with, each the mean over all ranks; no step is judged before this
    start has this many."""


class Train(Section):
    """Length of the training, and the handling of its steps."""

    # Either of the two is required; rules.py checks it, because pydantic sees single fields.
    max_steps: Positive | None = None
    """Optimizer steps. Or give `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data, instead of `max_steps`; the number of steps is computed when
    the data are read. 0.5 is half a pass."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Maximum of the global gradient norm, for clipping; null: no clipping."""
    loss_weight: Text | None = None
    """Weight of a micro batch in the loss of a step and of an evaluation, for custom data:
    `samples`, `labels` (those that are not -100, without the first of each sample where the model
    predicts the next word), or a key of the batch, whose numbers are summed (one number for each
    sample, or a mask). Loss and gradients are then the mean over everything counted in the global
    batch, over passes and ranks: the model itself must return the mean over everything counted in
    its micro batch. The key is passed to the model only where its forward names it. null: labels
    for transformers' tasks (for pretraining on text the masked words, whose weight also applies to
    the sentence pairs), samples for the tasks custom and lightning."""
    evaluate_every_steps: Positive | None = None
    """Steps between evaluations on `data.evaluation`; an evaluation always runs at the end."""
    evaluate_every_epochs: Annotated[float, Field(gt=0)] | None = None
    """The same in passes over the training data, as 0.25: an evaluation follows the step that
    completes each further quarter of a pass. Instead of `evaluate_every_steps`."""
    stop_after: StopAfter | None = None
    """End the training early, with its export, as `{metric: loss, evaluations: 3}`: after this many
    successive evaluations that were not better than the best before them; null: never."""
    hook: Text | None = None
    """`package.module:Class`, in the recipe's folder or installed: a class of yours without
    arguments, created on rank 0, with any of `on_step(step, values)` (after each logged step, with
    that line of metrics.jsonl), `on_evaluation(step, values)` (`loss` and the other metrics) and
    `on_checkpoint(step, folder)` (a complete checkpoint). A method that returns `"stop"` ends the
    run as `ortlaunch stop` does, saved; one that raises ends it with an error. null: none."""
    metric: Text | None = None
    """`package.module:function`, in the recipe's folder or installed: a metric of yours, called on
    rank 0 after each evaluation as `function(outputs, batch)`; it returns numbers by name. Both
    arguments are NumPy arrays by name, with a row for each sample of `data.evaluation` in its
    order, for any number of ranks: the model's outputs beside its loss, such as `logits`, and the
    samples' values, such as `labels` (a list of rows where batches differ in their shape). For
    language models (causal-lm, masked-lm, pretraining), whose scores over a vocabulary are too
    large to keep, the function gets `predictions` and `losses` at the position of each label: the
    most likely word (-100 where no label counts), and the label's negative log likelihood (nan
    there). The numbers are recorded with the evaluation's own, and `checkpoint.keep_best` and
    `stop_after` may name one. null: none."""
    on_nonfinite: BadStepAction = "stop"
    """Response to a loss or gradient that is inf or nan and was not caused by an fp16 loss scale.
    `stop`: the run ends. `skip`: this step changes no weight, no optimizer state and no buffer.
    `rollback`: the newest checkpoint is loaded in the same process, and the batch is left out: the
    step uses the samples that follow (without a checkpoint one is written before step 1). In each
    case the step, the samples and the first bad parameter are printed, and recorded in
    bad_steps.jsonl. `skip` and `rollback` check the loss of every step before its update, on all
    ranks."""
    on_spike: Spike | None = None
    """The same response for a loss that jumps, as `{action: rollback}`; null: no loss is too
    high."""
    max_skips: Positive = 10
    """Number of skipped bad steps in a run; the next bad step ends it."""
    max_rollbacks: Positive = 3
    """Number of rollbacks in a run, over all its starts; the next bad step ends it."""
    stall_seconds: SecondsOrAuto | None = "auto"
    """Seconds without progress after which a run is ended; the ranks that are behind are printed
    with their positions. `auto`: during steps 20 times their usual duration and at least 60 (ten
    times that while those ranks compute), and 600 where no rank does anything in the first two
    steps, in an export, a save or an evaluation. A number applies to all of them, but a rank that
    computes there has 30 times as long. null: never."""

    @property
    def evaluates(self) -> bool:
        """Whether evaluations run before the end, too."""
        return self.evaluate_every_steps is not None or self.evaluate_every_epochs is not None

    @property
    def steps(self) -> int:
        """`max_steps`, for callers after the worker has set it from `epochs`."""
        assert self.max_steps is not None
        return self.max_steps


class Checkpoint(Section):
    """Checkpoints: saved state to continue from."""

    every_minutes: Annotated[float, Field(gt=0)] | None = 30
    """Minutes since the last save after which the next save follows, by rank 0's clock; null: not
    by time. A checkpoint is always written at the end."""
    every_steps: Positive | None = None
    """Also save after every this many steps; null: not by steps."""
    every_epochs: Annotated[float, Field(gt=0)] | None = None
    """The same in passes over the training data, as 0.5: a save follows the step that completes
    each further half of a pass. Instead of `every_steps`."""
    keep: Positive | None = 3
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: Positive | None = None
    """Of the checkpoints that `keep` would delete, keep one for good every this many steps: the
    first at or after each multiple."""
    keep_best: KeepBest | None = None
    """Save after each evaluation that is the best so far, and keep the best checkpoint in addition
    to those of `keep`, as `{metric: f1_macro}`; null: none."""
    export: Annotated[tuple[Literal["huggingface", "onnx"], ...], BeforeValidator(tuple_of)] = ()
    """Also write each checkpoint as a model, as [huggingface, onnx], into `exports/`, as `ortlaunch
    export` does (an ONNX model is run and compared with PyTorch). One process beside rank 0 does so
    on the CPU while training goes on, and the end of the run waits for it. An export is deleted
    with its checkpoint (`keep`). One that fails is printed and recorded (exports.jsonl), and
    training goes on. Costs that process's CPU time, and on rank 0's host memory for a copy of the
    model and of the data."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Response to a save that fails (a full disk, a folder that became read-only); older
    checkpoints stay unchanged. `stop`: the run ends. `continue`: the run prints the failure, counts
    it in summary.json, trains on and tries again at the next save; where the save at the end fails
    the export is written, and the run has failed."""
    # `async` is a keyword of Python, so no plain assignment can declare the field; the description
    # below stands for the docstring.
    __annotations__["async"] = Annotated[
        bool | None,
        Field(
            default=None,
            description="Copy the state into memory and write it while training goes on; another save waits for it, "
            "and so does the end of the run. Saves that a stop or `ortlaunch checkpoint` asks "
            "for, and the last, are "
            "written at once. Takes memory of the host for one more copy of weights and "
            "optimizer state. null: on "
            "GPUs.",
        ),
    ]


class Log(Section):
    """Output during training."""

    every_steps: Positive = 10
    """Steps between printed and recorded metrics."""
    ranks: Literal["first", "all"] = "first"
    """Ranks whose output the terminal shows during the run: rank 0, or all, with every line after
    `HOST rank N: `. Each rank has its own logs in the run folder, and the error of any rank is
    shown at the end."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], BeforeValidator(tuple_of)
    ] = ()
    """Destinations of metrics in addition to metrics.jsonl; each needs the extra of its name. W&B
    and MLflow read account and server from their own variables (`WANDB_*`, `MLFLOW_*`;
    `WANDB_MODE=offline` works). A tracker that fails never ends a run."""
    project: str | None = None
    """W&B's project, MLflow's experiment; null: the recipe's name."""
    profile_steps: Annotated[tuple[Positive, Positive], BeforeValidator(tuple_of)] | None = None
    """The first and the last step to profile, as `[4, 9]`: the ten largest costs by operator, layer
    and source line are printed and written to profile.json and `ortlaunch report`, and a timeline
    for chrome://tracing and Perfetto to trace.json.gz. Every other step is profiled; those between
    them measure the profiler's own cost. Costs, with ort, the memory of a second session. The first
    steps also compile and fill caches: begin at 4 or later. On a CPU only."""


class Recipe(Section):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the run: at most 100 letters, digits, `.`, `_` and `-`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    """Seeds weights, masking, order and dropout."""
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    precision: Annotated[str, NameIn(PRECISIONS)] = "fp32"
    """Number format of the passes; weights keep a float32 copy."""
    engine: Engine = Engine()
    zero: Zero | None = None
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    launch: Launch = Launch()
    submit: Submit = Submit()
    log: Log = Log()
    sweep: Search | None = None
    """A search over fields of this recipe, for `ortlaunch sweep`; null: none."""
    # Folder of the file from which the Python API loaded it: the user's own modules are there.
    _folder: str = PrivateAttr("")

    def sweep_lines(self) -> list[str]:
        """Return the sweep as lines for a person; none without one."""
        return [] if self.sweep is None else self.sweep.lines(self.train.max_steps)

    def epoch_intervals(self) -> Iterator[tuple[str, float]]:
        """Yield the intervals that are given in epochs, by their names in steps.json."""
        for name, every in (
            ("evaluated_every", self.train.evaluate_every_epochs),
            ("saved_every", self.checkpoint.every_epochs),
        ):
            if every is not None:
                yield name, every

    @property
    def format(self) -> Precision:
        """The precision's row in the table of precisions."""
        return PRECISIONS[self.precision]
