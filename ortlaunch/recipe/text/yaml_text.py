"""Parse one YAML document as a tree whose values have their place: file, line and column.

Rules of YAML 1.1 that would surprise a user are off, and syntax errors are explained.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from ortlaunch.recipe.text.source_location import (
    Key,
    KeyPath,
    ProblemLine,
    SourceError,
    SourceLocation,
    format_key_path,
)
from ortlaunch.recipe.text.tree import Tree, merge_trees_of_same_format

# In YAML 1.1, and so in PyYAML, a float needs a point, and its exponent a sign: `1e-5` and `1.5e3`
# are strings there, and floats here.
_FLOAT = re.compile(
    r"^[-+]?(?=[0-9_.]*[.eE])([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$"
)
# In YAML 1.1 `24:00:00` is 86400 and `010` is 8. Nobody means that in a recipe, so they stay text.
_SURPRISING = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9]+)+(\.[0-9]*)?)")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SCALAR_TAGS = ("str", "int", "float", "bool", "null")
# YAML 1.1 gives a date, `=` and `<<` types of their own. As values they are text here.
_WORD_TAGS = ("timestamp", "value", "merge")
_LIBRARY = "tag:yaml.org,2002:"
# PyYAML may be built without libyaml.
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# libyaml's composer recurses in C without a limit, so that deep nesting would crash the process. A
# text of fewer characters cannot nest that deep; longer ones are read by the slow loader.
_MOST_FAST_CHARACTERS = 10_000
# Limits far above any recipe. They bound the time that a wrong or hostile file needs.
MAX_CHARACTERS = 250_000
_MAX_DEPTH = 50
_MAX_VALUES = 20_000


def parse_yaml_tree(
    yaml_document_text: str,
    source_name: str,
    problems: list[ProblemLine],
    override_path: KeyPath = (),
) -> Tree:
    """Parse one YAML document; an empty one gives a scalar without raw text.

    Args:
        yaml_document_text: the document.
        source_name: the name of the file, for the places.
        problems: a line is added to it for every duplicate key.
        override_path: if the text is the value of an override, that override's key.

    Raises:
        SourceError: the text is not YAML, or is larger than a recipe can be.
    """
    try:
        loader, node = _compose_loader_and_root_node_or_refuse(yaml_document_text, source_name)
    except SourceError as error:
        location, message = error.line
        raise SourceError(
            location, f"{format_key_path(override_path)}: {message}" if override_path else message
        ) from None
    return (
        Tree(SourceLocation(source_name, 1, 1))
        if node is None
        else _TreeBuilder(loader, source_name, problems, override_path).build_tree_of_yaml_node(
            node
        )
    )


def _compose_loader_and_root_node_or_refuse(
    yaml_document_text: str, source_name: str
) -> tuple[Any, yaml.Node | None]:
    start_location = SourceLocation(source_name, 1, 1)
    if len(yaml_document_text) > MAX_CHARACTERS:
        raise SourceError(
            start_location, f"has {len(yaml_document_text):,} characters, too many for a recipe"
        )
    if unprintable := _UNPRINTABLE.search(yaml_document_text):
        text_before = yaml_document_text[: unprintable.start()]
        location = SourceLocation(
            source_name, text_before.count("\n") + 1, unprintable.start() - text_before.rfind("\n")
        )
        raise SourceError(
            location, f"is not YAML: it holds the character {unprintable[0]!r}; remove it"
        )
    try:
        loader = _loader_class(yaml_document_text)(yaml_document_text)
        return loader, loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error_at_place_to_correct(error, source_name, yaml_document_text) from None
    # The slow loader's composer recurses in Python.
    except RecursionError:
        raise SourceError(start_location, "is nested too deeply for a recipe") from None
    except yaml.YAMLError as error:
        raise SourceError(start_location, f"is not YAML: {str(error).splitlines()[0]}") from None


def _syntax_error_at_place_to_correct(
    error: yaml.MarkedYAMLError, source_name: str, yaml_document_text: str
) -> SourceError:
    """Return the parser's error at the place to correct, with its usual cause."""
    # A no-break space is easily copied from a web page, and looks like a space.
    if no_break_space := re.search(r":\xa0", yaml_document_text):
        location = SourceLocation(
            source_name,
            yaml_document_text.count("\n", 0, no_break_space.start()) + 1,
            no_break_space.start() - yaml_document_text.rfind("\n", 0, no_break_space.start()),
        )
        return SourceError(
            location, "is not YAML: a no-break space follows this colon; write a plain space"
        )
    problem_mark = error.problem_mark or error.context_mark
    context_mark = error.context_mark
    lines = yaml_document_text.splitlines()
    problem_line_text = (
        lines[problem_mark.line] if problem_mark and problem_mark.line < len(lines) else ""
    )
    is_same_line = bool(problem_mark and context_mark and problem_mark.line == context_mark.line)
    problem = _yaml_problem(
        error.problem or "syntax error", error.context or "", problem_line_text, is_same_line
    )
    mark = context_mark if problem.is_at_opening and context_mark else problem_mark
    location = (
        SourceLocation(source_name, mark.line + 1, mark.column + 1)
        if mark
        else SourceLocation(source_name, 1, 1)
    )
    remedy_text = f"; {problem.remedy}" if problem.remedy else ""
    return SourceError(location, f"is not YAML: {problem.message}{remedy_text}")


class YamlProblem(NamedTuple):
    """The error of a text that is not YAML."""

    is_at_opening: bool
    """Whether the place to correct is the opening quote or bracket."""
    message: str
    remedy: str


def _yaml_problem(
    parser_message: str, parser_context: str, line_text: str, is_same_line: bool
) -> YamlProblem:
    if "quoted" in parser_context and "unexpected" in parser_message:
        return YamlProblem(True, "this quote is never closed", "close it at the end of the value")
    if "quoted" in parser_context:
        return YamlProblem(
            True,
            parser_message,
            "in double quotes a backslash is an escape: use single quotes, or / in a path",
        )
    if "flow" in parser_context and not is_same_line:
        bracket = "{" if "mapping" in parser_context else "["
        return YamlProblem(
            True, f"this {bracket} is never closed", "close it, or add the comma that is missing"
        )
    if "flow" in parser_context:
        return YamlProblem(False, parser_message, "a comma, a bracket or quotes are missing")
    if "\t" in line_text:
        return YamlProblem(False, parser_message, "this line holds a tab: indent with spaces")
    if "another document" in parser_message or "<document start>" in parser_message:
        return YamlProblem(
            False,
            "a second document begins here",
            "a recipe has one document, without `---` between its lines",
        )
    if "mapping values are not allowed" in parser_message:
        return YamlProblem(
            False, parser_message, "quote a value that contains ': ', and check the indentation"
        )
    if "alias" in parser_message + parser_context or "cannot start any token" in parser_message:
        return YamlProblem(
            "alias" in parser_context,
            parser_message,
            "quote a value that begins with `*`, `@`, `%` or a backquote",
        )
    if "':'" in parser_message:
        return YamlProblem(
            False, parser_message, "write `key: value`, with a space after the colon"
        )
    if "block" in parser_message + parser_context:
        return YamlProblem(
            False, parser_message, "the keys of one section begin in the same column"
        )
    return YamlProblem(False, parser_message, "")


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes a string if `parse` would read it as a number."""


_Dumper.add_implicit_resolver(_LIBRARY + "float", _FLOAT, list("-+.0123456789"))


def load_dumped(text: str) -> Any:
    """Return the plain values of a text that `dump` wrote.

    Raises: yaml.YAMLError: the text is not YAML.
    """
    return yaml.load(text, _loader_class(text))


def _loader_class(text: str) -> Any:
    return _FAST_LOADER if len(text) < _MOST_FAST_CHARACTERS else yaml.SafeLoader


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML text that `parse` reads back, with keys in their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def one_line_yaml_text(value: Any) -> str:
    """Return a value on one line, in the form of a recipe or the command line."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=math.inf,
    )
    # PyYAML writes `...`, the end of a document, after a plain scalar.
    return text.removesuffix("...\n").rstrip()


class _TreeBuilder:
    """Builder of a Tree from YAML nodes, without YAML 1.1's surprising values."""

    def __init__(
        self, loader: Any, source: str, problems: list[ProblemLine], override_path: KeyPath
    ) -> None:
        self.loader = loader
        self.source = source
        self.problems = problems
        self.open_nodes: list[yaml.Node] = []
        self.key_path = override_path
        self.value_count = 0

    def node_location(self, node: yaml.Node) -> SourceLocation:
        return SourceLocation(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def build_tree_of_yaml_node(self, yaml_node: yaml.Node) -> Tree:
        self.value_count += 1
        if any(yaml_node is parent for parent in self.open_nodes):
            raise self.error_at_node(yaml_node, "this anchor contains itself")
        # A few aliases of aliases can expand to billions of values.
        if len(self.open_nodes) > _MAX_DEPTH or self.value_count > _MAX_VALUES:
            raise self.error_at_node(
                yaml_node, "is nested too deeply, or expands too much, for a recipe"
            )
        if isinstance(yaml_node, yaml.ScalarNode):
            return Tree(
                self.node_location(yaml_node),
                self.scalar_value_or_refuse(yaml_node),
                yaml_node.value,
                quoted=bool(yaml_node.style),
            )
        if yaml_node.tag not in (_LIBRARY + "map", _LIBRARY + "seq"):
            raise self.unknown_tag_error(yaml_node)
        self.open_nodes.append(yaml_node)
        try:
            return (
                self.build_tree_of_yaml_mapping(yaml_node)
                if isinstance(yaml_node, yaml.MappingNode)
                else self.build_list(yaml_node)
            )
        finally:
            self.open_nodes.pop()

    def error_at_node(self, node: yaml.Node, message: str) -> SourceError:
        return SourceError(
            self.node_location(node),
            f"{format_key_path(self.key_path)}: {message}" if self.key_path else message,
        )

    def unknown_tag_error(self, node: yaml.Node) -> SourceError:
        return self.error_at_node(
            node,
            f"the tag {node.tag.replace(_LIBRARY, '!!')} has no meaning in a recipe; remove it",
        )

    def build_list(self, node: yaml.Node) -> Tree:
        children: dict[Key, Tree] = {
            i: self.build_tree_of_yaml_node(child) for i, child in enumerate(node.value)
        }
        return Tree(self.node_location(node), node_type="list", children=children)

    def build_tree_of_yaml_mapping(self, yaml_node: yaml.Node) -> Tree:
        children: dict[Key, Tree] = {}
        merged_bases = Tree(self.node_location(yaml_node), node_type="mapping")
        for key_node, value_node in yaml_node.value:
            key = self.key_text(key_node)
            outer_path = self.key_path
            self.key_path = (*self.key_path, key)
            value = self.build_tree_of_yaml_node(value_node)
            if key_node.tag == _LIBRARY + "merge":
                merged_bases = self.add_merged_yaml_bases(merged_bases, value, value_node)
            else:
                children[key] = self.add_problem_if_key_repeated(
                    children.get(key), value, self.node_location(key_node)
                )
            self.key_path = outer_path
        return merge_trees_of_same_format(merged_bases, replace(merged_bases, children=children))

    def add_merged_yaml_bases(self, merged_bases: Tree, value: Tree, node: yaml.Node) -> Tree:
        """Merge `<<: *base`, or a list of bases; of a list the first base has precedence."""
        # In reverse order, because a later merge overrides an earlier one.
        bases = [value] if value.node_type != "list" else list(value.children.values())[::-1]
        for base in bases:
            if base.node_type != "mapping":
                raise self.error_at_node(node, "takes a mapping, as `<<: *anchor`")
            merged_bases = merge_trees_of_same_format(merged_bases, base)
        return merged_bases

    def add_problem_if_key_repeated(
        self, earlier_value: Tree | None, value: Tree, key_location: SourceLocation
    ) -> Tree:
        """Return the value with the place of its key; add a problem if `earlier_value` has the same key."""
        if earlier_value is not None and earlier_value.key_location:
            message = (
                f"{format_key_path(self.key_path)}: this key is already given in line "
                f"{earlier_value.key_location.line}; "
                "keep one of them"
            )
            self.problems.append(ProblemLine(key_location, message))
        return replace(value, key_location=key_location)

    def key_text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error_at_node(
                node, "a key must be text; quote it if it begins with `[` or `{`"
            )
        return str(node.value)

    def scalar_value_or_refuse(self, yaml_node: yaml.ScalarNode) -> Any:
        text = yaml_node.value
        tag = yaml_node.tag.replace(_LIBRARY, "")
        # A plain scalar; a quoted one is always text.
        if not yaml_node.style and tag in ("int", "float", "str"):
            if _SURPRISING.fullmatch(text):
                return text
            if _FLOAT.fullmatch(text):
                return self.refuse_non_finite(yaml_node, float(text.replace("_", "")))
        if tag in _WORD_TAGS:
            return text
        if tag not in _SCALAR_TAGS:
            raise self.unknown_tag_error(yaml_node)
        try:
            value = self.loader.construct_object(yaml_node, deep=True)
            # It fails for half a surrogate pair, and for an integer of thousands of digits.
            f"{value}".encode()
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            raise self.error_at_node(
                yaml_node, f"cannot read {text[:80]!r}; quote it if it is text"
            ) from None
        if isinstance(value, str) and "\0" in value:
            raise self.error_at_node(
                yaml_node,
                "holds a null character, which file names and environment variables cannot "
                "contain; remove it",
            )
        return self.refuse_non_finite(yaml_node, value)

    def refuse_non_finite(self, node: yaml.Node, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error_at_node(node, f"got {node.value}; a number must be finite")
        return value
