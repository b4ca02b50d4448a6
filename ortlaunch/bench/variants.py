"""What a bench compares: the recipe once for each engine and each combination of varied keys.

A variant that the recipe's rules, this machine or what is installed refuse stays in the list with its reason.
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
_OF_INDUCTOR = ("parity_steps", "parity_tolerance")
_VARY_FORM = (
    "write it as --vary key.path=first,second, for example --vary engine.memory_optimization=0,1"
)
_PAIRS = {")": "(", "]": "[", "}": "{"}


class Variant(NamedTuple):
    """A recipe with one engine and one choice of each varied key; resolved, or refused with a reason."""

    engine: str
    chosen: tuple[str, ...]  # key.path=value of each varied key
    resolved: ResolvedRun | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        """`ort memory_optimization=1`: short, for tables."""
        choices = (text.partition("=") for text in self.chosen)
        return " ".join(
            [self.engine, *(f"{key.rpartition('.')[2]}={value}" for key, _, value in choices)]
        )

    @property
    def slug(self) -> str:
        """The name as a folder's."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name).strip("-")

    def overrides(self, before: Engine) -> tuple[str, ...]:
        """What the variant changes in a recipe with this section `engine`."""
        # No fallback: a bench of plain PyTorch under ort's name would be a lie.
        strict = ("engine.allow_fallback=false",) if self.engine == "ort" else ()
        return (*engine_overrides(self.engine, before), *strict, *self.chosen)


def engine_overrides(engine: str, before: Engine, parity: bool = False) -> tuple[str, ...]:
    """An engine in place of the recipe's: fields for ort go where another engine comes.

    before: the recipe's section.
    parity: inductor keeps its comparison with plain PyTorch.
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
    """Engines x values of every varied key, engines first, in the order given.

    Raises:
        InputError: an unknown engine, or a `--vary` that is no key with values.
    """
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown or len(set(engines)) < len(engines):
        raise InputError(
            f"--engines {','.join(engines)}: give some of {', '.join(ENGINES)}, each once"
        )
    choices = [_choices(text) for text in vary]
    found = [
        Variant(engine, chosen) for chosen in itertools.product(*choices) for engine in engines
    ]
    names = [variant.slug for variant in found]
    twice = next((variant.name for variant in found if names.count(variant.slug) > 1), None)
    if twice:
        raise InputError(f"--vary: {twice} is there twice")
    return found


def _choices(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    found = list(split_values(values))
    if not equals or not key.strip() or not all(found):
        raise InputError(f"--vary {text}: {_VARY_FORM}")
    if key.strip() in ("engine", "engine.name"):
        raise InputError(f"--vary {text}: engines are chosen with --engines")
    return [f"{key.strip()}={value}" for value in found]


def split_values(text: str) -> Iterator[str]:
    """`0,{a: [1, 2]},x` -> `0`, `{a: [1, 2]}`, `x`: commas inside brackets and quotes separate nothing."""
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
    """The variant with its plan, or with the reason why it cannot run here."""
    try:
        overrides = variant.overrides(base.file.recipe.engine)
        resolved = base.with_overrides(*overrides).with_task("bench")
        doctor.require(resolved.file.recipe, resolved.world)
        check_launcher(resolved.world, RunDir(variant.slug))
    except InputError as error:
        return variant._replace(refused=str(error))
    return variant._replace(resolved=resolved)
