"""The recipe's section `data`: where samples come from, and what becomes of text.

As in models.py the docstring under each field is the manual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from ortlaunch.recipe.fields.section import (
    LIST,
    MAPPING,
    MOST,
    WORD,
    OneOrMore,
    Positive,
    Section,
    Text,
    tuple_of,
)


def _kind(value: object) -> str:
    """Which branch of "a name, a mapping or a list" a value belongs to."""
    if isinstance(value, (list, tuple)):
        return LIST
    return MAPPING if isinstance(value, (dict, BaseModel)) else WORD


def _kind_of_one(value: object) -> str:
    return MAPPING if isinstance(value, (dict, BaseModel)) else WORD


class Corpus(Section):
    """Where samples come from."""

    format: Literal["text", "jsonl", "parquet", "hub", "custom"]
    """`text`: lines of plain text; `jsonl`, `parquet`: rows; `hub`: a data set's name on the hub;
    `custom`: your own `factory`."""
    path: OneOrMore | None = None
    """Files, `*` and `**` allowed, for text, jsonl and parquet. Relative to where you run."""
    name: Text | None = None
    """Data set on the hub, for format hub."""
    subset: Text | None = None
    """Configuration of the hub data set, as `wikitext-2-raw-v1`."""
    revision: Text | None = None
    """Commit, tag or branch of the hub data set; null: its newest. A whole commit also finds cached
    tokens offline."""
    document: Literal["paragraph", "line", "file"] = "paragraph"
    """What one document is in format text: a `paragraph`, up to a blank line (BERT's own form: a
    sentence a line, a blank line between documents), a `line`, or a `file`. Rows of the other
    formats are documents. None is longer than 16 million characters. An end mark of causal language
    models, the pairs of pretraining and `attend_across_documents` go by them. One document at a
    time has to fit into memory."""
    split: Text = "train"
    """Split of the hub data set."""
    text_column: Text = "text"
    """Column that holds the text; for token-classification a list of words."""
    label_column: Text = "label"
    """Column that holds the class, for sequence-classification: an integer from 0 to 999,999, or a
    word; words are numbered as the model that is trained on numbers them, else in the order of the
    alphabet. They, or the names that a hub data set or Parquet file has for its integers
    (ClassLabel), stand in the exported model's config (`id2label`). For sequence-regression a
    number. For token-classification a list of classes, one for each word; of a word's pieces the
    first is counted."""
    messages_column: Text | None = None
    """Column that holds a chat, for instruction tuning with causal-lm: a list of messages, each
    with `role` and `content`. The tokenizer's chat template writes it (`data.chat_template`), a
    chat a sample, and the loss is that of answers alone: what the template writes for messages of
    role assistant, with their end mark."""
    prompt_column: Text | None = None
    """In place of messages: column that holds a prompt, which the template writes as the user's
    message."""
    response_column: Text | None = None
    """Column that holds the answer to it."""
    factory: Text | None = None
    """`package.module:function` for format custom: returns an object with `__len__` and
    `__getitem__`; each item is a mapping from the names that the model's forward takes to tensors
    (or numbers)."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `factory`."""


class TokenizerTraining(Section):
    """Train a tokenizer on the training corpus, once; it is cached by corpus and settings."""

    train: Literal["wordpiece", "bpe"]
    """`wordpiece` as in BERT (lower case), `bpe` byte-level as in GPT-2 and Llama-3."""
    vocab_size: Annotated[int, Field(ge=300, le=MOST)] = 30522
    """Upper bound of the vocabulary; a small corpus may give fewer."""


class MaskedLm(Section):
    """Masking for masked-lm and pretraining: 80 % [MASK], 10 % a random word, 10 % unchanged, as in
    BERT."""

    probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens to predict."""
    max_predictions: Positive | None = None
    """At most this many predictions a sequence; null: no limit. Each has exactly as many as in
    BERT's own data: the smaller of this and `probability` x its tokens, [CLS] and [SEP] among them,
    rounded (19 of 128, 77 of 512)."""
    whole_words: bool = False
    """Mask all pieces of a word or none, as BERT's whole-word models; for tokenizers whose pieces
    begin with ##. A sequence may then have a prediction less, where no word is left that fits."""


BucketLength = Annotated[int, Field(ge=8, le=MOST)]
BuiltIn = Literal["python-docs", "python-chats"]
Source = Annotated[
    Annotated[BuiltIn, Tag(WORD)] | Annotated[Corpus, Tag(MAPPING)],
    Discriminator(_kind_of_one),
]
TokenizerChoice = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[TokenizerTraining, Tag(MAPPING)],
    Discriminator(_kind_of_one),
]


class Part(Section):
    """One source of a mixture."""

    source: Source
    """The corpus, as `data.train` takes one."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the samples, beside the weights of the others: of weights 3 and 1 the first
    gives three quarters, however large each is. What is small comes round sooner."""


TrainingSource = Annotated[
    Annotated[BuiltIn, Tag(WORD)]
    | Annotated[Corpus, Tag(MAPPING)]
    | Annotated[tuple[Part, ...], BeforeValidator(tuple_of), Field(min_length=1), Tag(LIST)],
    Discriminator(_kind),
]


class Data(Section):
    """What it is trained on."""

    train: TrainingSource
    """The training corpus: a mapping, or `python-docs`, the language reference inside every
    CPython, or `python-chats`, the same as questions and answers, to try instruction tuning. Or a
    mixture, a list as `[{source: python-docs, weight: 1}, {source: {format: text, path: a.txt},
    weight: 3}]`: every 65,536 samples hold the weights to the sample. An epoch of it is as many
    samples as all its sources have together."""
    evaluation: Source | None = None
    """Held-out corpus for the evaluation loss; null: none."""
    tokenizer: TokenizerChoice | None = None
    """Local folder or hub id, or `{train: wordpiece, vocab_size: 30522}`; null only for custom
    data."""
    chat_template: Text | None = None
    """How chats are written: a Jinja file, or its text; null: the tokenizer's own. It goes into the
    export with the tokenizer. Where it marks answers by {% generation %}, those are learned; else
    what it writes for messages of role assistant, after its prompt for one
    (`add_generation_prompt`)."""
    sequence_length: Annotated[int, Field(ge=8, le=MOST)] | None = None
    """Tokens a sample, the same for all: shorter texts are padded, longer ones cut. So all steps
    run one graph, which ONNX Runtime and torch.compile plan and keep memory for once; null only for
    custom data."""
    bucket_lengths: (
        Annotated[tuple[BucketLength, ...], BeforeValidator(tuple_of), Field(max_length=3)] | None
    ) = None
    """Up to three lengths below `sequence_length`, for chats and texts with labels, as [64, 128]: a
    step's samples are dealt out to its passes and ranks by their lengths, and each micro batch is
    padded to the shortest length that holds it. For padding that costs more than more shapes do:
    inductor compiles each, ONNX Runtime and GPUs keep memory for each. The step's samples are the
    same, and so are its loss and gradients. null: none."""
    padding: Literal["fixed", "longest"] = "fixed"
    """`fixed`: to `sequence_length`, or to `bucket_lengths`. `longest`, for chats and texts with
    labels: the step's samples are dealt out as by `bucket_lengths`, and each micro batch is padded
    to its longest sample, rounded up to a multiple of 8. Least padding, most shapes: not on
    inductor, which compiles few and runs the rest as eager."""
    attend_across_documents: bool = True
    """Of causal-lm on text, whose samples are packed with documents one after another: whether a
    token sees those of documents before its own in the sample. false: each document is as alone, by
    a block-diagonal mask of fixed shape and positions that begin anew; its first token is not
    predicted. Attention then takes a mask, which fused kernels without one outrun."""
    masked_lm: MaskedLm | None = None
    """Masking; null takes BERT's (15 %, no limit)."""
    collate: Text | None = None
    """`package.module:function`, for custom data: a list of samples (as the factory's object has
    them, of any type) becomes a batch, names to tensors, as for padding of your own; evaluation
    takes it, too. null: samples are mappings to tensors of one shape, and are stacked."""
    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """Processes of each rank that read micro batches while earlier ones train, for custom data
    whose samples take time to make, or text. Each sample is read with Python's, NumPy's and torch's
    random numbers seeded by seed, epoch and sample, the same with any number of workers. 0: none.
    null: for text on a GPU a thread, which is enough; on a CPU, and for custom data, none. Not for
    evaluation."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The training corpus as a mixture; one source is a mixture of one."""
        return self.train if isinstance(self.train, tuple) else (Part(source=self.train),)

    @property
    def factories(self) -> list[str]:
        """The user's own functions that make training samples."""
        sources = [part.source for part in self.parts]
        return [each.factory for each in sources if isinstance(each, Corpus) and each.factory]

    @property
    def is_custom(self) -> bool:
        """Whether the user's own functions make the training samples."""
        return all(is_custom(part.source) for part in self.parts)

    @property
    def lengths(self) -> Sequence[int]:
        """Those below `sequence_length` that a micro batch may be padded to, ascending."""
        return (
            range(8, self.sequence_length or 0, 8)
            if self.padding == "longest"
            else self.bucket_lengths or ()
        )

    def sources(self) -> Iterator[tuple[str, str | Corpus]]:
        """Every source with its key in the recipe."""
        for number, part in enumerate(self.parts):
            yield (
                f"data.train[{number}].source" if isinstance(self.train, tuple) else "data.train",
                part.source,
            )
        if self.evaluation is not None:
            yield "data.evaluation", self.evaluation


def is_chat(source: str | Corpus) -> bool:
    """Whether its rows are chats."""
    if isinstance(source, str):
        return source == "python-chats"
    return bool(source.messages_column or source.prompt_column or source.response_column)


def is_custom(source: str | Corpus) -> bool:
    """Whether it is a function of the user's."""
    return isinstance(source, Corpus) and source.format == "custom"
