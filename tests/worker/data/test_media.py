"""Images and recordings in folders and tables: the rows and tensors of Hugging Face's loaders."""

from __future__ import annotations

import json
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data_audit import training_row_count_by_class_name
from ortlaunch.worker.model.model import build_transformers_config_fitting_data_or_refuse
from tests.makers import bert

VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
       "intermediate_size": 8, "image_size": 16, "patch_size": 8}  # fmt: skip
WHISPER = {"model_type": "whisper", "d_model": 8, "decoder_start_token_id": 1}


@pytest.fixture
def processors(tmp_path: Path) -> Path:
    """Return a folder with a processor of images and one of sounds, each in its folder."""
    size = {"height": 16, "width": 16}
    preprocessor = {"image_processor_type": "ViTImageProcessorPil", "size": size}
    (tmp_path / "image").mkdir()
    (tmp_path / "image/preprocessor_config.json").write_text(json.dumps(preprocessor))
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(tmp_path / "sound")
    return tmp_path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of two splits with images of three classes, one of them turned by EXIF."""
    random = np.random.default_rng(0)
    for split, count in (("train", 3), ("validation", 1)):
        for name in ("emu", "cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                points = random.integers(0, 255, (20, 30, 3), np.uint8)
                # Orientation 6: a camera held upright; a loader must turn the image.
                exif = Image.Exif()
                exif[0x112] = 6
                Image.fromarray(points).save(folder / f"{number}.JPG", quality=95, exif=exif)
                Image.fromarray(points[..., 0]).save(folder / f"{number}.png")
    return tmp_path / "images"


def image_recipe(source: dict[str, object], processors: Path, **data: object) -> Recipe:
    fields = {"train": source, "processor": str(processors / "image"), **data}
    return bert(model={"task": "image-classification", "config": VIT}, data=fields)


def test_an_image_folder_is_that_of_datasets(images: Path, processors: Path) -> None:
    """Files, classes and pixels of both splits are those of `datasets` and the processor."""
    import datasets
    from transformers import AutoImageProcessor

    # A visible file gets a note; a hidden one is the file system's own.
    (images / "train/cat/notes.txt").write_text("no image")
    (images / "train/cat/.DS_Store").write_text("hidden")
    splits: Any = datasets.load_dataset("imagefolder", data_dir=str(images))
    source = {"format": "folder", "path": str(images)}
    recipe = image_recipe(source, processors, evaluation={**source, "split": "validation"})
    data = LoadedData(recipe)
    assert data.class_names == splits["train"].features["label"].names == ["cat", "dog", "emu"]
    processor = AutoImageProcessor.from_pretrained(processors / "image")
    for ours, theirs in ((data.train, splits["train"]), (data.evaluation, splits["validation"])):
        assert ours is not None
        files = theirs.cast_column("image", datasets.Image(decode=False))
        paths = [row["image"]["path"] for row in files]
        assert len(ours) == len(paths) > 0
        # The order of `datasets` is another one.
        for index, number in enumerate(sorted(range(len(paths)), key=paths.__getitem__)):
            row = theirs[number]
            sample = ours.sample(index, 0)
            assert int(sample["labels"]) == row["label"]
            # Half of the images are grey; a model of three channels takes none of them.
            pixels = processor(row["image"].convert("RGB"), return_tensors="pt").pixel_values[0]
            assert torch.equal(sample["pixel_values"], pixels)
    assert take_cache_notes() == [f"{images}/train/cat: 1 files are no images and are not read"]
    assert build_transformers_config_fitting_data_or_refuse(recipe, data).id2label == {
        0: "cat",
        1: "dog",
        2: "emu",
    }
    names = [data.class_names[number] for number in splits["train"]["label"]]
    assert training_row_count_by_class_name(data) == Counter(names)
    assert collate([data.train.sample(n, 0) for n in range(4)])["pixel_values"].shape[0] == 4


@pytest.mark.parametrize("form", ["folder", "csv", "jsonl"])
def test_images_that_a_table_names(form: str, images: Path, processors: Path) -> None:
    """Metadata in CSV or JSON lines name files and classes, as a folder or as a table."""
    rows = [("cat/0.png", "b"), ("dog/1.JPG", "a"), ("emu/0.png", "b")]
    lines = {
        "jsonl": [json.dumps({"file_name": name, "label": label}) for name, label in rows],
        "csv": ["file_name,label", *map(",".join, rows)],
    }
    kind = "jsonl" if form == "jsonl" else "csv"
    path = images / "train" / f"metadata.{kind}"
    path.write_text("\n".join(lines[kind]))
    source = {"format": form, "path": str(images if form == "folder" else path)}
    data = LoadedData(image_recipe(source, processors))
    found = [data.train.sample(index, 0) for index in range(3)]
    assert [int(sample["labels"]) for sample in found] == [1, 0, 1]
    plain = LoadedData(
        image_recipe({"format": "folder", "path": str(images / "train")}, processors)
    ) if form == "jsonl" else None  # fmt: skip
    assert plain is None or len(plain.train) == 3


def test_the_identity_is_of_contents(images: Path, processors: Path) -> None:
    """Images are known by their contents and classes, not by their names."""
    source = {"format": "folder", "path": str(images / "train")}
    before = data_identity_record(LoadedData(image_recipe(source, processors)).train)
    # A resume on another machine finds the same images elsewhere.
    images.rename(images.parent / "moved")
    source["path"] = str(images.parent / "moved/train")
    assert data_identity_record(LoadedData(image_recipe(source, processors)).train) == before
    Image.new("RGB", (9, 9)).save(images.parent / "moved/train/cat/0.png")
    assert data_identity_record(LoadedData(image_recipe(source, processors)).train) != before


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


def _row(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "metadata.csv").write_text(f"file_name,label\n{name},a\n")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (lambda folder: (folder / "cat/0.JPG").write_text(POINTER), "0.JPG is a pointer of git-lfs"),
    "other": (lambda folder: (folder / "cat/0.JPG").write_text("text"), "cat/0.JPG: cannot be read as an image"),
    "deep": (lambda folder: (folder / "cat/young").mkdir(), "alone; young is a folder in it; metadata"),
    "empty class": (lambda folder: (folder / "yak").mkdir(), "yak: is a class and has no files .* alone; m"),
    "no file": (_row("cat/9.png"), "metadata.csv:2: file_name is 'cat/9.png'; no such file exists"),
    "no class": (lambda folder: (folder / "metadata.csv").write_text("file_name,x\ncat/0.png,a\n"),
                 "metadata.csv:2: no column 'label'; it has file_name, x"),
    "split": (lambda folder: folder.rename(folder.parent / "test"), "nor the split 'train'; it has test, validation"),
    "one class": (_row("cat/0.png"), "every label is 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_images_are_named(fault: str, images: Path, processors: Path) -> None:
    """A folder or an image that cannot be read is named, with the row that names it."""
    change, message = BAD[fault]
    change(images / "train")
    source = {"format": "folder", "path": str(images)}
    with pytest.raises(InputError, match=message):
        LoadedData(image_recipe(source, processors)).train.sample(0, 0)


def write_sound(path: Path, seconds: float, rate: int = 16_000, channels: int = 1) -> None:
    """Write a WAV file of a tone."""
    # The channels differ, so that a loader that takes the first one is seen.
    tone = np.sin(np.arange(int(seconds * rate))[:, None] / 9) * np.linspace(0.2, 0.8, channels)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes((tone * 32767).astype("<i2").tobytes())


def sound_recipe(folder: Path, processors: Path, **data: object) -> Recipe:
    source = {"format": "folder", "path": str(folder), "text_column": "transcription"}
    fields = {"train": source, "tokenizer": {"train": "bpe", "vocab_size": 300}, "transcript_length": 8,
              "processor": str(processors / "sound"), **data}  # fmt: skip
    return bert(model={"task": "speech-seq2seq", "config": WHISPER}, data=fields)


@pytest.mark.usefixtures("own_cache")
def test_an_audio_folder_is_that_of_datasets(
    processors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and transcripts are those of `datasets`, the features those of the processor."""
    import datasets

    folder = tmp_path / "sounds"
    (folder / "in").mkdir(parents=True)
    write_sound(folder / "b.wav", 0.5)
    write_sound(folder / "in/a.wav", 0.25, channels=2)
    rows = (("b.wav", "one, two"), ("in/a.wav", "six"))
    lines = [json.dumps({"file_name": name, "transcription": text}) for name, text in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    # datasets is the reader that nobody here wrote.
    # Encoding and decoding would need torchcodec; the pairs of file and text are compared.
    monkeypatch.setattr(
        datasets.Audio, "encode_example", lambda _, value: {"path": str(value), "bytes": None}
    )
    theirs: Any = datasets.load_dataset(
        "audiofolder", data_dir=str(folder), split="train", streaming=True
    )
    theirs = [*theirs.cast_column("audio", datasets.Audio(decode=False))]
    data = LoadedData(sound_recipe(folder, processors))
    extract = WhisperFeatureExtractor(chunk_length=1)
    assert len(data.train) == len(theirs) == 2
    for index, row in enumerate(sorted(theirs, key=lambda row: row["audio"]["path"])):
        with wave.open(row["audio"]["path"]) as file:
            sound = np.frombuffer(file.readframes(1 << 20), "<i2").reshape(-1, file.getnchannels())
        features = extract(sound.mean(1) / 32768, sampling_rate=16_000, return_tensors="pt")
        sample = data.train.sample(index, 0)
        torch.testing.assert_close(sample["input_features"], features.input_features[0])
        labels = sample["labels"]
        words = data.tokenizer.decode(labels[labels != -100], skip_special_tokens=True)
        assert (words, labels.shape) == (row["transcription"], (8,))
    assert data_identity_record(data.train) == data_identity_record(
        LoadedData(sound_recipe(folder, processors)).train
    )


SOUNDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "rate": (lambda path: write_sound(path, 0.1, rate=8000), r"a.wav: has 8,000 samples a second of 16 bits; the "
             r"processor takes 16,000 of 16; type: ffmpeg -i \S*a.wav -ar 16000 -ac 1 -c:a pcm_s16le NEW.wav"),
    "long": (lambda path: write_sound(path, 1.5), "a.wav: lasts 1.5 s, and the processor reads 1 s; cut sound and"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "a.wav: is cut off; copy it again"),
    "no wav": (lambda path: path.write_bytes(b"ID3"), "a.wav: is not read as WAV: .*; type: ffmpeg"),
    "pointer": (lambda path: path.write_text(POINTER), "a.wav is a pointer of git-lfs"),
    "gone": (lambda path: path.unlink(), r"metadata.jsonl:1: file_name is 'a.wav'; no such file"),
}  # fmt: skip


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("fault", SOUNDS)
def test_bad_recordings_are_named(fault: str, processors: Path, tmp_path: Path) -> None:
    """A recording that the processor does not take is named before step 1, with the remedy."""
    write_sound(tmp_path / "a.wav", 0.5)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.wav", "transcription": "one"}')
    change, message = SOUNDS[fault]
    change(tmp_path / "a.wav")
    with pytest.raises(InputError, match=message):
        assert LoadedData(sound_recipe(tmp_path, processors)).train


@pytest.mark.usefixtures("own_cache")
def test_an_empty_transcript_is_noted(processors: Path, tmp_path: Path) -> None:
    """A recording of silence may be meant, a text that is missing is not."""
    write_sound(tmp_path / "a.wav", 0.5)
    (tmp_path / "metadata.csv").write_text("file_name,transcription\na.wav,one\na.wav,\n")
    take_cache_notes()
    assert len(LoadedData(sound_recipe(tmp_path, processors)).train) == 2
    assert any("csv:3: the transcript is empty (1 of 2 are)" in text for text in take_cache_notes())


@pytest.mark.usefixtures("own_cache")
def test_a_long_transcript_is_refused(processors: Path, tmp_path: Path) -> None:
    """A transcript that would be cut off is refused with its row."""
    write_sound(tmp_path / "a.wav", 0.5)
    (tmp_path / "metadata.csv").write_text("file_name,transcription\na.wav,one two three\n")
    with pytest.raises(
        DataError, match=r"csv:2: its text has 4 tokens; set data.transcript_length"
    ):
        assert LoadedData(sound_recipe(tmp_path, processors, transcript_length=3)).train
