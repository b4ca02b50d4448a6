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

from ortlaunch.cache import add_cache_note
from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.inputs import require_no_pointers
from ortlaunch.worker.data.corpus import rows, value
from ortlaunch.worker.data.label_rows import SourceSummary, class_of, labelled_rows, text_of
from ortlaunch.worker.data.labelled import LabelledTexts
from ortlaunch.worker.data.reading import DataError, Row, blocks_hash
from ortlaunch.worker.data.samples import IGNORED, Sample
from ortlaunch.worker.data.streams.hub import hub_reason
from ortlaunch.worker.data.tokenizer import pinned

# Files whose contents identify a data set; up to twice as many are used.
_SOME = 64
_PROCESSORS = {"image": "AutoImageProcessor", "sound": "AutoFeatureExtractor"}


def load_processor(recipe: Recipe) -> Any:
    """Return the processor that makes tensors of files, or None where the data have no files.

    Raises:
        InputError: the processor is neither a folder nor reachable on the hub.
    """
    media = recipe.model.traits.media
    source = str(recipe.data.processor or recipe.model.pretrained)
    return _loaded(media, source) if media and not recipe.data.is_custom else None


@functools.lru_cache(maxsize=1)
def _loaded(media: str, source: str) -> Any:
    import transformers

    try:
        return getattr(transformers, _PROCESSORS[media]).from_pretrained(pinned(source))
    # Of a package that the processor needs, too.
    except (OSError, ValueError, ImportError) as error:
        reason = hub_reason(error, source)
        raise InputError(f"data.processor: cannot load {source!r}: {reason}") from None


class LabelledImages(LabelledTexts):
    """Samples of images with a class each."""

    def __init__(self, source: Corpus, recipe: Recipe, _: Any) -> None:
        self.processor = load_processor(recipe)
        found = SourceSummary()
        self.rows = [
            (str(row.text), row.numbers) for row in labelled_rows(source, _classified, found)
        ]
        self.labels, self.counts = [*found.labels], found.counts
        self.largest, self.names = found.largest, found.names

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> Sample:
        path, numbers = self.rows[index]
        return _tensors(_image(path), self.processor, self._label(numbers))

    def some(self) -> list[tuple[Any, Any]]:
        """Return hashes of some images, evenly spread, with their classes."""
        return [(blocks_hash(path), self._label(numbers)) for path, numbers in _some(self.rows)]


class Recordings:
    """Samples of recordings with a transcript each."""

    varies = True

    def __init__(self, source: Corpus, recipe: Recipe, tokenizer: Any) -> None:
        self.processor = load_processor(recipe)
        found = [*rows(source)]
        self.rows = [
            (_file(row, source), _transcript(row, source, tokenizer, recipe.data.transcript_length))
            for row in found
        ]
        if empty := [row.place for row in found if not text_of(row, source).strip()]:
            add_cache_note(f"{empty[0]}: the transcript is empty ({len(empty):,} of {len(found):,} are); "
                 "leave such rows out, unless silence is meant")  # fmt: skip
        for path, _ in self.rows:
            _sound(path, self.processor, 0)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> Sample:
        path, labels = self.rows[index]
        rate = {"sampling_rate": self.processor.sampling_rate}
        return _tensors(_sound(path, self.processor), self.processor, labels, **rate)

    def some(self) -> list[tuple[Any, Any]]:
        """Return hashes of some recordings, evenly spread, with their transcripts."""
        return [(blocks_hash(path), labels) for path, labels in _some(self.rows)]


def _tensors(content: Any, processor: Any, label: Any, **options: Any) -> Sample:
    name = processor.model_input_names[0]
    found = processor(content, return_tensors="pt", **options)[name][0]
    return {name: found, "labels": torch.tensor(label)}


def _some(found: list[Any]) -> list[Any]:
    return found[:: max(1, len(found) // _SOME)]


def _file(row: Row, source: Corpus) -> str:
    """Return the path of a row's file, whose name is relative to the file of the row.

    Raises:
        DataError: the row has no such column, or there is no such file.
    """
    name = value(row, source.file_column)
    path = os.path.join(os.path.dirname(row.place), str(name))
    if not isinstance(name, str) or not os.path.isfile(path):
        raise DataError(f"{row.place}: {source.file_column} is {name!r:.80}; no such file exists")
    return path


def _classified(row: Row, source: Corpus, first: Any) -> tuple[str, list[Any]]:
    """Return a file and its class."""
    label = value(row, source.label_column)
    return _file(row, source), [class_of(row, source.label_column, label, first)]


def _transcript(row: Row, source: Corpus, tokenizer: Any, length: int) -> list[int]:
    """Return the labels of a row's text, with an end mark, padded to a length.

    Raises:
        DataError: the row has no text, or a longer one.
    """
    ids = tokenizer(text_of(row, source)).input_ids
    # The model puts its start mark before the labels itself.
    starts = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    ids = ids[1:] if ids and ids[0] in starts else ids
    ids += [] if tokenizer.eos_token_id in (None, *ids[-1:]) else [tokenizer.eos_token_id]
    if len(ids) > length:
        told = f"its text has {len(ids)} tokens; set data.transcript_length, now {length}"
        raise DataError(f"{row.place}: {told}, or leave the row out")
    return [*ids, *[IGNORED] * (length - len(ids))]


def _image(path: str) -> Any:
    from transformers.image_utils import load_image

    try:
        # Upright, and with three colours.
        return load_image(path)
    except (OSError, ValueError) as error:
        require_no_pointers([path])
        raise DataError(f"{path}: cannot be read as an image: {error}") from None


def _sound(path: str, processor: Any, most: int = sys.maxsize) -> NDArray[np.float64]:
    """Return the samples of a WAV file, from -1 to 1, as the mean of its channels.

    Args:
        path: the file.
        processor: the feature extractor, whose sampling rate and longest sound are checked.
        most: largest number of samples to read.

    Raises:
        DataError: the file is cut off, is longer than the processor reads, or has another form.
    """
    rate = processor.sampling_rate
    mend = f"type: ffmpeg -i {shlex.quote(path)} -ar {rate} -ac 1 -c:a pcm_s16le NEW.wav"
    try:
        with wave.open(path) as file:
            channels, width, own_rate, frames, *_ = file.getparams()
            data = file.readframes(min(most, frames))
    except (wave.Error, EOFError) as error:
        require_no_pointers([path])
        raise DataError(f"{path}: is not read as WAV: {error}; {mend}") from None
    # Whisper's processor would cut the rest off.
    longest = getattr(processor, "n_samples", frames)
    for is_wrong, told in (
        ((own_rate, width) != (rate, 2), f"has {own_rate:,} samples a second of {8 * width} bits; the "
         f"processor takes {rate:,} of 16; {mend}"),
        (os.path.getsize(path) < width * channels * frames, "is cut off; copy it again"),
        (frames > longest, f"lasts {frames / rate:.1f} s, and the processor reads {longest / rate:g} s; "
         "cut sound and text in two"),
    ):  # fmt: skip
        if is_wrong:
            raise DataError(f"{path}: {told}")
    sound: NDArray[np.float64] = np.frombuffer(data, "<i2").reshape(-1, channels).mean(1)
    return sound / 32768


MEDIA: dict[str, type[LabelledImages] | type[Recordings]] = {
    "image": LabelledImages,
    "sound": Recordings,
}
