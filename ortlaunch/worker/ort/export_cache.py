"""Keeps exported graphs, so that a restart need not export: `exports` in the cache folder, one file for each.

Owns the files: whole or absent, checked when read, bounded in number and size. What makes two exports the same is
export_key.py's. ORT's own ORTMODULE_CACHE_DIR is never used: it takes a training graph for an evaluation graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortlaunch.cache import cache_root
from ortlaunch.worker.ort.export_key import key_of
from ortlaunch.worker.ort.known import TRANSITION, owner
from ortlaunch.worker.ort.patching import wrap_method
from ortlaunch.worker.ort.plain import NotPlain
from ortlaunch.worker.ort.python_values import fits
from ortlaunch.worker.ort.tally import tally, traced

ENABLED = "_ortlaunch_export_cache"
_FILES, _BYTES = 64, 4 << 30
_LARGEST = 1 << 30


def cache_exports() -> None:
    """A restart would export again what has not changed; ORT's own cache gives wrong graphs."""
    wrap_method(owner(TRANSITION), "_get_exported_model", _from_cache)


def _from_cache(original: Callable[..., Any], **kwargs: Any) -> Any:
    transition = kwargs["stage3_param_handle"]
    traced(transition).clear()
    if kwargs["ortmodule_cache_dir"]:
        tally.note("ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from it")
        kwargs["ortmodule_cache_dir"] = ""
    path = _path(kwargs) if getattr(transition, ENABLED, False) else None
    found = _read(path) if path else None
    if found and fits(found[2], kwargs["flatten_module_inputs"]):
        tally.cache_hits += 1
        model, schema, seen = found
        traced(transition).update(seen)
        return model, schema
    began = time.perf_counter()
    model, schema = original(**kwargs)
    tally.exports += 1
    tally.export_seconds += time.perf_counter() - began
    if path:
        _keep(path, model, schema, traced(transition))
    return model, schema


def _path(export: dict[str, Any]) -> Path | None:
    """Where the graph is or goes; None, and said, where it cannot be kept."""
    if export["enable_zero_stage3_support"]:
        tally.uncached("under ZeRO 3 an export holds pieces of weights")
        return None
    try:
        return cache_root() / "exports" / f"{key_of(export)}.graph"
    except Exception as error:  # an object that cannot even be looked at must not end a run
        tally.uncached(str(error) if isinstance(error, NotPlain) else f"{type(error).__name__}: {error}")
        return None


def _keep(path: Path, model: Any, schema: Any, seen: dict[str, Any]) -> None:
    """Write the file, unless the graph means something only in this process or is too large."""
    if any(node.op_type == "PythonOp" for node in model.graph.node):
        tally.uncached("a custom autograd function in the graph is one of this process")
        return
    if model.ByteSize() > _LARGEST:
        tally.uncached(f"the graph is larger than {_LARGEST >> 30} GiB")
        return
    try:
        meta = json.dumps({"schema": _packed(schema), "traced": seen}).encode()
        _write(path, len(meta).to_bytes(8, "big") + meta + model.SerializeToString())
        _prune(path.parent)
    except (NotPlain, OSError) as error:
        tally.uncached(str(error))


def _read(path: Path) -> tuple[Any, Any, dict[str, Any]] | None:
    """What `_keep` wrote; None where there is none, or a broken one, which goes."""
    import onnx

    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used, so not the first to go
    length = int.from_bytes(body[:8], "big")
    meta = json.loads(body[8 : 8 + length])
    return onnx.load_model_from_string(body[8 + length :]), _unpacked(meta["schema"]), meta["traced"]


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _prune(folder: Path) -> None:
    """Leave the files that were used last; other ranks may prune at the same time."""
    graphs = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            used, size = path.stat().st_mtime, path.stat().st_size
            if path.suffix == ".graph":
                graphs.append((used, size, path))
            elif path.suffix == ".part" and time.time() - used > 3600:  # left half written
                path.unlink()
    total = 0
    for place, (_, size, path) in enumerate(sorted(graphs, reverse=True)):
        total += size
        if place >= _FILES or total > _BYTES:
            with contextlib.suppress(OSError):
                path.unlink()


def _packed(schema: Any) -> Any:
    """The form of a module's output as JSON."""
    from onnxruntime.training.utils.torch_io_helper import _TensorStub

    if isinstance(schema, _TensorStub):
        return {"stub": {name: getattr(schema, name) for name in _TensorStub.__slots__}}
    if schema is None or type(schema) in (str, int, float, bool):
        return {"value": schema}
    if type(schema) in (list, tuple):
        return {type(schema).__name__: [_packed(item) for item in schema]}
    if type(schema) is dict and all(type(name) is str for name in schema):
        return {"dict": {name: _packed(item) for name, item in schema.items()}}
    raise NotPlain(
        f"the model's forward returns a {type(schema).__name__}; tensors, tuples, lists and dicts can be kept"
    )


def _unpacked(packed: Any) -> Any:
    from onnxruntime.training.utils.torch_io_helper import _TensorStub

    ((kind, value),) = packed.items()
    if kind == "stub":
        return _TensorStub(**value)
    if kind == "dict":
        return {name: _unpacked(item) for name, item in value.items()}
    if kind in ("list", "tuple"):
        items = [_unpacked(item) for item in value]
        return items if kind == "list" else tuple(items)
    return value
