"""Counting tokens piece by piece gives the same as encoding, or is not tried."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from mmtrain.data.text.token_counter import TokenCounter

CORPUS = ["What colour is the circle? It's red.", "How many shapes are there? 3 of 12\n\nWe'll see", "x = 1 + 2  "] * 3
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>"]
    options: dict[str, Any] = {"vocab_size": 320, "initial_alphabet": alphabet, "special_tokens": special}
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(**options, show_progress=False))
    tokenizer.encode_special_tokens = True
    return tokenizer


def split(pattern: str, behavior: str = "isolated") -> Any:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), plain])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
FAST = {"gpt2": trained(GPT2), "qwen2": trained(split(QWEN2)), "llama3": trained(split(LLAMA3))}
FAST |= {
    f"digits {alone}": trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=alone), GPT2]))
    for alone in (True, False)
}
SLOW = {
    "normalised": trained(GPT2, normalizers.NFC()),
    "prefixed": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "gaps": trained(split(r"\p{L}+")),
    "merged": trained(split(QWEN2, "merged_with_next")),
    "groups": trained(split(r"(\s+)|\S+")),
    "sets in sets": trained(split(r"[\p{L}[1-3]]+|[^\p{L}]")),
    "upper": trained(split(r"\p{Lu}|\P{Lu}+")),
    "hex": trained(split(r"[\x20-\x7e]+|\h|.")),
    "words": trained(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), GPT2])),
}
TEXTS = st.one_of(
    st.text(st.characters(max_codepoint=127), max_size=60),
    st.text("aT's 'LL1\n\r\t\x1c\v.<|end|>é", max_size=40),
    st.lists(st.sampled_from([*CORPUS, " ", "\n", "<|end|>", "<|user|>"]), max_size=4).map("".join),
    st.text(max_size=20),
)


@given(TEXTS, st.sampled_from(sorted(FAST)))
def test_counts_equal_those_of_encoding(text: str, name: str) -> None:
    tokenizer = FAST[name]
    assert TokenCounter(tokenizer)(text) == len(tokenizer.encode(text, add_special_tokens=False).ids)


@given(TEXTS, st.sampled_from(sorted(FAST | SLOW)))
def test_min_tokens_is_a_lower_bound(text: str, name: str) -> None:
    counter = TokenCounter((FAST | SLOW)[name])
    assert counter.min_tokens(len(text)) <= counter(text)
    assert counter.min_tokens(10**6) > 1000 or name in SLOW, "of other tokenizers nothing is known"


@pytest.mark.parametrize("name", FAST)
def test_words_and_pieces_are_cached(name: str) -> None:
    counter = TokenCounter(FAST[name])
    assert counter._words is not None
    assert counter._pieces is not None
    counter("What colour is the circle?")
    counter("the is What  is")
    pieces, words = dict(counter._pieces), dict(counter._words[1])
    counter("What is the circle? is colour")
    assert (counter._pieces, counter._words[1]) == (pieces, words)
    counter("the is  What ")
    assert set(counter._pieces) - set(pieces) <= {" "}


@pytest.mark.parametrize("name", FAST)
def test_single_spaces_start_pieces(name: str) -> None:
    """Counting by words relies on this; tried with every pair of characters around a space."""
    tokenizer = FAST[name]
    unusual = "aZ'7.(-_\t\n\r\x0b\x1c\x7f<"
    for left in ("x" + c for c in unusual):
        for right in (c + "y" for c in unusual if not c.isspace()):
            apart = len(tokenizer.encode(left).ids) + len(tokenizer.encode(" " + right).ids)
            assert len(tokenizer.encode(f"{left} {right}").ids) == apart


@given(TEXTS, st.sampled_from(sorted(SLOW)))
def test_other_tokenizers_are_used_directly(text: str, name: str) -> None:
    tokenizer = SLOW[name]
    assert TokenCounter(tokenizer)(text) == len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_added_words_are_cut_out_first() -> None:
    tokenizer = trained(GPT2)
    tokenizer.add_tokens(["circle"])
    assert TokenCounter(tokenizer)("the circles") == len(tokenizer.encode("the circles").ids) == 4
