"""What the user most likely meant by an unknown key."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.deepspeed_keys import SETTINGS
from ortlaunch.recipe.fields.families import CONFIG_FIELDS
from ortlaunch.recipe.fields.fields import below, everywhere, names_in, section_at
from ortlaunch.recipe.hints.dialects import FOREIGN
from ortlaunch.recipe.text.place import KeyPath, dotted, keys
from ortlaunch.recipe.text.words import likeness, normal

_LIKE = 0.65  # less is another word


class Advice(NamedTuple):
    """What to say of an unknown key, and the key that was meant.

    `sure`: the value may be read as that key's; else the key is only known to be spoken of.
    """

    text: str
    target: KeyPath | None = None
    sure: bool = False


def advise(key: str, section: KeyPath) -> Advice:
    """What to say of a key that `section` does not have."""
    if key.isdecimal():
        return Advice("a comma inside { } separates keys; write a number without commas, as 1000")
    if section == ("log",) and normal(key) in ("tensorboard", "wandb", "mlflow"):
        return Advice(f"write log.trackers: [{normal(key)}]", ("log", "trackers"))
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
        f"keys nest in a file: write `{first}:`, and `{rest}:` in it",
        (*section, *keys(key)),
        sure=True,
    )


def _foreign(key: str, section: KeyPath) -> Advice | None:
    key = normal(key)
    entry = FOREIGN.get(f"{dotted(section)}.{key}") or FOREIGN.get(key)
    if entry is None:
        return None
    if entry.ours.startswith("none: "):
        return Advice(f"{entry.tool}'s {key} is not needed here: {entry.ours[6:]}")
    target = keys(entry.ours.split()[0].rstrip(",:"))
    known = section_at(target[:-1]) and target[-1] in names_in(target[:-1])
    return Advice(f"{entry.tool} says {key}; here it is {entry.ours}", target if known else None)


def _elsewhere(key: str, section: KeyPath) -> Advice | None:
    """A key of ours, or of the model's config, or of DeepSpeed, in the wrong section."""
    if key == "extends":
        return Advice("it is read at the top of a file only")
    in_config = f"model.config.{key}" if key in CONFIG_FIELDS else None
    path = (in_config if section[:1] == ("model",) else None) or everywhere().get(key) or in_config
    if path is None and key in SETTINGS:
        path = f"zero.deepspeed.{SETTINGS[key]}"
    inner = below(section, key) if section else None
    if path is None and inner:
        return Advice(f"it belongs at {dotted(inner)}", inner)
    if path is None or keys(path)[:-1] == section:
        return None
    return Advice(f"it belongs at {path}", keys(path), sure=True)


def _nearest(key: str, section: KeyPath) -> Advice | None:
    """The most similar key: of this section rather than of another one, of ours rather than of
    another tool."""
    options = [
        (
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
        like = 0.0 if "." in name else likeness(key, name) - 0.05
        advice = _foreign(name, section) if like >= _LIKE else None
        if advice:
            options.append((like, advice._replace(text=f"did you mean {name}? {advice.text}")))
    best, advice = max(options, key=lambda option: option[0])
    return advice if best >= _LIKE else None
