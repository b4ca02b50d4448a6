"""The identity of a data set, independent of file names.

It has the number of samples, a hash of some of them, and the order of an epoch.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ortlaunch.worker.data.mixture import Mixture, SampleSubset
from ortlaunch.worker.data.order import order_method_name
from ortlaunch.worker.data.packed_samples import PackedSamples
from ortlaunch.worker.data.samples import Samples
from ortlaunch.worker.data.streams.samples import StreamedSamples
from ortlaunch.worker.data.user_data import SAMPLES

# Only these pieces of the corpus are hashed, as it may be larger than memory.
_HASHED_PIECES = 64
# Tokens of a piece.
_TOKENS = 4096


def data_identity_record(samples: Samples) -> dict[str, object]:
    """Return the identity of a data set: `samples`, `fingerprint` and `order`.

    The fingerprint is of tokens, texts or a few of the user's own samples; it is None if these are
    random.
    """
    held_out_count = _held_out_sample_count(samples)
    record: dict[str, object] = {
        "samples": len(samples),
        "fingerprint": _samples_fingerprint_or_none(samples),
        "order": _order_name_of_samples(samples),
    }
    return {**record, "held_out": held_out_count} if held_out_count else record


def _held_out_sample_count(samples: Samples) -> int:
    """Return the number of samples that are held out; with seed and total it says which."""
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    unpacked_parts = (part.samples if isinstance(part, PackedSamples) else part for part in parts)
    return sum(
        len(part.whole) - len(part) for part in unpacked_parts if isinstance(part, SampleSubset)
    )


def _order_name_of_samples(samples: Samples) -> str:
    if isinstance(samples, Mixture):
        return f"mixture of {', '.join(map(_order_name_of_samples, samples.parts))}"
    return "stream" if isinstance(samples, StreamedSamples) else order_method_name(len(samples))


def _samples_fingerprint_or_none(samples: object) -> str | None:
    if isinstance(samples, Mixture):
        parts = [_samples_fingerprint_or_none(part) for part in samples.parts]
        known_fingerprints = [part for part in parts if part]
        if len(known_fingerprints) < len(parts):
            return None
        if known_fingerprints[0].startswith(SAMPLES):
            return " ".join(known_fingerprints)
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    # Of a stream, or of the user's own samples.
    if hasattr(samples, "fingerprint"):
        own_fingerprint: str | None = samples.fingerprint
        return own_fingerprint
    if hasattr(samples, "tokens"):
        tokens = samples.tokens
        token_hash = hashlib.blake2b(str(len(samples.tokens)).encode(), digest_size=8)
        for start in np.linspace(0, max(0, len(tokens) - _TOKENS), _HASHED_PIECES, dtype=np.int64):
            # int64 independent of the stored type: the fingerprint is kept in checkpoints.
            token_hash.update(
                np.ascontiguousarray(tokens[int(start) : int(start) + _TOKENS])
                .astype(np.int64)
                .tobytes()
            )
        return token_hash.hexdigest()
    if hasattr(samples, "some"):
        return hashlib.blake2b(repr(samples.some()).encode(), digest_size=8).hexdigest()
    return None
