"""Find the answers in a rendered conversation, each with the token that ends it, from the template itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmtrain.data.text.chat_messages import Conversation
from mmtrain.data.text.chat_template import PROBE, RenderError, Rendering, Span
from mmtrain.data.text.rendering_skeletons import Render
from mmtrain.data.text.sample_tokenizer import BadConversationError
from mmtrain.data.text.template_facts import TemplateFacts

_SPACES = re.compile(r"\s*")


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

    Renderings for every answer would take a time that is quadratic in the number of turns, so a few stand for many.
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
        found = self._find_all(conversation, answers, rendering.text)
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

    def _find_all(self, conversation: Conversation, answers: Sequence[int], text: str) -> list[Span]:
        """Find the answers that are the messages of these numbers."""
        text_spans = self._find_texts(conversation, answers, text)
        starts = self._find_starts(conversation, text_spans, text)
        return [self._span(conversation, number, text, text_spans[number], starts[number]) for number in answers]

    def _span(
        self, conversation: Conversation, number: int, text: str, text_span: Span | None, start: int | None
    ) -> Span:
        """Return where an answer is, from where its text is and where its prompt ends, if these are known."""
        if start is None and text_span is not None:
            start = text_span[0]
            if text.endswith(self._facts.answer_lead, 0, start):
                start -= len(self._facts.answer_lead)
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

    def _find_texts(self, conversation: Conversation, answers: Sequence[int], text: str) -> dict[int, Span | None]:
        """Return where the texts of answers are: by one rendering, if the template writes each as it is or trimmed."""
        texts = {number: conversation.plain_text(number) for number in answers}
        plain = {number: answer for number, answer in texts.items() if answer and not answer.isspace()}
        spans: dict[int, Span | None] = {}
        try:
            pieces = self._render(conversation.with_probes(plain), False, conversation.tools).text.split(PROBE)
        except RenderError:
            pieces = []
        for trim in (str, str.strip, str.lstrip, str.rstrip):
            written = list(map(trim, plain.values()))
            if len(pieces) == len(written) + 1 and _interleave(pieces, written) == text:
                end = 0
                for number, piece, answer in zip(plain, pieces, written, strict=False):
                    start = end + len(piece)
                    end = start + len(answer)
                    spans[number] = (start, end)
                break
        return {n: spans[n] if n in spans else self.find_text(conversation, n, text) for n in answers}

    def _find_starts(
        self, conversation: Conversation, text_spans: Mapping[int, Span | None], text: str
    ) -> dict[int, int | None]:
        """Return where the prompts for answers end.

        Answers that follow a message of one role have the same between prompt and text, if the first and the
        last but one of them have; the last of all may be treated in another way, and is looked at for itself.
        """
        starts: dict[int, int | None] = {}
        groups: dict[str, list[int]] = {}
        for number in text_spans:
            groups.setdefault(conversation.messages[number - 1]["role"] if number else "", []).append(number)
        for numbers in groups.values():
            leads = []
            for number in dict.fromkeys((numbers[0], numbers[-2:][0], numbers[-1])):
                starts[number] = self._find_start(conversation, number, text)
                leads.append(_lead(text, starts[number], text_spans[number]))
            for number in numbers[1:-2]:
                span, lead = text_spans[number], leads[0]
                is_alike = span is not None and lead == leads[1]
                if is_alike and lead is None:
                    starts[number] = None
                elif is_alike and span is not None and lead is not None and text.endswith(lead, 0, span[0]):
                    starts[number] = span[0] - len(lead)
                else:
                    starts[number] = self._find_start(conversation, number, text)
        return starts

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
            before, *after = self._render(conversation.with_probes((number,)), False, conversation.tools).text.split(
                PROBE
            )
        except RenderError:
            return None
        if len(after) != 1 or not text.startswith(before) or not text[len(before) :].endswith(after[0]):
            return None
        return len(before), len(text) - len(after[0])

    def _with_terminator(self, text: str, end: int) -> int:
        """Return the end of an answer with the terminator that follows its text, if one does."""
        terminator = self._facts.terminator
        after_spaces = _SPACES.match(text, end)
        assert after_spaces is not None, "it matches nothing, too"
        has_terminator = bool(terminator) and text.startswith(terminator, after_spaces.end())
        return after_spaces.end() + len(terminator) if has_terminator else end


def _interleave(pieces: Sequence[str], texts: Sequence[str]) -> str:
    """Put texts between pieces, of which there is one more."""
    return "".join(piece + text for piece, text in zip(pieces, [*texts, ""], strict=True))


def _lead(text: str, start: int | None, text_span: Span | None) -> str | None:
    """Return what is between a prompt and the text of the answer; None if that is not known."""
    is_before = start is not None and text_span is not None and start <= text_span[0]
    return text[start : text_span[0]] if is_before and text_span is not None else None
