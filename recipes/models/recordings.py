"""Recordings with their text: {"audio": FILE.wav, "text": ...} a line of JSONL."""

import json
import wave
from pathlib import Path

import numpy
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor


class Recordings:
    """WAV files of 16 kHz, up to `seconds` long, with the words to write down."""

    def __init__(self, path, tokenizer, longest, seconds):
        self.folder = Path(path).parent
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self.rows = [json.loads(line) for line in lines if line.strip()]
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.longest = longest
        self.extract = WhisperFeatureExtractor(chunk_length=seconds)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        with wave.open(str(self.folder / row["audio"])) as file:
            if (file.getframerate(), file.getsampwidth(), file.getnchannels()) != (16_000, 2, 1):
                raise ValueError(f"{row['audio']}: not 16 kHz, 16 bits, one channel")
            sound = numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16) / 32768
        features = self.extract(sound, sampling_rate=16_000, return_tensors="pt").input_features[0]
        words = self.tokenizer(row["text"]).input_ids[: self.longest]
        # The model writes its start token itself; -100: nothing to write.
        if words[0] == self.tokenizer.convert_tokens_to_ids("<|startoftranscript|>"):
            words = words[1:]
        return {
            "input_features": features,
            "labels": torch.tensor(words + [-100] * (self.longest - len(words))),
        }


def data(path, tokenizer, longest=128, seconds=30):
    """Return the recordings that a JSONL file names, files beside it."""
    return Recordings(path, tokenizer, longest, seconds)
