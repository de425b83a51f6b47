"""Small model folders, tokenizer and template: those of well-known families in shape, written and trained here."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mmtrain.data.text import token_counter
from mmtrain.data.text.sample_tokenizer import MediumFeatures, TimedItems
from mmtrain.families import FAMILIES as MODEL_FAMILIES
from mmtrain.families.family import Markups
from mmtrain.recipe.settings.modalities import MediaKind

CHATML = """
{%- if messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- else -%}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}{#START#}{{- message.content + '<|im_end|>' -}}{#END#}{{- '\\n' -}}
    {%- elif not (loop.first and message.role == 'system') -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
CHATML_WITH_MEDIA = """
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {#START#}{{- message.content + '<|im_end|>' -}}{#END#}{{- '\\n' -}}
        {%- continue -%}
    {%- endif -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
# A line break follows each medium, whose text the processor writes.
INTERNVL = (
    CHATML_WITH_MEDIA.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\\n")
    .replace("<|vision_start|><|video_pad|><|vision_end|>", "<video>\\n")
    .replace("Be helpful.", "You see pictures.")
)
# Turns begin with their role; an end token closes answers.
GLM4V = """[gMASK]<sop>
{%- for message in messages -%}
    {{- '\\n<|' + message.role + '|>' -}}
    {%- if message.role == 'assistant' -%}
        {{- '\\n' -}}{#START#}{{- message.content + '<|endoftext|>' -}}{#END#}
        {%- continue -%}
    {%- endif -%}
    {{- '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
            {%- elif part.type == 'video' -%}
                {{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n<|assistant|>\\n' -}}{%- endif -%}
"""
# Thoughts are shown in the last answer only, so that earlier answers change when later turns come.
THINKING = """
{%- set ns = namespace(last_question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = message.content -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- set thought = '' -%}
        {%- if '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- set thought = '<think>\\n' + thought + '\\n</think>\\n\\n' if loop.index0 > ns.last_question else '' -%}
        {#START#}{{- thought + text + '<|im_end|>' -}}{#END#}{{- '\\n' -}}
    {%- else -%}
        {{- text + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
LLAMA3 = """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] | trim -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' -}}
{{- system + '<|eot_id|>' -}}
{%- for message in rest -%}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {#START#}{{- message['content'] | trim + '<|eot_id|>' -}}{#END#}
    {%- else -%}
        {{- message['content'] | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
# The system text stands in the last question, so that earlier questions change when later ones come.
MISTRAL = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate, from user to assistant.') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {%- if system is defined and (loop.last or loop.index0 == rest | length - 2) -%}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' -}}
        {%- else -%}
            {{- '[INST] ' + message['content'] + ' [/INST]' -}}
        {%- endif -%}
    {%- else -%}
        {#START#}{{- ' ' + message['content'] + eos_token -}}{#END#}
    {%- endif -%}
{%- endfor -%}
"""
LLAVA = """
{%- for message in messages %}
{%- if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ part['text'] + ' ' }}{% endgeneration %}
{%- else %}{{ part['text'] + ' ' }}{% endif %}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""
VICUNA = """
{%- if messages[0]['role'] != 'system' %}{{ 'A chat with a polite assistant. ' }}{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] | trim + ' ' }}
{%- elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] | trim + ' ' }}
{%- else %}{{ 'ASSISTANT:' }}{#START#}{{ ' ' + message['content'] | trim + eos_token }}{#END#}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""
GEMMA = """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate') -}}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<start_of_turn>' + role + '\\n' -}}
    {%- if role == 'model' -%}
        {#START#}{{- message['content'] | trim + '<end_of_turn>' -}}{#END#}{{- '\\n' -}}
    {%- else -%}
        {{- message['content'] | trim + '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
WORDS = [
    "what",
    "colour",
    "is",
    "the",
    "circle",
    "left",
    "of",
    "a",
    "square",
    "answer",
    "red",
    "green",
    "assistant",
    "user",
    "system",
    "how",
    "many",
    "café",
    "12",
    "345",
    "1999",
    "'",
    "'s",
    "don't",
    "I'll",
    "we're",
    "...",
    "!?",
    "--",
    "->",
    "USER:",
    "ASSISTANT:",
    "[INST]",
    "<b>",
    "</b>",
    "北京",
    "天气",
    "好",
    "naïve",
    "Ünder",
    "🙂",
    "\xa0",
    "é",
    "＜ﬁ＞",
]


# Comments in the templates show where answers start and end. This is what a judge may know, and mmtrain may not.
MARK_ANSWERS = {"{#START#}": "{%- generation -%}", "{#END#}": "{%- endgeneration -%}"}


@dataclass(frozen=True)
class Family:
    """How to make the folder of a family."""

    template: str
    train: Callable[[list[str]], Tokenizer]  # special tokens -> tokenizer
    special: tuple[str, ...]
    named: dict[str, str]  # names of special tokens
    media: tuple[str, ...] = ()  # kinds that the template takes as parts
    has_system: bool = True
    answers_end_with: str = ""
    thinks: bool = False
    markups: Markups = field(default_factory=dict)
    # Of a family that writes more for a medium than the template: its text by kind and features, in `transformers`.
    write: Callable[[MediaKind, MediumFeatures], str] | None = None
    placeholders: dict[str, MediaKind] = field(default_factory=dict)  # which `write` replaces in a rendering


TILE_FEATURES = 4  # of the InternVL here


def write_like_internvl(kind: MediaKind, features: MediumFeatures) -> str:
    """Return what InternVL's processor writes for a medium. It cannot be made without torchvision."""
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    processor: Any = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=TILE_FEATURES,
    )
    if isinstance(features, int):
        num_tiles = features // TILE_FEATURES
        return str(InternVLProcessor.replace_image_token(processor, {"num_patches": [num_tiles]}, 0))
    frames = np.zeros((len(features), 1))
    return str(InternVLProcessor.replace_video_token(processor, {"pixel_values_videos": [frames]}, 0))


def write_like_qwen3_vl(kind: MediaKind, features: MediumFeatures) -> str:
    """Return what Qwen3-VL's processor writes for a medium. It cannot be made without torchvision."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    sides = SimpleNamespace(merge_size=1, temporal_patch_size=2)
    processor: Any = SimpleNamespace(
        image_token="<|image_pad|>", video_token="<|video_pad|>", vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>", image_processor=sides, video_processor=sides,
    )  # fmt: skip
    if isinstance(features, int):
        return str(Qwen3VLProcessor.replace_image_token(processor, {"image_grid_thw": [np.array([1, 1, features])]}, 0))
    assert isinstance(features, TimedItems)
    processor._calculate_timestamps = lambda *_: [tenth / 10 for tenth in features.tenths]
    grid = np.array([len(features.features), 1, features.features[0]])
    metadata = SimpleNamespace(frames_indices=[], fps=24)
    inputs = {"video_grid_thw": [grid], "video_metadata": [metadata]}
    return str(Qwen3VLProcessor.replace_video_token(processor, inputs, 0))


def write_like_glm4v(kind: MediaKind, features: MediumFeatures) -> str:
    """Return what the processor of GLM-4.5V writes for a medium. It cannot be made without torchvision."""
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor

    sides = SimpleNamespace(merge_size=1)
    processor: Any = SimpleNamespace(image_token="<|image|>", image_processor=sides, video_processor=sides)
    processor.replace_frame_token_id = lambda *args, **kwargs: Glm4vProcessor.replace_frame_token_id(
        processor, *args, **kwargs
    )
    if isinstance(features, int):
        return str(Glm4vProcessor.replace_image_token(processor, {"image_grid_thw": [np.array([1, 1, features])]}, 0))
    assert isinstance(features, TimedItems)
    grid = np.array([len(features.features), 1, features.features[0]])
    seconds = [tenth / 10 for tenth in features.tenths for _ in range(2)]
    inputs = {"video_grid_thw": [grid], "video_metadata": [SimpleNamespace(fps=24, timestamps=seconds)]}
    return str(Glm4vProcessor.replace_video_token(processor, inputs, 0))


def byte_level(
    pattern: str | None, normalizer: normalizers.Normalizer | None = None
) -> Callable[[list[str]], Tokenizer]:
    """Return a trainer of byte-level BPE, with a pre-tokenizer as GPT-2 (None), Qwen2 or Llama 3 have it."""

    def train(special: list[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
        split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, by_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_corpus(), trainer)
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        return tokenizer

    return train


def llama2(special: list[str]) -> Tokenizer:
    """Train BPE with byte fallback over the whole text, spaces written as `▁`, as Llama 2 has it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator((word for line in _corpus() for word in line.split(" ")), trainer)
    content = json.loads(tokenizer.to_str())
    names = {"<unk>", *special}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in names]
    return Tokenizer.from_str(json.dumps(content))


def metaspace(special: list[str]) -> Tokenizer:
    """Train a Unigram model with byte fallback that marks the first word of the whole text only, as T5 and Llama do."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        CHATML,
        byte_level(token_counter._QWEN2_PATTERN, normalizers.NFC()),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        answers_end_with="<|im_end|>",
    ),
    "qwen2_vl": Family(
        CHATML_WITH_MEDIA,
        byte_level(token_counter._QWEN2_PATTERN, normalizers.NFC()),
        (
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        ),
        {"eos_token": "<|im_end|>", "image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        media=("image", "video"),
        answers_end_with="<|im_end|>",
    ),
    "qwen3_vl": Family(
        CHATML_WITH_MEDIA,
        byte_level(token_counter._QWEN2_PATTERN, normalizers.NFC()),
        (
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        ),
        {"eos_token": "<|im_end|>", "image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        media=("image", "video"),
        answers_end_with="<|im_end|>",
        markups=MODEL_FAMILIES["qwen3_vl"].markups,
        write=write_like_qwen3_vl,
        placeholders={"<|image_pad|>": "image", "<|video_pad|>": "video"},
    ),
    "glm4v": Family(
        GLM4V,
        byte_level(token_counter._LLAMA3_PATTERN),
        (
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"),
            *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ),
        {"eos_token": "<|endoftext|>"},
        media=("image", "video"),
        answers_end_with="<|endoftext|>",
        markups=MODEL_FAMILIES["glm4v_moe"].markups,
        write=write_like_glm4v,
        placeholders={"<|image|>": "image", "<|video|>": "video"},
    ),
    "internvl": Family(
        INTERNVL,
        byte_level(token_counter._QWEN2_PATTERN, normalizers.NFC()),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        media=("image", "video"),
        answers_end_with="<|im_end|>",
        markups=MODEL_FAMILIES["internvl"].markups,
        write=write_like_internvl,
        placeholders={"<IMG_CONTEXT>": "image", "<video>": "video"},
    ),
    "thinking": Family(
        THINKING,
        byte_level(token_counter._QWEN2_PATTERN, normalizers.NFC()),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>"},
        answers_end_with="<|im_end|>",
        thinks=True,
    ),
    "llama3": Family(
        LLAMA3,
        byte_level(token_counter._LLAMA3_PATTERN),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        answers_end_with="<|eot_id|>",
    ),
    "gpt2_chatml": Family(
        CHATML,
        byte_level(None),
        ("<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>"},
        answers_end_with="<|im_end|>",
    ),
    "mistral": Family(
        MISTRAL, llama2, ("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, answers_end_with="</s>"
    ),
    "llava": Family(
        LLAVA,
        llama2,
        ("<s>", "</s>", "<image>"),
        {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"},
        media=("image",),
    ),
    "vicuna": Family(
        VICUNA, llama2, ("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, answers_end_with="</s>"
    ),
    "gemma": Family(
        GEMMA,
        metaspace,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>"},
        has_system=False,
        answers_end_with="<end_of_turn>",
    ),
}


def write_folder(path: Path, family: Family, **changes: object) -> Path:
    """Write the folder of a family; `changes` replace entries of `tokenizer_config.json`, None removes them."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = family.train(list(family.special))
    if family.thinks:  # as Qwen3 has it: tokens that texts may spell
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": family.template,
        **family.named,
    } | changes
    entries = {name: value for name, value in config.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(entries))
    return path


def draw_text(random: Random, max_words: int = 8) -> str:
    """Draw words with several kinds of space before, between and after them."""
    spaces = ("", " ", " ", " ", "  ", "\n", "\n\n", "\t", " \n")
    words = [random.choice(spaces) + random.choice(WORDS) for _ in range(random.randint(1, max_words))]
    return "".join(words) + random.choice(("", "", "", " ", "\n", "."))


def _corpus() -> Iterator[str]:
    random = Random(0)
    for _ in range(200):
        yield draw_text(random, 20)
