"""A recipe that another tool's config is turned into, and an account of every key of that config. Pure.

Every key ends in exactly one list of the account; nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ortlaunch.recipe.fields.fields import choices, everywhere, names_in, section_at
from ortlaunch.recipe.hints.dialects import DIALECTS
from ortlaunch.recipe.text.place import HIDDEN, SECRET, Place, keys, without_secrets
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.words import closest, normal
from ortlaunch.recipe.text.yaml_text import in_line

NONE = "none: "
_NO_BF16 = (
    "engine.name",
    "eager",
    "ONNX Runtime has bf16 on CUDA only; precision=fp32 engine.name=ort runs on it",
)


class Remark(NamedTuple):
    """What became of a key."""

    place: Place
    key: str
    value: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.value} -> {self.text}"


@dataclass
class ImportReport:
    """What became of each key."""

    taken: list[Remark] = field(default_factory=list)
    """The text is our key."""
    changed: list[Remark] = field(default_factory=list)
    """Taken, but it does not mean quite the same here."""
    dropped: list[Remark] = field(default_factory=list)
    """Without a counterpart."""
    needless: list[Remark] = field(default_factory=list)
    """There is nothing to be set for it."""
    empty: list[str] = field(default_factory=list)
    """null, false or empty: asks for nothing."""
    assumed: list[str] = field(default_factory=list)
    """What the config does not say, by the tool's own default."""


class Draft:
    """The keys that are left to be looked at, and the recipe so far, each part with the place it came from."""

    def __init__(self, config: Tree, tools: Sequence[str], command: Tree, base: Tree) -> None:
        """`command` has the keys of the command line, which replace the config's; `base` those of --base."""
        self.left = {str(key): node for key, node in config.children.items()}
        self.tools = tools
        self.account = ImportReport()
        self.command = command
        self.base = base
        self.recipe = Tree(config.place, kind="mapping")
        self._assumed: list[tuple[str, object, str]] = []

    def take(self, key: str) -> Tree | None:
        """A key that asks for something, which is then dealt with; None where it is absent or asks for nothing."""
        node = self.left.get(key)
        if node is None or is_empty(node):
            return None
        return self.left.pop(key)

    def value(self, key: str) -> Any:
        """The value of a key that stays to be dealt with."""
        node = self.left.get(key)
        return None if node is None else node.plain()

    def expected(self, path: str) -> Any:
        """The value that the recipe will have there, so far as it is known."""
        trees = (tree.find(keys(path)) for tree in (self.command, self.recipe, self.base))
        there = next((tree for tree in trees if tree is not None), None)
        assumed = [value for each, value, _ in self._assumed if each == path]
        return there.plain() if there is not None else assumed[0] if assumed else None

    def put(self, path: str, node: Tree, key: str, value: object = None, why: str = "") -> None:
        """Set a key of the recipe to `value`, or to the config's own; `why` it does not mean quite the same."""
        tree = node if value is None else made(value, node)
        there = self.recipe.find(keys(path))
        if there is not None and there.plain() == tree.plain():
            return self.needless(key, node, f"{path} has it")
        if there is not None:
            return self.drop(key, node, f"{path} is set by another key already")
        self.recipe = self.recipe.put(keys(path), tree)
        written = path if value is None else f"{path}: {word(tree)}"
        self._remark(
            self.account.changed if why else self.account.taken,
            key,
            node,
            f"{written}; {why}" if why else written,
        )
        return None

    def assume(self, path: str, value: object, why: str) -> None:
        """Set what the config does not say, once all that it says is known."""
        self._assumed.append((path, value, why))

    def drop(self, key: str, node: Tree, why: str) -> None:
        """A key without a counterpart."""
        self._remark(self.account.dropped, key, node, why)

    def needless(self, key: str, node: Tree, why: str) -> None:
        """A key for which there is nothing to be set."""
        self._remark(self.account.needless, key, node, why)

    def without_adapters(self, why: str) -> None:
        """Keys of LoRA where all weights are trained."""
        for key in [each for each in self.left if each.startswith("lora_")]:
            node = self.take(key)
            if node is not None:
                self.needless(key, node, f"of no effect there: {why}")

    def rest(self) -> None:
        """Everything that is left, by the tables of other tools' words and by our own names; then what is assumed."""
        for key, node in self.left.items():
            if is_empty(node):
                self.account.empty.append(key)
            else:
                self._by_tables(key, node)
        self.left = {}
        if self.expected("precision") == "bf16":
            self.assume(*_NO_BF16)
        for path, value, why in self._assumed:
            if self.recipe.find(keys(path)) is None:
                self.recipe = self.recipe.put(keys(path), made(value, self.recipe))
                self.account.assumed.append(f"{path}: {value} ({why})")

    def _by_tables(self, key: str, node: Tree) -> None:
        ours = next(
            (DIALECTS[tool][normal(key)] for tool in self.tools if normal(key) in DIALECTS[tool]),
            None,
        )
        ours = ours or everywhere().get(normal(key)) or ""
        if ours.startswith(NONE):
            self.needless(key, node, ours.removeprefix(NONE))
        elif not is_key(ours):
            self.drop(key, node, f"no counterpart; nearest: {ours}" if ours else "no counterpart")
        elif choices(keys(ours)) and isinstance(node.scalar, str):
            self._by_word(key, node, ours)
        else:
            self.put(ours, node, key)

    def _by_word(self, key: str, node: Tree, ours: str) -> None:
        words = choices(keys(ours))
        found = closest(node.scalar, words)
        if found is None:
            return self.drop(key, node, f"{ours} has {', '.join(words)}")
        return self.put(ours, node, key, found)

    def _remark(self, where: list[Remark], key: str, node: Tree, text: str) -> None:
        value = HIDDEN if SECRET.search(key) else " ".join(word(node).split())
        where.append(
            Remark(
                node.key_place or node.place,
                key,
                value if len(value) <= 80 else value[:77] + "...",
                text,
            )
        )


def is_key(path: str) -> bool:
    """Whether it is a key of the recipe and nothing more."""
    where = keys(path) if path and " " not in path else ()
    return (
        bool(where)
        and section_at(where[:-1]) is not None
        and str(where[-1]) in names_in(where[:-1])
    )


def is_empty(node: Tree) -> bool:
    """Whether a value asks for nothing."""
    if node.kind != "scalar":
        return not node.children
    return node.scalar is None or node.scalar is False or node.scalar == ""


def made(value: object, node: Tree) -> Tree:
    """A value of ours with the place of another tool's."""
    if isinstance(value, Tree):
        return value
    if isinstance(value, dict):
        return Tree(
            node.place,
            kind="mapping",
            key_place=node.key_place,
            children={k: made(v, node) for k, v in value.items()},
        )
    if isinstance(value, (list, tuple)):
        return Tree(
            node.place,
            kind="list",
            key_place=node.key_place,
            children={i: made(v, node) for i, v in enumerate(value)},
        )
    return Tree(node.place, value, str(value), key_place=node.key_place)


def null(node: Tree) -> Tree:
    """Nothing, where the recipe must say so, with the place of another tool's value."""
    return Tree(node.place, raw="null", key_place=node.key_place)


def word(node: Tree) -> str:
    """A value on a line."""
    if node.kind == "scalar":
        return str(node.raw if node.raw is not None else node.scalar)
    text = in_line(without_secrets(node.plain()))
    return text if len(text) <= 80 else text[:77] + "..."


def number(node: Tree | None) -> float | None:
    """A number, or None."""
    value = node.scalar if node is not None and node.kind == "scalar" else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
