"""Advice about an unknown key: the key that the user most likely meant.

recipe/text/words.py compares spellings, keys_of_other_tools.py has the keys of other tools.
"""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.deepspeed_keys import SETTINGS
from ortlaunch.recipe.fields.families import CONFIG_FIELDS
from ortlaunch.recipe.fields.field_lookup import below, everywhere, names_in, section_at
from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
from ortlaunch.recipe.text.place import KeyPath, dotted, keys
from ortlaunch.recipe.text.words import likeness, normal

# Least likeness of a suggested key: below it, keys count as unrelated.
_LIKE = 0.65


class Advice(NamedTuple):
    """The advice about an unknown key, and the key that was meant.

    `sure`: the value may be used as that key's; else the key is only known to be involved.
    """

    text: str
    target: KeyPath | None = None
    sure: bool = False


def advise(key: str, section: KeyPath) -> Advice:
    """Return the advice about a key that `section` does not have."""
    # YAML reads {a: 1,000} as the keys `a` and `000`.
    if key.isdecimal():
        return Advice("a comma inside { } separates keys; write the number without commas, as 1000")
    if section == ("log",) and normal(key) in ("tensorboard", "wandb", "mlflow"):
        return Advice(f"write log.trackers: [{normal(key)}]", ("log", "trackers"))
    # Exact matches come first: a guess must not hide them.
    exact = _nested(key, section) or _foreign(key, section) or _elsewhere(normal(key), section)
    if exact:
        return exact
    here = normal(key)
    if here in names_in(section):
        return Advice(f"did you mean {dotted((*section, here))}?", (*section, here), sure=True)
    return _nearest(key, section) or Advice("valid here: " + ", ".join(sorted(names_in(section))))


def _nested(key: str, section: KeyPath) -> Advice | None:
    first, dot, rest = key.partition(".")
    if not dot or first not in names_in(section):
        return None
    return Advice(
        f"nest the keys in a file: write `{first}:`, and `{rest}:` under it",
        (*section, *keys(key)),
        sure=True,
    )


def _foreign(key: str, section: KeyPath) -> Advice | None:
    key = normal(key)
    entry = FOREIGN.get(f"{dotted(section)}.{key}") or FOREIGN.get(key)
    if entry is None:
        return None
    # The form of these texts is described in keys_of_other_tools.py.
    if entry.ours.startswith("none: "):
        return Advice(f"{entry.tool}'s {key} is not needed here: {entry.ours[6:]}")
    if entry.ours.startswith("no: "):
        return Advice(entry.ours[4:])
    # The key comes first; a remark in parentheses may follow.
    target = keys(entry.ours.split()[0].rstrip(",:"))
    # An entry may also be a sentence, whose first word is no key.
    known = section_at(target[:-1]) and target[-1] in names_in(target[:-1])
    return Advice(f"{entry.tool}'s {key}; use {entry.ours}", target if known else None)


def _elsewhere(key: str, section: KeyPath) -> Advice | None:
    """Return the advice about a key of the recipe, a config or DeepSpeed in the wrong section."""
    if key == "extends":
        return Advice("it is valid only at the top of a file")
    in_config = f"model.config.{key}" if key in CONFIG_FIELDS else None
    path = (in_config if section[:1] == ("model",) else None) or everywhere().get(key) or in_config
    if path is None and key in SETTINGS:
        path = SETTINGS[key]
    inner = below(section, key) if section else None
    if path is None and inner:
        return Advice(f"it belongs at {dotted(inner)}", inner)
    if path is None or keys(path)[:-1] == section:
        return None
    return Advice(f"it belongs at {path}", keys(path), sure=True)


def _nearest(key: str, section: KeyPath) -> Advice | None:
    """Return the advice about the most similar key, or None.

    Keys of this section come before keys of other sections, and these before keys of other tools.
    """
    options = [
        (
            # Bonus for the section that the user wrote the key in.
            likeness(key, name) + 0.1,
            Advice(f"did you mean {dotted((*section, name))}?", (*section, name), sure=True),
        )
        for name in names_in(section)
    ]
    options += [
        (likeness(key, name), Advice(f"did you mean {path}?", keys(path)))
        for name, path in everywhere().items()
    ]
    for name in FOREIGN:
        # Keys that are foreign in one section only have a dot; they are no candidates.
        like = 0.0 if "." in name else likeness(key, name) - 0.05
        advice = _foreign(name, section) if like >= _LIKE else None
        if advice:
            options.append((like, advice._replace(text=f"did you mean {name}? {advice.text}")))
    best, advice = max(options, key=lambda option: option[0])
    return advice if best >= _LIKE else None
