"""What tells one data set from another, whatever its files are called: how many samples, what some of them hold,
and in which order an epoch takes them."""

from __future__ import annotations

import hashlib

import numpy as np

from ortlaunch.worker.data.mixture import Mixture
from ortlaunch.worker.data.order import order_name
from ortlaunch.worker.data.samples import Samples

# looked at; a corpus may be larger than memory
_PIECES = 64
_TOKENS = 4096


def identity(samples: Samples) -> dict[str, object]:
    """`samples`, `fingerprint` of tokens or texts (null for custom data, whose items may be random), and `order`."""
    return {"samples": len(samples), "fingerprint": _fingerprint(samples), "order": _order(samples)}


def _order(samples: Samples) -> str:
    if isinstance(samples, Mixture):
        return f"mixture of {', '.join(order_name(len(part)) for part in samples.parts)}"
    return order_name(len(samples))


def _fingerprint(samples: object) -> str | None:
    if isinstance(samples, Mixture):
        parts = [_fingerprint(part) for part in samples.parts]
        return (
            None
            if None in parts
            else hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
        )
    if hasattr(samples, "tokens"):
        tokens = samples.tokens
        found = hashlib.blake2b(str(len(samples.tokens)).encode(), digest_size=8)
        for start in np.linspace(0, max(0, len(tokens) - _TOKENS), _PIECES, dtype=np.int64):
            found.update(
                np.ascontiguousarray(tokens[int(start) : int(start) + _TOKENS])
                .astype(np.int64)
                .tobytes()
            )
        return found.hexdigest()
    if hasattr(samples, "some"):
        return hashlib.blake2b(repr(samples.some()).encode(), digest_size=8).hexdigest()
    return None
