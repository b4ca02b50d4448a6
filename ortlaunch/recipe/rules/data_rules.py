"""Rules of the section `data`: formats of sources, and the task's demands on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.base.units import human_bytes
from ortlaunch.recipe.fields.data import (
    Corpus,
    Data,
    HeldOut,
    TokenizerTraining,
    has_chat_rows,
    is_custom,
    is_written_by_chat_template,
)
from ortlaunch.recipe.fields.prompts import PLACE_NAMES, PLACES, PROMPTS, PromptTemplate
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import (
    MAX_COUNT,
    NO_EFFECT_MESSAGE,
    names_of_non_default_fields,
)
from ortlaunch.recipe.rules.document_mask import (
    document_mask_reason_or_empty,
    too_long_for_mask_text_or_empty,
)
from ortlaunch.recipe.rules.model_rules import function_name_rules
from ortlaunch.recipe.text.source_location import Problem
from ortlaunch.tables.model_tasks import MODEL_TASKS

_LOSS_FIELDS = ("train_on", "train_on_end")
_TEMPLATE_FIELDS = ("tools_column", "ignore_fields")
_CHAT_FIELDS = ("system_column", "input_column", "role_key", "content_key", "roles", "prompt",
          "train_key", "train_parts", *_TEMPLATE_FIELDS, *_LOSS_FIELDS)  # fmt: skip
_TEXT_COLUMN_FIELDS = ("text_column", "label_column")
# Columns of tasks whose rows have other ones.
_TASK_COLUMN_FIELDS = (
    "question_column", "context_column", "answers_column", "target_column", "source_prefix", "choice_columns",
)  # fmt: skip
# Fields of `data` that only some tasks have.
_TASK_DATA_FIELDS = tuple(name for row in MODEL_TASKS.values() for name in row.data_fields)
_COLUMN_FIELDS = (*_TEXT_COLUMN_FIELDS, *_TASK_COLUMN_FIELDS, "text_columns", "messages_column", "prompt_column",
            "response_column", *_CHAT_FIELDS, "most_rows")  # fmt: skip
# A cell of CSV is text, so that it has no messages.
_CSV_FIELDS = (*_TEXT_COLUMN_FIELDS, "text_columns", "target_column", "source_prefix", "context_column",
          "choice_columns", "prompt_column", "response_column", "system_column", "input_column", "prompt",
          *_TEMPLATE_FIELDS, *_LOSS_FIELDS, "most_rows")  # fmt: skip
# Fields that each format uses; any other field has no effect.
_FORMAT_FIELDS = {
    "text": ("path", "document", "most_rows"),
    "jsonl": ("path", *_COLUMN_FIELDS, "file_column"),
    "csv": ("path", *_CSV_FIELDS, "file_column"),
    "parquet": ("path", *_COLUMN_FIELDS, "file_column"),
    "folder": ("path", "split", "file_column", "text_column", "label_column", "most_rows"),
    "hub": ("name", "subset", "files", "revision", "split", *_COLUMN_FIELDS),
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
_FIELDS_BY_MEDIA = {
    "": ("tokenizer", "sequence_length"),
    "image": ("processor",),
    "sound": ("tokenizer", "processor", "transcript_length"),
}
_REASONS_NEEDED = {
    "tokenizer": "text needs a tokenizer and a sequence_length",
    "sequence_length": "text needs a tokenizer and a sequence_length",
    "processor": "files become tensors by the processor of a model: give its folder or hub id",
}
_FILE_FORMATS = ("folder", "jsonl", "csv", "parquet", "custom")


def all_data_section_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule of the section."""
    for source_key, source in recipe.data.key_and_source_pairs():
        if isinstance(source, Corpus):
            yield from _corpus_field_rules(source_key, source)
            yield from _streamed_source_rules(source_key, source, recipe)
    yield from _mixture_weight_rules(recipe.data)
    yield from _task_and_data_rules(recipe)
    yield from _task_field_rules(recipe)
    yield from _tokenizer_and_masking_rules(recipe.data, recipe.model.task)
    yield from _chat_task_and_template_rules(recipe.data, recipe.model.task)
    yield from _packing_and_attention_rules(recipe.data, recipe.model.task)
    if problem := too_long_for_mask_text_or_empty(
        recipe.data.sequence_length, document_mask_reason_or_empty(recipe)
    ):
        yield ("data.sequence_length", "engine.name"), problem
    yield from _padding_length_rules(recipe.data, recipe.model.task)
    if recipe.data.padding == "longest" and recipe.engine.name == "inductor":
        message = (
            "got longest, but inductor compiles at most eight lengths and runs the others in "
            "eager mode: set"
        )
        yield ("data.padding", "engine.name"), f"{message} data.bucket_lengths, up to three"
    yield from function_name_rules("data.collate", recipe.data.collate)


def _corpus_field_rules(source_key: str, corpus: Corpus) -> Iterator[Problem]:
    format_key = f"{source_key}.format"
    required_field = _FORMAT_NEEDS[corpus.format]
    accepted_fields = _FORMAT_FIELDS[corpus.format]
    if getattr(corpus, required_field) is None:
        yield (
            (f"{source_key}.{required_field}", format_key),
            f"is missing: format {corpus.format} needs {required_field}",
        )
    # `_stream` reports where a stream is possible.
    for key in sorted(
        names_of_non_default_fields(corpus) - {"format", "stream"} - set(accepted_fields)
    ):
        yield (
            (f"{source_key}.{key}", format_key),
            NO_EFFECT_MESSAGE.format(f"format {corpus.format}", ", ".join(accepted_fields)),
        )
    yield from function_name_rules(f"{source_key}.factory", corpus.factory)
    pair_columns = [key for key in ("prompt_column", "response_column") if getattr(corpus, key)]
    if corpus.messages_column and pair_columns:
        yield (
            (f"{source_key}.{pair_columns[0]}", f"{source_key}.messages_column"),
            "is an alternative to messages_column; give only one",
        )
    elif len(pair_columns) == 1 and not corpus.prompt:
        missing_column = "response_column" if pair_columns == ["prompt_column"] else "prompt_column"
        yield (
            (f"{source_key}.{missing_column}", f"{source_key}.{pair_columns[0]}"),
            f"is missing: {pair_columns[0]} needs it",
        )
    if corpus.role_key == corpus.content_key:
        yield (
            (f"{source_key}.content_key", f"{source_key}.role_key"),
            f"got {corpus.content_key}, which is role_key, too; they are two keys of a message",
        )
    has_pairs = bool(pair_columns or corpus.prompt)
    main_column = (
        "messages_column" if corpus.messages_column else "prompt_column" if has_pairs else ""
    )
    fields_by_column = {
        "messages_column": (
            "role_key",
            "content_key",
            "roles",
            "system_column",
            "train_key",
            "train_parts",
            *_TEMPLATE_FIELDS,
            *_LOSS_FIELDS,
        ),
        "prompt_column": (
            "input_column",
            "system_column",
            "prompt",
            *(() if corpus.prompt else _TEMPLATE_FIELDS),
            *_LOSS_FIELDS,
        ),
    }
    for key in sorted(
        names_of_non_default_fields(corpus)
        & {*_CHAT_FIELDS} - {*fields_by_column.get(main_column, ())}
    ):
        rows_text = main_column or "rows without messages_column or prompt_column"
        yield (f"{source_key}.{key}", format_key), f"has no effect with {rows_text}; remove it"
    for key in sorted(
        names_of_non_default_fields(corpus) & {"train_key", "train_on_end", "train_parts"}
    ):
        if corpus.train_on == "all":
            yield (
                (f"{source_key}.{key}", f"{source_key}.train_on"),
                "has no effect with train_on: all; remove it",
            )
    if corpus.prompt is not None:
        yield from _prompt_placeholder_rules(source_key, corpus, corpus.prompt)


def _prompt_placeholder_rules(
    source_key: str, corpus: Corpus, prompt: str | PromptTemplate
) -> Iterator[Problem]:
    """Yield the problems of the places in a prompt's template."""
    template = PROMPTS[prompt] if isinstance(prompt, str) else prompt
    placeholders = set(PLACES.findall(template.template))
    for key in ("template", "without_input"):
        template_names = PLACES.findall(getattr(template, key) or "{instruction}")
        for placeholder in sorted({*template_names} - {*PLACE_NAMES}):
            yield (
                (f"{source_key}.prompt.{key}",),
                f"got {{{placeholder}}}; it may have "
                f"{', '.join(f'{{{placeholder_name}}}' for placeholder_name in PLACE_NAMES)}",
            )
        if "instruction" not in template_names:
            yield (f"{source_key}.prompt.{key}",), "has no {instruction}, the text of prompt_column"
    for key, placeholder in (("system_column", "system"), ("input_column", "input")):
        if getattr(corpus, key) and placeholder not in placeholders:
            yield (
                (f"{source_key}.{key}", f"{source_key}.prompt"),
                f"has no effect with this prompt, whose template has no {{{placeholder}}}",
            )


def _streamed_source_rules(source_key: str, corpus: Corpus, recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of a source whose samples are not known in advance."""
    stream_key = f"{source_key}.stream"
    stream = corpus.stream
    if stream is None:
        if remote_path := next(
            (file_path for file_path in corpus.path or () if "://" in file_path), None
        ):
            yield (
                (f"{source_key}.path",),
                f"got {remote_path}; to read a URL give {stream_key}: {{buffer: 2GiB}}; or copy or mount it",
            )
        return
    data = recipe.data
    traits = recipe.model.traits
    least_buffer_bytes = 4 * stream.shuffle * (data.sequence_length or 0) * 4
    needs_text = f"needs all samples of data.train, and {stream_key} has none yet; give"
    needs_all_rows = traits.label or traits.pairs or traits.compares or traits.leaves_spans_out
    may_hold_out_first_chats = (
        has_chat_rows(corpus)
        and data.train is corpus
        and isinstance(data.evaluation, HeldOut)
        and data.evaluation.samples is not None
    )
    for key_name, is_broken, message in (
        (
            stream_key,
            corpus.path is None,
            "is for text, jsonl, csv and parquet; a data set of the hub is format: "
            "parquet, path: hf://datasets/NAME/**/*.parquet",
        ),
        (
            stream_key,
            source_key == "data.evaluation",
            "has no effect on evaluation, which reads all samples each time; leave it out",
        ),
        (
            stream_key,
            needs_all_rows,
            "is for text without labels, and for chats; labels, pairs of sentences and spans that are "
            "left out need all rows: leave it out",
        ),
        (
            f"{stream_key}.buffer",
            stream.buffer_bytes < least_buffer_bytes,
            f"got {stream.buffer}, less than four windows of "
            f"shuffle: {stream.shuffle} samples, {human_bytes(least_buffer_bytes)}; enlarge it, or lower shuffle",
        ),
        (f"{source_key}.most_rows", corpus.most_rows, f"{needs_text} fewer files"),
        (
            "data.tokenizer.train",
            isinstance(data.tokenizer, TokenizerTraining),
            f"{needs_text} the name or folder of a tokenizer",
        ),
        (
            "data.evaluation",
            isinstance(data.evaluation, HeldOut) and not may_hold_out_first_chats,
            f"{needs_text} a corpus of its own"
            + (", or {samples: 500}" if has_chat_rows(corpus) and data.train is corpus else ""),
        ),
        ("train.epochs", recipe.train.epochs, f"{needs_text} train.max_steps"),
        (
            "train.evaluate_every_epochs",
            recipe.train.evaluate_every_epochs,
            f"{needs_text} train.evaluate_every_steps",
        ),
        (
            "checkpoint.every_epochs",
            recipe.checkpoint.every_epochs,
            f"{needs_text} checkpoint.every_steps",
        ),
        *(
            (
                f"data.train[{part_index}].weight",
                part.weight is None and part.source is corpus,
                f"{needs_text} weights",
            )
            for part_index, part in enumerate(data.parts)
        ),
    ):
        if is_broken:
            yield (key_name, stream_key), message


def _mixture_weight_rules(data_section: Data) -> Iterator[Problem]:
    # Only ratios of weights matter; they need not sum to 1.
    total_weight = sum(filter(None, [part.weight for part in data_section.parts]))
    for part_index, part in enumerate(data_section.parts):
        part_key = f"data.train[{part_index}]"
        if part.weight is None and total_weight:
            yield (
                (f"{part_key}.weight", "data.train"),
                "is null, and other sources have a number: null for all sources, or none",
            )
        if part.weight and part.weight / total_weight < _SMALLEST_SHARE:
            yield (
                (f"{part_key}.weight", "data.train"),
                f"got {part.weight:g}, and all weights are {total_weight:g}: less than one sample in "
                "65,536; leave it out",
            )
        if is_custom(part.source) and not data_section.is_custom:
            yield (
                (f"{part_key}.source", "data.train"),
                "is custom, and other sources of data.train are not: use custom for all or none",
            )


def _task_and_data_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of data that do not suit the task or the other fields."""
    data = recipe.data
    task = recipe.model.task
    traits = recipe.model.traits
    # Custom data are tensors already: fields for text have no effect on them.
    is_custom_data = data.is_custom
    evaluation_source = data.evaluation
    if isinstance(evaluation_source, HeldOut):
        yield from _held_out_part_rules(
            evaluation_source, "" if is_custom_data else traits.reason_against_held_out_part
        )
    elif evaluation_source is not None and is_custom(evaluation_source) != is_custom_data:
        yield (
            ("data.evaluation", "data.train.format", "data.evaluation.format"),
            "must be custom if and only if data.train is custom",
        )
    used_fields = () if is_custom_data else _FIELDS_BY_MEDIA[traits.media]
    samples_text = "custom data: its factory makes the tensors" if is_custom_data else task
    for key in ("tokenizer", "sequence_length", "processor", "transcript_length"):
        if (
            key not in used_fields
            and key in names_of_non_default_fields(data)
            and getattr(data, key) is not None
        ):
            yield (f"data.{key}", "data.train.format"), f"has no effect with {samples_text}"
        value = getattr(data, key) or (key == "processor" and recipe.model.pretrained)
        if key in used_fields and not value:
            yield (f"data.{key}", "data.train.format"), f"is missing: {_REASONS_NEEDED[key]}"
    if data.masked_lm is not None and (is_custom_data or traits.predicts != "masked"):
        yield (
            ("data.masked_lm", "model.task", "data.train.format"),
            "is for the tasks masked-lm and pretraining on text, not for "
            f"{'custom data' if is_custom_data else task}",
        )
    if data.collate is not None and not is_custom_data:
        yield (
            ("data.collate", "data.train.format"),
            "is for custom data only",
        )
    for key, source in data.key_and_source_pairs():
        file_format = source.format if isinstance(source, Corpus) else "text"
        format_key = f"{key}.format"
        for key_names, is_broken, message in (
            ((key, "model.task", format_key), traits.media and file_format not in _FILE_FORMATS,
             f"names no files; {task} needs format {', '.join(_FILE_FORMATS)}"),
            ((key, "model.task", format_key),
             (traits.label or traits.compares) and file_format == "text" and source != "python-pairs",
             f"has no {'labels' if traits.label else 'rows of several texts'}; {task} needs format "
             "jsonl, csv, parquet, hub or custom"),
            ((key, "model.task"), source == "python-pairs" and not traits.compares,
             f"got python-pairs, which is for embedding and reranker, not for {task}"),
            ((f"{key}.text_columns", "model.task"),
             isinstance(source, Corpus) and source.text_columns and not traits.compares,
             f"is for embedding and reranker, not for {task}; use text_column"),
            ((f"{key}.text_columns", "model.task"),
             isinstance(source, Corpus) and traits.compares and not is_custom_data
             and len(source.text_columns) < 2,
             f"is missing: {task} needs the columns of a query and its documents, as [query, positive]"),
            ((f"{key}.text_columns",),
             isinstance(source, Corpus) and len({*source.text_columns}) < len(source.text_columns),
             "has a column twice: a text would be compared with itself; give each once"),
            ((format_key, "model.task"), file_format == "folder" and not traits.media,
             "got folder, which is for image-classification and speech-seq2seq"),
            ((format_key, "model.task"), file_format == "csv" and traits.has_list_label,
             f"got csv, whose cells are no lists; {task} needs format jsonl, parquet or hub"),
        ):  # fmt: skip
            if is_broken:
                yield key_names, message


def _task_field_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the fields of data and of columns that are another task's."""
    traits = recipe.model.traits
    data_fields = () if recipe.data.is_custom else traits.data_fields
    other_fields = {*_TASK_DATA_FIELDS} - {*data_fields}
    for key in sorted(names_of_non_default_fields(recipe.data) & other_fields):
        yield (f"data.{key}", "model.task"), f"has no effect with {recipe.model.task}"
    has_own_columns = not {*traits.columns}.isdisjoint(_TASK_COLUMN_FIELDS)
    other_columns = {*_TASK_COLUMN_FIELDS, *(_TEXT_COLUMN_FIELDS if has_own_columns else ())}
    for source_key, source in recipe.data.key_and_source_pairs():
        if isinstance(source, Corpus):
            for key in sorted(
                names_of_non_default_fields(source) & other_columns - {*traits.columns}
            ):
                yield (
                    (f"{source_key}.{key}", "model.task"),
                    f"has no effect with {recipe.model.task}, which reads {', '.join(traits.columns)}",
                )


def _held_out_part_rules(held_out: HeldOut, reason_against: str) -> Iterator[Problem]:
    if held_out.share is not None and held_out.samples is not None:
        yield (
            ("data.evaluation.samples", "data.evaluation.share"),
            f"got {held_out.samples} beside share: {held_out.share:g}; keep one",
        )
    elif held_out.share is None and held_out.samples is None:
        yield ("data.evaluation",), "is missing: give share or samples, or a corpus of its own"
    if reason_against:
        yield (
            ("data.evaluation", "model.task"),
            f"got a part of data.train, and {reason_against}; give a corpus of its own",
        )


def _chat_task_and_template_rules(data_section: Data, task_name: str) -> Iterator[Problem]:
    """Yield the problems of sources of chats, and of the template that writes them."""
    chat_keys = [
        key for key, source in data_section.key_and_source_pairs() if has_chat_rows(source)
    ]
    for key in chat_keys if MODEL_TASKS[task_name].predicts != "next" else ():
        yield (
            (key, "model.task"),
            f"contains chats, which are for task causal-lm, not for {task_name}",
        )
    uses_chat_template = any(
        is_written_by_chat_template(source) for _, source in data_section.key_and_source_pairs()
    )
    if data_section.chat_template is not None and not uses_chat_template:
        yield (
            ("data.chat_template", "data.train"),
            "has no effect without chats: no source has a messages_column",
        )
    if data_section.template_arguments and not uses_chat_template:
        yield (
            ("data.template_arguments", "data.train"),
            "has no effect without chats: no source has a messages_column",
        )
    if (
        uses_chat_template
        and isinstance(data_section.tokenizer, TokenizerTraining)
        and data_section.chat_template is None
    ):
        yield (
            ("data.chat_template", "data.tokenizer.train", chat_keys[0]),
            "is missing: a tokenizer that is trained here has no chat template of its own",
        )


def _packing_and_attention_rules(data_section: Data, task_name: str) -> Iterator[Problem]:
    field_path = "data.attend_across_documents"
    text_keys = [
        key for key, source in data_section.key_and_source_pairs() if not has_chat_rows(source)
    ]
    if data_section.packing and len(text_keys) == len([*data_section.key_and_source_pairs()]):
        yield ("data.packing", "data.train"), "has no effect without chats; text is always packed"
    elif data_section.packing and text_keys and data_section.attend_across_documents:
        yield (
            (field_path, "data.packing"),
            f"is missing: false; {text_keys[0]} is text, and packed chats never attend to others",
        )
    if data_section.packing and data_section.padding_bucket_or_multiple_of_8_lengths:
        key = "data.bucket_lengths" if data_section.bucket_lengths else "data.padding"
        yield (key, "data.packing"), "has no effect with data.packing, whose samples are full"
    if data_section.attend_across_documents:
        return
    traits = MODEL_TASKS[task_name]
    if data_section.is_custom or not traits.predicts or traits.pairs:
        data_text = "custom data" if data_section.is_custom else task_name
        yield (
            (field_path, "model.task", "data.train.format"),
            f"is for causal-lm and masked-lm on text, not for {data_text}",
        )
    for key in (
        key for key, source in data_section.key_and_source_pairs() if has_chat_rows(source)
    ):
        if not (data_section.packing and text_keys):
            yield (field_path, key), "has no effect with chats: each is one sample, or packed apart"


def _padding_length_rules(data_section: Data, task_name: str) -> Iterator[Problem]:
    field_path = "data.bucket_lengths" if data_section.bucket_lengths else "data.padding"
    lengths = data_section.bucket_lengths
    if lengths is None and data_section.padding == "fixed":
        return
    # Other text is cut into windows of equal length.
    traits = MODEL_TASKS[task_name]
    if (
        not traits.label
        and not traits.compares
        and not any(has_chat_rows(source) for _, source in data_section.key_and_source_pairs())
    ):
        yield (
            (field_path, "model.task"),
            f"has no effect for {task_name} on text, whose samples are windows without padding",
        )
    if lengths is None:
        return
    if data_section.padding == "longest":
        yield (
            ("data.padding", field_path),
            "got longest, which needs no bucket_lengths; give only one of them",
        )
    sequence_length = data_section.sequence_length or MAX_COUNT
    if list(lengths) != sorted(set(lengths)) or not lengths or lengths[-1] >= sequence_length:
        lengths_text = ", ".join(map(str, lengths))
        yield (
            (field_path, "data.sequence_length"),
            f"got {lengths_text}; they must rise, below sequence_length: {sequence_length}",
        )


def _tokenizer_and_masking_rules(data_section: Data, task_name: str) -> Iterator[Problem]:
    """Yield the problems of the tokenizer, and of the words that are masked."""
    tokenizer = data_section.tokenizer
    length = data_section.sequence_length
    # A common mistake: these names would be looked up on the hub.
    if tokenizer in ("wordpiece", "bpe"):
        yield (
            ("data.tokenizer",),
            f"got {tokenizer}; to train one write {{train: {tokenizer}, vocab_size: 30522}}",
        )
    trained_type = isinstance(tokenizer, TokenizerTraining) and tokenizer.train
    if trained_type == "bpe" and MODEL_TASKS[task_name].predicts == "masked":
        yield (
            ("data.tokenizer.train", "model.task"),
            f"got bpe, which has no [MASK] token, for task {task_name}; use wordpiece",
        )
    masked = data_section.masked_lm
    if masked and (masked.final_probability is None) != (masked.final_step is None):
        is_set = "final_step" if masked.final_probability is None else "final_probability"
        missing = {"final_step", "final_probability"} - {is_set}
        yield (
            (f"data.masked_lm.{is_set}",),
            f"needs {missing.pop()}, too: give both, or neither for one share of tokens",
        )
    max_predictions = data_section.masked_lm.max_predictions if data_section.masked_lm else None
    if max_predictions and length and max_predictions >= length:
        yield (
            ("data.masked_lm.max_predictions", "data.sequence_length"),
            f"got {max_predictions}, and a sequence has {length} tokens; BERT uses 20 of 128, 80 of 512",
        )
