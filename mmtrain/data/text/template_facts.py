"""Find out by rendering short conversations what a chat template does: before training, not in the middle of it.

`probe_template` finds how it writes turns and media, `find_turn_tokens` the tokens with which a text could forge a
turn, and `find_thought_end` what it writes between thoughts and an answer.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.text.chat_messages import thought_as_part
from mmtrain.data.text.chat_template import PROBE, ChatTemplate, Message, RenderError, Span
from mmtrain.data.text.media_parts import KindFacts, MediaProber
from mmtrain.data.text.rendering_skeletons import Render
from mmtrain.data.text.tokenizer_folder import TokenizerFolder
from mmtrain.errors import DataError
from mmtrain.families.family import Markups, MediaMarkup
from mmtrain.recipe.settings.modalities import MediaKind

_QUESTIONS = (f"{PROBE}first question", f"{PROBE}second question")
_ANSWERS = (f"{PROBE}first answer", f"{PROBE}second answer")
_TWO_ROUNDS = (("user", _QUESTIONS[0]), ("assistant", _ANSWERS[0]), ("user", _QUESTIONS[1]), ("assistant", _ANSWERS[1]))
_TOOL_RESULT = f"{PROBE}result"
_CALL_ID = "probe0000"  # templates of Mistral demand nine characters
_LOOKS_LIKE_TOKEN = re.compile(r"<\|\w+\|>")
_QUESTION, _THOUGHT, _ANSWER = "a question", "a thought", "an answer"
PLAIN_THOUGHT_END = "</think>"
_SYSTEM = "system text"
_SEQUENCE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class TemplateFacts:
    """What a template does with every conversation, as far as short ones show."""

    texts_as_parts: bool  # whether it needs all contents as lists of parts
    answer_header: str  # what `add_generation_prompt` adds; empty if answers follow the user's turn directly
    answer_lead: str  # what stands between the prompt for an answer and its text
    terminator: str  # the special token after an answer; empty if there is none
    ends_alike: bool  # whether every answer has the terminator, not only the last one
    has_tool_turns: bool  # whether it writes turns of the role `tool`
    media: dict[MediaKind, KindFacts]
    thoughts_as_parts: bool = False  # whether it reads a thought as a part of the content, and not beside it

    @property
    def markups(self) -> dict[MediaKind, MediaMarkup]:
        """How media of each kind are written, of those that can be."""
        return {kind: facts.markup for kind, facts in self.media.items() if facts.markup is not None}

    def message(self, role: str, text: str) -> Message:
        """Return a turn whose content is a text or a list of parts, as the template reads it."""
        return _message(role, _text_parts(text) if self.texts_as_parts else text)


def probe_template(
    template: ChatTemplate, folder: TokenizerFolder, added_tokens: Sequence[str], family_markups: Markups
) -> TemplateFacts:
    """Render short conversations with a template. `family_markups` take precedence over what the folder says.

    Raises `DataError` if the template cannot render them, if it has no generation prompt, or if it writes special
    tokens that the tokenizer lacks.
    """
    return _Prober(template, folder, added_tokens).probe(family_markups)


class _Prober:
    def __init__(self, template: ChatTemplate, folder: TokenizerFolder, added_tokens: Sequence[str]) -> None:
        self._template = template
        self._folder = folder
        self._added_tokens = frozenset(added_tokens)
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._any_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._texts_as_parts = False

    def probe(self, family_markups: Markups) -> TemplateFacts:
        """Return all facts."""
        question, *_ = _QUESTIONS
        answer, *_ = _ANSWERS
        self._texts_as_parts = self._needs_parts()
        header = self._answer_header()
        prompt = self._render([("user", question)], add_generation_prompt=True)
        ended = self._render([("user", question), ("assistant", answer)])
        lead = ended.removeprefix(prompt).partition(answer)[0] if ended.startswith(prompt) else ""
        two_answers = self._render(_TWO_ROUNDS)
        for text, role in ((question, "a user's"), (answer, "an assistant's")):
            if text not in two_answers:
                raise self._error(f"does not write the text of {role} turn")
        terminator = self._token_after(ended, answer)
        self._check_tokens(ended + header)
        prober = MediaProber(self._template, tuple(self._added_tokens))
        named = self._folder.media_tokens
        media = {
            kind: prober.probe(kind, named.get(kind), family_markups.get(kind))
            for kind in get_args(MediaKind)
            if family_markups.get(kind, True) is not None
        }
        return TemplateFacts(
            texts_as_parts=self._texts_as_parts,
            answer_header=header,
            answer_lead=lead,
            terminator=terminator,
            ends_alike=bool(terminator) and self._token_after(two_answers, answer) == terminator,
            has_tool_turns=self._has_tool_turns(),
            media=media,
            thoughts_as_parts=self._reads_thought(as_part=True) and not self._reads_thought(as_part=False),
        )

    def _needs_parts(self) -> bool:
        """Return whether a user's turn is rendered only if its content is a list of parts."""
        question = _QUESTIONS[0]
        reasons = []
        for content in (question, _text_parts(question)):
            try:
                text = self._template.render([_message("user", content)], add_generation_prompt=True).text
            except RenderError as error:
                reasons.append(str(error))
                continue
            if question in text:
                return not isinstance(content, str)
        reason = f"cannot render a question: {reasons[0]}" if reasons else "does not write the text of a user's turn"
        raise self._error(reason)

    def _has_tool_turns(self) -> bool:
        """Return whether a tool's turn is rendered, and not as an answer, after a call of the tool or any answer."""
        question, answer = (
            _message("user", self._content(_QUESTIONS[0])),
            _message("assistant", self._content(_ANSWERS[0])),
        )
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
        calling = {**_message("assistant", ""), "tool_calls": [call]}
        result = {**_message("tool", self._content(_TOOL_RESULT)), "name": "probe", "tool_call_id": _CALL_ID}
        for before in (calling, answer):
            try:
                text = self._template.render([question, before, result, answer]).text
                as_answer = self._template.render([question, before, {**result, "role": "assistant"}, answer]).text
            except RenderError:
                continue
            if _TOOL_RESULT in text and text != as_answer:
                return True
        return False

    def _reads_thought(self, as_part: bool) -> bool:
        """Return whether the template writes what an assistant thought."""
        answer = {**_message("assistant", self._content(_ANSWER)), "reasoning_content": _THOUGHT}
        messages = [_message("user", self._content(_QUESTION)), thought_as_part(answer) if as_part else answer]
        try:
            text = self._template.render(messages).text
        except RenderError:
            return False
        return _THOUGHT in text and _ANSWER in text

    def _content(self, text: str) -> object:
        return _text_parts(text) if self._texts_as_parts else text

    def _answer_header(self) -> str:
        """Return what `add_generation_prompt` appends to a question."""
        question, answer = _QUESTIONS[0], _ANSWERS[0]
        prompt = self._render([("user", question)], add_generation_prompt=True)
        without = self._render([("user", question)])
        if prompt != without:
            return prompt.removeprefix(without) if prompt.startswith(without) else ""
        answered = self._render([("user", question), ("assistant", answer)])
        header = answered.partition(question)[2].partition(answer)[0]
        if header.strip() and not (
            answered.startswith(prompt) and not answered[len(prompt) :].partition(answer)[0].strip()
        ):
            raise self._error(
                "has no generation prompt: it writes "
                f"{header.strip()!r} before an answer, but not with add_generation_prompt; add "
                "`{% if add_generation_prompt %}...{% endif %}` at its end"
            )
        return ""

    def _token_after(self, text: str, answer: str) -> str:
        """Return the special token right after an answer, or an empty text if there is none."""
        rest = text.partition(answer)[2].lstrip()
        token = self._any_token.match(rest)
        return token.group() if token else ""

    def _check_tokens(self, text: str) -> None:
        """Raise `DataError` if the template writes special tokens that the tokenizer does not have."""
        special_tokens = self._folder.special_tokens
        used = [special_tokens[name] for name in sorted(self._template.variables_used & special_tokens.keys())]
        missing = [
            token
            for token in dict.fromkeys([*used, *_LOOKS_LIKE_TOKEN.findall(text)])
            if token not in self._added_tokens
        ]
        if missing:
            raise self._error(
                f"writes the special tokens {' '.join(missing)}, which the tokenizer of the folder lacks; take both "
                "from the same model, or add the tokens with `add_special_tokens` of transformers, save the tokenizer, "
                "and raise model.llm.vocab to its size"
            )

    def _render(self, turns: Sequence[tuple[str, str]], add_generation_prompt: bool = False) -> str:
        messages = [_message(role, self._content(text)) for role, text in turns]
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt).text
        except RenderError as error:
            roles = ", ".join(role for role, _ in turns)
            raise self._error(f"cannot render a plain conversation ({roles}): {error}") from None

    def _error(self, reason: str) -> DataError:
        return DataError(f"data.tokenizer: {self._template.name}: the chat template {reason}")


def _message(role: str, content: object) -> Message:
    return {"role": role, "content": content}


def _text_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@dataclass(frozen=True)
class ThoughtEnd:
    """What stands between thoughts and an answer."""

    text: str = PLAIN_THOUGHT_END  # as decoding writes it, without special tokens
    token_id: int | None = None  # of the last special token of it
    written: str = PLAIN_THOUGHT_END  # as the template writes it, without space around it

    def cut(self, ids: Sequence[int] | IntArray) -> list[int]:
        """Return the ids behind the last token that ends a thought; all where a text ends thoughts."""
        answer = [int(token) for token in ids]
        if self.token_id is None or self.token_id not in answer:
            return answer
        return answer[len(answer) - answer[::-1].index(self.token_id) :]

    def behind(self, rendering: str, span: Span) -> Span:
        """Return the part of an answer's span that is behind the thoughts in it, and behind the space after them."""
        place = rendering.rfind(self.written, *span)
        if place < 0:
            return span
        answer = rendering[place + len(self.written) : span[1]]
        return span[1] - len(answer.lstrip()), span[1]

    def cut_text(self, text: str) -> str:
        """Return what a decoded answer says behind its thoughts, without space around it."""
        return (text.rpartition(self.text)[2] if self.text else text).strip()


def find_thought_end(
    render: Render, facts: TemplateFacts, special_ids: dict[str, int], special_token: re.Pattern[str]
) -> ThoughtEnd:
    """Find out what a template writes between a thought, as a field of a turn or inside its text, and the answer."""
    with_field = {**facts.message("assistant", _ANSWER), "reasoning_content": _THOUGHT}
    inline = facts.message("assistant", f"<think>\n{_THOUGHT}\n{PLAIN_THOUGHT_END}\n\n{_ANSWER}")
    for answer in (thought_as_part(with_field) if facts.thoughts_as_parts else with_field, inline):
        try:
            rendered = render([facts.message("user", _QUESTION), answer], False, ()).text
        except RenderError:
            continue
        between = rendered.partition(_THOUGHT)[2].partition(_ANSWER)[0].strip()
        if between:
            tokens = special_token.findall(between)
            last_id = special_ids[tokens[-1]] if tokens else None
            return ThoughtEnd(special_token.sub("", between).strip(), last_id, between)
    return ThoughtEnd()


def find_turn_tokens(
    render: Render, facts: TemplateFacts, folder: TokenizerFolder, special: Collection[str], added: re.Pattern[str]
) -> list[str]:
    """Return the added tokens that a template writes around turns, those that end an answer, and those of a sequence.

    What only opens or closes a thought divides no turns, though a template may write it in front of an answer.

    special: the added tokens that are marked as special. added: matches all added tokens.
    """
    tokens = [facts.terminator, *added.findall(facts.answer_header)[:1]]
    for first in ((), (("system", _SYSTEM),)):
        turns = [facts.message(role, text) for role, text in (*first, *_TWO_ROUNDS)]
        try:
            text = render(turns, False, ()).text
        except RenderError:  # such as of a system turn
            continue
        text = text.partition(_QUESTIONS[1])[0]
        tokens += [token for token in added.findall(text) if token in special]
        tokens += added.findall(text.partition(_ANSWERS[0])[2])  # the end of an answer, and the start of a question
    tokens += [folder.special_tokens.get(name, "") for name in _SEQUENCE_TOKENS]
    tokens += [folder.tokenizer.id_to_token(token_id) or "" for token_id in folder.end_ids]
    # Gemma's vocabulary has line breaks and spaces among its added tokens: they cannot forge anything.
    return [token for token in dict.fromkeys(tokens) if added.fullmatch(token) and not token.isspace()]
