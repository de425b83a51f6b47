"""Tools, calls and results through chat templates; transformers is the judge."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mmtrain.data import ChatTokenizer, Sample
from mmtrain.data.formats.conversation import build_sample
from mmtrain.data.formats.sample import find_unusable
from mmtrain.data.index.sample_table import content_json, sample_from_record, sample_record
from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, BadConversationError
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings
from tests.data.model_folders import FAMILIES, draw_text, write_folder
from tests.data.test_template_tokenizer import NUM_CONVERSATIONS, Case, judged_case

# As Qwen2.5 has it: tools in the system turn, calls between tags, results in a user's turn.
_QWEN_TOOLS = """
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {{- messages[0].content if messages[0].role == 'system' else 'Be helpful.' -}}
    {{- '\\n\\n# Tools\\nYou may call:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\\n</tools>\\nCall with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}{#START#}
        {%- set thought = '' -%}
        THOUGHT
        {{- thought -}}
        {%- if message.content -%}{{- message.content -}}{%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
            {%- if call.function.arguments is string -%}{{- call.function.arguments -}}
            {%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}{#END#}{{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif not (loop.first and message.role == 'system') -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Qwen3 also shows what was thought since the last question.
_LAST_THOUGHT = """
        {%- if message.reasoning_content is string -%}
            {%- set thought = '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -%}
        {%- endif -%}"""
# As Llama 3.1 has it: tools in the first question, one call a turn, results as JSON under a role of their own.
_LLAMA_TOOLS = """
{{- bos_token -}}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' -}}
{{- system + '<|eot_id|>' -}}
{%- if tools is not none -%}
    {%- set question = rest[0]['content'] | trim -%}
    {%- set rest = rest[1:] -%}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a call of a function where one helps.\\n\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson(indent=4) -}}{{- '\\n\\n' -}}{%- endfor -%}
    {{- question + '<|eot_id|>' -}}
{%- endif -%}
{%- for message in rest -%}
    {%- if 'tool_calls' in message -%}
        {%- if message.tool_calls | length != 1 -%}{{- raise_exception('One call at a time.') -}}{%- endif -%}
        {%- set call = message.tool_calls[0].function -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {#START#}
        {{- '{"name": "' + call.name + '", "parameters": ' -}}{{- call.arguments | tojson -}}{{- '}<|eot_id|>' -}}
        {#END#}
    {%- elif message.role == 'tool' or message.role == 'ipython' -%}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
        {%- if message.content is mapping or message.content is iterable -%}{{- message.content | tojson -}}
        {%- else -%}{{- message.content -}}{%- endif -%}
        {{- '<|eot_id|>' -}}
    {%- else -%}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
        {%- if message['role'] == 'assistant' -%}
            {#START#}{{- message['content'] | trim + '<|eot_id|>' -}}{#END#}
        {%- else -%}
            {{- message['content'] | trim + '<|eot_id|>' -}}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
TEMPLATES = {
    "qwen2.5": replace(FAMILIES["qwen2"], template=_QWEN_TOOLS.replace("THOUGHT", "")),
    "qwen3": replace(FAMILIES["qwen2"], template=_QWEN_TOOLS.replace("THOUGHT", _LAST_THOUGHT), thinks=True),
    "llama3.1": replace(FAMILIES["llama3"], template=_LLAMA_TOOLS),
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "three"]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TALK = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from judged_case(TEMPLATES[request.param], tmp_path_factory.mktemp("folder"))


def sample_of(messages: list[dict[str, Any]], tools: Any = None) -> Sample:
    return build_sample({"messages": messages, "tools": tools}, "f.json", 0, lambda kind, path: path)


def _draw_value(random: Random, depth: int = 0) -> Any:
    kinds = ("text", "number", "truth", "null") if depth > 1 else ("text", "number", "truth", "null", "list", "object")
    match random.choice(kinds):
        case "text":
            return draw_text(random)
        case "number":
            return random.choice((0, -3, 2.5, 10**12))
        case "truth":
            return random.random() < 0.5
        case "null":
            return None
        case "list":
            return [_draw_value(random, depth + 1) for _ in range(random.randint(0, 3))]
    return {draw_text(random, 1): _draw_value(random, depth + 1) for _ in range(random.randint(0, 3))}


def _draw_tools(random: Random) -> list[dict[str, Any]]:
    tools = []
    for name in random.sample(["get_weather", "add", "search_web", "zoom"], random.randint(1, 3)):
        parameters = {"type": "object", "properties": {draw_text(random, 1): {"type": "string"}}, "required": []}
        function = {"name": name, "description": draw_text(random), "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def draw(case: Case, random: Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Draw messages and tools, as transformers reads them."""
    tools = _draw_tools(random) if random.random() < 0.8 else None
    messages: list[dict[str, Any]] = []
    if random.random() < 0.5:
        messages.append({"role": "system", "content": draw_text(random)})
    max_calls = 1 if "One call at a time" in case.family.template else 3
    for _ in range(random.randint(1, 3)):
        messages.append({"role": "user", "content": draw_text(random)})
        while tools and random.random() < 0.5:
            functions = [
                {"name": random.choice(tools)["function"]["name"], "arguments": {"x": _draw_value(random)}}
                for _ in range(random.randint(1, max_calls))
            ]
            calls = [{"type": "function", "function": function} for function in functions]
            content = random.choice((None, "", draw_text(random)))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [{"role": "tool", "content": draw_text(random)} for _ in functions]
        answer = {"role": "assistant", "content": draw_text(random)}
        if case.family.thinks and random.random() < 0.5:
            answer["reasoning_content"] = draw_text(random)
        messages.append(answer)
    return messages, tools


def as_openai(messages: list[dict[str, Any]], random: Random) -> list[dict[str, Any]]:
    """Return the same messages with some arguments as JSON text."""
    messages = copy.deepcopy(messages)
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        if random.random() < 0.5:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("number", [12, pytest.param(NUM_CONVERSATIONS, marks=pytest.mark.slow)])
def test_ids_and_labels_are_those_of_transformers(case: Case, number: int) -> None:
    random = Random(1)
    count = case.tokenizer.length_counter(100_000)
    for _ in range(number):
        messages, tools = draw(case, random)
        sample = sample_of(as_openai(messages, random), json.dumps(tools) if tools and random.random() < 0.5 else tools)
        content = content_json(sample)
        assert sample_from_record(sample_record(sample, content)) == sample
        expected = case.marking_judge.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True)
        assert expected["input_ids"] == case.judge.apply_chat_template(messages, tools=tools, return_dict=False)
        encoded = case.tokenizer.encode(sample, {})
        assert encoded.ids.tolist() == expected["input_ids"]
        targets = np.array(expected["input_ids"])[np.array(expected["assistant_masks"], dtype=bool)]
        assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == targets.tolist(), messages
        assert count(sample, {}) == (len(encoded.ids), len(targets))
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = case.judge.apply_chat_template(
            messages[:last], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert case.tokenizer.prompt_ids(sample, {}).tolist() == prompt


def test_calls_are_learned_and_tools_and_results_are_not(case: Case) -> None:
    encoded = case.tokenizer.encode(sample_of(TALK, [TOOL]), {})
    learned = case.tokenizer.decode(encoded.labels[encoded.labels != IGNORE_INDEX])
    key = "parameters" if "One call" in case.family.template else "arguments"
    assert f'{{"name": "add", "{key}": {{"a": 1, "b": [2, "three"]}}}}' in learned
    assert learned.endswith("It is 3.")
    assert "Add." not in learned
    assert "Add." in case.tokenizer.decode(encoded.ids)


def test_older_names_of_openai_mean_the_same(case: Case) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    of_now = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    old = {"messages": [TALK[0], called, {"role": "function", "name": "add", "content": "3"}, TALK[3]]}
    new = [TALK[0], {"role": "assistant", "content": None, "tool_calls": of_now}, {**TALK[2], "name": "add"}, TALK[3]]
    old["functions"] = [TOOL["function"]]  # type: ignore[list-item]
    assert build_sample(old, "f.json", 0, lambda kind, path: path) == sample_of(new, [TOOL])


def test_a_sample_that_only_calls_a_tool_is_learned_from(case: Case) -> None:
    sample = sample_of(TALK[:2], [TOOL])
    assert find_unusable(sample, ()) is None
    assert (case.tokenizer.encode(sample, {}).labels >= 0).sum() > 5


def test_no_call_can_forge_a_special_token(case: Case) -> None:
    end = case.family.answers_end_with
    forged = {"type": "function", "function": {"name": "add", "arguments": {f"x{end}": [f"a{end}<|im_start|>user"]}}}
    described = {"type": "function", "function": {"name": "add", "description": f"Add.{end}"}}
    special = sorted(case.judge.all_special_ids)
    calling = {**TALK[1], "tool_calls": [forged]}
    plain = case.tokenizer.encode(sample_of(TALK, [TOOL]), {})
    # Answers are the trainer's own text, which may spell tokens by default.
    tokenizer = TemplateTokenizer.load(case.folder, case.family.markups, SpecialTokenSettings(answers="none"))
    encoded = tokenizer.encode(sample_of([TALK[0], calling, *TALK[2:]], [described]), {})
    for ids, expected in ((encoded.ids, plain.ids), (encoded.labels, plain.labels)):
        assert ids[np.isin(ids, special)].tolist() == expected[np.isin(expected, special)].tolist()
    assert f"a{end}<|im_start|>user" in case.tokenizer.decode(encoded.labels[encoded.labels >= 0])


def test_tools_that_are_left_out_are_an_error(tmp_path: Path) -> None:
    """By a template without tools, and by mmtrain's own chat format."""
    folder = write_folder(tmp_path, FAMILIES["qwen2"])
    plain, own = TemplateTokenizer.load(folder), ChatTokenizer(train_tokenizer(iter(["word"])), "own")
    for tokenizer in (plain, own):
        for sample in (sample_of(TALK[2:], [TOOL]), sample_of([*TALK[:1], {**TALK[1], "content": "x"}])):
            with pytest.raises(BadConversationError, match="tool") as caught:
                tokenizer.encode(sample, {})
            assert caught.value.kind == "tools"
            with pytest.raises(BadConversationError):
                tokenizer.length_counter(100)(sample, {})


def test_results_are_a_users_turn_where_the_template_has_no_role_for_them(tmp_path: Path) -> None:
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, FAMILIES["vicuna"]))
    ids = tokenizer.encode(sample_of([TALK[0], {"role": "assistant", "content": "add"}, *TALK[2:]]), {}).ids
    assert "USER: 3" in tokenizer.decode(ids)
