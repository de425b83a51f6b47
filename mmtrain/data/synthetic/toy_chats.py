"""Conversations about sums and short words, and a tokenizer folder for them: what a tiny model is fine-tuned on."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmtrain.families.tiny import MEDIA_TOKENS, PAD_TOKEN, TINY_TOKENS, TINY_VOCAB_SIZE, TURN_END_TOKEN

CHATS_FILE = "conversations.json"
_SYSTEM_TEXT = "You answer in one word."
_WORDS = ["apple", "bird", "cat", "door", "egg", "fish", "green", "hat", "jam", "lamp", "moon", "oak", "queen", "sun"]
_NUMBERS = range(20)

# ChatML; a part of a content that is no text becomes the token of its medium.
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}{{ '<' + part.type + '>' }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@dataclass(frozen=True)
class ToyChats:
    """What was written."""

    conversations: int
    vocab: int  # tokens of the tokenizer


def write_toy_chats(out: Path, seed: int, count: int) -> ToyChats:
    """Write `conversations.json` in the `messages` format, and the files of a tokenizer with a chat template."""
    rng = random.Random(seed)
    rows = [{"messages": list(_draw_turns(rng))} for _ in range(count)]
    (out / CHATS_FILE).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    tokenizer = _train_tokenizer([turn["content"] for row in rows for turn in row["messages"]])
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = {"pad_token": PAD_TOKEN, "eos_token": TURN_END_TOKEN}
    media = {f"{kind}_token": token for kind, token in MEDIA_TOKENS.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(out / "tokenizer_config.json", {**settings, **tokens, "extra_special_tokens": media})
    _write_json(out / "generation_config.json", {"eos_token_id": tokenizer.token_to_id(TURN_END_TOKEN)})
    (out / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return ToyChats(count, tokenizer.get_vocab_size())


def _draw_turns(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield the turns of one conversation: one or two questions, in some after a system turn."""
    if rng.random() < 0.3:
        yield {"role": "system", "content": _SYSTEM_TEXT}
    for _ in range(rng.randint(1, 2)):
        question, answer = rng.choice((_sum, _first_letter, _longer))(rng)
        yield {"role": "user", "content": question}
        yield {"role": "assistant", "content": answer}


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(_NUMBERS), rng.choice(_NUMBERS)
    return f"What is {a} plus {b}?", str(a + b)


def _first_letter(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(_WORDS)
    return f"What is the first letter of {word}?", word[0]


def _longer(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(_WORDS, 2)
    if len(first) == len(second):
        return f"Which word is longer, {first} or {second}?", "neither"
    return f"Which word is longer, {first} or {second}?", max(first, second, key=len)


def _train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose special tokens have the ids that tiny models expect."""
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in TINY_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
