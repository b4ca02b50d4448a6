"""Tensor values that a forward pass reads in Python; a graph keeps those of the first batch.

`if x.sum() > 0`, `.item()` and `.tolist()` of values are refused, unless
`Settings.allow_traced_values` is true. Checks (`assert`, or an `if` that only raises) add a note.
After `len(x)` or `int(x.shape[0])`, a batch of other sizes causes another export. After
`self.scale.item()` of a buffer, a change of the model's buffers does. Numbers among the arguments
belong to the export itself, and their change is detected elsewhere.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export, traced_facts
from ortlaunch.ortmodule.base.settings import settings_of
from ortlaunch.ortmodule.base.torch_calls import getter, untraced
from ortlaunch.ortmodule.torch_in_graph import attention, torch_modules
from ortlaunch.ortmodule.tracing import aliases, grad_mode, python_state
from ortlaunch.ortmodule.tracing.grad_mode import changed_since, tensors, versions_of
from ortlaunch.ortmodule.tracing.selections import Selections

if TYPE_CHECKING:
    from types import FrameType

    from ortlaunch.ortmodule.base.export import Facts
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args, Kwargs, Manager, Transition

_T = torch.Tensor
_SIZES = {_T.size, _T.numel, _T.nelement, torch.numel, getter("shape"), _T.__len__}
# Functions that return values of a tensor to Python.
_TAKEN = {_T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__, _T.item, _T.tolist, _T.numpy,
          _T.__array__, _T.is_nonzero, torch.is_nonzero, torch.equal, _T.equal, torch.allclose,
          _T.allclose}  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_USERS = (
    f"{_TORCH}/",
    str(Path(__file__).parents[1]),
    f"{Path(_TORCH).parent}/onnxruntime/",
)
# torch's function that compares a mask with the causal one.
_MASK_CHECK = "_detect_is_causal_mask"
# Files of ortlaunch whose frames are between a call of torch and the model.
_BETWEEN = (
    grad_mode.__file__,
    aliases.__file__,
    attention.__file__,
    str(Path(__file__).with_name("weight_changes.py")),
)
# Reads by ortlaunch itself, by the exporter, and torch's checks of a distribution's parameters.
_QUIET = (
    str(Path(__file__).parents[1]),
    f"{_TORCH}/distributions",
    f"{_TORCH}/onnx",
    f"{_TORCH}/jit",
    "onnxruntime",
)


# ------------------------------------------------------------------------------------------------ in the export


@contextlib.contextmanager
def watched(export: Export) -> Iterator[None]:
    """Record where the model reads values and sizes in Python.

    A trace makes those of the first batch constant.
    """
    facts = export.facts
    numbers = [
        name in export.info.onnx_graph_input_const_as_tensor
        for name in export.info.onnx_graph_input_names
    ]
    with _Watch(export.module, numbers, torch_modules.paths(export)) as watch:
        facts["made"] = watch.made
        yield
    facts.update({name: sorted(places) for name, places in vars(watch.places).items() if places})
    if watch.places.sizes or watch.places.ones:
        facts["of"] = _shapes(export.inputs, facts)


class _ReadLocations:
    """Lines of the model's code that read values in Python, as `file:line`."""

    def __init__(self) -> None:
        self.decisions: set[str] = set()
        self.checks: set[str] = set()
        self.sizes: set[str] = set()
        self.ones: set[str] = set()
        """Where a size is compared with 0 or 1 only, such as attention of one token."""
        self.buffers: set[str] = set()
        self.layers: set[str] = set()
        """Paths of the layers whose code makes decisions."""
        self.masks: set[str] = set()
        """Where torch's transformer layers check whether a mask is causal."""


# Kinds of tensors, in this order: a result has the largest kind of its arguments.
# _SOME: whether a selection has an element, which the first batch's has.
_CONSTANT, _BUFFER, _ONE, _SIZE, _SOME, _SELECTED, _VALUE = range(7)
_COMPARED = {
    _T.__gt__,
    _T.__lt__,
    _T.__ge__,
    _T.__le__,
    _T.__eq__,
    _T.__ne__,
    _T.gt,
    _T.lt,
    _T.ge,
    _T.le,
    _T.eq,
    _T.ne,
}
# Functions that draw random numbers: their results are values, also if the arguments are sizes.
_DRAWN = ("rand", "normal_", "bernoulli", "multinomial", "uniform_", "exponential_", "dropout")


class _Watch(TorchFunctionMode):
    """A record of torch's calls, and of the tensors that depend on sizes or constants only.

    numbers: which arguments of `module` are tensors in place of Python numbers, because ORT made
        them so.
    whole: paths of its layers that run as torch.
    """

    def __init__(self, module: torch.nn.Module, numbers: list[bool], whole: list[str]) -> None:
        super().__init__()
        self.places = _ReadLocations()
        # Tensors without an entry are values.
        self._kinds = WeakTensorKeyDictionary()
        self._selections = Selections()
        # The sizes of selections themselves, and nothing computed from them.
        self._chosen = WeakTensorKeyDictionary()
        self.made = WeakTensorKeyDictionary()
        """Values, with the line of the model's code that made each."""
        self._module = module
        self._numbers = numbers
        # Only methods of a layer that runs as torch are recorded here, not its call.
        layers = [
            (path, layer)
            for path, layer in module.named_modules()
            if not torch_modules.inside(path, whole)
        ]
        self._paths = {id(layer): path.partition(".")[2] for path, layer in layers}

    def __enter__(self) -> _Watch:
        self._hook = self._module.register_forward_pre_hook(self._begin)
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._hook.remove()

    def _begin(self, module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._kinds.update(dict.fromkeys(module.buffers(), _BUFFER))
        self._kinds.update(
            {tensor: _CONSTANT for tensor, number in zip(inputs, self._numbers) if number}
        )

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        # ORT also runs the model without tracing, to learn its outputs.
        if not torch.jit.is_tracing():
            return func(*args, **kwargs)
        given = tensors((args, kwargs))
        kind = max((self._kinds.get(tensor, _VALUE) for tensor in given), default=_CONSTANT)
        versions = versions_of(given)
        result = func(*args, **kwargs)
        selected = self._selections.read(func, args, result) if func in _SIZES else []
        if func in _SIZES:
            kind = min(kind, _SELECTED if selected and func is _T.__len__ else _SIZE)
        elif kind == _SIZE and func in _COMPARED and _zero_or_one(*args[1:]):
            kind = _ONE
        elif func in _COMPARED and args[0] in self._chosen and _zero_or_one(*args[1:]):
            # The losses of some models ask for a batch of which every label is ignored.
            with untraced():
                kind = _SOME if args[1] == 0 and int(args[0]) > 0 else kind
        elif func is torch.normal or getattr(func, "__name__", "").startswith(_DRAWN):
            kind = _VALUE
        if (func in _TAKEN or func is _T.__len__) and kind != _CONSTANT:
            places = self.places
            decided = places.decisions
            self._note(
                (places.buffers, places.ones, places.sizes, places.checks, decided, decided)[
                    kind - 1
                ],
                of_size=_ONE <= kind <= _SELECTED,
            )
        changed = changed_since(given, versions)
        for tensor in (
            *changed,
            *tensors(list(result) if isinstance(result, torch.Size) else result),
        ):
            self._kinds[tensor] = kind
        self._kinds.update(dict.fromkeys(tensors(selected), _SELECTED))
        self._chosen.update(dict.fromkeys(tensors(selected)))
        self._selections.follow(func, args, given, result)
        if kind == _VALUE:
            frame = user_frame()
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.made.update(
                (tensor, line)
                for tensor in tensors(result)
                if not any(tensor is one for one in given)
            )
        return result

    def _note(self, places: set[str], of_size: bool) -> None:
        """Record the line of the model that reads a value, or a size."""
        frame = sys._getframe(2)
        while frame.f_back and frame.f_code.co_filename in _BETWEEN:
            frame = frame.f_back
        if any(part in frame.f_code.co_filename for part in _QUIET):
            return
        asked = frame.f_code.co_filename
        # torch checks the sizes of arguments, as nn.GRU does.
        if of_size and asked.startswith(_TORCH) and _only_checks(asked, frame.f_lineno):
            return
        masked = False
        while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, *_BETWEEN)):
            masked = masked or frame.f_code.co_name == _MASK_CHECK
            frame = frame.f_back
        file = frame.f_code.co_filename
        line = frame.f_lineno
        if places is self.places.decisions and _only_checks(file, line):
            places = self.places.checks
        places.add(f"{file}:{line}")
        if places is self.places.decisions:
            self.places.layers.update(innermost(frame, self._paths))
        if masked:
            self.places.masks.add(f"{file}:{line}")


def user_frame() -> FrameType:
    """Return the innermost running frame of code that is neither torch's nor ortlaunch's."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def innermost(frame: FrameType | None, paths: dict[int, str]) -> list[str]:
    """Return the path of the layer whose code a frame runs, as a list; empty for the model itself."""
    while frame:
        path = paths.get(id(python_state.first_argument(frame)))
        if path is not None:
            return [path] if path else []
        frame = frame.f_back
    return []


def _zero_or_one(*values: object) -> bool:
    return len(values) == 1 and isinstance(values[0], int) and values[0] in (0, 1)


def _shapes(values: object, facts: Facts) -> list[list[int]]:
    """Return the sizes of tensors that a trace with the facts `facts` depends on.

    Either the sizes themselves, or only 0, 1 and more (as 2).
    """
    # If the model only compares sizes with 0 and 1, all larger ones share a graph.
    most = sys.maxsize if "sizes" in facts else 2
    return [[min(size, most) for size in tensor.shape] for tensor in tensors(values)]


def _only_checks(file: str, line: int) -> bool:
    """Return whether the line is an assertion, or a condition under which the model only raises."""
    here, after = (linecache.getline(file, number).strip() for number in (line, line + 1))
    return here.startswith("assert") or (here.startswith("if ") and after.startswith("raise "))


def judge(export: Export) -> None:
    """Refuse values that would stay those of the first batch, or add a note where that is allowed."""
    facts = export.facts
    if "checks" in facts:
        tally.note(
            f"checked in the first batch only, because {_listed(facts['checks'])} takes values "
            "into Python"
        )
    if "decisions" in facts:
        what = f"the model takes values of tensors into Python at {_listed(facts['decisions'])}"
        if not settings_of(export.options).allow_traced_values:
            mend = "Use torch.where or another function of torch's in their place"
            if "masks" in facts:
                where = _listed(facts["masks"])
                mend = f"Give is_causal=True or False (a decoder: tgt_is_causal=) at {where}, "
                mend += "or torch looks at the mask"
            raise RuntimeError(
                f"{what}: ONNX Runtime's graph would hold those of the first batch. {mend}, or "
                f"Settings.allow_traced_values=True where they never change, or {_layer(facts)}"
            )
        tally.note(f"{what}: they stay those of the first batch (Settings.allow_traced_values)")


def _layer(facts: Facts) -> str:
    """Return the setting that would let the layers with such code run as torch."""
    layers = facts.get("layers", ["PATH OF THE LAYER"])
    # One pattern for the many equal layers of a model.
    if len(layers) > 4:
        layers = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", layer) for layer in layers})
    names = ", ".join(map(repr, layers[:4]))
    return (
        f"Settings.torch_modules=[{names}], which runs the layer as torch inside ONNX "
        "Runtime's graph"
    )


def _listed(places: list[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


# ------------------------------------------------------------------------------------------- in later passes


def fixed_sizes(manager: Manager, values: object) -> list[list[int]] | None:
    """Return the sizes of the tensors in `values` if the graph depends on them, else None."""
    facts = traced_facts(manager._graph_transition_manager)
    return _shapes(values, facts) if "of" in facts else None


def fixed_buffers(manager: Manager) -> list[tuple[int, int]] | None:
    """Return values that change with a model's buffers, if its graph depends on them, else None.

    BatchNorm's buffers are left out: they change in every pass, and no Python code reads them
    except for a momentum of None.
    """
    if "buffers" not in traced_facts(manager._graph_transition_manager):
        return None
    layers = [
        layer for layer in manager._flattened_module.modules() if not isinstance(layer, _BatchNorm)
    ]
    return [(id(b), b._version) for layer in layers for b in layer.buffers(recurse=False)]


def report_again(transition: Transition) -> None:
    """Add a note why a batch of other sizes, or a changed buffer, causes another export."""
    facts = traced_facts(transition)
    places = _listed(
        [place for kind in ("sizes", "ones", "buffers") for place in facts.get(kind, [])]
    )
    tally.note(
        f"exported again for other sizes or buffers, which the model takes into Python at {places}"
    )
