"""Pad the samples of a microbatch to its longest, as trainers without packing do: a baseline to run and to plan."""

from dataclasses import replace

import numpy as np

from mmtrain.balance.batch_meta import BatchMeta, IntArray


def pad_microbatches(meta: BatchMeta) -> BatchMeta:
    """Pad every sample's LLM tokens to the longest sample of its microbatch.

    `tokens` are then what the LLM computes, and `padding` says how many of them are padding. Items keep their tokens:
    encoders compute images and clips of different sizes side by side, here as in the trainers that are compared.
    """
    microbatch = meta.replica * (int(meta.index.max(initial=0)) + 1) + meta.index
    longest = np.zeros(int(microbatch.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(longest, microbatch, meta.tokens)
    padded: IntArray = longest[microbatch]
    return replace(meta, tokens=padded, padding=padded - meta.tokens)


def without_padding(meta: BatchMeta) -> BatchMeta:
    """Return the batch as it is without padding."""
    return replace(meta, tokens=meta.sample_tokens, padding=None)
