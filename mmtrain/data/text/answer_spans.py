"""Find the answers in a rendered conversation, each with the token that ends it, from the template itself."""

import re
from dataclasses import dataclass
from itertools import pairwise

from mmtrain.data.text.chat_messages import Conversation
from mmtrain.data.text.chat_template import PROBE, RenderError, Rendering, Span
from mmtrain.data.text.rendering_skeletons import Render
from mmtrain.data.text.sample_tokenizer import BadConversationError
from mmtrain.data.text.template_facts import TemplateFacts


@dataclass(frozen=True)
class AnswerSpans:
    """Where the answers are in a rendering."""

    spans: tuple[Span, ...]
    follow_header: bool  # whether the text before each is the answer header


class AnswerFinder:
    """Finds the answers that a template has rendered.

    With `{% generation %}` the template says itself where they are. Otherwise an answer starts where the prompt for
    it ends: at the answer header, if that holds a special token, which no text can forge; else after the rendering
    of the turns before it with the generation prompt. A template may render earlier turns otherwise as soon as there
    are later ones; then an answer starts with its text, and with what the template writes between a prompt and a text.
    It ends with the terminator, or with its text.
    """

    def __init__(self, render: Render, facts: TemplateFacts, special_token: re.Pattern[str]) -> None:
        """Find the answers in what `render` returns. `special_token` matches what no text can forge."""
        self._render = render
        self._facts = facts
        self._scans_headers = facts.ends_alike and special_token.search(facts.answer_header) is not None

    def find(self, conversation: Conversation, rendering: Rendering) -> AnswerSpans:
        """Return the spans of all answers. Raises `BadConversationError` if one cannot be found."""
        if rendering.generated:
            return AnswerSpans(rendering.generated, follow_header=False)
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if self._scans_headers:
            spans = self._after_headers(rendering.text)
            if len(spans) == len(answers):
                return AnswerSpans(tuple(spans), follow_header=True)
        found = [self._find_one(conversation, number, rendering.text) for number in answers]
        in_order = all(before[1] <= after[0] for before, after in pairwise(found))
        if not in_order:
            raise BadConversationError("the chat template renders answers out of order")
        return AnswerSpans(tuple(found), follow_header=False)

    def _after_headers(self, text: str) -> list[Span]:
        header, terminator = self._facts.answer_header, self._facts.terminator
        spans: list[Span] = []
        position = text.find(header)
        while position >= 0:
            start = position + len(header)
            end = text.find(terminator, start)
            if end < 0:
                return []
            spans.append((start, end + len(terminator)))
            position = text.find(header, spans[-1][1])
        return spans

    def _find_one(self, conversation: Conversation, number: int, text: str) -> Span:
        """Find the answer that is message `number`."""
        text_span = self.find_text(conversation, number, text)
        start = self._find_start(conversation, number, text)
        if start is None and text_span is not None:
            start = len(text[: text_span[0]].removesuffix(self._facts.answer_lead))
        end: int | None = None
        if self._facts.ends_alike and start is not None:
            end = text.find(self._facts.terminator, start) + len(self._facts.terminator)
        elif text_span is not None and "tool_calls" not in conversation.messages[number]:  # which follow the text
            end = self._with_terminator(text, text_span[1])
        if start is None or end is None or end < start:
            raise BadConversationError(
                f"the chat template does not show where message {number + 1}, an answer, starts and ends: it renders "
                "it in several places, or otherwise depending on its text"
            )
        return start, end

    def _find_start(self, conversation: Conversation, number: int, text: str) -> int | None:
        """Return where the prompt for an answer ends; None if the rendering does not start with that prompt."""
        if not number:
            return None
        try:
            prompt = self._render(conversation.messages[:number], True, conversation.tools).text
        except RenderError:
            return None
        return len(prompt) if text.startswith(prompt) else None

    def find_text(self, conversation: Conversation, number: int, text: str) -> Span | None:
        """Return where the text of a message is, from a rendering with another text in its place."""
        try:
            before, *after = self._render(conversation.with_probe(number), False, conversation.tools).text.split(PROBE)
        except RenderError:
            return None
        if len(after) != 1 or not text.startswith(before) or not text[len(before) :].endswith(after[0]):
            return None
        return len(before), len(text) - len(after[0])

    def _with_terminator(self, text: str, end: int) -> int:
        """Return the end of an answer with the terminator that follows its text, if one does."""
        terminator = self._facts.terminator
        rest = text[end:]
        spaces = len(rest) - len(rest.lstrip())
        has_terminator = bool(terminator) and rest.startswith(terminator, spaces)
        return end + spaces + len(terminator) if has_terminator else end
