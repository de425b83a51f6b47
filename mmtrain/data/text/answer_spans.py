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

    With `{% generation %}` the template says itself where they are. Otherwise an answer starts where the prompt for it
    ends. That is at the answer header, if the header holds a special token, which no text can forge. Else it is after
    the rendering of the turns before it with the generation prompt. A template may render earlier turns otherwise as
    soon as there are later ones. Then an answer starts with its text, and with the lead that the template writes
    between a prompt and a text. It ends with the terminator, or with its text.

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

    def learned(self, conversation: Conversation, rendering: Rendering, spans: Sequence[Span]) -> Sequence[Span]:
        """Return those of the spans of all answers that are to be learned.

        A template that says itself where answers are (`{% generation %}`) may write several spans for one; then the
        answers are looked for in its text. Raises `BadConversationError` if it does not show where they are.
        """
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if all(conversation.is_learned[number] for number in answers):
            return spans
        if len(spans) == len(answers):
            return [span for number, span in zip(answers, spans, strict=True) if conversation.is_learned[number]]
        unlearned = [number for number in answers if not conversation.is_learned[number]]
        found = [self.find_text(conversation, number, rendering.text) for number in unlearned]
        left_out = [span for span in found if span is not None]
        if len(left_out) < len(unlearned):
            raise BadConversationError("the chat template does not show where an answer is that is not to be learned")
        return [span for span in spans if not any(span[0] < end and start < span[1] for start, end in left_out)]

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
        starts = self._find_starts(conversation, answers, text)
        incomplete = [number for number in answers if starts[number] is None or not self._facts.ends_alike]
        text_spans: dict[int, Span | None] = {**self._find_together(conversation, incomplete, text)}
        for number in incomplete:
            if number not in text_spans and starts[number] is None:
                of_text = self.find_text(conversation, number, text)
                text_spans[number] = of_text or self._find_start_of_calls(conversation, number, text)
        ends = {number: span[1] for number, span in text_spans.items() if span is not None}
        ends_only = [number for number in incomplete if number not in text_spans]
        ends |= self._find_text_ends(conversation, ends_only, text)
        return [
            self._span(number, text, text_spans.get(number), starts[number], ends.get(number)) for number in answers
        ]

    def _span(self, number: int, text: str, text_span: Span | None, start: int | None, text_end: int | None) -> Span:
        """Return where an answer is, from where its prompt and its text end, if these are known."""
        if start is None and text_span is not None:
            start = text_span[0]
            if text.endswith(self._facts.answer_lead, 0, start):
                start -= len(self._facts.answer_lead)
        end: int | None = None
        if self._facts.ends_alike and start is not None:
            end = text.find(self._facts.terminator, start) + len(self._facts.terminator)
        elif text_end is not None:
            end = self._with_terminator(text, text_end)
        if start is None or end is None or end < start:
            raise BadConversationError(
                f"the chat template does not show where message {number + 1}, an answer, starts and ends: it renders "
                "it in several places, or otherwise depending on its text"
            )
        return start, end

    def _find_together(self, conversation: Conversation, numbers: Sequence[int], text: str) -> dict[int, Span]:
        """Return where texts of messages are, by one rendering, if the template writes each as it is or trimmed.

        A template may treat empty texts in another way; then these are left out.
        """
        texts = {number: conversation.plain_text(number) for number in numbers}
        plain = {number: plain_text for number, plain_text in texts.items() if plain_text is not None}
        full = {number: plain_text for number, plain_text in plain.items() if plain_text and not plain_text.isspace()}
        for written in (plain, full) if len(full) < len(plain) else (full,):
            spans = self._find_as_written(conversation, written, text) if written else {}
            if spans:
                return spans
        return {}

    def _find_as_written(self, conversation: Conversation, texts: Mapping[int, str], text: str) -> dict[int, Span]:
        try:
            pieces = self._render(conversation.with_probes(texts), False, conversation.tools).text.split(PROBE)
        except RenderError:
            return {}
        spans: dict[int, Span] = {}
        for trim in (str, str.strip, str.lstrip, str.rstrip):
            written = list(map(trim, texts.values()))
            if len(pieces) == len(written) + 1 and _interleave(pieces, written) == text:
                end = 0
                for number, piece, one_text in zip(texts, pieces, written, strict=False):
                    start = end + len(piece)
                    end = start + len(one_text)
                    spans[number] = (start, end)
                break
        return spans

    def _find_starts(self, conversation: Conversation, answers: Sequence[int], text: str) -> dict[int, int | None]:
        """Return where the prompts for answers end.

        Answers are grouped by the role of the message before them. If the first and the last but one of a group have
        the same text between that message and the end of the prompt, so have those between them. A template may treat
        the last answer in another way, so it is rendered separately.
        """
        starts: dict[int, int | None] = {}
        groups: dict[str, list[int]] = {}
        for number in answers:
            groups.setdefault(conversation.messages[number - 1]["role"] if number else "", []).append(number)
        for numbers in groups.values():
            for number in dict.fromkeys((numbers[0], numbers[-2:][0], numbers[-1])):
                starts[number] = self._find_start(conversation, number, text)
            if len(numbers) > 3:
                starts |= self._find_starts_between(conversation, numbers, starts, text)
        return starts

    def _find_starts_between(
        self, conversation: Conversation, numbers: Sequence[int], starts: Mapping[int, int | None], text: str
    ) -> dict[int, int | None]:
        """Return where prompts end for the answers between the first and the last but one of a group.

        starts: of these two. The text that ends a prompt is looked up behind the text of the message before, so that
        answers may be empty or call tools. If that message holds media, it is looked up in front of the answer's text.
        """
        first, *middle, last = numbers[:-1]
        if starts[first] is None and starts[last] is None:  # as of a template that treats earlier turns otherwise
            return dict.fromkeys(middle)
        before = self._find_together(conversation, [number - 1 for number in numbers], text)
        if len(before) == len(numbers):
            borders = {number + 1: span[1] for number, span in before.items()}
        else:
            borders = {number: span[0] for number, span in self._find_together(conversation, numbers, text).items()}
        known = _find_alike(numbers, starts, borders, text)
        return {n: known[n] if n in known else self._find_start(conversation, n, text) for n in middle}

    def _find_text_ends(self, conversation: Conversation, answers: Sequence[int], text: str) -> dict[int, int]:
        """Return where the texts of answers end that a template writes otherwise than other texts.

        Texts of spaces are an example: some templates leave out the line break before them. What calls tools has
        those behind its text, so it is not looked for. As with prompts, a few show what stands between an answer and
        the next text.
        """
        messages = conversation.messages
        groups: dict[str, list[int]] = {}
        for number in answers:
            if "tool_calls" not in messages[number]:
                next_role = messages[number + 1]["role"] if number + 1 < len(messages) else ""
                groups.setdefault(next_role, []).append(number)
        ends: dict[int, int | None] = {}
        for numbers in groups.values():
            for number in dict.fromkeys((numbers[0], numbers[-2:][0], numbers[-1])):
                ends[number] = self._find_text_end(conversation, number, text)
            if len(numbers) > 3:
                after = self._find_together(conversation, [number + 1 for number in numbers], text)
                ends |= _find_alike(numbers, ends, {n - 1: span[0] for n, span in after.items()}, text)
            for number in numbers:
                if number not in ends:
                    ends[number] = self._find_text_end(conversation, number, text)
        return {number: end for number, end in ends.items() if end is not None}

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
        before, after = self._around(conversation, number)
        if before is None or not text.startswith(before) or not text[len(before) :].endswith(after):
            return None
        return len(before), len(text) - len(after)

    def _find_start_of_calls(self, conversation: Conversation, number: int, text: str) -> Span | None:
        """Return the empty span where the text of a message would start that calls tools and has no text.

        A template may write something between a text and calls, so that nothing behind another text looks alike.
        """
        calls_alone = (
            "tool_calls" in conversation.messages[number] and not (conversation.plain_text(number) or "").strip()
        )
        if not self._facts.ends_alike or not calls_alone:
            return None
        before, _ = self._around(conversation, number)
        return (len(before), len(before)) if before is not None and text.startswith(before) else None

    def _find_text_end(self, conversation: Conversation, number: int, text: str) -> int | None:
        """Return where the text of a message ends that has something else before it than another text would have.

        Such as a text of spaces behind a thought, before which a template leaves out a line break.
        """
        before, after = self._around(conversation, number)
        return len(text) - len(after) if before is not None and text.endswith(after) else None

    def _around(self, conversation: Conversation, number: int) -> tuple[str | None, str]:
        """Return what is rendered before and after another text of a message; None before it if that is not known."""
        try:
            rendered = self._render(conversation.with_probes((number,)), False, conversation.tools).text
        except RenderError:
            return None, ""
        before, *after = rendered.split(PROBE)
        return (before, after[0]) if len(after) == 1 else (None, "")

    def _with_terminator(self, text: str, end: int) -> int:
        """Return the end of an answer with the terminator that follows its text, if one does."""
        terminator = self._facts.terminator
        after_spaces = _SPACES.match(text, end)
        assert after_spaces is not None, "it matches nothing, too"
        has_terminator = bool(terminator) and text.startswith(terminator, after_spaces.end())
        return after_spaces.end() + len(terminator) if has_terminator else end


def _interleave(pieces: Sequence[str], texts: Sequence[str]) -> str:
    """Put texts between pieces; there is one piece more than texts."""
    return "".join(piece + text for piece, text in zip(pieces, [*texts, ""], strict=True))


def _find_alike(
    numbers: Sequence[int], places: Mapping[int, int | None], borders: Mapping[int, int], text: str
) -> dict[int, int]:
    """Return places for numbers between the first and the last but one, as far from their borders as those are.

    places: of these two, at least. Nothing is returned where the text between border and place is another one.
    """
    first, *middle, last = numbers[:-1]
    gaps = [_between(text, borders.get(number), places[number]) for number in (first, last)]
    if gaps[0] is None or gaps[0] != gaps[1]:
        return {}
    is_behind, gap = gaps[0]
    found: dict[int, int] = {}
    for number in middle:
        border = borders.get(number)
        if border is not None:
            place = border + len(gap) if is_behind else border - len(gap)
            if _between(text, border, place) == (is_behind, gap):
                found[number] = place
    return found


def _between(text: str, border: int | None, place: int | None) -> tuple[bool, str] | None:
    """Return whether a place is behind a border, and what is between both; None if either is not known."""
    if border is None or place is None:
        return None
    return border < place, text[min(border, place) : max(border, place)]
