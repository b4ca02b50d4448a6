"""The recipe's section `data`: the sources of samples, and the processing of text.

The docstring under each field is the manual, as in recipe.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from ortlaunch.base.units import bytes_of_size_or_none
from ortlaunch.recipe.fields.prompts import PromptName, PromptTemplate
from ortlaunch.recipe.fields.section import (
    APPLIED,
    LIST,
    MAPPING,
    MAX_COUNT,
    OTHER_DATA,
    PART,
    WORD,
    OneOrMore,
    Positive,
    Section,
    Text,
    Words,
    convert_list_to_tuple,
    effect_rule,
)


# pydantic runs a Discriminator before it validates: a value may be plain YAML, or a model that was
# built in code.
def _source_branch(value: object) -> str:
    """Return the branch of "a name, a mapping or a list" that a value belongs to."""
    if isinstance(value, (list, tuple)):
        return LIST
    return MAPPING if isinstance(value, (dict, BaseModel)) else WORD


def _single_source_branch(value: object) -> str:
    return MAPPING if isinstance(value, (dict, BaseModel)) else WORD


def _evaluation_branch(value: object) -> str:
    is_held_out_part = isinstance(value, dict) and bool({"share", "samples"} & value.keys())
    return PART if is_held_out_part or isinstance(value, HeldOut) else _single_source_branch(value)


SpecialToken = Literal[
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"
]
AnswerPart = Literal["answers", "tool_calls", "thoughts"]
SevereFinding = Literal["no_answers", "unknown_tokens", "overlap"]
PromptChoice = Annotated[
    Annotated[PromptName, Tag(WORD)] | Annotated[PromptTemplate, Tag(MAPPING)],
    Discriminator(_single_source_branch),
]


# Micro batches that each of `data.workers` reads ahead.
BATCHES_EACH_WORKER = 2
_LESS_PADDING = effect_rule("the same samples, with less padding")


class StreamSettings(Section, resume_rule=OTHER_DATA):
    """Samples of a corpus that are fetched and tokenized while the training runs.

    The files of an epoch are read one after the other, in an order by the seed; the samples of a
    window of `shuffle` samples are shuffled. A resume in any number of ranks has the same order. It
    opens one file, at the window of the checkpoint. The number of samples is not known in advance,
    so the training's length and its intervals are set in steps. The last tokens of each file, fewer
    than a sample, are left out. Not for texts with labels and pairs of sentences.
    """

    buffer: Annotated[
        str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(MiB|GiB|TiB)$"), effect_rule("the same samples")
    ] = "2GiB"
    """Disk space for tokens (4 bytes each) that are waiting, in the run folder, with a unit: MiB,
    GiB or TiB. It has at least four windows."""
    shuffle: Positive = 4096
    """Samples of a window; of chats with `data.packing`, the chats that are packed together. The
    first step waits for the first window. A file whose rows are sorted needs larger windows, or an
    order of its own."""

    @property
    def buffer_bytes(self) -> int:
        """The buffer in bytes."""
        return bytes_of_size_or_none(self.buffer) or 0


class Corpus(Section, resume_rule=OTHER_DATA):
    """Source of samples."""

    format: Literal["text", "jsonl", "csv", "parquet", "folder", "hub", "custom"]
    """`text`: lines of plain text; `jsonl`, `parquet`: rows (a JSON file that is one array of
    objects is read, too, all of it in memory); `csv`: rows of a table in UTF-8, whose first line
    names the columns, separated by commas, semicolons or tabs; its cells are text, and labels that
    are all whole numbers are in their order; `folder`: images or recordings (16-bit WAV) as
    FOLDER/CLASS/FILE, or with FOLDER/metadata.csv (.jsonl, .parquet) as Hugging Face's imagefolder
    and audiofolder; `hub`: a data set's name on the hub; `custom`: your own `factory`."""
    path: OneOrMore | None = None
    """Files for text, jsonl, csv and parquet (`*` and `**` are allowed), or folders. Like `model.pretrained`,
    `data.tokenizer` and `data.chat_template`, a relative path starts beside the recipe, or else in
    the current folder. `~`, $HOME, $SCRATCH, $TMPDIR, $WORK, $DATA and the variables that
    `launch.forward` lists are expanded."""
    name: Text | None = None
    """Data set on the hub, for format hub."""
    subset: Text | None = None
    """Configuration of the hub data set, as `wikitext-2-raw-v1`."""
    files: OneOrMore | None = None
    """Files of the hub data set to read, as `data/train-*.jsonl`; null: those of the split."""
    revision: Text | None = None
    """Commit, tag or branch of the hub data set; null: its newest. With a full commit hash cached
    tokens are also found offline."""
    document: Literal["paragraph", "line", "file"] = "paragraph"
    """Unit of text that counts as one document in format text: a `paragraph`, up to a blank line
    (BERT's own form: a sentence a line, a blank line between documents; blanks and tabs on it do not
    count), a `line`, or a `file`.
    Rows of the other formats are documents. None is longer than 16 million characters. The end mark
    of causal language models, the sentence pairs of pretraining and `attend_across_documents`
    depend on this unit. One document at a time has to fit into memory."""
    split: Text = "train"
    """Split of the hub data set; of a folder whose sub-folders are splits, the one to read."""
    file_column: Text = "file_name"
    """Column with the file of an image or a recording, relative to the file of the row. Images have
    their class in `label_column`, which is the folder's name without metadata; recordings have
    their transcript in `text_column`."""
    text_column: Text = "text"
    """Column with the text; for token-classification a list of words."""
    text_columns: Words = ()
    """Columns with the texts of a row, for tasks embedding and reranker: the query, then documents,
    as [query, positive, negative]. A column may hold a list of texts, as many in each row."""
    label_column: Text = "label"
    """Column with the class, for sequence-classification: an integer from 0 to 999,999, or a
    word. Words get the numbers that the model to be trained already has for them, else numbers in
    alphabetical order, or by value if all are whole numbers. For a trained model `3` and `"3"`
    are one label. For multi-label-classification a list of such classes, which may be empty.
    These words, or the names that a hub data set or Parquet file has for its integers
    (ClassLabel), are written into the exported model's config (`id2label`). For
    sequence-regression a number. For token-classification a list of classes, one for each word
    (`data.label_pieces`)."""
    target_column: Text = "target"
    """Column with the text to write, for seq2seq; `text_column` has the text that is read."""
    source_prefix: str = ""
    """Text before each text that is read, for seq2seq, as T5's `"summarize: "`."""
    question_column: Text = "question"
    """Column with the question, for question-answering."""
    context_column: Text = "context"
    """Column with the text that contains the answer, for question-answering; for multiple-choice the
    text before each choice."""
    choice_columns: OneOrMore = ("choices",)
    """Columns with a choice each, for multiple-choice, or one column with a list of them;
    `label_column` has the index of the right one, from 0."""
    answers_column: Text = "answers"
    """Column with the accepted answers, for question-answering, as SQuAD has them: `{"text": [...],
    "answer_start": [...]}`, texts of the context and the index of the first character of each. The
    first one is trained on; empty lists: the context has no answer."""
    messages_column: Text | None = None
    """Column with a chat, for instruction tuning with causal-lm: a list of messages, each with
    `role` and `content`. The tokenizer's chat template (`data.chat_template`) writes each chat as
    one sample. The loss counts answers alone: the text that the template writes for messages of
    role assistant, with their end mark. A content is text, a list of parts of text, or null beside
    `tool_calls`. The template also gets the tools and other columns that it names. A part of a chat
    that it does not write ends the start, with the row (`ignore_fields`)."""
    tools_column: Text | None = None
    """Column with the tools of a chat: a list of objects, or its JSON; null: `tools`, in rows that
    have it."""
    ignore_fields: Words = ()
    """Columns, keys of messages and types of the parts of a content that are left out of chats before
    the template writes them, as [id, reasoning_content, image_url]."""
    prompt_column: Text | None = None
    """In place of messages: column with a prompt, which the template writes as the user's
    message."""
    response_column: Text | None = None
    """Column with the answer to the prompt."""
    input_column: Text | None = None
    """Column with an input that belongs to the prompt. It follows the prompt after a line end where
    it is not empty."""
    system_column: Text | None = None
    """Column with the text of a system message, before the prompt or the messages, where it is not
    empty."""
    prompt: PromptChoice | None = None
    """Format that writes a row of instruction, input and response as plain text, in place of the
    chat template: `alpaca`, Stanford Alpaca's, or a `template` of your own. The columns are
    `prompt_column`, `input_column` and `response_column`; without them `instruction`, `input` and
    `output`. The tokenizer's end mark ends the response; it counts in the loss as the response
    does."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Part of a chat or of a prompt with its response that counts in the loss: all answers, the
    `last` answer, or `all` of the text."""
    train_parts: Annotated[
        tuple[AnswerPart, ...], BeforeValidator(convert_list_to_tuple), Field(min_length=1)
    ] = ("answers", "tool_calls", "thoughts")
    """Parts of these answers that count: the content (`answers`), `tool_calls`, `thoughts`
    (`reasoning_content`, `thinking` or `reasoning` of a message). The template's marks around a
    part count with it, the end mark with the last part. A row whose parts cannot be told apart in
    its text is refused."""
    train_on_end: bool = True
    """Whether an answer's end mark (end of turn, end of text) counts in the loss, too."""
    train_key: Text | None = None
    """Key of a message that decides whether this answer counts, as `train` or `weight`: true or 1,
    false or 0. An answer without it counts."""
    role_key: Text = "role"
    """Key of a message's role, as `from` in ShareGPT's form."""
    content_key: Text = "content"
    """Key of a message's content, as `value` in ShareGPT's form."""
    roles: dict[Text, Text | None] = {}
    """Roles by their names in the rows, as `{human: user, gpt: assistant}`; other roles keep their
    names. null leaves the messages of a role out, as `{system: null}`. Answers are messages of role
    assistant."""
    most_rows: Positive | None = None
    """Read only this many rows (of text: documents), the first ones; null: all."""
    stream: StreamSettings | None = None
    """Train while the files are fetched and tokenized, as `{buffer: 2GiB}`; null: all of them are
    read before step 1. The files of `path` may then be URLs, too: `https://host/part-*.jsonl.gz`,
    `s3://bucket/**/*.parquet`, `hf://datasets/owner/name/**/*.parquet` (extra `stream`; each
    protocol has its usual variables of the environment for accounts). A lost connection is tried
    again for a quarter of an hour."""
    factory: Text | None = None
    """`package.module:function` for format custom: returns an object with `__len__` and
    `__getitem__`; each item is a mapping from names of arguments of the model's forward to tensors
    (or numbers). For task lightning items are of any form of which torch's default_collate makes a
    tensor, a list, or a mapping of tensors. Before the call Python's, NumPy's and torch's random
    generators are seeded by `seed`; a few samples are compared over the ranks and at a resume."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `factory`."""


class TokenizerTraining(Section, resume_rule=OTHER_DATA):
    """Tokenizer that is trained once on the training corpus, and cached by corpus and settings."""

    train: Literal["wordpiece", "bpe"]
    """`wordpiece` as in BERT (lower case), `bpe` byte-level as in GPT-2 and Llama-3."""
    vocab_size: Annotated[int, Field(ge=300, le=MAX_COUNT)] = 30522
    """Upper bound of the vocabulary; a small corpus may give fewer entries."""


class MaskedLm(Section, resume_rule=OTHER_DATA):
    """Masking as in BERT: 80 % [MASK], 10 % a random word, 10 % unchanged."""

    probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens to predict."""
    final_probability: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share that `probability` goes to in equal steps, as from 0.3 to 0.15, and an evaluation's; null:
    it stays."""
    final_step: Positive | None = None
    """Step from which it is `final_probability`."""
    max_predictions: Positive | None = None
    """Maximum predictions of a sequence; null: no limit. Each sequence has exactly as many as in
    BERT's own data: the smaller of this and `probability` x its tokens, [CLS] and [SEP] included,
    rounded (19 of 128, 77 of 512)."""
    whole_words: bool = False
    """Mask all pieces of a word or none, as BERT's whole-word models; for tokenizers whose pieces
    begin with ##. A sequence may then have one prediction less, where no remaining word fits."""


class SpanCorruption(Section, resume_rule=OTHER_DATA):
    """Spans that are left out, as in T5's pretraining.

    Each is one of the tokens <extra_id_0>, <extra_id_1> and so on in the text that is read, and the
    model writes them all, each after its token.
    """

    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens that are left out."""
    mean_span_length: Annotated[float, Field(ge=1)] = 3.0
    """Mean tokens of a span."""


# The lower bound of `sequence_length`, too.
BucketLength = Annotated[int, Field(ge=8, le=MAX_COUNT)]
BuiltIn = Literal["python-docs", "python-chats", "python-pairs"]
# Tags instead of a plain union: pydantic then reports errors of the chosen branch only.
Source = Annotated[
    Annotated[BuiltIn, Tag(WORD)] | Annotated[Corpus, Tag(MAPPING)],
    Discriminator(_single_source_branch),
]


class HeldOut(Section):
    """Part of the training data that is held out for evaluation, chosen by the seed."""

    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the samples of `data.train`, as 0.05; of a mixture the same share of each source.
    These samples are not trained on. They depend on `seed` and the number of samples alone, so they
    are the same in every world and after a resume. Samples of plain text are windows of it: a
    window that is held out may continue one that is trained on."""
    samples: Positive | None = None
    """Number of samples, instead of `share`. Of a stream of chats: of the first chats of the first
    file."""


EvaluationSource = Annotated[
    Annotated[BuiltIn, Tag(WORD)] | Annotated[Corpus, Tag(MAPPING)] | Annotated[HeldOut, Tag(PART)],
    Discriminator(_evaluation_branch),
]
TokenizerChoice = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[TokenizerTraining, Tag(MAPPING)],
    Discriminator(_single_source_branch),
]


class Part(Section):
    """One source of a mixture."""

    source: Source
    """The corpus, as `data.train` takes one."""
    weight: Annotated[float, Field(gt=0)] | None = 1.0
    """Weight of this source relative to the other sources: with weights 3 and 1 the first source
    gives three quarters of the samples, whatever the sizes are. A small source repeats sooner.
    null, for all sources: as many as a source has samples, so that each sample counts the same."""


TrainingSource = Annotated[
    Annotated[BuiltIn, Tag(WORD)]
    | Annotated[Corpus, Tag(MAPPING)]
    | Annotated[
        tuple[Part, ...], BeforeValidator(convert_list_to_tuple), Field(min_length=1), Tag(LIST)
    ],
    Discriminator(_source_branch),
]


class Data(Section, resume_rule=OTHER_DATA):
    """Training and evaluation data."""

    train: TrainingSource
    """The training corpus: a mapping, or `python-docs`, the language reference inside every
    CPython, or `python-chats`, the same as questions and answers, to try instruction tuning, or
    `python-pairs`, its sentences as queries, each with the rest of its paragraph and that of another
    one, to try embedding and reranker. Or a mixture, a list as `[{source: python-docs, weight: 1},
    {source: {format: text, path: a.txt}, weight: 3}]`: in every 65,536 samples
    the weights hold exactly. An epoch of a mixture has as many samples as all its sources together."""
    # Nothing is trained on it.
    evaluation: Annotated[EvaluationSource | None, APPLIED] = None
    """Held-out corpus for the evaluation loss, or a part of the training data, as `{share: 0.05}`
    or `{samples: 500}`; null: none."""
    tokenizer: TokenizerChoice | None = None
    """Local folder or hub id (or `owner/name@revision`), or `{train: wordpiece, vocab_size: 30522}`;
    null only for custom data."""
    special_tokens: dict[SpecialToken, Text] = {}
    """Special tokens in place of the tokenizer's, as `{pad_token: <pad>, eos_token: <|im_end|>}`. A
    token that the vocabulary lacks is added to it; a pretrained model then needs a larger
    `model.config.vocab_size`, which the error names."""
    added_tokens: Words = ()
    """More special tokens for the vocabulary, such as marks of a chat template that the tokenizer
    would split into pieces."""
    chat_template: Text | None = None
    """Template that writes chats: `chatml`, `gemma`, `llama3`, `mistral`, `phi_3`, `vicuna` or
    `zephyr`, a Jinja file, or its text; null: the tokenizer's own. It is exported with the
    tokenizer. Where it marks answers by {% generation %}, the loss counts those;
    else it counts the text that the template writes for messages of role assistant, after the
    template's prompt for an answer (`add_generation_prompt`)."""
    template_arguments: dict[str, Any] = {}
    """Values of variables of the chat template, as `{enable_thinking: false, date_string: 26 Jul
    2024}`. They are exported within the template. A row's column of the same name, or its
    `chat_template_kwargs`, comes first."""
    processor: Text | None = None
    """Local folder or hub id of the processor that makes tensors of images or recordings; null:
    `model.pretrained`. It is exported with the model."""
    transcript_length: Positive = 128
    """Tokens that the transcript of a recording is padded to; a longer one is refused."""
    sequence_length: Annotated[int, Field(ge=8, le=MAX_COUNT)] | None = None
    """Tokens of a sample, the same for all: shorter texts are padded, longer ones cut. All steps
    then run one graph, for which ONNX Runtime and torch.compile plan and reserve memory once; null
    only for custom data."""
    target_length: Positive = 128
    """Tokens that the text to write is padded to, for seq2seq, its end mark included."""
    cut_long: bool = False
    """Whether longer texts are cut, for seq2seq: the text that is read to `sequence_length`, the text
    to write to `target_length`; end marks stay. False: a longer text ends the start, with its
    row."""
    label_pieces: Literal["first", "all"] = "first"
    """Tokens of a word that have its tag, for token-classification: the `first`, or `all`, of which
    the later ones of B-TYPE have I-TYPE if it is a class (run_ner.py's `label_all_tokens`). An
    evaluation counts each token with a tag."""
    stride: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Tokens that the windows of a longer context share, for question-answering; null: a third of
    `sequence_length` (128 of 384). Each window is a sample of its own; where it does not contain
    the answer, its positions are those of [CLS]."""
    # Three at most, because every length is a graph of its own: one more compilation, one more
    # memory plan.
    bucket_lengths: Annotated[
        Annotated[
            tuple[BucketLength, ...], BeforeValidator(convert_list_to_tuple), Field(max_length=3)
        ]
        | None,
        _LESS_PADDING,
    ] = None
    """Up to three lengths below `sequence_length`, for chats and texts with labels, as [64, 128].
    The samples of a step are grouped by length into its passes and ranks, and each micro batch is
    padded to the shortest length that fits. Useful where padding costs more than additional shapes:
    inductor compiles each shape, ONNX Runtime and GPUs reserve memory for each. The step's samples
    are the same, and so are its loss and gradients. null: none."""
    padding: Annotated[Literal["fixed", "longest"], _LESS_PADDING] = "fixed"
    """`fixed`: to `sequence_length`, or to `bucket_lengths`. `longest`, for chats and texts with
    labels: samples are grouped as with `bucket_lengths`, and each micro batch is padded to its
    longest sample, rounded up to a multiple of 8. Least padding, most shapes: not suitable for
    inductor, which compiles few shapes and runs the others as eager."""
    attend_across_documents: bool = True
    """For causal-lm and masked-lm on text, whose samples are packed with several documents: whether a
    token attends to other documents of its sample. false: each document is independent, and
    positions restart. For causal-lm the first token of a document is not predicted; for masked-lm
    documents are packed whole, each as `[CLS] document [SEP]`, longer ones in pieces. Attention runs
    on each document alone; on engine ort, and in models without transformers' sdpa, a mask keeps at
    most 8,192 tokens apart."""
    packing: bool = False
    """Whether several chats, or prompts with their responses, share a sample. They are packed whole
    by first-fit decreasing; none attends to another, and positions restart at 0, as with
    `attend_across_documents: false`. A sample of a batch, or a weight of a mixture, is then such a
    pack; `evaluation: {share: ...}` still holds out rows. Text is always packed."""
    allow_findings: Annotated[
        tuple[SevereFinding, ...], BeforeValidator(convert_list_to_tuple), APPLIED
    ] = ()
    """Severe findings of the data's audit that shall not end the training: `no_answers`, nearly all
    chats have no learned token; `unknown_tokens`, half of the tokens are unknown to the tokenizer;
    `overlap`, half of the evaluation rows are training rows, from another source. `ortlaunch data
    show` prints all findings."""
    masked_lm: MaskedLm | None = None
    """Masking; null: BERT's (15 %, no limit)."""
    span_corruption: SpanCorruption | None = None
    """Spans of task span-corruption; null: T5's (15 % of tokens, 3 in a span)."""
    collate: Text | None = None
    """`package.module:function`, for custom data: turns a list of samples (of any type, as the
    factory's object returns them) into a batch, a mapping from names to tensors, for example with
    padding of your own; evaluation uses it, too. null: samples are mappings to tensors of one
    shape, and are stacked."""
    workers: Annotated[
        Annotated[int, Field(ge=0, le=256)] | None,
        effect_rule("random values of the samples may differ"),
    ] = None
    """Processes of each rank that read micro batches while earlier ones train, for text, or for
    custom data whose samples take time to make. Each sample is read with Python's, NumPy's and
    torch's random generators seeded by seed, epoch and sample, so that it does not depend on the
    number of workers. 0: none. null: for text on a GPU one thread, which is enough; on a CPU, and
    for custom data, none. Not used for evaluation."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The training corpus as a mixture; a single source is a mixture of one."""
        return self.train if isinstance(self.train, tuple) else (Part(source=self.train),)

    @property
    def factories(self) -> list[str]:
        """The user's own functions that make training samples."""
        sources = [part.source for part in self.parts]
        return [
            source.factory for source in sources if isinstance(source, Corpus) and source.factory
        ]

    @property
    def is_custom(self) -> bool:
        """Whether the user's own functions make the training samples."""
        return all(is_custom(part.source) for part in self.parts)

    @property
    def separates_documents(self) -> bool:
        """Whether samples hold documents that do not attend to each other."""
        return self.packing or not self.attend_across_documents

    @property
    def padding_bucket_or_multiple_of_8_lengths(self) -> Sequence[int]:
        """Lengths below `sequence_length` that a micro batch may be padded to, ascending."""
        return (
            # Multiples of 8, as `padding: longest` rounds up; the full length is not among them.
            range(8, self.sequence_length or 0, 8)
            if self.padding == "longest"
            else self.bucket_lengths or ()
        )

    def key_and_source_pairs(self) -> Iterator[tuple[str, str | Corpus]]:
        """Yield every source with its key in the recipe."""
        for part_index, part in enumerate(self.parts):
            yield (
                f"data.train[{part_index}].source"
                if isinstance(self.train, tuple)
                else "data.train",
                part.source,
            )
        if isinstance(self.evaluation, (str, Corpus)):
            yield "data.evaluation", self.evaluation


def has_chat_rows(source_name_or_corpus: str | Corpus) -> bool:
    """Return whether the rows of a source are chats."""
    if isinstance(source_name_or_corpus, str):
        return source_name_or_corpus == "python-chats"
    return bool(
        source_name_or_corpus.messages_column
        or source_name_or_corpus.prompt_column
        or source_name_or_corpus.response_column
        or source_name_or_corpus.prompt
    )


def is_written_by_chat_template(source_name_or_corpus: str | Corpus) -> bool:
    """Return whether a chat template writes the rows of a source."""
    return has_chat_rows(source_name_or_corpus) and (
        isinstance(source_name_or_corpus, str) or source_name_or_corpus.prompt is None
    )


def is_custom(source: str | Corpus) -> bool:
    """Return whether a source is a function of the user's."""
    return isinstance(source, Corpus) and source.format == "custom"
