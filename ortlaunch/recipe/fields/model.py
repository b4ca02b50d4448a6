"""The section `model` of a recipe: what is trained, and which of its weights."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from ortlaunch.recipe.fields.compared_texts import Embedding, Reranker
from ortlaunch.recipe.fields.section import (
    OTHER_MODEL,
    Decay,
    NameIn,
    OneOrMore,
    Positive,
    Section,
    Text,
    Words,
    effect_rule,
)
from ortlaunch.tables.model_tasks import MODEL_TASKS, ModelTask

_OTHER_MEMORY = effect_rule("the same values with other memory use")


class Lora(Section, resume_rule=OTHER_MODEL):
    """Low-rank adapters (peft): the base weights stay frozen."""

    r: Positive = 8
    """Rank of the update matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale: the update is multiplied by alpha / r."""
    rslora: bool = False
    """Multiply it by alpha / sqrt(r) instead (rsLoRA)."""
    dora: bool = False
    """Train the length of each weight's rows apart from their direction (DoRA)."""
    rank_pattern: dict[Text, Positive] = {}
    """Other ranks: a regular expression for the end of a layer's name, as `layers.0.*q_proj`, and
    its `r`."""
    alpha_pattern: dict[Text, Annotated[float, Field(gt=0)]] = {}
    """Other scales, in the same way."""
    init: Literal[
        "default",
        "gaussian",
        "orthogonal",
        "olora",
        "pissa",
        "pissa_niter_4",
        "pissa_niter_16",
        "eva",
    ] = "default"
    """First values, by peft's names. `default`: the update is zero. `pissa`, `olora`: from the base
    weights' largest singular values, or their QR decomposition, which is taken off the base; with
    `merge` alone, for the adapters do not fit the published base. `pissa_niter_N`: faster, with N
    iterations. `eva`: the update is zero, and the first matrix has the largest singular vectors of
    the layer's inputs in the first 32 samples of `data.train`, which pass through the model on the
    CPU; each layer keeps the rank `r`."""
    pretrained: Text | None = None
    """Local folder or hub id (`owner/name@revision`) of published adapters to continue. They have
    all the fields of this section except `merge`."""
    dropout: Decay = 0.0
    """Dropout before the adapters."""
    target_modules: OneOrMore = ("q_proj", "v_proj")
    """Names of the linear layers that get an adapter; `all-linear`: all but the head. A single text
    with other signs than letters, digits, `_`, `.` and `-` is a regular expression of whole names in
    the model, as `model.layers.[0-3].*_proj`."""
    target_parameters: Words = ()
    """More weights that get an adapter, by the end of their names, for experts that a model has in
    one tensor, as `experts.gate_up_proj`. Not with engine ort, and with `dropout` 0."""
    modules_to_save: Words = ()
    """Modules that are trained whole beside the adapters, as [embed_tokens, lm_head], and saved
    and exported with them. The embeddings of new tokens (`data.special_tokens`,
    `data.added_tokens`) must be among them."""
    merge: Annotated[bool, effect_rule("it affects only the export")] = True
    """Export the whole model with the adapters merged into its weights; false: only the adapters,
    in peft's format. Checkpoints contain only the adapters in any case."""

    @property
    def target_pattern(self) -> str:
        """The regular expression of `target_modules`; "" where it has names."""
        is_name = re.fullmatch(r"[\w.-]*", self.target_modules[0]) is not None
        return "" if is_name or len(self.target_modules) > 1 else self.target_modules[0]


class Quantize(Section, resume_rule=OTHER_MODEL):
    """Frozen base weights in 4 or 8 bits (bitsandbytes), beside which `lora` trains: QLoRA.

    The linear layers inside the model's repeated blocks are quantized, and no embedding, norm or
    head. For engines eager and inductor, with `zero` up to stage 2, and nf4 with `parallel`.
    """

    type: Literal["nf4", "int8"]
    """`nf4`: QLoRA's 4 bits, in blocks of 64 values. `int8`: the 8 bits of LLM.int8()."""
    double: bool = True
    """Quantize the scales of the blocks of nf4, too: 4.13 bits a weight in place of 4.5."""
    compute: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the products with nf4 weights; null: `precision`."""


class Model(Section, resume_rule=OTHER_MODEL):
    """Model that is trained."""

    task: Annotated[str, NameIn(MODEL_TASKS)]
    """`pretraining` is BERT's: masked words and next sentence. `sequence-classification`: a class
    for a text; `multi-label-classification`: any number of classes for a text, each of which is
    predicted where its probability is above 0.5; `sequence-regression`: a number;
    `question-answering`: a span of a context; `seq2seq`: a text, written by a decoder;
    `span-corruption`: T5's pretraining on text, which writes the spans that were left out;
    `multiple-choice`: one of several texts; `token-classification`: a class for each word.
    `embedding`: a vector for a text, and `reranker`: a number for a query with a document, both
    of rows with several texts (`text_columns`). `image-classification` and `speech-seq2seq` take
    files, by `format: folder` or a table with `file_column`, or custom data, whose samples have
    `pixel_values` or `input_features`, and `labels`. `custom` and `lightning` (a LightningModule)
    require `factory`."""
    pretrained: Text | None = None
    """Local folder or hub id of a transformers model to start from, with a commit, a tag or a branch
    as `owner/name@revision`; null: random weights from `config`."""
    config: dict[str, Any] | None = None
    """Fields of the transformers config, `model_type` first. With `pretrained`: fields to change;
    its vocabulary is resized to another `vocab_size`, with new words initialized near the mean of
    the others."""
    allow_partial: Annotated[bool, effect_rule("a checkpoint has all weights")] = False
    """Start from `pretrained` even if some of its weights have no counterpart in the model, or if
    some of the model's weights are missing in it and start at random. False: only a head that is
    new for the task, or has another number of labels, may start at random or be left out."""
    factory: Text | None = None
    """`package.module:function` that returns the model when task is custom; its forward accepts a
    batch's keys and returns the loss (or an object, mapping or tuple that contains it). For task
    lightning it returns a LightningModule, or is its class: its training_step and validation_step
    run (`ortlaunch docs lightning`). The module may be in the recipe's folder."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `factory`."""
    attention: Annotated[
        Literal["auto", "eager", "sdpa"], effect_rule("the same function with other kernels")
    ] = "auto"
    """Attention implementation in transformers. `auto`: sdpa for the models that have it."""
    gradient_checkpointing: Annotated[bool, _OTHER_MEMORY] = False
    """Keep only each layer's input and compute the layer again in the backward pass, on every
    engine: transformers' own, not reentrant, on eager and inductor; ONNX Runtime's recomputation
    (`engine.memory_optimization: 1`) on ort. Saves most of the activations, costs about a forward
    pass, a quarter to a third of a step; for models that do not fit otherwise. A custom model must
    have a method `gradient_checkpointing_enable`, which is called."""
    offload_activations: Annotated[bool, _OTHER_MEMORY] = False
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
    quantize: Quantize | None = None
    """Keep the frozen weights of `pretrained` quantized, with `lora` (needs the extra
    `bitsandbytes`). A model that is stored so already needs it, too. The export with merged
    adapters has whole weights, dequantized in float32."""
    embedding: Embedding | None = None
    """For task embedding: pooling, prompts and loss; null: the defaults."""
    reranker: Reranker | None = None
    """For task reranker: the loss; null: the default."""

    @property
    def text_comparison(self) -> Embedding | Reranker | None:
        """The section of a task that compares texts, with defaults; None: another task."""
        sections: dict[str, Embedding | Reranker] = {
            "embedding": self.embedding or Embedding(),
            "reranker": self.reranker or Reranker(),
        }
        return sections.get(self.traits.compares)

    @property
    def traits(self) -> ModelTask:
        """The task's row in the table of tasks."""
        return MODEL_TASKS[self.task]

    @property
    def is_built_of_values(self) -> bool:
        """Whether each rank needs the base's values: scales or first adapters are made of them."""
        lora = self.lora
        has_values = lora is not None and (lora.pretrained or lora.init != "default")
        return self.quantize is not None or bool(has_values)
