"""Parameter groups: the rate, the weight decay and the optimizer of each parameter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.recipe.fields.optimizer import Optimizer, ParameterGroup
from ortlaunch.run_folder.engine_report import OptimizerGroup
from ortlaunch.worker.data.own import find

# Names of settings in torch's groups, where they differ from the recipe's.
_TORCH = {"betas": "betas", "epsilon": "eps", "momentum": "momentum"}
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of its own parameter groups, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Share the groups and the states of the parts, which have no parameter in common."""
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        # The parts' own mappings: a change of a rate or of a state must reach them.
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # no overloads
        """Step each optimizer once."""
        loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by their names in the user's model, which LossModule contains."""
    return [(name.removeprefix("model."), p) for name, p in module.named_parameters()]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters for which the last pattern that matches does not begin with `!`.

    Raises:
        InputError: a pattern matches no parameter.
    """
    named = dict(model.named_parameters())
    _require_matches(
        "model.freeze", [each.removeprefix("!") for each in patterns], named, "parameter"
    )
    for name, parameter in named.items():
        matching = [each for each in patterns if _matches(name, [each.removeprefix("!")])]
        if matching and not matching[-1].startswith("!"):
            parameter.requires_grad_(False)


def parameter_groups(recipe: Optimizer, module: nn.Module) -> tuple[list[Json], tuple[str, ...]]:
    """Return the groups of trained parameters as torch's optimizers take them, and notes.

    A group also has the name of its optimizer in the recipe, as `optimizer`, and its rate as a
    factor of the recipe's, as `rate_factor`, unless it is 1.

    Raises:
        InputError: a pattern of `groups` matches no trained parameter, or the values of
            `attributes` are not valid.
    """
    named = [(name, p) for name, p in named_parameters(module) if p.requires_grad]
    names = [name for name, _ in named]
    patterns = [pattern for group in recipe.groups for pattern in group.match]
    _require_matches("optimizer.groups", patterns, names, "trained parameter")
    depths = layer_depths([name for name, _ in named_parameters(module)])
    spared = {name for name in names for word in recipe.no_decay if word in name}
    own = _groups_of(recipe)
    found: dict[str, Json] = {}
    for name, parameter in named:
        group = own(name, parameter)
        settings: Json = {"optimizer": group.name or _optimizer_of(recipe, name, parameter)}
        factor = recipe.layer_decay ** depths[name]
        if group.learning_rate is not None:
            factor = group.learning_rate / recipe.learning_rate
        if factor != 1:
            settings |= {"lr": recipe.learning_rate * factor, "rate_factor": factor}
        for field, key in _TORCH.items():
            if getattr(group, field) is not None:
                settings[key] = getattr(group, field)
        settings["weight_decay"] = 0.0 if name in spared else recipe.weight_decay
        if group.weight_decay is not None:
            settings["weight_decay"] = group.weight_decay
        found.setdefault(str(settings), {"params": [], **settings})["params"].append(parameter)
    # Parameters with weight decay come first, in the order of the model.
    return sorted(found.values(), key=lambda group: not group["weight_decay"]), _idle_words(
        recipe, names
    )


def describe_groups(groups: Sequence[Json], module: nn.Module, rate: float) -> list[OptimizerGroup]:
    """Return the record of the groups, the frozen parameters as the last one.

    Args:
        groups: those of `parameter_groups`.
        module: the model with the parameters.
        rate: the recipe's learning rate.
    """
    named = named_parameters(module)
    names = {id(parameter): name for name, parameter in named}
    records = [
        OptimizerGroup(
            group["optimizer"],
            rate * group.get("rate_factor", 1.0),
            group["weight_decay"],
            sum(p.numel() for p in group["params"]),
            [names[id(p)] for p in group["params"]],
        )
        for group in groups
    ]
    if frozen := [(name, p.numel()) for name, p in named if not p.requires_grad]:
        sizes = sum(size for _, size in frozen)
        records.append(OptimizerGroup(None, 0.0, 0.0, sizes, [name for name, _ in frozen]))
    return records


def layer_depths(names: Sequence[str]) -> dict[str, int]:
    """Return the number of layers above each parameter, in the stack that it belongs to.

    The number in a name's path is its layer. Parameters without one belong to the stack beside or
    below which they are. Before the stack's layers they are embeddings, with one more layer above
    than layer 0 has; after them they are the head, with none.
    """
    layers = {
        name: (name[: match.start()], int(match[1]))
        for name in names
        if (match := _LAYER.search(name))
    }
    counts: dict[str, int] = {}
    for stack, layer in layers.values():
        counts[stack] = max(counts.get(stack, 0), layer + 1)
    first = {
        stack: names.index(next(n for n in layers if layers[n][0] == stack)) for stack in counts
    }
    depths = {}
    for at, name in enumerate(names):
        if name in layers:
            stack, layer = layers[name]
            depths[name] = counts[stack] - layer
            continue
        # The stack of the nearest module that contains both.
        near = max(counts, key=lambda stack: _common(stack, name), default="")
        depths[name] = counts[near] + 1 if near in first and at < first[near] else 0
    return depths


def _common(stack: str, name: str) -> int:
    """Return the number of leading parts that two names share, without the stack's own name."""
    pairs = zip(stack.split(".")[:-1], name.split("."))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), stack.count("."))


def _optimizer_of(recipe: Optimizer, name: str, parameter: nn.Parameter) -> str:
    """Return the optimizer of a parameter without a group; muon is for matrices of layers."""
    if recipe.name != "muon" or (parameter.ndim == 2 and _LAYER.search(name)):
        return recipe.name
    return "adamw"


def _groups_of(recipe: Optimizer) -> Callable[[str, nn.Parameter], ParameterGroup]:
    """Return the function that finds the group of a parameter."""
    attributes = recipe.attributes and find("optimizer.attributes", recipe.attributes)
    nothing = ParameterGroup(match=("*",))

    def group(name: str, parameter: nn.Parameter) -> ParameterGroup:
        given = attributes(name, parameter) if callable(attributes) else None
        if given is not None:
            return _checked(given, f"{recipe.attributes}({name!r}, ...)")
        return next((one for one in recipe.groups if _matches(name, one.match)), nothing)

    return group


def _checked(given: Any, call: str) -> ParameterGroup:
    if not isinstance(given, Mapping):
        raise InputError(
            f"optimizer.attributes: {call} returned {given!r}; it must return a mapping of the "
            "fields of optimizer.groups, or None"
        )
    try:
        return ParameterGroup(match=("*",), **given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        raise InputError(f"optimizer.attributes: {call} returned {given!r}: {problems}") from None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(
    field: str, patterns: Iterable[str], names: Collection[str], kind: str
) -> None:
    idle = [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]
    if idle:
        near = [*difflib.get_close_matches(idle[0], names, 3, 0.4), *names][:3]
        raise InputError(
            f"{field}: no {kind} matches {', '.join(idle)}; the names are like {', '.join(near)}"
        )


def _idle_words(recipe: Optimizer, names: Sequence[str]) -> tuple[str, ...]:
    """Return a note if words of `no_decay` are in no trained parameter's name."""
    idle = [word for word in recipe.no_decay if not any(word in name for name in names)]
    # The default lists the norms of several model families, of which each model has only some:
    # only the user's own names make a note.
    own = recipe.no_decay != Optimizer.model_fields["no_decay"].default and recipe.weight_decay > 0
    if not (idle and own):
        return ()
    return (f"optimizer.no_decay: no parameter's name contains {', '.join(idle)}",)
