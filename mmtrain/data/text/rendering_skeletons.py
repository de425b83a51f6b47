"""Render a template once for each form of conversation, where it writes texts as they are.

Most templates write a text as it is, or without the white space around it, whatever it says. Then the text around them
depends on roles and kinds of parts only, and a dataset has few combinations of these. That a template is such a one is
not assumed: it gets texts that raise an error when anything else is done with them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from mmtrain.data.formats.tool_calls import THOUGHT_PART
from mmtrain.data.text.chat_template import (
    FIRST_TRIMMED,
    FIRST_WHOLE,
    MAX_OPAQUE_TEXTS,
    Message,
    OpaqueText,
    RenderError,
    Rendering,
    Tools,
)

Render = Callable[
    [Sequence[Message], bool, Tools], Rendering
]  # (messages, whether to add the generation prompt, tools)

_MAX_SKELETONS = 1 << 12
_SLOT = re.compile(f"([{chr(FIRST_WHOLE)}-{chr(FIRST_TRIMMED + MAX_OPAQUE_TEXTS - 1)}])")
# By these, a template makes plain text of an opaque one and could look into it afterwards.
_TEXT_MAKING_NODES = (nodes.Concat, nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)
# These hand a text on as it is, or look into it by its own methods, which raise.
_FILTERS = frozenset(("trim", "tojson", "length", "count", "upper", "lower", "list", "selectattr", "rejectattr"))
_TESTS = frozenset(("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "true", "false"))
_EQUALITY_TESTS = frozenset(("equalto", "eq", "=="))

_Form = tuple[bool, tuple[tuple[str, tuple[str, ...]], ...]]  # (generation prompt, (role, types of parts) by message)


@dataclass(frozen=True)
class _Skeleton:
    """What a template writes for one form of conversation."""

    literals: tuple[str, ...]  # before, between and after the texts
    slots: tuple[tuple[int, bool], ...]  # number of each text, and whether it is trimmed

    def fill(self, texts: Sequence[str]) -> str:
        """Return the rendering of a conversation with these texts."""
        parts = [self.literals[0]]
        for (number, is_trimmed), literal in zip(self.slots, self.literals[1:], strict=True):
            parts.append(texts[number].strip() if is_trimmed else texts[number])
            parts.append(literal)
        return "".join(parts)


class SkeletonRenderer:
    """Renders as a template does, from what it wrote for the same form of conversation wherever that is sure."""

    def __init__(self, tree: nodes.Template, render: Render) -> None:
        """Render by `render`, whose template has the syntax tree `tree`."""
        self._render = render
        self._may_use_skeletons = not any(map(_may_hide_inspection, tree.find_all(nodes.Node)))
        self._skeletons: dict[_Form, _Skeleton | None] = {}  # None: the template must see the texts

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools = ()) -> Rendering:
        """Render a conversation. Raises `RenderError`."""
        is_plain = not tools and all(map(_is_plain, messages))
        if self._may_use_skeletons and is_plain:
            form, texts = _form_and_texts(messages, add_generation_prompt)
            if len(texts) <= MAX_OPAQUE_TEXTS and not any(not text or text.isspace() for text in texts):
                skeleton = self._skeleton(form, messages)
                if skeleton is not None:
                    return Rendering(skeleton.fill(texts), ())
        return self._render(messages, add_generation_prompt, tools)

    def _skeleton(self, form: _Form, messages: Sequence[Message]) -> _Skeleton | None:
        if form not in self._skeletons and len(self._skeletons) < _MAX_SKELETONS:
            try:
                written = self._render(_with_opaque_texts(messages), form[0], ()).text
            except RenderError:  # it looked into a text, or it rejects conversations of this form
                self._skeletons[form] = None
            else:
                parts = _SLOT.split(written)
                numbers = [ord(slot) - FIRST_WHOLE for slot in parts[1::2]]
                slots = [(number % MAX_OPAQUE_TEXTS, number >= MAX_OPAQUE_TEXTS) for number in numbers]
                self._skeletons[form] = _Skeleton(tuple(parts[::2]), tuple(slots))
        return self._skeletons.get(form)


def _is_plain(message: Message) -> bool:
    """Return whether a message has a role and a content, and no texts in this but those of its parts of text."""
    content = message["content"]
    is_text = content is None or isinstance(content, str)
    return len(message) == 2 and (is_text or not any(part["type"] == THOUGHT_PART for part in content))


def _may_hide_inspection(node: nodes.Node) -> bool:
    """Return whether a node of a template may look into an opaque text without calling a method of the text."""
    if isinstance(node, nodes.Filter):
        by_attribute = node.name in ("selectattr", "rejectattr")
        return node.name not in _FILTERS or (by_attribute and not _compares_by_equality(node.args))
    if isinstance(node, nodes.Test):
        return node.name not in _TESTS | _EQUALITY_TESTS
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):  # such as "".join([text])
        given = [*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs]
        return not all(argument is None or isinstance(argument, nodes.Const) for argument in given)
    if isinstance(node, nodes.Compare):  # such as `text in "yes no"`
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        return searches and not isinstance(node.expr, nodes.Const)
    if isinstance(node, nodes.Mod):  # such as "%s" % text
        return not (isinstance(node.right, nodes.Const) and isinstance(node.right.value, int))
    return isinstance(node, _TEXT_MAKING_NODES)


def _compares_by_equality(arguments: Sequence[nodes.Node]) -> bool:
    """Return whether the arguments of `selectattr` name an attribute, and a test that calls a method of its value."""
    constants = [argument.value for argument in arguments if isinstance(argument, nodes.Const)]
    is_constant = len(constants) == len(arguments)
    return is_constant and (len(constants) == 1 or constants[1] in _EQUALITY_TESTS | _TESTS)


def _form_and_texts(messages: Sequence[Message], add_generation_prompt: bool) -> tuple[_Form, list[str]]:
    """Return what a skeleton depends on, and the texts to fill into it."""
    forms: list[tuple[str, tuple[str, ...]]] = []
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            forms.append((message["role"], ()))
            texts.append(content)
        else:
            forms.append((message["role"], tuple([part["type"] for part in content])))
            texts += [part["text"] for part in content if "text" in part]
    return (add_generation_prompt, tuple(forms)), texts


def _with_opaque_texts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an opaque text in the place of each text."""
    opaque: list[Message] = []
    number = 0
    for message in messages:
        content: Any = message["content"]
        if isinstance(content, str):
            content = OpaqueText.of(number)
            number += 1
        else:
            parts = []
            for part in content:
                is_text = "text" in part
                parts.append({**part, "text": OpaqueText.of(number)} if is_text else part)
                number += is_text
            content = parts
        opaque.append({**message, "content": content})
    return opaque
