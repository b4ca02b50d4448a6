"""Sounds of one second, each a melody of one to three notes, and the Whisper that writes the notes down.

For speech: WhisperForConditionalGeneration.from_pretrained("openai/whisper-tiny") as the model, its WhisperProcessor in
place of the extractor here, recordings of up to 30 seconds, and their text by the processor's tokenizer as `labels`.
"""

import numpy
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

RATE, SECONDS, NOTES, LONGEST = 16_000, 1, 8, 3
START, END, PADDING = NOTES, NOTES + 1, NOTES + 2  # after the notes, which are words 0 to 7


def model(hidden, layers):
    config = WhisperConfig(
        vocab_size=NOTES + 8, d_model=hidden, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=4 * hidden, decoder_ffn_dim=4 * hidden,
        max_source_positions=50 * SECONDS, max_target_positions=16, decoder_start_token_id=START, bos_token_id=START,
        eos_token_id=END, pad_token_id=PADDING, suppress_tokens=None, begin_suppress_tokens=None, use_cache=False,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


class Melodies:
    """Each is made when it is asked for, the same every time."""

    def __init__(self, samples, seed):
        self.samples, self.seed = samples, seed
        self.extract = WhisperFeatureExtractor(
            feature_size=80, sampling_rate=RATE, chunk_length=SECONDS
        )

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        random = numpy.random.default_rng([self.seed, index])
        notes = random.integers(NOTES, size=random.integers(1, LONGEST + 1))
        sound = numpy.concatenate([_sound(note, random) for note in notes])
        sound += 0.05 * random.standard_normal(len(sound))
        features = self.extract(sound, sampling_rate=RATE, return_tensors="pt").input_features[0]
        words = [*notes.tolist(), END, *[-100] * (LONGEST - len(notes))]  # -100: nothing to write
        return {"input_features": features, "labels": torch.tensor(words)}


def _sound(note, random):
    """A tone of about a quarter of a second, with an overtone, and silence after it."""
    time = numpy.arange(int(RATE * random.uniform(0.22, 0.3))) / RATE
    pitch = 300 * 2 ** (note / 4)
    tone = numpy.sin(2 * numpy.pi * pitch * time) + 0.4 * numpy.sin(4 * numpy.pi * pitch * time)
    return numpy.concatenate([tone * random.uniform(0.3, 1.0), numpy.zeros(RATE // 50)])


def data(samples, seed=0):
    return Melodies(samples, seed)
