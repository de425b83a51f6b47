"""Write the tokenizer side of a tiny model's folder: a vocabulary trained on given texts, and a chat template."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmtrain.families.family import MEDIA_TOKENS, PAD_TOKEN, TINY_TOKENS, TINY_VOCAB_SIZE, TURN_END_TOKEN, Family
from mmtrain.recipe.settings.modalities import MODALITIES, MediaKind

# ChatML; a part of a content that is no text becomes the token of its medium.
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}{{ placeholders[part.type] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def write_tiny_tokenizer(folder: Path, texts: Iterable[str], family: Family) -> int:
    """Write the files of a tokenizer whose special tokens have the ids that tiny models expect; return its size.

    A family's own tokens, which its `tokenizer_config.json` names, come after those of all. If they are tokens for the
    borders of a modality or of a kind of media, such as `vision_bos_token` or `image_bos_token`, the template writes
    them around these media.
    """
    own_names = family.tiny.get("tokenizer_config.json", {}).get("extra_special_tokens", {})
    own_tokens = [token for token in own_names.values() if token not in TINY_TOKENS]
    tokenizer = train_byte_level_bpe(texts, (*TINY_TOKENS, *own_tokens), TINY_VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"pad_token": PAD_TOKEN, "eos_token": TURN_END_TOKEN}
    names = {f"{kind}_token": token for kind, token in MEDIA_TOKENS.items()} | own_names
    written: dict[MediaKind | str, str] = {}
    placeholders = {kind: markup.placeholder for kind, markup in family.markups.items() if markup is not None}
    for modality in MODALITIES.values():
        for kind in modality.media:
            of_kind = [own_names.get(f"{kind}_{border}_token") for border in ("bos", "eos")]
            of_modality = [own_names.get(f"{modality.name}_{border}_token") for border in ("bos", "eos")]
            before, after = (mine or general or "" for mine, general in zip(of_kind, of_modality, strict=True))
            written[kind] = f"{before}{placeholders.get(kind, MEDIA_TOKENS[kind])}{after}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {
        "tokenizer_config.json": {**settings, **tokens, "extra_special_tokens": names},
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id(TURN_END_TOKEN)},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        f"{{%- set placeholders = {json.dumps(written)} -%}}\n{_TEMPLATE}", encoding="utf-8"
    )
    size: int = tokenizer.get_vocab_size()
    return size


def train_byte_level_bpe(texts: Iterable[str], special_tokens: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, in which each digit is a token of its own.

    The ids of the special tokens are their places in `special_tokens`.
    """
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
