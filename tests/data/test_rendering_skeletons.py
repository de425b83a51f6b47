"""Renderings from skeletons are those of the template, and templates that look into texts have none."""

from itertools import product

import pytest

from mmtrain.data.text.chat_template import ChatTemplate, Message, Rendering, Tools
from mmtrain.data.text.rendering_skeletons import SkeletonRenderer
from tests.data.model_folders import CHATML, GEMMA, LLAMA3, MISTRAL

TEXTS = ["a", "<think>b</think>c", " a\n", "yes", "\u3000d ", "'\"<&"]


class Counted:
    """A template that counts how often it is rendered."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(source, "t", {"bos_token": "<s>", "eos_token": "</s>"})
        self.count = 0

    def render(self, messages: "list[Message]", add_generation_prompt: bool, tools: Tools) -> Rendering:
        self.count += 1
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)


def conversations() -> list[list[Message]]:
    pairs = product(TEXTS, repeat=2)
    return [[{"role": "user", "content": text}, {"role": "assistant", "content": other}] for text, other in pairs]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA], ids=["chatml", "llama3", "mistral", "gemma"])
def test_templates_that_write_texts_are_rendered_once_for_each_form(template: str) -> None:
    counted = Counted(template)
    renderer = SkeletonRenderer(counted.template.tree, counted.render)  # type: ignore[arg-type]
    for messages in conversations():
        assert renderer.render(messages, False) == counted.template.render(messages)
    assert counted.count == 1


@pytest.mark.parametrize(
    "looks",
    [
        "{% if 'think' in m.content %}!{% endif %}",
        "{% if m.content in 'yes no' %}!{% endif %}",
        "{% if m.content == 'yes' %}!{% endif %}",
        "{% if m.content != 'yes' %}!{% endif %}",
        "{% if m.content is in ['yes'] %}!{% endif %}",
        "{% if m.content is eq 'yes' %}!{% endif %}",
        "{% if m.content | length > 3 %}!{% endif %}",
        "{% if m.content[0] == 'y' %}!{% endif %}",
        "{% if m.content.startswith('y') %}!{% endif %}",
        "{% if 'yes'.startswith(m.content) %}!{% endif %}",
        "{% if ('-' + m.content).endswith('s') %}!{% endif %}",
        "{% if ('-' ~ m.content) == '-yes' %}!{% endif %}",
        "{% if '%s' % m.content == 'yes' %}!{% endif %}",
        "{% if ''.join([m.content]) == 'yes' %}!{% endif %}",
        "{% if [m.content] | join == 'yes' %}!{% endif %}",
        "{% if [m] | selectattr('content', 'in', 'yes') | list %}!{% endif %}",
        "{% if m | tojson == '' %}!{% endif %}",
        "{% set text %}{{ m.content }}{% endset %}{% if text == 'yes' %}!{% endif %}",
        "{% macro text() %}{{ m.content }}{% endmacro %}{% if text() == 'yes' %}!{% endif %}",
        "{{ m.content | upper }}",
        "{{ m.content | replace('a', 'b') }}",
        "{{ m.content | trim('a') }}",
        "{{ m.content.strip('a') }}",
        "{{ m.content.lstrip() }}",
        "{{ ('a' + m.content) | trim }}",
        "{{ m.content.split('</think>')[-1] }}",
        "{{ '{}'.format(m.content) }}",
        "{{ m.content * 2 }}",
        "{{ m.content < 'b' }}",
        "{{ {'yes': 1}[m.content] }}",
        "{{ m }}",
    ],
)
def test_a_template_that_looks_into_texts_sees_them(looks: str) -> None:
    counted = Counted("{% for m in messages %}" + looks + "{{ m.content }}{% endfor %}")
    renderer = SkeletonRenderer(counted.template.tree, counted.render)  # type: ignore[arg-type]
    for messages in conversations():
        assert renderer.render(messages, False) == counted.template.render(messages)
    assert counted.count >= len(TEXTS) ** 2
