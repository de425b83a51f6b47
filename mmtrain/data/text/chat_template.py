"""Render a Hugging Face chat template: Jinja source of an untrusted folder, in a sandbox, with what it may call.

The environment is the one that the documentation of transformers promises to templates: `trim_blocks`,
`lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, a `tojson` without HTML escapes, and
`{% generation %}` around what the model writes.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmtrain.errors import DataError

Message = Mapping[str, Any]  # `role` and `content` (a text, or a list of parts), and what calls tools
Tools = Sequence[Mapping[str, Any]]  # descriptions of tools
Span = tuple[int, int]  # first character, and the one after the last

# Characters of the last private plane that no text may hold; see `TemplateTokenizer`.
GENERATION_START = "\U0010fff0"
GENERATION_END = "\U0010fff1"
PROBE = "\U0010fff2"  # stands for a text whose place in a rendering is wanted
ESCAPE = "\U0010fff3"  # stands for the first character of a special token that a text spells
TIME = "\U0010fff4"  # stands for the seconds at which the first item of a video is shown
RESERVED_CHARACTERS = GENERATION_START + GENERATION_END + PROBE + ESCAPE + TIME

# The date that `strftime_now` formats. The clock would make token ids and lengths depend on the day of reading: a
# cached index would not fit the steps, and a resumed run would train on other prompts. Llama's templates write this
# date where they have no clock.
TEMPLATE_DATE = datetime(2024, 7, 26)
NO_REPLACEMENTS: Mapping[str, str] = {}
_GENERATION_MARKS = re.compile(f"[{GENERATION_START}{GENERATION_END}]")
_ATTRIBUTE_FILTERS = ("attr", "map", "selectattr", "rejectattr", "groupby", "sum", "sort", "unique", "min", "max")
_LOADING_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
MAX_OPAQUE_TEXTS = 64
# Private-use characters that no text may hold (see `chat_messages`), one for each text as it is and without the white
# space around it.
FIRST_WHOLE = 0x10FF00
FIRST_TRIMMED = FIRST_WHOLE + MAX_OPAQUE_TEXTS


class RenderError(Exception):
    """A conversation that a chat template does not render; the message is the reason."""


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation."""

    text: str
    generated: tuple[Span, ...]  # what stood between `{% generation %}` and `{% endgeneration %}`


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, name: str, variables: Mapping[str, str | bool], usual_tools: Tools = ()) -> None:
        """Compile `source`; messages call it `name`. `variables`: its special tokens, as `eos_token`, and choices.

        usual_tools: those of conversations without any, for a template that is only used with tools.

        Raises `DataError` for a syntax error, and for code that reaches for more than a template may.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"data.tokenizer: {name}, line {error.lineno}: the chat template is not valid Jinja: {error.message}"
            ) from None
        except Exception as error:  # of Python, which compiles what Jinja makes of it, and computes what is constant
            raise DataError(
                f"data.tokenizer: {name}: the chat template cannot be compiled: {type(error).__name__}: {error}"
            ) from None
        _check_harmless(tree, name)
        self.name = name
        self.tree = tree
        self._source = source
        self.variables_used = frozenset(meta.find_undeclared_variables(tree))
        self.marks_generation = any(
            isinstance(node.call, nodes.Call)
            and isinstance(node.call.node, nodes.ExtensionAttribute)
            and node.call.node.identifier == _GenerationTag.identifier
            for node in tree.find_all(nodes.CallBlock)
        )
        self._variables = dict(variables)
        self._usual_tools = usual_tools

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str, str, dict[str, str | bool], Tools]]:
        """Pickle the source: loader workers compile it again, because compiled templates cannot be pickled."""
        return type(self), (self._source, self.name, self._variables, self._usual_tools)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        replacements: Mapping[str, str] = NO_REPLACEMENTS,
        tools: Tools = (),
    ) -> Rendering:
        """Render a conversation, or the part of it before an answer with the prompt for that.

        `replacements`: texts to replace in the result, such as the placeholders of media. Raises `RenderError`.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=list(tools or self._usual_tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise RenderError(str(error)) from None
        except Exception as error:  # of Python, such as a division by zero in the template
            raise RenderError(f"{type(error).__name__}: {error}") from None
        for written, replacement in replacements.items():
            text = text.replace(written, replacement)
        return _take_out_marks(text) if self.marks_generation else Rendering(text, ())


class _GenerationTag(Extension):
    """The tag `{% generation %}`: encloses what is between it and `{% endgeneration %}` in two marks."""

    identifier = "mmtrain.generation"
    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{GENERATION_START}{caller()}{GENERATION_END}"


def _take_out_marks(text: str) -> Rendering:
    """Take the marks of `{% generation %}` out of a rendering; return the spans between them."""
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    start = 0
    last_end = 0
    for mark in _GENERATION_MARKS.finditer(text):
        parts.append(text[last_end : mark.start()])
        length += len(parts[-1])
        last_end = mark.end()
        if mark.group() == GENERATION_START:
            start = length
        else:
            spans.append((start, length))
    parts.append(text[last_end:])
    return Rendering("".join(parts), tuple(spans))


def _check_harmless(tree: nodes.Template, name: str) -> None:
    """Reject what the sandbox would stop only when it is reached, or what looks for other files."""
    for node in tree.find_all(_LOADING_NODES):
        raise DataError(
            f"data.tokenizer: {name}, line {node.lineno}: the chat template loads another template; write it as one"
        )
    for lookup in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter)):
        attribute = _named_attribute(lookup)
        if attribute.startswith("_"):
            raise DataError(
                f"data.tokenizer: {name}, line {lookup.lineno}: the chat template reaches for `{attribute}`, by which "
                "code gets out of a sandbox; mmtrain does not run such templates"
            )


def _named_attribute(node: nodes.Node) -> str:
    """Return the attribute that a node of a template looks up by a name written there, or an empty text."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    arguments: list[nodes.Node] = []
    if isinstance(node, nodes.Getitem):
        arguments = [node.arg]
    elif isinstance(node, nodes.Filter) and node.name in _ATTRIBUTE_FILTERS:
        arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    names = [argument.value for argument in arguments if isinstance(argument, nodes.Const)]
    return next((name for name in names if isinstance(name, str) and name.startswith("_")), "")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if holds_opaque_text(value):
        raise InspectedTextError
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class InspectedTextError(Exception):
    """A template did more with a text than to write it."""


class OpaqueText(str):
    """Text that may be written, trimmed and put together with other text; all else raises `InspectedTextError`."""

    slot: int | None = None  # the number of the text, if this is one as it is in the conversation

    @classmethod
    def of(cls, slot: int) -> "OpaqueText":
        """Return the text with a number."""
        text = cls(chr(FIRST_WHOLE + slot))
        text.slot = slot
        return text

    def __str__(self) -> str:
        return str.__str__(self)

    def __bool__(self) -> bool:
        return True  # only texts that are more than white space are replaced by opaque ones

    def __add__(self, other: str) -> "OpaqueText":
        return OpaqueText("".join((str(self), str(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "OpaqueText":
        return OpaqueText("".join((str(other), str(self)))) if isinstance(other, str) else NotImplemented

    def strip(self, characters: str | None = None, /) -> "OpaqueText":
        """Return the text without white space around it. Raises `InspectedTextError` if that is not all."""
        if self.slot is None or characters is not None:
            raise InspectedTextError
        return OpaqueText(chr(FIRST_TRIMMED + self.slot))


def holds_opaque_text(value: object) -> bool:
    """Return whether an opaque text is somewhere in a value of JSON's types."""
    if isinstance(value, dict):
        return any(map(holds_opaque_text, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_opaque_text, value))
    return isinstance(value, OpaqueText)


def _inspected(self: OpaqueText, *_: Any, **__: Any) -> NoReturn:
    raise InspectedTextError


def _forbid_inspection() -> None:
    """Make every other method of a text raise, those of operators included."""
    allowed = {*vars(OpaqueText), "__new__", "__getattribute__"}
    for name, method in vars(str).items():
        if name not in allowed and callable(method):
            setattr(OpaqueText, name, _inspected)


_forbid_inspection()
