"""The identity of a data set, independent of file names.

It has the number of samples, a hash of some of them, and the order of an epoch.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ortlaunch.worker.data.mixture import Mixture, SplitPart
from ortlaunch.worker.data.order import order_name
from ortlaunch.worker.data.own import SAMPLES
from ortlaunch.worker.data.packs import Packs
from ortlaunch.worker.data.samples import Samples
from ortlaunch.worker.data.streams.samples import StreamedSamples

# Only these pieces of the corpus are hashed, as it may be larger than memory.
_PIECES = 64
# Tokens of a piece.
_TOKENS = 4096


def identity(samples: Samples) -> dict[str, object]:
    """Return the identity of a data set: `samples`, `fingerprint` and `order`.

    The fingerprint is of tokens, texts or a few of the user's own samples; it is None if these are
    random.
    """
    held = _held_out(samples)
    found: dict[str, object] = {
        "samples": len(samples),
        "fingerprint": _fingerprint(samples),
        "order": _order(samples),
    }
    return {**found, "held_out": held} if held else found


def _held_out(samples: Samples) -> int:
    """Return the number of samples that are held out; with seed and total it says which."""
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    whole = (part.samples if isinstance(part, Packs) else part for part in parts)
    return sum(len(part.whole) - len(part) for part in whole if isinstance(part, SplitPart))


def _order(samples: Samples) -> str:
    if isinstance(samples, Mixture):
        return f"mixture of {', '.join(map(_order, samples.parts))}"
    return "stream" if isinstance(samples, StreamedSamples) else order_name(len(samples))


def _fingerprint(samples: object) -> str | None:
    if isinstance(samples, Mixture):
        parts = [_fingerprint(part) for part in samples.parts]
        known = [part for part in parts if part]
        if len(known) < len(parts):
            return None
        if known[0].startswith(SAMPLES):
            return " ".join(known)
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    # Of a stream, or of the user's own samples.
    if hasattr(samples, "fingerprint"):
        own: str | None = samples.fingerprint
        return own
    if hasattr(samples, "tokens"):
        tokens = samples.tokens
        found = hashlib.blake2b(str(len(samples.tokens)).encode(), digest_size=8)
        for start in np.linspace(0, max(0, len(tokens) - _TOKENS), _PIECES, dtype=np.int64):
            # int64 independent of the stored type: the fingerprint is kept in checkpoints.
            found.update(
                np.ascontiguousarray(tokens[int(start) : int(start) + _TOKENS])
                .astype(np.int64)
                .tobytes()
            )
        return found.hexdigest()
    if hasattr(samples, "some"):
        return hashlib.blake2b(repr(samples.some()).encode(), digest_size=8).hexdigest()
    return None
