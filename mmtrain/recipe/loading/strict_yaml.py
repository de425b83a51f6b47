"""Strict YAML: every value means what it looks like, and keeps its line.

PyYAML reads YAML 1.1: `1e-5` is text, `on` and `no` are booleans, `010` is eight, `12:30:00` is a number, the last of
repeated keys wins silently, and a few aliases can expand to gigabytes. Here scalars follow a subset of YAML 1.2's core
schema: `null`, `~` or nothing; `true` and `false`; decimal integers and floats; everything else is text. Repeated keys,
aliases and tags are rejected.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from mmtrain.errors import RecipeError
from mmtrain.recipe.raw_tree import KeyPath, Node, Origin, Problem, Scalar

_TAG = "tag:yaml.org,2002:"
_MAX_DEPTH = 50  # nested levels: far more than a recipe has, far fewer than Python's recursion limit
_PATTERNS = {  # 19 digits hold every 64-bit integer; longer numbers are identifiers and stay text
    "null": re.compile(r"(?:null|~|)\Z"),
    "bool": re.compile(r"(?:true|false)\Z"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+)"
        r"|[-+]?\.inf|\.nan)\Z"
    ),
}
_RESOLVERS: dict[Any, Any] = {None: [(_TAG + kind, pattern) for kind, pattern in _PATTERNS.items()]}
_INTERPOLATION = re.compile(r"\$\$\{|\$\{(?:env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _error("aliases (`*name`) are not allowed; share settings with `extends`", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _error(f"the tag {event.tag!r} is not allowed; write the plain value", event.start_mark)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _error(f"nested deeper than {_MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: object) -> bool:
        return True


def parse_yaml(text: str, origin: Origin, env: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    """Parse one YAML document into a tree and replace `${env:NAME}`.

    Args:
        text: the document.
        origin: where the text starts; without a line for an override, whose nodes then have no lines either.
        env: environment variables.

    Returns:
        The tree, and problems that leave the rest readable: repeated keys, unset variables.

    Raises:
        RecipeError: with file and line if the text is not YAML.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and origin.line is not None:
            origin = replace(origin, line=mark.line + 1)
        reason = ", ".join(filter(None, (error.context, error.problem)))
        raise RecipeError(f"{origin}: not valid YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        if origin.line is not None:
            origin = replace(origin, line=text.count("\n", 0, error.position) + 1)
        character = f"U+{ord(text[error.position]):04X}"
        raise RecipeError(f"{origin}: not valid YAML: the character {character} is not allowed") from None
    problems: list[Problem] = []
    if root is None:
        return Node(None, origin), problems
    return _convert(root, (), origin, env, problems), problems


def dump_yaml(value: object) -> str:
    """Write plain values as YAML that `parse_yaml` reads back as the same values."""
    text: str = yaml.dump(_escape(value), Dumper=_Dumper, sort_keys=False, width=10**6)
    return text


def _convert(node: yaml.Node, path: KeyPath, origin: Origin, env: Mapping[str, str], problems: list[Problem]) -> Node:
    """Convert PyYAML's node at `path` to ours; append what is wrong to `problems`."""
    if isinstance(node, yaml.ScalarNode):
        return Node(_scalar(node, path, origin, env, problems), origin)
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return Node([_convert(item, (*path, i), _at_node(origin, item), env, problems) for i, item in items], origin)
    children: dict[str, Node] = {}
    for key_node, child in node.value:
        key_origin = _at_node(origin, key_node)
        if not _is_name(key_node):
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            problems.append(Problem(path, f"found the key {shown}; allowed: names and whole numbers", key_origin))
            continue
        key = key_node.value
        if key in children:
            text = f"written twice, first at {children[key].origin}; keep one"
            problems.append(Problem((*path, key), text, key_origin))
        children[key] = _convert(child, (*path, key), key_origin, env, problems)
    return Node(children, origin)


def _is_name(key: yaml.Node) -> bool:
    """Return whether a key is a name, or a whole number in plain digits, such as a step."""
    if not isinstance(key, yaml.ScalarNode):
        return False
    return key.tag == _TAG + "str" or (key.tag == _TAG + "int" and str(key.value).isdecimal())


def _scalar(
    node: yaml.ScalarNode, path: KeyPath, origin: Origin, env: Mapping[str, str], problems: list[Problem]
) -> Scalar:
    text: str = node.value
    messages: list[str] = []
    filled = _INTERPOLATION.sub(lambda match: _interpolate(match, env, messages), text)
    problems += [Problem(path, message, origin) for message in messages]
    is_quoted = node.style is not None
    if is_quoted:
        return filled
    # Only a value that is one variable and nothing else may become a number or a boolean.
    single = _INTERPOLATION.fullmatch(text)
    if "${" in text and not (single and single["name"]):
        return filled
    return _typed(filled)


def _interpolate(match: re.Match[str], env: Mapping[str, str], messages: list[str]) -> str:
    """Return the text for one interpolation. As in a shell, `:-` also covers a variable that is set but empty."""
    if match[0] == "$${":
        return "${"
    name, default = match["name"], match["default"]
    if name is None:
        allowed = "${env:NAME} and ${env:NAME:-default}, or $${ for ${ itself"
        messages.append(f"found {match.string!r}; allowed with `${{`: {allowed}")
        return ""
    if default is not None:
        return env.get(name) or str(default)
    if name not in env:
        messages.append(f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}")
    return env.get(name, "")


def _typed(text: str) -> Scalar:
    if _PATTERNS["null"].match(text):
        return None
    if _PATTERNS["bool"].match(text):
        return text == "true"
    if _PATTERNS["int"].match(text):
        return int(text)
    if _PATTERNS["float"].match(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _escape(value: object) -> object:
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, dict):
        return {key: _escape(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(child) for child in value]
    return value


def _at_node(origin: Origin, node: yaml.Node) -> Origin:
    return origin if origin.line is None else replace(origin, line=node.start_mark.line + 1)


def _error(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)
