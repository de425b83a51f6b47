"""Conversations of many turns: answers are found in a time that is linear in them, and where transformers has them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.data.text.chat_template import ChatTemplate, Rendering
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX
from tests.data.model_folders import FAMILIES
from tests.data.test_template_tokenizer import Case, judged_case
from tests.data.test_tool_calls import CALL, TEMPLATES, TOOL, sample_of
from tests.data.thinking_folders import THINKING_FAMILIES

NUM_ROUNDS = 100
_TOOLS = TEMPLATES["qwen3"]
# No special token shows where answers start; in the second one, none shows where they end.
NO_HEADER = _TOOLS.template.replace("'<|im_start|>' + message.role", "message.role").replace(
    "'<|im_start|>assistant\\n'", "'assistant\\n'"
)
CASES = {
    "no_header": replace(_TOOLS, template=NO_HEADER),
    "mistral": FAMILIES["mistral"],
    "vicuna": FAMILIES["vicuna"],
    "opens_thought": THINKING_FAMILIES["qwen3_thinking"],
    "glm": THINKING_FAMILIES["glm"],
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    yield from judged_case(CASES[request.param], tmp_path)


def messages_of(case: Case, num_rounds: int) -> list[dict[str, Any]]:
    """Return many turns, with calls of tools where the template has them, thoughts, and empty answers."""
    messages: list[dict[str, Any]] = []
    for number in range(num_rounds):
        messages.append({"role": "user", "content": f"question {number}"})
        if "tool_call" in case.family.template and number % 3:
            content = (None, "Wait.")[number % 2]
            messages.append({"role": "assistant", "content": content, "tool_calls": [CALL] * (1 + number % 2)})
            messages += [{"role": "tool", "content": "red"}] * (1 + number % 2)
        answer = ("", f"answer {number}", f"<think>\nhm {number}\n</think>\n\nanswer")[number % 3]
        messages.append({"role": "assistant", "content": answer})
    return messages


def test_answers_are_found_in_linear_time_where_transformers_has_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What templates write is counted."""
    messages = messages_of(case, NUM_ROUNDS)
    tools = [TOOL] if "tool_call" in case.family.template else None
    expected = case.marking_judge.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
    targets = np.array(expected["input_ids"])[np.array(expected["assistant_masks"], dtype=bool)]
    written: list[int] = []
    render = ChatTemplate.render

    def count(template: ChatTemplate, *arguments: Any, **options: Any) -> Rendering:
        rendering = render(template, *arguments, **options)
        written.append(len(rendering.text))
        return rendering

    monkeypatch.setattr(ChatTemplate, "render", count)
    encoded = case.tokenizer.encode(sample_of(messages, tools), {})
    assert encoded.ids.tolist() == expected["input_ids"]
    assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == targets.tolist()
    assert sum(written) < 15 * max(written)
