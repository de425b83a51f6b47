"""Strict YAML: what a recipe says is what it means.

PyYAML reads YAML 1.1, where `1e-5` is text, `on` and `no` are booleans, `010` is eight and `12:30:00` a number, where
a repeated key silently wins and a few aliases can grow into gigabytes. Here scalars follow a subset of YAML 1.2's core
schema: `null`, `~` or nothing; `true` and `false`; decimal integers and floats; everything else is text. Repeated
keys, aliases and tags are refused, and every value keeps its line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from mmtrain.errors import RecipeError
from mmtrain.recipe.raw_tree import KeyPath, Node, Origin, Problem, Scalar

_TAG = "tag:yaml.org,2002:"
_MAX_DEPTH = 50  # far above any recipe, far below Python's recursion limit
_FORMS = {  # nineteen digits hold every 64-bit count; longer ones are identifiers, kept as text
    "null": re.compile(r"(?:null|~|)\Z"),
    "bool": re.compile(r"(?:true|false)\Z"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+)"
        r"|[-+]?\.inf|\.nan)\Z"
    ),
}
_RESOLVERS: dict[Any, Any] = {None: [(_TAG + kind, form) for kind, form in _FORMS.items()]}
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
    """Parse one YAML document into a tree, filling in `${env:NAME}`.

    `origin.line` None means the text is not a file (an override): its nodes then carry no line either.
    Raises `RecipeError` with file and line where the text is no YAML; repeated keys and unset variables, which leave
    the rest readable, come back as problems.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = replace(origin, line=mark.line + 1) if mark and origin.line is not None else origin
        reason = ", ".join(filter(None, (error.context, error.problem)))
        raise RecipeError(f"{place}: not valid YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        place = origin if origin.line is None else replace(origin, line=text.count("\n", 0, error.position) + 1)
        raise RecipeError(f"{place}: not valid YAML: the character U+{ord(text[error.position]):04X}") from None
    problems: list[Problem] = []
    if root is None:
        return Node(None, origin), problems
    return _convert(root, (), origin, env, problems), problems


def dump_yaml(value: object) -> str:
    """Write plain values as YAML that `parse_yaml` reads back to the same values."""
    text: str = yaml.dump(_escape(value), Dumper=_Dumper, sort_keys=False, width=10**6)
    return text


def _convert(node: yaml.Node, at: KeyPath, origin: Origin, env: Mapping[str, str], problems: list[Problem]) -> Node:
    if isinstance(node, yaml.ScalarNode):
        return Node(_scalar(node, at, origin, env, problems), origin)
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return Node([_convert(child, (*at, i), _at(origin, child), env, problems) for i, child in items], origin)
    children: dict[str, Node] = {}
    for key_node, child in node.value:
        place = _at(origin, key_node)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            problems.append(Problem(at, f"found the key {shown}; allowed: names", place))
            continue
        key = key_node.value
        if key in children:
            text = f"written twice, first at {children[key].origin}; keep one"
            problems.append(Problem((*at, key), text, place))
        children[key] = _convert(child, (*at, key), place, env, problems)
    return Node(children, origin)


def _scalar(
    node: yaml.ScalarNode, at: KeyPath, origin: Origin, env: Mapping[str, str], problems: list[Problem]
) -> Scalar:
    is_plain = node.style is None
    text: str = node.value
    whole = _INTERPOLATION.fullmatch(text)
    filled = _INTERPOLATION.sub(
        lambda match: _fill(match, env, lambda p: problems.append(Problem(at, p, origin))), text
    )
    retypes = "${" not in text or (whole and whole["name"])
    return _typed(filled) if is_plain and retypes else filled


def _fill(match: re.Match[str], env: Mapping[str, str], complain: Callable[[str], None]) -> str:
    """Replace one interpolation; as in a shell, `:-` also covers a variable that is set but empty."""
    if match[0] == "$${":
        return "${"
    name, default = match["name"], match["default"]
    if name is None:
        known = "${env:NAME} and ${env:NAME:-default}, or $${ for ${ itself"
        complain(f"found {match.string!r}; allowed with `${{`: {known}")
        return ""
    if default is not None:
        return env.get(name) or str(default)
    if name not in env:
        complain(f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}")
    return env.get(name, "")


def _typed(text: str) -> Scalar:
    if _FORMS["null"].match(text):
        return None
    if _FORMS["bool"].match(text):
        return text == "true"
    if _FORMS["int"].match(text):
        return int(text)
    if _FORMS["float"].match(text):
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


def _at(origin: Origin, node: yaml.Node) -> Origin:
    return origin if origin.line is None else replace(origin, line=node.start_mark.line + 1)


def _error(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)
