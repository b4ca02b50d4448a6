"""Samples of images with a class each, and of recordings with a transcript each.

The model's own processor of transformers makes the tensors; nothing is drawn at random.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import wave
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.base.cache import add_cache_note
from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.inputs import refuse_lfs_pointers_and_unreadable_files
from ortlaunch.worker.data.corpus import (
    read_corpus_rows_up_to_limit,
    require_column_value_of_allowed_length,
)
from ortlaunch.worker.data.file_rows import (
    DataError,
    Row,
    hash_of_size_and_first_middle_last_blocks,
)
from ortlaunch.worker.data.label_rows import (
    SourceSummary,
    labelled_rows_filling_summary,
    require_class_label_of_same_type,
    require_row_text,
)
from ortlaunch.worker.data.labelled_samples import LabelledTexts
from ortlaunch.worker.data.samples import IGNORED, Sample
from ortlaunch.worker.data.streams.hub import hub_error_reason_and_remedy
from ortlaunch.worker.data.tokenizer import download_revision_or_keep_name

# Files whose contents identify a data set; up to twice as many are used.
_SOME = 64
_PROCESSORS = {"image": "AutoImageProcessor", "sound": "AutoFeatureExtractor"}


def load_media_processor_or_none(recipe: Recipe) -> Any:
    """Return the processor that makes tensors of files, or None where the data have no files.

    Raises:
        InputError: the processor is neither a folder nor reachable on the hub.
    """
    media = recipe.model.traits.media
    source = str(recipe.data.processor or recipe.model.pretrained)
    return (
        _load_cached_media_processor_or_refuse(media, source)
        if media and not recipe.data.is_custom
        else None
    )


@functools.lru_cache(maxsize=1)
def _load_cached_media_processor_or_refuse(media: str, source: str) -> Any:
    import transformers

    try:
        return getattr(transformers, _PROCESSORS[media]).from_pretrained(
            download_revision_or_keep_name(source)
        )
    # Of a package that the processor needs, too.
    except (OSError, ValueError, ImportError) as error:
        reason = hub_error_reason_and_remedy(error, source)
        raise InputError(f"data.processor: cannot load {source!r}: {reason}") from None


class LabelledImages(LabelledTexts):
    """Samples of images with a class each."""

    def __init__(self, source: Corpus, recipe: Recipe, _: Any) -> None:
        self.processor = load_media_processor_or_none(recipe)
        summary = SourceSummary()
        self.rows = [
            (str(row.text), row.label_integers)
            for row in labelled_rows_filling_summary(source, _image_path_and_class_of_row, summary)
        ]
        self.labels, self.counts = [*summary.labels], summary.counts
        self.largest, self.names = summary.largest, summary.names

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> Sample:
        path, stored_numbers = self.rows[index]
        return _processed_tensor_and_label(
            _load_image_or_refuse(path),
            self.processor,
            self._label_of_stored_numbers(stored_numbers),
        )

    def some(self) -> list[tuple[Any, Any]]:
        """Return hashes of some images, evenly spread, with their classes."""
        return [
            (
                hash_of_size_and_first_middle_last_blocks(path),
                self._label_of_stored_numbers(stored_numbers),
            )
            for path, stored_numbers in _evenly_spread(self.rows)
        ]


class Recordings:
    """Samples of recordings with a transcript each."""

    varies = True

    def __init__(self, source: Corpus, recipe: Recipe, tokenizer: Any) -> None:
        self.processor = load_media_processor_or_none(recipe)
        corpus_rows = [*read_corpus_rows_up_to_limit(source)]
        self.rows = [
            (
                _require_row_file_path(row, source),
                _transcript_labels_with_end_mark_padded_or_refuse(
                    row, source, tokenizer, recipe.data.transcript_length
                ),
            )
            for row in corpus_rows
        ]
        if empty := [
            row.location for row in corpus_rows if not require_row_text(row, source).strip()
        ]:
            add_cache_note(f"{empty[0]}: the transcript is empty ({len(empty):,} of {len(corpus_rows):,} are); "
                 "leave such rows out, unless silence is meant")  # fmt: skip
        for path, _ in self.rows:
            _read_wav_as_mean_of_channels_or_refuse(path, self.processor, 0)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> Sample:
        path, labels = self.rows[index]
        rate = {"sampling_rate": self.processor.sampling_rate}
        return _processed_tensor_and_label(
            _read_wav_as_mean_of_channels_or_refuse(path, self.processor),
            self.processor,
            labels,
            **rate,
        )

    def some(self) -> list[tuple[Any, Any]]:
        """Return hashes of some recordings, evenly spread, with their transcripts."""
        return [
            (hash_of_size_and_first_middle_last_blocks(path), labels)
            for path, labels in _evenly_spread(self.rows)
        ]


def _processed_tensor_and_label(content: Any, processor: Any, label: Any, **options: Any) -> Sample:
    name = processor.model_input_names[0]
    tensor = processor(content, return_tensors="pt", **options)[name][0]
    return {name: tensor, "labels": torch.tensor(label)}


def _evenly_spread(items: list[Any]) -> list[Any]:
    return items[:: max(1, len(items) // _SOME)]


def _require_row_file_path(row: Row, source: Corpus) -> str:
    """Return the path of a row's file, whose name is relative to the file of the row.

    Raises:
        DataError: the row has no such column, or there is no such file.
    """
    name = require_column_value_of_allowed_length(row, source.file_column)
    path = os.path.join(os.path.dirname(row.location), str(name))
    if not isinstance(name, str) or not os.path.isfile(path):
        raise DataError(
            f"{row.location}: {source.file_column} is {name!r:.80}; no such file exists"
        )
    return path


def _image_path_and_class_of_row(
    row: Row, source: Corpus, first_label: Any
) -> tuple[str, list[Any]]:
    label = require_column_value_of_allowed_length(row, source.label_column)
    return _require_row_file_path(row, source), [
        require_class_label_of_same_type(row, source.label_column, label, first_label)
    ]


def _transcript_labels_with_end_mark_padded_or_refuse(
    row: Row, source: Corpus, tokenizer: Any, max_length: int
) -> list[int]:
    """Return the labels of a row's text, with an end mark, padded to a length.

    Raises:
        DataError: the row has no text, or a longer one.
    """
    ids = tokenizer(require_row_text(row, source)).input_ids
    # The model puts its start mark before the labels itself.
    starts = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    ids = ids[1:] if ids and ids[0] in starts else ids
    ids += [] if tokenizer.eos_token_id in (None, *ids[-1:]) else [tokenizer.eos_token_id]
    if len(ids) > max_length:
        problem = f"its text has {len(ids)} tokens; set data.transcript_length, now {max_length}"
        raise DataError(f"{row.location}: {problem}, or leave the row out")
    return [*ids, *[IGNORED] * (max_length - len(ids))]


def _load_image_or_refuse(image_path: str) -> Any:
    from transformers.image_utils import load_image

    try:
        # Upright, and with three colours.
        return load_image(image_path)
    except (OSError, ValueError) as error:
        refuse_lfs_pointers_and_unreadable_files([image_path])
        raise DataError(f"{image_path}: cannot be read as an image: {error}") from None


def _read_wav_as_mean_of_channels_or_refuse(
    wav_path: str, processor: Any, max_frames: int = sys.maxsize
) -> NDArray[np.float64]:
    """Return the samples of a WAV file, from -1 to 1, as the mean of its channels.

    Args:
        wav_path: the file.
        processor: the feature extractor, whose sampling rate and longest sound are checked.
        max_frames: largest number of samples to read.

    Raises:
        DataError: the file is cut off, is longer than the processor reads, or has another form.
    """
    rate = processor.sampling_rate
    remedy = f"type: ffmpeg -i {shlex.quote(wav_path)} -ar {rate} -ac 1 -c:a pcm_s16le NEW.wav"
    try:
        with wave.open(wav_path) as file:
            channels, width, own_rate, frames, *_ = file.getparams()
            data = file.readframes(min(max_frames, frames))
    except (wave.Error, EOFError, PermissionError) as error:
        refuse_lfs_pointers_and_unreadable_files([wav_path])
        raise DataError(f"{wav_path}: is not read as WAV: {error}; {remedy}") from None
    # Whisper's processor would cut the rest off.
    longest = getattr(processor, "n_samples", frames)
    for is_wrong, problem in (
        ((own_rate, width) != (rate, 2), f"has {own_rate:,} samples a second of {8 * width} bits; the "
         f"processor takes {rate:,} of 16; {remedy}"),
        (os.path.getsize(wav_path) < width * channels * frames, "is cut off; copy it again"),
        (frames > longest, f"lasts {frames / rate:.1f} s, and the processor reads {longest / rate:g} s; "
         "cut sound and text in two"),
    ):  # fmt: skip
        if is_wrong:
            raise DataError(f"{wav_path}: {problem}")
    sound: NDArray[np.float64] = np.frombuffer(data, "<i2").reshape(-1, channels).mean(1)
    return sound / 32768


MEDIA: dict[str, type[LabelledImages] | type[Recordings]] = {
    "image": LabelledImages,
    "sound": Recordings,
}
