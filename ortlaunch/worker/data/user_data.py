"""Samples and batches made by the user's own `module:function`.

Its random generators are seeded by the recipe, so that it draws the same values on every rank, in
every process that reads, and at a resume.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ortlaunch.worker.data.file_rows import DataError, MissingCode
from ortlaunch.worker.data.samples import Sample

# The name of a batch that is one tensor, and the start of names of a list's tensors.
_BATCH = "_batch"
# Attributes of objects whose items are no samples -> the expression of their samples.
_SAMPLES_BY_ATTRIBUTE = {
    "iloc": "table.to_dict('records')",
    "to_pylist": "table.to_pylist()",
    "to_dicts": "table.to_dicts()",
    "batch_sampler": "loader.dataset (batch.global_size is the size; data.collate is collate_fn)",
}
# The first word of a fingerprint of samples.
SAMPLES = "samples"
# Samples of a fingerprint, reads of each, and elements of a tensor in it.
_HASHED_SAMPLES = 5
_READS_EACH = 3
_ELEMENTS = 16


def seed_all_random_generators(seed: int) -> None:
    """Seed all generators, those of GPUs included."""
    torch.manual_seed(seed)
    random.seed(seed)
    # NumPy's legacy seed has 32 bits.
    np.random.seed(seed % (1 << 32))


def seed_cpu_generators_for_sample(seed: int, sample_index: int, epoch: int) -> None:
    """Seed the generators of the CPU for one sample, so that any process draws the same values."""
    # A hash, unlike a sum, gives different samples different seeds.
    drawn = int.from_bytes(
        hashlib.blake2b(f"{seed} {epoch} {sample_index}".encode(), digest_size=7).digest(), "big"
    )
    # A GPU's generator is the training's own.
    torch.default_generator.manual_seed(drawn)
    random.seed(drawn)
    np.random.seed(drawn % (1 << 32))


@contextlib.contextmanager
def restore_cpu_generators_after() -> Iterator[None]:
    """Restore the states of the CPU's generators when the context closes."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def import_user_function(recipe_key: str, function_path: str) -> Any:
    """Return the user's own function.

    Args:
        recipe_key: the recipe's field, for errors.
        function_path: `module:function`.

    Raises:
        MissingCode: there is no such module.
        DataError: the module has no such function.
    """
    module, _, function = function_path.partition(":")
    try:
        user_function = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        # A missing import within the user's module is not reported as a missing module.
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise MissingCode(
                f"{recipe_key}: no module {module!r} beside the recipe, in this folder or installed"
            ) from None
        raise
    if not callable(user_function):
        raise DataError(f"{recipe_key}: module {module!r} has no function {function!r}")
    return user_function


def seed_and_call_user_function(
    recipe_key: str, function_path: str, arguments: dict[str, object], seed: int
) -> Any:
    """Call the user's own `module:function`, and return its result.

    Args:
        recipe_key: the recipe's field, for errors.
        function_path: `module:function`.
        arguments: the function's arguments by name.
        seed: all random generators are seeded with it, before the import and before the call.

    Raises:
        DataError: there is no such module or function, or it does not accept the arguments.
    """
    seed_all_random_generators(seed)
    user_function = import_user_function(recipe_key, function_path)
    # Checked before the call, so that a TypeError within the function keeps its own traceback.
    try:
        inspect.signature(user_function).bind(**arguments)
    except TypeError as error:
        raise DataError(
            f"{recipe_key}: {function_path}{inspect.signature(user_function)} and its `arguments` differ: {error}"
        ) from None
    seed_all_random_generators(seed)
    return user_function(**arguments)


class UserCollate:
    """The user's own function that makes a batch of a list of samples."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function = import_user_function("data.collate", name)

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        batch = self.function(samples)
        if not isinstance(batch, Mapping) or not batch:
            raise DataError(
                f"data.collate: {self.name} returned {type(batch).__name__}; "
                "it must be names to tensors"
            )
        try:
            return {str(name): torch.as_tensor(value) for name, value in batch.items()}
        # torch raises all three.
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"data.collate: {self.name} returned a value that cannot become a tensor: {error}"
            ) from None


def collate_to_named_tensors(
    collate: Callable[[list[Any]], Any], samples: list[Any]
) -> dict[str, torch.Tensor]:
    """Return a batch of any form by names: of a list or tuple `_batch_0`, `_batch_1` and so on.

    Raises:
        DataError: it is no tensor, and no list, tuple or mapping of tensors.
    """
    batch = collate(samples)
    if isinstance(batch, torch.Tensor):
        batch = {_BATCH: batch}
    elif isinstance(batch, (list, tuple)):
        batch = {f"{_BATCH}_{value_index}": value for value_index, value in enumerate(batch)}
    if not isinstance(batch, Mapping) or not all(
        isinstance(item, torch.Tensor) for item in batch.values()
    ):
        raise DataError(
            f"a batch is {type(batch).__name__} with values that are no tensors; for task "
            "lightning data.collate returns a tensor, or a list, tuple or mapping of tensors"
        )
    return {str(name): value for name, value in batch.items()}


def batch_in_original_form(batch: dict[str, torch.Tensor]) -> Any:
    """Return a batch of `collate_to_named_tensors` in the form that it had; a tuple is a list."""
    list_or_mapping = [*batch.values()] if f"{_BATCH}_0" in batch else batch
    return batch.get(_BATCH, list_or_mapping)


def _value_as_rounded_text_and_numbers(sample_value: Any) -> object:
    """Return a value as text and numbers that are the same in every process and on every CPU."""
    if isinstance(sample_value, Mapping):
        return [
            (str(name), _value_as_rounded_text_and_numbers(item))
            for name, item in sample_value.items()
        ]
    if isinstance(sample_value, (list, tuple)):
        return [_value_as_rounded_text_and_numbers(item) for item in sample_value]
    if isinstance(sample_value, torch.Tensor) and sample_value.layout is torch.strided:
        sample_value = sample_value.detach().cpu()
        sample_value = (
            sample_value.float().numpy()
            if sample_value.is_floating_point()
            else sample_value.numpy()
        )
    elif isinstance(sample_value, (int, float, complex)):
        sample_value = np.asarray(sample_value)
    if isinstance(sample_value, (str, bytes)) or sample_value is None:
        return sample_value
    if not isinstance(sample_value, (np.ndarray, np.generic)) or sample_value.dtype.hasobject:
        return type(sample_value).__name__
    if sample_value.dtype.kind not in "fc" or not sample_value.size:
        return sample_value.shape, hashlib.blake2b(
            sample_value.tobytes(), digest_size=8
        ).hexdigest()
    # Some elements, rounded: CPUs differ in the last digits, and wholly where values cancel out.
    some_elements = sample_value.ravel()[:: max(1, sample_value.size // _ELEMENTS)]
    some_elements = np.where(
        np.abs(some_elements) < np.abs(some_elements).max() / 1e4, 0, some_elements
    )
    return sample_value.shape, [f"{item:.3g}" for item in some_elements]


class UserSamples:
    """The user's own data set: any object with `__len__` and `__getitem__`."""

    def __init__(
        self, items: Any, is_mapping: bool = True, recipe_key: str = "data.train.factory"
    ) -> None:
        """Wrap the user's data set.

        Args:
            items: the data set.
            is_mapping: whether samples must be mappings; False if the user's own collate function
                processes them.
            recipe_key: the recipe's field of the function that made the data set, for messages.

        Raises:
            DataError: the object is no data set, or is empty.
        """
        returned = f"{recipe_key} returned {type(items).__name__}"
        if form := next(
            (form for name, form in _SAMPLES_BY_ATTRIBUTE.items() if hasattr(items, name)), None
        ):
            raise DataError(f"{returned}, which has no samples by number; return {form}")
        try:
            count = len(items) if hasattr(items, "__len__") else None
        # Python takes no negative, fractional or huge number.
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{returned}, whose __len__ is no number of samples: {error}"
            ) from error
        # An IterableDataset inherits a `__getitem__` that raises.
        if isinstance(items, torch.utils.data.IterableDataset) or (
            hasattr(items, "__iter__") and (count is None or not hasattr(items, "__getitem__"))
        ):
            raise DataError(
                f"{returned}, which has samples in one order only; it must have samples, __len__ "
                "and __getitem__: return list(samples), or the first of them, "
                "list(itertools.islice(samples, 100_000))"
            )
        if hasattr(items, "__getitem__") and count == 0:
            raise DataError(f"{returned}, which is empty; it must have samples")
        if not hasattr(items, "__getitem__") or not count:
            raise DataError(f"{returned}; it must have samples, __len__ and __getitem__")
        # Names of splits or of columns.
        if isinstance(items, Mapping) and 0 not in items:
            keys = ", ".join(map(repr, itertools.islice(items, 5)))
            raise DataError(
                f"{returned} with keys {keys}; it must have samples indexed from 0: return one of "
                "its values, or, of columns, [dict(zip(columns, row)) for row in "
                "zip(*columns.values())]"
            )
        self.items = items
        self.is_mapping = is_mapping
        self.key = recipe_key

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """Hashes of a few samples; None if reads of one sample differ, so that it is random."""
        fingerprint_parts = [SAMPLES]
        with restore_cpu_generators_after():
            for index in np.linspace(
                0, len(self) - 1, min(_HASHED_SAMPLES, len(self)), dtype=int
            ).tolist():
                hashes = {
                    self._seed_and_hash_sample_or_its_error(index) for _ in range(_READS_EACH)
                }
                if len(hashes) > 1:
                    return None
                fingerprint_parts += hashes
        return " ".join(fingerprint_parts)

    def _seed_and_hash_sample_or_its_error(self, sample_index: int) -> str:
        seed_cpu_generators_for_sample(0, sample_index, 0)
        try:
            form = _value_as_rounded_text_and_numbers(self.sample(sample_index, 0))
        # The user's code may raise anything. It does so again where the training reads the sample.
        except Exception as error:
            form = type(error).__name__
        return hashlib.blake2b(repr(form).encode(), digest_size=4).hexdigest()

    def __len__(self) -> int:
        return len(self.items)

    def sample(self, index: int, epoch: int) -> Sample:
        item: Mapping[str, object] = self.items[index]
        if self.is_mapping and not isinstance(item, Mapping):
            raise DataError(
                f"sample {index} of {self.key} is a {type(item).__name__}; it must be a "
                "mapping of names to tensors, or data.collate must make a batch of such samples, as "
                "{'x': torch.stack([each[0] for each in samples])}"
            )
        return item
