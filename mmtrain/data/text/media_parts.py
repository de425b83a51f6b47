"""Find the form of message part by which a chat template reads media; several forms are in use."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from mmtrain.data.text.chat_template import PROBE, ChatTemplate, RenderError
from mmtrain.families.family import MediaMarkup
from mmtrain.recipe.settings.modalities import MODALITIES, MediaKind

MediaPart = Mapping[str, Any]
_QUESTION = f"{PROBE}question"
_MEDIUM = f"{PROBE}medium"  # in the place of a path, an address or data


@dataclass(frozen=True)
class KindFacts:
    """What a template does with media of one kind.

    markup: how they are written; None if they cannot be, and then `reason` completes "the chat template ...".
    part: the form of part that it renders; None for a template for texts, whose texts hold the placeholders.
    """

    markup: MediaMarkup | None
    part: MediaPart | None
    reason: str = ""


def part_forms(kind: MediaKind) -> tuple[MediaPart, ...]:
    """Return the forms of part for a medium that templates are written for, those of transformers first."""
    address = f"{kind}_url"
    forms: list[MediaPart] = [
        {"type": kind},
        *({"type": kind, key: _MEDIUM} for key in (kind, "url", "path", address)),
        {"type": address, address: {"url": _MEDIUM}},
        {"type": address, address: _MEDIUM},
    ]
    if kind == "audio":
        forms.append({"type": "input_audio", "input_audio": {"data": _MEDIUM, "format": "wav"}})
    return tuple(forms)


class MediaProber:
    """Renders questions about a medium in every form of part."""

    def __init__(self, template: ChatTemplate, added_tokens: Sequence[str]) -> None:
        """Render by a template. `added_tokens` are those of the tokenizer."""
        self._template = template
        self._added_tokens = frozenset(added_tokens)
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._any_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._without = self._written([])  # a question in parts without a medium; None: the template reads texts only

    def probe(self, kind: MediaKind, named: str | None, of_family: MediaMarkup | None) -> KindFacts:
        """Return what the template does with media of a kind.

        named: the token that the folder names for their features.
        of_family: how the family of the model writes them, which takes precedence.
        """
        own = next(modality.placeholder for modality in MODALITIES.values() if kind in modality.media)
        token = named or own
        expected = of_family or (MediaMarkup(token, token) if token in self._added_tokens else None)
        if self._without is None and not self._names_parts_of(kind):
            return KindFacts(expected, None)
        rendered = [
            (part, tokens) for part in part_forms(kind) if (tokens := self._tokens_written_for(part)) is not None
        ]
        for part, tokens in rendered:
            if expected is not None and (of_family or named) and expected.placeholder in tokens:
                return KindFacts(expected, part)
        if of_family is None and named is None and rendered and len(rendered[0][1]) == 1:
            part, (token,) = rendered[0]  # another form may fall into the branch of another kind
            return KindFacts(MediaMarkup(token, token), part)
        if expected is None:
            return KindFacts(None, None)
        return KindFacts(None, None, _describe_missing(kind, expected, rendered))

    def _names_parts_of(self, kind: MediaKind) -> bool:
        """Return whether the template asks for parts of a kind by a type or a key of them."""
        names = {name for part in part_forms(kind) for name in (part["type"], *part)} - {"type", "url", "path"}
        constants = {node.value for node in self._template.tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return bool(names & (constants | {node.attr for node in self._template.tree.find_all(nodes.Getattr)}))

    def _tokens_written_for(self, part: MediaPart) -> list[str] | None:
        """Return the special tokens that the template writes for a medium; None if it does not read such a part."""
        text = self._written([part])
        if text is None or text == self._without or _MEDIUM in text or "'type'" in text:
            return None
        tokens = self._any_token.findall(text)
        for token in self._any_token.findall(self._without or ""):
            if token in tokens:
                tokens.remove(token)
        return tokens

    def _written(self, media: Sequence[MediaPart]) -> str | None:
        """Return a rendered question in parts; None if the template does not write the text in it as such."""
        try:
            content = [*media, {"type": "text", "text": _QUESTION}]
            text = self._template.render([{"role": "user", "content": content}]).text
        except RenderError:
            return None
        return text if _QUESTION in text and "'type'" not in text else None


def _describe_missing(
    kind: MediaKind, expected: MediaMarkup, rendered: Sequence[tuple[MediaPart, Sequence[str]]]
) -> str:
    """Say of a template that reads parts that it does not write what stands for a medium."""
    written = [token for _, tokens in rendered for token in tokens]
    found = f"it writes {' '.join(dict.fromkeys(written))}" if written else "it writes no special token"
    return (
        f"reads the parts of a message, but does not write {expected.placeholder} for a part of {kind} in any form "
        f'({{"type": "{kind}"}}, with `{kind}`, `url`, `path` or `{kind}_url` beside it, or of the type `{kind}_url`): '
        f'{found}; let it write {expected.placeholder} for {{"type": "{kind}"}}'
    )
