"""Folders of all families that train on conversations, with vocabularies of published models.

Templates are written here, with the features of the published ones. Comments in them show where answers start and end:
this is what a judge may know, and mmtrain may not.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from mmtrain.data.text.sample_tokenizer import MediumFeatures, total_features
from mmtrain.data.text.template_tokenizer import DEFAULT_THOUGHTS
from mmtrain.families import FAMILIES
from mmtrain.recipe.settings.modalities import MediaKind
from mmtrain.recipe.settings.text_settings import ThoughtSettings
from tests.data import model_folders
from tests.data.published_vocabularies import published_vocabulary
from tests.data.test_tool_calls import TEMPLATES as TOOL_TEMPLATES

# As Mistral has it since version 7 of its tokenizers: a system text between marks of its own, and texts or parts.
MISTRAL3 = """
{{- bos_token -}}
{%- set rest = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set text = messages[0]['content'] -%}
    {{- '[SYSTEM_PROMPT]' + (text if text is string else text[0]['text']) + '[/SYSTEM_PROMPT]' -}}
    {%- set rest = messages[1:] -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST]' -}}
        {%- if message['content'] is string -%}
            {{- message['content'] -}}
        {%- else -%}
            {%- for part in message['content'] -%}
                {%- if part['type'] == 'text' -%}{{- part['text'] -}}
                {%- elif part['type'] in ['image', 'image_url'] -%}{{- '[IMG]' -}}
                {%- else -%}{{- raise_exception('Only text and image parts are supported.') -}}{%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {{- '[/INST]' -}}
    {%- elif message['role'] == 'assistant' -%}
        {#START#}{{- message['content'] if message['content'] is string else message['content'][0]['text'] -}}
        {{- eos_token -}}{#END#}
    {%- else -%}
        {{- raise_exception('Only user and assistant roles are supported.') -}}
    {%- endif -%}
{%- endfor -%}
"""
# Llama 2's chat: the system text in the first question; nothing stands before an answer but the end of the question.
LLAMA2_CHAT = """
{%- set system = '' -%}
{%- set rest = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if message['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' -}}
    {%- else -%}
        {#START#}{{- ' ' + message['content'] | trim + ' ' + eos_token -}}{#END#}
    {%- endif -%}
{%- endfor -%}
"""
# As LLaVA-NeXT with Mistral has it: pictures before the text of a question.
LLAVA_NEXT = """
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {{- '<<SYS>>\\n' + message['content'][0]['text'] + '\\n<</SYS>>\\n\\n' -}}
    {%- elif message['role'] == 'user' -%}
        {{- '[INST] ' -}}
        {%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
            {{- '<image>\\n' -}}
        {%- endfor -%}
        {%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{- part['text'] -}}{%- endfor -%}
        {{- ' [/INST]' -}}
    {%- else -%}
        {#START#}{{- ' ' + message['content'][0]['text'] + '</s>' -}}{#END#}{{- ' ' -}}
    {%- endif -%}
{%- endfor -%}
"""
# All contents are parts; pictures and videos stand before the text.
ONEVISION = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + ' ' -}}
    {%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>' -}}{%- endfor -%}
    {%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}{{- '<video>' -}}{%- endfor -%}
    {%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
        {%- if message['role'] == 'assistant' -%}
            {#START#}{{- '\\n' + part['text'] + '<|im_end|>' -}}{#END#}
        {%- else -%}
            {{- '\\n' + part['text'] -}}
        {%- endif -%}
    {%- endfor -%}
    {%- if message['role'] != 'assistant' -%}{{- '<|im_end|>' -}}{%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}
"""
# Clips are numbered. They are known by their key, whatever the type of the part.
QWEN2_AUDIO = """
{%- set clips = namespace(number=0) -%}
{%- for message in messages -%}
    {%- if loop.first and message['role'] != 'system' -%}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {#START#}{{- message['content'] + '<|im_end|>' -}}{#END#}{{- '\\n' -}}
        {%- continue -%}
    {%- endif -%}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if AUDIO_PART -%}
                {%- set clips.number = clips.number + 1 -%}
                {{- 'Audio ' ~ clips.number ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}
            {%- elif 'text' in part -%}
                {{- part['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
OMNI = (
    model_folders.CHATML_WITH_MEDIA.replace("<|image_pad|>", "<|IMAGE|>")
    .replace("<|video_pad|>", "<|VIDEO|>")
    .replace("<|vision_start|>", "<|vision_bos|>")
    .replace("<|vision_end|>", "<|vision_eos|>")
    .replace(
        "{%- else -%}\n                {{- part.text -}}",
        "{%- elif part.type == 'audio' -%}\n                {{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}\n"
        "            {%- else -%}\n                {{- part.text -}}",
    )
)  # fmt: skip
QWEN3_OMNI = model_folders.CHATML_WITH_MEDIA.replace(
    "{%- else -%}\n                {{- part.text -}}",
    "{%- elif part.type == 'audio' -%}\n                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}\n"
    "            {%- else -%}\n                {{- part.text -}}",
)
# The system text stands in the first question, also where that is a list of parts.
GEMMA3 = """
{{- bos_token -}}
{%- set prefix = '' -%}
{%- set rest = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set text = messages[0]['content'] -%}
    {%- set prefix = (text if text is string else text[0]['text']) + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate') -}}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- '<start_of_turn>model\\n' -}}
        {#START#}{{- message['content'] | trim + '<end_of_turn>' -}}{#END#}{{- '\\n' -}}
    {%- else -%}
        {{- '<start_of_turn>user\\n' + (prefix if loop.first else '') -}}
        {%- if message['content'] is string -%}
            {{- message['content'] | trim -}}
        {%- else -%}
            {%- for part in message['content'] -%}
                {%- if part['type'] == 'image' -%}{{- '<start_of_image>' -}}
                {%- elif part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {{- '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
# All texts are trimmed. Thoughts since the last question are shown, empty ones too; the prompt opens one, or with
# `enable_thinking=False` closes an empty one. Arguments of calls are written one by one.
QWEN3_5 = """
{%- macro written(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- else -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set system = written(messages[0].content) | trim if messages[0].role == 'system' else '' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>' + ('\\n\\n' + system if system else '') + '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set turns = namespace(last_question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' and not (written(message.content) | trim).startswith('<tool_response>') -%}
        {%- set turns.last_question = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- if turns.last_question < 0 -%}{{- raise_exception('No question of a user.') -}}{%- endif -%}
{%- for message in messages -%}
    {%- set text = written(message.content) | trim -%}
    {%- if message.role == 'assistant' -%}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
        {%- if message.reasoning_content is not string and '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if loop.index0 > turns.last_question -%}
            {{- '<think>\\n' -}}{#START#}{{- thought | trim + '\\n</think>\\n\\n' -}}{#ANSWER#}
            {{- text -}}CALLS{{- '<|im_end|>' -}}{#END#}
        {%- else -%}
            {#START#}{{- text -}}CALLS{{- '<|im_end|>' -}}{#END#}
        {%- endif -%}
        {{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- '<|im_start|>user\\n' + text + '<|im_end|>\\n' -}}
    {%- elif not loop.first -%}
        {{- raise_exception('The system text comes first.') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n<think>\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
""".replace(
    "CALLS",
    """
            {%- for call in message.tool_calls or [] -%}
                {{- ('\\n' if not loop.first else '\\n\\n' if text else '') -}}
                {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
                {%- for name, value in call.function.arguments | items -%}
                    {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) -}}
                    {{- '\\n</parameter>\\n' -}}
                {%- endfor -%}
                {{- '</function>\\n</tool_call>' -}}
            {%- endfor -%}""",
)
_ANSWERS_ALONE = QWEN3_5.replace("{#START#}{{- thought", "{{- thought").replace("{#ANSWER#}", "{#START#}")
# Special tokens of all families of a vocabulary that it does not have itself, in the order of their ids.
_MORE_TOKENS = {
    "llama2": ("<image>",),
    "llama3": (*("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),),
    "qwen3": (
        *("<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"),
        *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
        *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    ),
    "gemma3": (),
}
TILE_FEATURES = model_folders.TILE_FEATURES


@dataclass(frozen=True)
class ChatFamily:
    """How to write a folder of a family, and what conversations with it may hold."""

    family: str  # in `mmtrain.families`
    vocabulary: str
    template: str
    tokens: Mapping[MediaKind, str] = field(default_factory=dict)  # by kind of media: what the template writes
    has_system: bool = True
    all_parts: bool = False  # whether texts are lists of parts too
    sorts_media: bool = False  # the template writes pictures before videos: samples with both are quarantined
    has_tools: bool = False
    thinks: bool = False
    max_calls: int = 3  # at a time
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)  # replaces entries of the published one
    features: Mapping[MediaKind, str] = field(default_factory=dict)  # its tokens of features, if those are others
    write: Callable[[MediaKind, MediumFeatures], str] | None = None  # what its processor writes for a medium, if more
    thoughts: ThoughtSettings = DEFAULT_THOUGHTS
    unsaid: tuple[str, ...] = ()  # its special tokens that drawn texts would spell otherwise


def _write_like_mistral3(kind: MediaKind, features: MediumFeatures) -> str:
    """Return what Pixtral's processor writes for a picture of these rows."""
    from tests.weights.pixtral_processor import processor_class

    assert isinstance(features, tuple)
    processor = SimpleNamespace(
        patch_size=1, spatial_merge_size=1, image_token="[IMG]", image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )  # fmt: skip
    sizes = {"image_sizes": [(len(features), features[0])]}
    return str(processor_class().replace_image_token(processor, sizes, 0))


def _write_like_gemma3(kind: MediaKind, features: MediumFeatures) -> str:
    return f"\n\n<start_of_image>{'<image_soft_token>' * total_features(features)}<end_of_image>\n\n"


_CHATML_MEDIA: dict[MediaKind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_QWEN_TOOLS, _QWEN3_TOOLS = (TOOL_TEMPLATES[name].template for name in ("qwen2.5", "qwen3"))
_AUDIO = {"audio": "<|AUDIO|>"}
_CUT_AS_QWEN3_5 = {"tokenizer_class": "Qwen3_5Tokenizer"}
CHAT_FAMILIES: dict[str, ChatFamily] = {
    "gemma3": ChatFamily(
        "gemma3",
        "gemma3",
        GEMMA3,
        {"image": "<start_of_image>"},
        features={"image": "<image_soft_token>"},
        write=_write_like_gemma3,
    ),
    "gemma3_text": ChatFamily("gemma3_text", "gemma3", GEMMA3),
    "internvl": ChatFamily(
        "internvl",
        "qwen3",
        model_folders.INTERNVL,
        {"image": "<IMG_CONTEXT>", "video": "<video>"},
        write=model_folders.write_like_internvl,
    ),
    "llama": ChatFamily(
        "llama",
        "llama3",
        TOOL_TEMPLATES["llama3.1"].template,
        has_tools=True,
        max_calls=1,
        tokenizer_config={"eos_token": "<|eot_id|>"},
    ),
    "llama2": ChatFamily("llama", "llama2", LLAMA2_CHAT),
    "vicuna": ChatFamily("llama", "llama2", model_folders.VICUNA, tokenizer_config={"legacy": False}),
    "llava": ChatFamily("llava", "llama2", model_folders.LLAVA, {"image": "<image>"}, all_parts=True),
    "llava_next": ChatFamily("llava_next", "llama2", LLAVA_NEXT, {"image": "<image>"}, all_parts=True),
    "llava_onevision": ChatFamily(
        "llava_onevision",
        "qwen3",
        ONEVISION,
        {"image": "<image>", "video": "<video>"},
        all_parts=True,
        sorts_media=True,
    ),
    "mistral": ChatFamily("mistral", "llama2", model_folders.MISTRAL),
    # No package has Mistral's vocabulary since version 7. Llama 3's cuts texts by a pattern as that one does.
    "mistral3": ChatFamily(
        "mistral3",
        "llama3",
        MISTRAL3,
        {"image": "[IMG]"},
        tokenizer_config={"eos_token": "<|eot_id|>"},
        write=_write_like_mistral3,
        unsaid=("[INST]",),
    ),
    "qwen2": ChatFamily("qwen2", "qwen3", _QWEN_TOOLS, has_tools=True),
    "qwen2_audio": ChatFamily(
        "qwen2_audio", "qwen3", QWEN2_AUDIO.replace("AUDIO_PART", "part['type'] == 'audio'"), _AUDIO
    ),
    "qwen2_vl": ChatFamily("qwen2_vl", "qwen3", model_folders.CHATML_WITH_MEDIA, _CHATML_MEDIA),
    "qwen2_5_omni": ChatFamily("qwen2_5_omni", "qwen3", OMNI, {"image": "<|IMAGE|>", "video": "<|VIDEO|>", **_AUDIO}),
    "qwen2_5_vl": ChatFamily("qwen2_5_vl", "qwen3", model_folders.CHATML_WITH_MEDIA, _CHATML_MEDIA),
    "qwen3": ChatFamily("qwen3", "qwen3", _QWEN3_TOOLS, has_tools=True, thinks=True),
    "qwen3_thoughts": ChatFamily("qwen3", "qwen3", model_folders.THINKING, thinks=True),
    "qwen3_omni_moe": ChatFamily("qwen3_omni_moe", "qwen3", QWEN3_OMNI, {**_CHATML_MEDIA, "audio": "<|audio_pad|>"}),
    "qwen3_vl": ChatFamily(
        "qwen3_vl",
        "qwen3",
        model_folders.CHATML_WITH_MEDIA,
        _CHATML_MEDIA,
        write=model_folders.write_like_qwen3_vl,
    ),
    # No package has the vocabulary of Qwen3.5. Its texts are cut by its own pattern all the same.
    "qwen3_5": ChatFamily(
        "qwen3_5",
        "qwen3",
        QWEN3_5,
        _CHATML_MEDIA,
        has_tools=True,
        thinks=True,
        tokenizer_config=_CUT_AS_QWEN3_5,
        write=model_folders.write_like_qwen3_vl,
    ),
    "qwen3_5_text": ChatFamily(
        "qwen3_5_text",
        "qwen3",
        QWEN3_5,
        has_tools=True,
        thinks=True,
        tokenizer_config=_CUT_AS_QWEN3_5,
    ),
}
CHAT_FAMILIES |= {
    f"qwen3_5, {name}": replace(CHAT_FAMILIES["qwen3_5"], template=_ANSWERS_ALONE, thoughts=ThoughtSettings(**thoughts))
    for name, thoughts in {
        "thoughts as context": {"learn": False},
        "thinking off": {"enable_thinking": False},
        "thinking on, thoughts as context": {"enable_thinking": True, "learn": False},
    }.items()
}


def write_chat_folder(root: Path, name: str) -> Path:
    """Write what decides the ids of a family's conversations: config, tokenizer and template. Return the folder.

    root: where to write it; vocabularies with the tokens of their families are written there once.
    """
    chat, path = CHAT_FAMILIES[name], root / name
    vocabulary = _with_more_tokens(chat.vocabulary, root)
    path.mkdir()
    (path / "tokenizer.json").symlink_to(vocabulary / "tokenizer.json")
    settings = json.loads((vocabulary / "tokenizer_config.json").read_text())
    settings = {**settings, "chat_template": chat.template, **chat.tokenizer_config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tiny = FAMILIES[chat.family].tiny["config.json"]
    tokens = {token["content"]: token["id"] for token in json.loads((vocabulary / "added.json").read_text())}
    ids = {f"{kind}_token_id": tokens[chat.features.get(kind, token)] for kind, token in chat.tokens.items()}
    of_text = {"thinker_config": ids} if chat.family in ("qwen2_5_omni", "qwen3_omni_moe") else ids
    config = {"architectures": tiny["architectures"], "model_type": tiny["model_type"], **of_text}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _with_more_tokens(name: str, root: Path) -> Path:
    """Return a folder with a vocabulary that has the special tokens of all its families."""
    published, folder = published_vocabulary(name), root / f"vocabulary-{name}"
    if not folder.exists():
        folder.mkdir()
        content = json.loads((published / "tokenizer.json").read_text(encoding="utf-8"))
        first_id = 1 + max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"]))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        more = [
            {"id": i, "content": token, **flags, "special": True}
            for i, token in enumerate(_MORE_TOKENS[name], first_id)
        ]
        content["added_tokens"] += more
        (folder / "added.json").write_text(json.dumps(content["added_tokens"]))
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        settings = json.loads((published / "tokenizer_config.json").read_text(encoding="utf-8"))
        del settings["added_tokens_decoder"]  # that of `tokenizer.json`, in other words
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
