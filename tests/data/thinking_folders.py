"""Templates of models that think, in own words, with what published ones do to thoughts."""

from dataclasses import replace

from tests.data.model_folders import FAMILIES, Family

_TURNS = """
{%- set ns = namespace(last_question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
"""
_SPLIT = """
        {%- set thought = message.reasoning_content | default('', true) -%}
        {%- if not thought and '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
"""
# Qwen3-Thinking, Qwen3-VL-Thinking: the generation prompt opens the thought, earlier thoughts are dropped.
OPENS_THOUGHT = (
    _TURNS
    + """
{%- for message in messages -%}
    {%- set text = message.content if message.content is string else message.content[0].text -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}"""
    + _SPLIT
    + """
        {%- if loop.index0 > ns.last_question -%}
            {{- '<think>\\n' -}}{#START#}
            {{- thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') + '<|im_end|>' -}}
            {#END#}{{- '\\n' -}}
        {%- else -%}
            {#START#}{{- text + '<|im_end|>' -}}{#END#}{{- '\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- text + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
)
# DeepSeek-R1: thoughts of all answers are dropped, and the prompt opens one.
DROPS_THOUGHTS = """
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{{- message.content -}}{%- endif -%}
    {%- if message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}{%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- set text = message.content -%}
        {%- if '</think>' in text -%}{%- set text = text.split('</think>')[-1] -%}{%- endif -%}
        {{- '<｜Assistant｜>' -}}{#START#}{{- text + '<｜end▁of▁sentence｜>' -}}{#END#}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""
# GLM-4.5: an empty thought in front of answers without one, and no token behind an answer but the next turn's.
EMPTY_THOUGHTS = (
    "{{- '[gMASK]<sop>' -}}"
    + _TURNS
    + """
{%- for message in messages -%}
    {%- set text = message.content -%}
    {%- if message.role == 'assistant' -%}"""
    + _SPLIT
    + """
        {{- '<|assistant|>' -}}{#START#}
        {%- if loop.index0 > ns.last_question and thought -%}
            {{- '\\n<think>' + thought.strip() + '</think>' -}}
        {%- else -%}
            {{- '\\n<think></think>' -}}
        {%- endif -%}
        {{- '\\n' + text.strip() if text.strip() else '' -}}{#END#}
    {%- else -%}
        {{- '<|' + message.role + '|>\\n' + text -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
)
# Ministral 3 Reasoning, Magistral: thoughts are parts of the content, and nothing beside it is read.
_THOUGHTS_IN_CONTENT = """
{{- bos_token -}}
{%- for message in messages -%}
    {%- set blocks = [{'type': 'text', 'text': message.content}] if message.content is string else message.content -%}
    {%- set around = 'SYSTEM_PROMPT]' if message.role == 'system' else 'INST]' -%}
    {%- if message.role == 'assistant' -%}
        {#START#}{%- for block in blocks -%}
            {%- if block.type == 'text' -%}{{- block.text -}}
            {%- elif block.type == 'thinking' -%}{{- '[THINK]' + block.thinking + '[/THINK]' -}}
            {%- else -%}{{- raise_exception('texts and thoughts only') -}}{%- endif -%}
        {%- endfor -%}{{- eos_token -}}{#END#}
    {%- else -%}
        {{- '[' + around -}}{%- for block in blocks -%}{{- block.text -}}{%- endfor -%}{{- '[/' + around -}}
    {%- endif -%}
{%- endfor -%}
"""
_BOXES = ("<|box_start|>", "<|box_end|>", "<tool_call>")
_QWEN = FAMILIES["thinking"]
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_BOXES)
THINKING_FAMILIES: dict[str, Family] = {
    "qwen3": replace(_QWEN, special=_QWEN_TOKENS),
    "qwen3_thinking": replace(_QWEN, template=OPENS_THOUGHT, special=_QWEN_TOKENS),
    "deepseek_r1": replace(
        _QWEN,
        template=DROPS_THOUGHTS,
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *_BOXES),
        named={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        answers_end_with="<｜end▁of▁sentence｜>",
    ),
    "glm": replace(
        _QWEN,
        template=EMPTY_THOUGHTS,
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", *_BOXES),
        named={"eos_token": "<|endoftext|>"},
        answers_end_with="",
    ),
}
THOUGHT_PARTS = replace(
    FAMILIES["mistral"],
    template=_THOUGHTS_IN_CONTENT,
    special=("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
)
