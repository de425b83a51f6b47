"""How fast fused kernels compute attention, by kernel, GPU, width of heads, length, mask and direction.

A kernel gives each block of threads a tile of queries, which passes over their keys. Starting and ending a tile takes
as long as some keys more, and tiles on the diagonal of a causal mask compute pairs that it hides. So a rate saturates
in the number of keys that a query sees:

    rate(keys) = limit * keys / (keys + start_keys + diagonal_keys if the mask is causal)

FLOPs are those of the pairs that the mask leaves, as papers count them.
"""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class PassRate:
    """The rate of one direction with heads of one width."""

    limit: float  # share of the GPU's peak, with many keys
    start_keys: float = 0.0
    diagonal_keys: float = 0.0

    def share_of_peak(self, keys: float, causal: bool) -> float:
        """Return the share of the peak that is reached where a query sees so many keys on average."""
        return self.limit * keys / (keys + self.start_keys + causal * self.diagonal_keys)


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel on a kind of GPU."""

    backends: tuple[str, ...]  # values of `train.attention` that run it
    widths: tuple[int, ...]  # of heads that it computes, ascending; other heads are padded to the next
    forward: tuple[PassRate, ...]  # by width
    backward: tuple[PassRate, ...]

    def efficiency(self, head_dim: int, keys: float, causal: bool, is_backward: bool) -> float:
        """Return the share of the peak for heads of `head_dim` features; what is computed for padding is lost."""
        index = min(bisect_left(self.widths, head_dim), len(self.widths) - 1)
        rate = (self.backward if is_backward else self.forward)[index]
        return rate.share_of_peak(keys, causal) * min(1.0, head_dim / self.widths[index])


# Whatever the length: for hardware of which a share of the peak is all that is known.
ANY_KERNEL = AttentionKernel((), (1,), (PassRate(1.0),), (PassRate(1.0),))

_H100_PEAK, _A100_PEAK, _B200_PEAK = 989.0, 312.0, 2250.0  # TFLOP/s


def _rates(peak: float, *tflops: tuple[float, float, float]) -> tuple[PassRate, ...]:
    return tuple(PassRate(limit / peak, start, diagonal) for limit, start, diagonal in tflops)


# H100 SXM: fitted to the tables in figures 5 and 6 of FlashAttention-3 (arXiv 2407.08608), 512 to 16,384 tokens, within
# 6%, of heads of 256 features 10%. The figures have no causal backward, nor any of 256 features. A later measurement of
# cuDNN's (cudnn-frontend@3929da2e, benchmark/sdpa_benchmark_training, H200) has one: its diagonal costs 276 keys, which
# is taken for all three, and the rates of 128 features for 256. FlashAttention-4 on Hopper has the tiles of
# FlashAttention-3 and about its speed (pytorch/torchtitan#4413). Padding: with 72 and 80 features encoders reach 0.53
# and 0.63 of what 128 would (297 and 348 TFLOP/s at 1,024 tokens; ai-dynamo/aiconfigurator@095f58a5, h100_sxm).
FLASH_ATTENTION_3_ON_HOPPER = AttentionKernel(
    ("flash_attn_3", "flash_attn_4"),
    (64, 128, 256),
    _rates(_H100_PEAK, (507, 270, 149), (663, 199, 112), (744, 232, 176)),
    _rates(_H100_PEAK, (496, 404, 276), (591, 427, 276), (591, 427, 276)),
)
FLASH_ATTENTION_2_ON_HOPPER = AttentionKernel(
    ("flash_attn", "varlen"),
    (64, 128, 256),
    _rates(_H100_PEAK, (318, 55, 147), (365, 75, 155), (320, 62, 80)),
    _rates(_H100_PEAK, (296, 252, 276), (329, 274, 276), (329, 274, 276)),
)
# cuDNN 9, which Transformer Engine and XLA prefer on Hopper; mmtrain does not run it, other frameworks do. Rates of 128
# features are those of cuDNN 9.19 on an H200 (cudnn-frontend, as above), within 5%; others those of FlashAttention-3's
# figures, which have the slower 9.1.
CUDNN_ON_HOPPER = AttentionKernel(
    ("cudnn",),
    (64, 128, 256),
    _rates(_H100_PEAK, (409, 105, 110), (710, 231, 239), (562, 71, 154)),
    _rates(_H100_PEAK, (451, 338, 276), (614, 394, 276), (614, 394, 276)),
)
# A100 SXM: FlashAttention-2 reaches up to 73% of the peak in forward and 63% in backward without a mask, with heads of
# 128 features (arXiv 2307.08691). Forward with a mask: 135, 166, 185, 195, 202 and 205 TFLOP/s with 512 to 16,384
# tokens (ai-dynamo/aiconfigurator@095f58a5, a100_sxm, SGLang 0.5.10), so its limit is 210 and a tile costs 138 keys.
# Heads of 64 and 256 features have the ratios to 128 that they have on the H100. Backward: the paper's limit, tiles as
# on the H100.
FLASH_ATTENTION_2_ON_AMPERE = AttentionKernel(
    ("flash_attn", "varlen"),
    (64, 128, 256),
    _rates(_A100_PEAK, (183, 55, 83), (210, 55, 83), (184, 55, 83)),
    _rates(_A100_PEAK, (176, 252, 276), (196, 274, 276), (196, 274, 276)),
)
# B200: Dao-AILab/flash-attention#2605 (forward, 1,024 to 16,384 tokens) and #2280 (backward of 128 features, 8,192
# tokens). Backward of 64 features: the ratio to forward of 128, an estimate.
FLASH_ATTENTION_4_ON_BLACKWELL = AttentionKernel(
    ("flash_attn_4",),
    (64, 128),
    _rates(_B200_PEAK, (1250, 150, 430), (1900, 240, 420)),
    _rates(_B200_PEAK, (930, 360, 355), (1420, 360, 355)),
)
