"""Train the small tokenizers of synthetic data."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


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
