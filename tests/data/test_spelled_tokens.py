"""Single tokens as text: together they are what was encoded, whatever tokens make up a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mmtrain.data.text.spelled_tokens import spell_tokens

WORDS = ["What colour is it? A red circle.", "naïve façade", "日本語", "two  spaces\n\nand lines"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer as Llama's: words start with `▁`, and unknown characters become bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", *every_byte], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer = Tokenizer.from_str(tokenizer.to_str().replace('"special":true', '"special":false'))
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "metaspace": metaspace()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="�▁<"), max_size=30))
def test_tokens_together_are_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    end = tokenizer.token_to_id("<|end|>")
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, end, *tokenizer.encode(" ok").ids, end]
    spelled = spell_tokens(tokenizer, ids)
    assert "".join(token.text for token in spelled) == f"{text}<|end|> ok<|end|>"
    assert [token.is_special for token in spelled] == [token_id == end for token_id in ids]


def test_the_last_token_of_a_character_has_its_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🎈b").ids
    assert [token.text for token in spell_tokens(tokenizer, ids)] == ["a", "", "", "", "🎈", "b"]


def test_half_a_character_is_shown_as_such() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    ids = [*tokenizer.encode("🎈").ids[:2], end]
    assert [token.text for token in spell_tokens(tokenizer, ids)] == ["", "�", "<|end|>"]
