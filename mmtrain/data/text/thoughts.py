"""Separate what an assistant thinks from what it answers, by what a chat template writes between both."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.text.chat_template import RenderError
from mmtrain.data.text.rendering_skeletons import Render
from mmtrain.data.text.template_facts import TemplateFacts

_QUESTION, _THOUGHT, _ANSWER = "a question", "a thought", "an answer"
PLAIN_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class ThoughtEnd:
    """What stands between thoughts and an answer."""

    text: str = PLAIN_THOUGHT_END  # as decoding writes it, without special tokens
    token_id: int | None = None  # of the last special token of it

    def cut(self, ids: Sequence[int] | IntArray) -> list[int]:
        """Return the ids behind the last token that ends a thought; all where a text ends thoughts."""
        answer = [int(token) for token in ids]
        if self.token_id is None or self.token_id not in answer:
            return answer
        return answer[len(answer) - answer[::-1].index(self.token_id) :]

    def cut_text(self, text: str) -> str:
        """Return what a decoded answer says behind its thoughts, without space around it."""
        return (text.rpartition(self.text)[2] if self.text else text).strip()


def find_thought_end(
    render: Render, facts: TemplateFacts, special_ids: dict[str, int], special_token: re.Pattern[str]
) -> ThoughtEnd:
    """Find out what a template writes between a thought, as a field of a turn or inside its text, and the answer."""
    inline = {"content": f"<think>\n{_THOUGHT}\n{PLAIN_THOUGHT_END}\n\n{_ANSWER}"}
    for message in ({"content": _ANSWER, "reasoning_content": _THOUGHT}, inline):
        turns: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", **message}]
        if facts.texts_as_parts:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        try:
            rendered = render(turns, False, ()).text
        except RenderError:
            continue
        between = rendered.partition(_THOUGHT)[2].partition(_ANSWER)[0].strip()
        if between:
            tokens = special_token.findall(between)
            return ThoughtEnd(special_token.sub("", between).strip(), special_ids[tokens[-1]] if tokens else None)
    return ThoughtEnd()
