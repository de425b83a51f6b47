"""Read tools and calls of tools, in the layouts of OpenAI and of Hugging Face, as chat templates take them.

An entry describes tools as `"tools": [{"type": "function", "function": {"name": ..., "parameters": ...}}]`, and a turn
calls them as `"tool_calls": [{"type": "function", "function": {"name": ..., "arguments": {...}}}]`. Lists may also be
JSON text, as in Parquet files, and arguments are JSON text in OpenAI's layout: templates get objects. `functions` and
`function_call`, OpenAI's older names, become the same.
"""

import json
from collections.abc import Mapping
from typing import Any

from mmtrain.foreign_json import parse_json

THOUGHT_PART = "thinking"  # type of a part of Mistral's messages, and the key of its text
# Of a turn, beside its role and text: what templates read.
_OTHER_FIELDS = ("name", "tool_call_id", "reasoning_content")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # of DeepSeek and Qwen; OpenRouter; Ollama


def read_thought(fields: str) -> str:
    """Return what an assistant thought before it answered, from the `fields` of a turn; an empty text for nothing."""
    return str(json.loads(fields).get("reasoning_content", "")) if '"reasoning_content"' in fields else ""


class BadToolsError(Exception):
    """Tools or calls that cannot be read; the reason completes a sentence about where they are."""


def read_tools(entry: Mapping[str, Any]) -> str:
    """Return the JSON list of the tools that an entry describes; an empty text for none. Raises `BadToolsError`."""
    tools = _objects(entry.get("tools"), "tools")
    functions = _objects(entry.get("functions"), "functions")
    tools += [{"type": "function", "function": function} for function in functions]
    return _to_json(tools) if tools else ""


def read_fields(turn: Mapping[str, Any]) -> str:
    """Return the JSON object of what templates read of a turn beside its role and text; an empty text for nothing.

    Raises `BadToolsError`.
    """
    fields: dict[str, Any] = {}
    calls = _objects(turn.get("tool_calls"), "tool_calls")
    function = turn.get("function_call")
    if function:
        calls += [{"type": "function", "function": of_call} for of_call in _objects([function], "function_call")]
    if calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        if turn.get("content", "") is None or "content" not in turn:
            fields["content"] = None
    for key in _OTHER_FIELDS:
        if isinstance(turn.get(key), str):
            fields[key] = turn[key]
    thought = next((turn[key] for key in _THOUGHT_KEYS if isinstance(turn.get(key), str) and turn[key]), None)
    if thought is not None:
        fields["reasoning_content"] = thought
    return _to_json(fields) if fields else ""


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    """Return a list of objects, which may be JSON text."""
    if isinstance(value, str) and value:
        value = _parsed(value, key)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadToolsError(f"has `{key}` that are not a list of objects")
    return list(value)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadToolsError("calls a tool without a `name`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "arguments") if arguments else {}
        if not isinstance(arguments, dict):
            raise BadToolsError(f"calls {function['name']} with `arguments` that are not an object")
        function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _parsed(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadToolsError(f"has `{key}` that are not valid JSON: {error}") from None


def _to_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # halves of surrogate pairs too
        raise BadToolsError(f"has tools or calls that are not valid JSON: {error}") from None
    return text
