"""Variants of a bench: the recipe once for each engine and each combination of varied keys.

A variant that the recipe's rules, this machine or the installed packages refuse stays in the list
with its reason.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ortlaunch import doctor
from ortlaunch.errors import InputError
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.resolve.prepare import check_launcher
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.folder import RunDir

ENGINES = ("ort", "inductor", "eager")
# Fields of `engine` for the comparison of inductor with plain PyTorch.
_OF_INDUCTOR = ("parity_steps", "parity_tolerance")
_VARY_FORM = (
    "write it as --vary key.path=first,second, for example --vary engine.memory_optimization=0,1"
)
_PAIRS = {")": "(", "]": "[", "}": "{"}


class Variant(NamedTuple):
    """A recipe with one engine and one value of each varied key; resolved, or refused."""

    engine: str
    # `key.path=value` of each varied key.
    chosen: tuple[str, ...]
    resolved: ResolvedRun | None = None
    # The reason; "" if the variant is not refused.
    refused: str = ""

    @property
    def name(self) -> str:
        """A short name for tables, such as `ort memory_optimization=1`."""
        choices = (text.partition("=") for text in self.chosen)
        return " ".join(
            [self.engine, *(f"{key.rpartition('.')[2]}={value}" for key, _, value in choices)]
        )

    @property
    def slug(self) -> str:
        """The name in a form for folders."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name).strip("-")

    def overrides(self, before: Engine) -> tuple[str, ...]:
        """Return the overrides that make this variant of a recipe; `before`: its section `engine`."""
        # No fallback: plain PyTorch must not be measured under ort's name.
        strict = ("engine.allow_fallback=false",) if self.engine == "ort" else ()
        return (*engine_overrides(self.engine, before), *strict, *self.chosen)


def engine_overrides(engine: str, before: Engine, parity: bool = False) -> tuple[str, ...]:
    """Return overrides that replace the recipe's engine, and drop fields of ort for other engines.

    Args:
        engine: the new engine.
        before: the recipe's section `engine`.
        parity: whether inductor keeps the fields of its comparison with plain PyTorch.
    """
    if engine == "ort":
        return ("engine.name=ort",)
    fields = {
        "matmul_precision",
        "chunked_loss",
        *(_OF_INDUCTOR if parity and engine == "inductor" else ()),
    }
    kept = before.model_dump(include=fields, exclude_defaults=True)
    return (f"engine={json.dumps({'name': engine, **kept})}",)


def variants(engines: Sequence[str], vary: Sequence[str]) -> list[Variant]:
    """Return a variant for each combination of an engine and a value of every varied key.

    Variants that differ only in the engine are neighbours; otherwise the order is the given one.

    Raises:
        InputError: an engine is unknown or given twice, a `--vary` is not of the form
            `key=values`, or two variants are the same.
    """
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown or len(set(engines)) < len(engines):
        raise InputError(
            f"--engines {','.join(engines)}: give one or more of {', '.join(ENGINES)}, each once"
        )
    choices = [_choices(text) for text in vary]
    found = [
        Variant(engine, chosen) for chosen in itertools.product(*choices) for engine in engines
    ]
    # Slugs are compared, because each variant needs its own folder.
    names = [variant.slug for variant in found]
    twice = next((variant.name for variant in found if names.count(variant.slug) > 1), None)
    if twice:
        raise InputError(f"--vary: {twice} is given twice")
    return found


def _choices(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    found = list(split_values(values))
    if not equals or not key.strip() or not all(found):
        raise InputError(f"--vary {text}: {_VARY_FORM}")
    # An override of the engine would contradict the variant's name.
    if key.strip() in ("engine", "engine.name"):
        raise InputError(f"--vary {text}: use --engines to choose engines")
    return [f"{key.strip()}={value}" for value in found]


def split_values(text: str) -> Iterator[str]:
    """Split `0,{a: [1, 2]},x` into `0`, `{a: [1, 2]}` and `x`.

    Commas inside brackets and quotes separate nothing.
    """
    piece = ""
    within: list[str] = []
    for character in text:
        if within and within[-1] in "'\"":
            if character == within[-1]:
                within.pop()
        elif character in "'\"([{":
            within.append(character)
        elif within and within[-1] == _PAIRS.get(character):
            within.pop()
        elif character == "," and not within:
            yield piece.strip()
            piece = ""
            continue
        piece += character
    yield piece.strip()


def resolve_variant(variant: Variant, base: ResolvedRun) -> Variant:
    """Return the variant with its plan, or with the reason why it cannot run here."""
    try:
        overrides = variant.overrides(base.file.recipe.engine)
        resolved = base.with_overrides(*overrides).with_task("bench")
        doctor.require(resolved.file.recipe, resolved.world)
        check_launcher(resolved.world, RunDir(variant.slug))
    except InputError as error:
        return variant._replace(refused=str(error))
    return variant._replace(resolved=resolved)
