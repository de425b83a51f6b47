"""Folders with several chat templates; transformers is the judge of which one a conversation gets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin

from mmtrain.data.formats.conversation import build_sample
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, BadConversationError
from mmtrain.data.text.tokenizer_folder import tokenizer_sha256
from mmtrain.errors import DataError
from tests.data.model_folders import CHATML, FAMILIES, write_folder
from tests.data.test_tool_calls import TALK, TEMPLATES, TOOL

# A template that is for tools only: it cannot be rendered without.
TOOL_USE = TEMPLATES["qwen2.5"].template.replace("{%- if tools -%}", "{%- if tools | length -%}")
PLAIN = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def write_templates(folder: Path, layout: str, templates: dict[str, str]) -> Path:
    """Write a folder with templates in one of the layouts in which transformers writes them."""
    stated: Any = [{"name": name, "template": source} for name, source in templates.items()]
    config = {"list": stated, "dict": templates, "files": None}[layout]
    write_folder(folder, FAMILIES["qwen2"], chat_template=config)
    if layout == "files":
        further = folder / "additional_chat_templates"
        further.mkdir()
        for name, source in templates.items():
            file = folder / "chat_template.jinja" if name == "default" else further / f"{name}.jinja"
            file.write_text(source)
    return folder


def ids_of(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int], list[int]]:
    sample = build_sample({"messages": messages, "tools": tools}, "f.json", 0, lambda kind, path: path)
    encoded = tokenizer.encode(sample, {})
    targets = encoded.labels[encoded.labels != IGNORE_INDEX].tolist()
    assert tokenizer.length_counter(10_000)(sample, {}) == (len(encoded.ids), len(targets))
    return encoded.ids.tolist(), targets, tokenizer.prompt_ids(sample, {}).tolist()


@pytest.mark.parametrize("layout", ["list", "dict", "files"])
@pytest.mark.parametrize("names", [("default", "tool_use"), ("default", "rag"), ("default",)])
def test_conversations_get_the_template_that_transformers_gives_them(
    layout: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    both = TEMPLATES["qwen3"].template.replace("# Tools", "# Functions")
    sources = {"default": both, "tool_use": TOOL_USE, "rag": CHATML}
    folder = write_templates(tmp_path, layout, {name: sources[name] for name in names})
    ours, judge = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for messages, tools in ((PLAIN, None), (TALK, [TOOL]), (PLAIN, [TOOL]), (TALK, None)):
        ids, targets, prompt = ids_of(ours, messages, tools)
        assert ids == judge.apply_chat_template(messages, tools=tools, return_dict=False)
        assert prompt == judge.apply_chat_template(
            messages[:-1], tools=tools, add_generation_prompt=True, return_dict=False
        )
        marked = (TOOL_USE if "tool_use" in names and tools else both).replace("{#START#}", "{% generation %}")
        mask = judge.apply_chat_template(
            messages,
            tools=tools,
            chat_template=marked.replace("{#END#}", "{% endgeneration %}"),
            return_assistant_tokens_mask=True,
            return_dict=True,
        )["assistant_masks"]
        assert targets == np.array(ids)[np.array(mask, dtype=bool)].tolist()


@pytest.mark.parametrize("layout", ["list", "dict", "files"])
def test_without_a_default_the_folder_is_rejected_as_by_transformers(layout: str, tmp_path: Path) -> None:
    folder = write_templates(tmp_path, layout, {"rag": CHATML, "other": CHATML})
    with pytest.raises(ValueError, match="no default"):
        AutoTokenizer.from_pretrained(folder).apply_chat_template(PLAIN)
    with pytest.raises(DataError, match="templates named other, rag, but none named `default`"):
        load_tokenizer(folder)


def test_a_template_for_tools_that_cannot_be_trained_with_loses_only_samples_with_tools(tmp_path: Path) -> None:
    broken = "{{ raise_exception('no, thanks') }}"
    tokenizer = load_tokenizer(write_templates(tmp_path, "files", {"default": CHATML, "tool_use": broken}))
    assert ids_of(tokenizer, PLAIN, None)[1]
    with pytest.raises(BadConversationError, match=r"tool_use.*no, thanks"):
        ids_of(tokenizer, PLAIN, [TOOL])


class _Processor(ProcessorMixin):
    def __init__(self, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)


# transformers opens the files of templates and leaves them to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("place", ["files", "processor_config.json", "chat_template.json", "tokenizer_config.json"])
def test_a_processor_takes_its_default_also_for_tools(place: str, tmp_path: Path) -> None:
    other = CHATML.replace("Be helpful.", "Be brief.")
    in_use = TEMPLATES["qwen2.5"].template.replace("# Tools", "# Functions")
    folder = write_folder(tmp_path, FAMILIES["qwen2"], chat_template=other)
    if place == "files":
        write_templates(tmp_path, "files", {"default": in_use, "tool_use": other})
    elif place == "tokenizer_config.json":  # transformers would reject it, but servers take it
        write_folder(tmp_path, FAMILIES["qwen2"], chat_template=in_use)
    else:
        stated: Any = {"default": in_use, "tool_use": other} if place == "processor_config.json" else in_use
        (folder / place).write_text(json.dumps({"chat_template": stated}))
    ours = load_tokenizer(folder, has_processor=True)
    judge = _Processor.from_pretrained(folder)
    template = in_use if place == "tokenizer_config.json" else None
    for messages, tools in ((PLAIN, None), (TALK, [TOOL])):
        ids = judge.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, chat_template=template)[
            "input_ids"
        ]
        assert ids_of(ours, messages, tools)[0] == list(ids[0] if isinstance(ids[0], list) else ids)


def test_a_tokenizer_takes_its_own_template_before_that_of_a_processor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["qwen2"])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML.replace("helpful", "brief")}))
    judge = AutoTokenizer.from_pretrained(folder)
    assert ids_of(load_tokenizer(folder), PLAIN, None)[0] == judge.apply_chat_template(PLAIN, return_dict=False)


def test_the_hash_of_a_folder_covers_all_templates(tmp_path: Path) -> None:
    folder = write_templates(tmp_path, "files", {"default": CHATML, "tool_use": TOOL_USE})
    hashes = {tokenizer_sha256(folder)}
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
    hashes.add(tokenizer_sha256(folder))
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": CHATML}))
    assert len(hashes | {tokenizer_sha256(folder)}) == 3
