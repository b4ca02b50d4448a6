"""The table of model tasks: the values of the recipe's `model.task`, and their properties.

Standard library only, for every side. Code reads a property of the row, not the task's name;
`recipe.model.traits` is the row. Metrics of a task are in `ortlaunch/tables/metrics.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelTask:
    """One row of the table."""

    auto_class: str = ""
    """The transformers class that builds the model; "": the user's factory builds it."""
    predicts: str = ""
    """Tokens that the language model head predicts: `masked` or `next`; "": no such head."""
    pairs: bool = False
    """Whether samples are pairs of sentences, which a second head classifies."""
    label: str = ""
    """The label of a sample: a `class`, a `number`, a class for each `word`, a set of `classes`,
    a `span` of a text, a `sequence` of tokens to write, or the `choice` of a text; "": none."""
    columns: tuple[str, ...] = ("text_column", "label_column")
    """Fields of a source that name the columns of rows with labels."""
    text_fields: tuple[str, ...] = ("text_column",)
    """Those of them whose columns hold text, on which a tokenizer may be trained."""
    data_fields: tuple[str, ...] = ()
    """Fields of `data` for this task alone."""
    pipeline: str = ""
    """The task's name on the Hugging Face hub."""
    # With this name peft trains the randomly initialized head, too.
    peft: str | None = None
    """peft's name of a task with a new head; None: there is no new head."""

    config_fields: tuple[tuple[str, object], ...] = ()
    """Fields of the transformers config that the task sets."""

    new_head: str = ""
    """Name of a head for labels, which LoRA trains whole, of tasks that peft does not know."""

    leaves_spans_out: bool = False
    """Whether samples are windows of text without some spans, which the model writes."""

    writes: bool = False
    """Whether an evaluation may let the model write (`train.generate`)."""

    media: str = ""
    """The files of samples that are no text: `image`, with a class, or `sound`, with its text."""

    wrapper: str = ""
    """`module:function` of the worker that wraps a LightningModule; "": the model is none."""

    compares: str = ""
    """Section of `model` for a task whose samples are several texts each (`text_columns`), which the
    loss compares: `embedding`, of each text alone, or `reranker`, of a query with each document."""
    loss_module: str = ""
    """`module:class` of the worker that computes the loss from the model's output; "": the model
    returns its loss."""

    @property
    def has_new_head(self) -> bool:
        """Whether the pretrained model's head may be another one than the task's."""
        has_label_head = self.label not in ("", "sequence")
        return has_label_head or bool(self.new_head or self.compares)

    @property
    def is_own(self) -> bool:
        """Whether the model is the user's own, which may return any values beside its loss."""
        return not self.auto_class

    @property
    def pools(self) -> bool:
        """Whether a head reads the pooled representation of a whole sample."""
        return (
            self.pairs
            or bool(self.compares)
            or self.label in ("class", "number", "classes", "choice")
        )

    @property
    def reason_against_held_out_part(self) -> str:
        """Why evaluation samples cannot be a part of the training samples; "": they can be."""
        if self.pairs:
            return "pairs of sentences are made of all documents"
        return "windows of one question would be in both" if self.label == "span" else ""

    @property
    def has_classes(self) -> bool:
        """Whether a head predicts classes, which may have names."""
        return self.label in ("class", "word", "classes") or self.media == "image"

    @property
    def has_list_label(self) -> bool:
        """Whether the label of a row is a list, which a cell of CSV cannot be."""
        return self.label in ("word", "classes", "span")


MODEL_TASKS = {
    # BERT's: masked tokens and next-sentence prediction.
    "pretraining": ModelTask(
        "AutoModelForPreTraining", predicts="masked", pairs=True, pipeline="fill-mask"
    ),
    "masked-lm": ModelTask("AutoModelForMaskedLM", predicts="masked", pipeline="fill-mask"),
    "causal-lm": ModelTask("AutoModelForCausalLM", predicts="next", pipeline="text-generation"),
    "sequence-classification": ModelTask(
        "AutoModelForSequenceClassification",
        label="class",
        pipeline="text-classification",
        peft="SEQ_CLS",
    ),
    "sequence-regression": ModelTask(
        "AutoModelForSequenceClassification",
        label="number",
        pipeline="text-classification",
        peft="SEQ_CLS",
        config_fields=(("num_labels", 1), ("problem_type", "regression")),
    ),
    "multi-label-classification": ModelTask(
        "AutoModelForSequenceClassification",
        label="classes",
        pipeline="text-classification",
        peft="SEQ_CLS",
        config_fields=(("problem_type", "multi_label_classification"),),
    ),
    "token-classification": ModelTask(
        "AutoModelForTokenClassification",
        label="word",
        data_fields=("label_pieces",),
        pipeline="token-classification",
        peft="TOKEN_CLS",
    ),
    "embedding": ModelTask(
        "AutoModel",
        pipeline="sentence-similarity",
        peft="FEATURE_EXTRACTION",
        compares="embedding",
        loss_module="ortlaunch.worker.model.embedding:EmbeddingLossModule",
    ),
    "reranker": ModelTask(
        "AutoModelForSequenceClassification",
        pipeline="text-ranking",
        peft="SEQ_CLS",
        config_fields=(("num_labels", 1), ("problem_type", "regression")),
        compares="reranker",
        loss_module="ortlaunch.worker.model.reranking:RerankerLossModule",
    ),
    "question-answering": ModelTask(
        "AutoModelForQuestionAnswering",
        label="span",
        columns=("question_column", "context_column", "answers_column"),
        text_fields=("question_column", "context_column"),
        data_fields=("stride",),
        pipeline="question-answering",
        peft="QUESTION_ANS",
    ),
    "multiple-choice": ModelTask(
        "AutoModelForMultipleChoice",
        label="choice",
        columns=("context_column", "choice_columns", "label_column"),
        text_fields=("context_column", "choice_columns"),
        pipeline="multiple-choice",
        new_head="classifier",
    ),
    "seq2seq": ModelTask(
        "AutoModelForSeq2SeqLM",
        label="sequence",
        columns=("text_column", "target_column", "source_prefix"),
        text_fields=("text_column", "target_column"),
        data_fields=("target_length", "cut_long"),
        writes=True,
        pipeline="text2text-generation",
    ),
    # T5's pretraining.
    "span-corruption": ModelTask(
        "AutoModelForSeq2SeqLM",
        data_fields=("span_corruption",),
        pipeline="text2text-generation",
        leaves_spans_out=True,
    ),
    # Custom data for them have `pixel_values` or `input_features`, and `labels`.
    "image-classification": ModelTask(
        "AutoModelForImageClassification",
        pipeline="image-classification",
        new_head="classifier",
        media="image",
    ),
    "speech-seq2seq": ModelTask(
        "AutoModelForSpeechSeq2Seq", pipeline="automatic-speech-recognition", media="sound"
    ),
    "custom": ModelTask(),
    "lightning": ModelTask(wrapper="ortlaunch.worker.model.lightning_module:wrap_lightning"),
}
