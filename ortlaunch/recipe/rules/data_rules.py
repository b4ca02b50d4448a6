"""Rules of the section `data`: formats of sources, and the task's demands on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.model_tasks import MODEL_TASKS
from ortlaunch.recipe.fields.data import (
    Corpus,
    Data,
    HeldOut,
    TokenizerTraining,
    is_chat,
    is_custom,
    uses_template,
)
from ortlaunch.recipe.fields.prompts import PLACE_NAMES, PLACES, PROMPTS, PromptTemplate
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import DOES_NOTHING, MOST, chosen
from ortlaunch.recipe.rules.model_rules import function
from ortlaunch.recipe.text.place import Problem
from ortlaunch.units import human_bytes

_LEARNED = ("train_on", "train_on_end")
_CHATS = ("system_column", "input_column", "role_key", "content_key", "roles", "prompt",
          "train_key", *_LEARNED)  # fmt: skip
_COLUMNS = ("text_column", "label_column", "messages_column", "prompt_column", "response_column",
            *_CHATS, "most_rows")  # fmt: skip
# A cell of CSV is text, so that it has no messages.
_CELLS = ("text_column", "label_column", "prompt_column", "response_column", "system_column",
          "input_column", "prompt", *_LEARNED, "most_rows")  # fmt: skip
# Fields that each format uses; any other field has no effect.
_FORMAT_FIELDS = {
    "text": ("path", "document", "most_rows"),
    "jsonl": ("path", *_COLUMNS, "file_column"),
    "csv": ("path", *_CELLS, "file_column"),
    "parquet": ("path", *_COLUMNS, "file_column"),
    "folder": ("path", "split", "file_column", "text_column", "label_column", "most_rows"),
    "hub": ("name", "subset", "files", "revision", "split", *_COLUMNS),
    "custom": ("factory", "arguments"),
}
# The one field that each format requires.
_FORMAT_NEEDS = {
    "text": "path",
    "jsonl": "path",
    "csv": "path",
    "parquet": "path",
    "folder": "path",
    "hub": "name",
    "custom": "factory",
}
# A block of a mixture has 65,536 samples (worker/data/mixture.py), of which each source needs at
# least one.
_SMALLEST_SHARE = 1 / 65_536


# Fields that samples of text, images and recordings use, and the reason why each is needed.
_USED = {
    "": ("tokenizer", "sequence_length"),
    "image": ("processor",),
    "sound": ("tokenizer", "processor", "transcript_length"),
}
_MISSING = {
    "tokenizer": "text needs a tokenizer and a sequence_length",
    "sequence_length": "text needs a tokenizer and a sequence_length",
    "processor": "files become tensors by the processor of a model: give its folder or hub id",
}
_OF_FILES = ("folder", "jsonl", "csv", "parquet", "custom")


def data_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule of the section."""
    for key, source in recipe.data.sources():
        if isinstance(source, Corpus):
            yield from _corpus(key, source)
            yield from _stream(key, source, recipe)
    yield from _mixture(recipe.data)
    yield from _kinds(recipe)
    yield from _words(recipe.data, recipe.model.task)
    yield from _chats(recipe.data, recipe.model.task)
    yield from _packing(recipe.data, recipe.model.task)
    yield from _buckets(recipe.data, recipe.model.task)
    if recipe.data.padding == "longest" and recipe.engine.name == "inductor":
        message = (
            "got longest, but inductor compiles at most eight lengths and runs the others in "
            "eager mode: set"
        )
        yield ("data.padding", "engine.name"), f"{message} data.bucket_lengths, up to three"
    yield from function("data.collate", recipe.data.collate)


def _corpus(path: str, corpus: Corpus) -> Iterator[Problem]:
    kind = f"{path}.format"
    needed = _FORMAT_NEEDS[corpus.format]
    takes = _FORMAT_FIELDS[corpus.format]
    if getattr(corpus, needed) is None:
        yield (f"{path}.{needed}", kind), f"is missing: format {corpus.format} needs {needed}"
    # `_stream` reports where a stream is possible.
    for key in sorted(chosen(corpus) - {"format", "stream"} - set(takes)):
        yield (
            (f"{path}.{key}", kind),
            DOES_NOTHING.format(f"format {corpus.format}", ", ".join(takes)),
        )
    yield from function(f"{path}.factory", corpus.factory)
    pair = [key for key in ("prompt_column", "response_column") if getattr(corpus, key)]
    if corpus.messages_column and pair:
        yield (
            (f"{path}.{pair[0]}", f"{path}.messages_column"),
            "is an alternative to messages_column; give only one",
        )
    elif len(pair) == 1 and not corpus.prompt:
        other = "response_column" if pair == ["prompt_column"] else "prompt_column"
        yield (f"{path}.{other}", f"{path}.{pair[0]}"), f"is missing: {pair[0]} needs it"
    if corpus.role_key == corpus.content_key:
        yield (
            (f"{path}.content_key", f"{path}.role_key"),
            f"got {corpus.content_key}, which is role_key, too; they are two keys of a message",
        )
    pairs = bool(pair or corpus.prompt)
    form = "messages_column" if corpus.messages_column else "prompt_column" if pairs else ""
    fields = {
        "messages_column": (
            "role_key",
            "content_key",
            "roles",
            "system_column",
            "train_key",
            *_LEARNED,
        ),
        "prompt_column": ("input_column", "system_column", "prompt", *_LEARNED),
    }
    for key in sorted(chosen(corpus) & {*_CHATS} - {*fields.get(form, ())}):
        own = form or "rows without messages_column or prompt_column"
        yield (f"{path}.{key}", kind), f"has no effect with {own}; remove it"
    for key in sorted(chosen(corpus) & {"train_key", "train_on_end"}):
        if corpus.train_on == "all":
            yield (
                (f"{path}.{key}", f"{path}.train_on"),
                "has no effect with train_on: all; remove it",
            )
    if corpus.prompt is not None:
        yield from _prompt(path, corpus, corpus.prompt)


def _prompt(path: str, corpus: Corpus, prompt: str | PromptTemplate) -> Iterator[Problem]:
    """Yield the problems of the places in a prompt's template."""
    form = PROMPTS[prompt] if isinstance(prompt, str) else prompt
    places = set(PLACES.findall(form.template))
    for key in ("template", "without_input"):
        names = PLACES.findall(getattr(form, key) or "{instruction}")
        for name in sorted({*names} - {*PLACE_NAMES}):
            yield (
                (f"{path}.prompt.{key}",),
                f"got {{{name}}}; it may have {', '.join(f'{{{each}}}' for each in PLACE_NAMES)}",
            )
        if "instruction" not in names:
            yield (f"{path}.prompt.{key}",), "has no {instruction}, the text of prompt_column"
    for key, name in (("system_column", "system"), ("input_column", "input")):
        if getattr(corpus, key) and name not in places:
            yield (
                (f"{path}.{key}", f"{path}.prompt"),
                f"has no effect with this prompt, whose template has no {{{name}}}",
            )


def _stream(key: str, corpus: Corpus, recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of a source whose samples are not known in advance."""
    path = f"{key}.stream"
    stream = corpus.stream
    if stream is None:
        if remote := next((each for each in corpus.path or () if "://" in each), None):
            yield (
                (f"{key}.path",),
                f"got {remote}; to read a URL give {path}: {{buffer: 2GiB}}; or copy or mount it",
            )
        return
    data = recipe.data
    traits = recipe.model.traits
    least = 4 * stream.shuffle * (data.sequence_length or 0) * 4
    unknown = f"needs all samples of data.train, and {path} has none yet; give"
    whole = is_chat(corpus) or traits.label or traits.pairs
    for place, wrong, message in (
        (path, corpus.path is None, "is for text, jsonl, csv and parquet; a data set of the hub is format: "
         "parquet, path: hf://datasets/NAME/**/*.parquet"),
        (path, key == "data.evaluation", "has no effect on evaluation, which reads all samples each "
         "time; leave it out"),
        (path, whole, "is for text without labels; chats, labels and pairs of sentences need all "
         "rows: leave it out"),
        (f"{path}.buffer", stream.buffer_bytes < least, f"got {stream.buffer}, less than four windows of "
         f"shuffle: {stream.shuffle} samples, {human_bytes(least)}; enlarge it, or lower shuffle"),
        (f"{key}.most_rows", corpus.most_rows, f"{unknown} fewer files"),
        ("data.tokenizer.train", isinstance(data.tokenizer, TokenizerTraining),
         f"{unknown} the name or folder of a tokenizer"),
        ("data.evaluation", isinstance(data.evaluation, HeldOut), f"{unknown} a corpus of its own"),
        ("train.epochs", recipe.train.epochs, f"{unknown} train.max_steps"),
        ("train.evaluate_every_epochs", recipe.train.evaluate_every_epochs,
         f"{unknown} train.evaluate_every_steps"),
        ("checkpoint.every_epochs", recipe.checkpoint.every_epochs, f"{unknown} checkpoint.every_steps"),
        *((f"data.train[{number}].weight", part.weight is None and part.source is corpus,
           f"{unknown} weights") for number, part in enumerate(data.parts)),
    ):  # fmt: skip
        if wrong:
            yield (place, path), message


def _mixture(data: Data) -> Iterator[Problem]:
    # Only ratios of weights matter; they need not sum to 1.
    total = sum(filter(None, [part.weight for part in data.parts]))
    for number, part in enumerate(data.parts):
        key = f"data.train[{number}]"
        if part.weight is None and total:
            yield (
                (f"{key}.weight", "data.train"),
                "is null, and other sources have a number: null for all sources, or none",
            )
        if part.weight and part.weight / total < _SMALLEST_SHARE:
            yield (
                (f"{key}.weight", "data.train"),
                f"got {part.weight:g}, and all weights are {total:g}: less than one sample in "
                "65,536; leave it out",
            )
        if is_custom(part.source) and not data.is_custom:
            yield (
                (f"{key}.source", "data.train"),
                "is custom, and other sources of data.train are not: use custom for all or none",
            )


def _kinds(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of data that do not suit the task or the other fields."""
    data = recipe.data
    task = recipe.model.task
    traits = recipe.model.traits
    # Custom data are tensors already: fields for text have no effect on them.
    own = data.is_custom
    held = data.evaluation
    if isinstance(held, HeldOut):
        yield from _held_out(held, traits.pairs and not own)
    elif held is not None and is_custom(held) != own:
        yield (
            ("data.evaluation", "data.train.format", "data.evaluation.format"),
            "must be custom if and only if data.train is custom",
        )
    used = () if own else _USED[traits.media]
    samples = "custom data: its factory makes the tensors" if own else task
    for key in ("tokenizer", "sequence_length", "processor", "transcript_length"):
        if key not in used and key in chosen(data) and getattr(data, key) is not None:
            yield (f"data.{key}", "data.train.format"), f"has no effect with {samples}"
        given = getattr(data, key) or (key == "processor" and recipe.model.pretrained)
        if key in used and not given:
            yield (f"data.{key}", "data.train.format"), f"is missing: {_MISSING[key]}"
    if data.masked_lm is not None and (own or traits.predicts != "masked"):
        yield (
            ("data.masked_lm", "model.task", "data.train.format"),
            "is for the tasks masked-lm and pretraining on text, not for "
            f"{'custom data' if own else task}",
        )
    if data.collate is not None and not own:
        yield (
            ("data.collate", "data.train.format"),
            "is for custom data only",
        )
    for key, source in data.sources():
        form = source.format if isinstance(source, Corpus) else "text"
        kind = f"{key}.format"
        for place, wrong, message in (
            ((key, "model.task", kind), traits.media and form not in _OF_FILES,
             f"names no files; {task} needs format {', '.join(_OF_FILES)}"),
            ((key, "model.task", kind), traits.label and form == "text",
             f"has no labels; {task} needs format jsonl, csv, parquet, hub or custom"),
            ((kind, "model.task"), form == "folder" and not traits.media,
             "got folder, which is for image-classification and speech-seq2seq"),
            ((kind, "model.task"), form == "csv" and traits.label == "word",
             f"got csv, whose cells are no lists; {task} needs format jsonl, parquet or hub"),
        ):  # fmt: skip
            if wrong:
                yield place, message


def _held_out(held: HeldOut, pairs: bool) -> Iterator[Problem]:
    if held.share is not None and held.samples is not None:
        yield (
            ("data.evaluation.samples", "data.evaluation.share"),
            f"got {held.samples} beside share: {held.share:g}; keep one",
        )
    elif held.share is None and held.samples is None:
        yield ("data.evaluation",), "is missing: give share or samples, or a corpus of its own"
    if pairs:
        yield (
            ("data.evaluation", "model.task"),
            "got a part of data.train, and pairs of sentences are made of all documents; give a "
            "corpus of its own",
        )


def _chats(data: Data, task: str) -> Iterator[Problem]:
    """Yield the problems of sources of chats, and of the template that writes them."""
    chats = [key for key, source in data.sources() if is_chat(source)]
    for key in chats if MODEL_TASKS[task].predicts != "next" else ():
        yield (key, "model.task"), f"contains chats, which are for task causal-lm, not for {task}"
    written = any(uses_template(source) for _, source in data.sources())
    if data.chat_template is not None and not written:
        yield (
            ("data.chat_template", "data.train"),
            "has no effect without chats: no source has a messages_column",
        )
    if written and isinstance(data.tokenizer, TokenizerTraining) and data.chat_template is None:
        yield (
            ("data.chat_template", "data.tokenizer.train", chats[0]),
            "is missing: a tokenizer that is trained here has no chat template of its own",
        )


def _packing(data: Data, task: str) -> Iterator[Problem]:
    path = "data.attend_across_documents"
    texts = [key for key, source in data.sources() if not is_chat(source)]
    if data.packing and len(texts) == len([*data.sources()]):
        yield ("data.packing", "data.train"), "has no effect without chats; text is always packed"
    elif data.packing and texts and data.attend_across_documents:
        yield (
            (path, "data.packing"),
            f"is missing: false; {texts[0]} is text, and packed chats never attend to others",
        )
    if data.packing and data.lengths:
        key = "data.bucket_lengths" if data.bucket_lengths else "data.padding"
        yield (key, "data.packing"), "has no effect with data.packing, whose samples are full"
    if data.attend_across_documents:
        return
    if data.is_custom or MODEL_TASKS[task].predicts != "next":
        own = "custom data" if data.is_custom else task
        yield (path, "model.task", "data.train.format"), f"is for causal-lm on text, not for {own}"
    for key in (key for key, source in data.sources() if is_chat(source)):
        if not (data.packing and texts):
            yield (path, key), "has no effect with chats: each is one sample, or packed apart"


def _buckets(data: Data, task: str) -> Iterator[Problem]:
    path = "data.bucket_lengths" if data.bucket_lengths else "data.padding"
    lengths = data.bucket_lengths
    if lengths is None and data.padding == "fixed":
        return
    # Other text is cut into windows of equal length.
    if not MODEL_TASKS[task].label and not any(is_chat(source) for _, source in data.sources()):
        yield (
            (path, "model.task"),
            f"has no effect for {task} on text, whose samples are windows without padding",
        )
    if lengths is None:
        return
    if data.padding == "longest":
        yield (
            ("data.padding", path),
            "got longest, which needs no bucket_lengths; give only one of them",
        )
    most = data.sequence_length or MOST
    if list(lengths) != sorted(set(lengths)) or not lengths or lengths[-1] >= most:
        shown = ", ".join(map(str, lengths))
        yield (
            (path, "data.sequence_length"),
            f"got {shown}; they must rise, below sequence_length: {most}",
        )


def _words(data: Data, task: str) -> Iterator[Problem]:
    """Yield the problems of the tokenizer, and of the words that are masked."""
    tokenizer = data.tokenizer
    length = data.sequence_length
    # A common mistake: these names would be looked up on the hub.
    if tokenizer in ("wordpiece", "bpe"):
        yield (
            ("data.tokenizer",),
            f"got {tokenizer}; to train one write {{train: {tokenizer}, vocab_size: 30522}}",
        )
    trained = isinstance(tokenizer, TokenizerTraining) and tokenizer.train
    if trained == "bpe" and MODEL_TASKS[task].predicts == "masked":
        yield (
            ("data.tokenizer.train", "model.task"),
            f"got bpe, which has no [MASK] token, for task {task}; use wordpiece",
        )
    most = data.masked_lm.max_predictions if data.masked_lm else None
    if most and length and most >= length:
        yield (
            ("data.masked_lm.max_predictions", "data.sequence_length"),
            f"got {most}, and a sequence has {length} tokens; BERT uses 20 of 128, 80 of 512",
        )
