"""The configurations that `bench_gpu.py` measures: model x packed length x attention backend x kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.recipe import Recipe

Settings = dict[str, Any]
Choice = tuple[str, str]  # `train.attention` and `train.kernels`

STEP_TOKENS = 32_768  # of the LLM, in all microbatches of a step
DRY_STEP_TOKENS = 512

# Qwen2-VL's encoder, with rotary positions as published, and Qwen2.5's LLMs (their config.json on Hugging Face).
VIT_600M: Settings = {
    "layers": 32,
    "hidden": 1280,
    "heads": 16,
    "ffn": 5120,
    "activation": "quick_gelu",
    "positions": "rotary",
    "downsample": "pixel_shuffle",
    "merge": 2,
    "patch_bias": False,
}
LLM_1_5B: Settings = {"layers": 28, "hidden": 1536, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151_936}
LLM_3B: Settings = {"layers": 36, "hidden": 2048, "heads": 16, "kv_heads": 2, "ffn": 11_008, "vocab": 151_936}
LLM_7B: Settings = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "ffn": 18_944, "vocab": 152_064}
QWEN: Settings = {"rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
TIED: Settings = {**QWEN, "tie_embeddings": True}


@dataclass(frozen=True)
class BenchModel:
    """A model, and what of it is frozen so that weights, gradients and AdamW's state fit on one GPU of 141 GB."""

    vision: Settings
    llm: Settings
    freeze: tuple[str, ...] = ()


MODELS: dict[str, BenchModel] = {
    "0.6B + 1.5B": BenchModel(VIT_600M, {**LLM_1_5B, **TIED}),
    "0.6B + 3B": BenchModel(VIT_600M, {**LLM_3B, **TIED}),
    # 18 bytes a parameter would be 147 GB: the encoder, the vocabulary's matrices and eight blocks do not train.
    "0.6B + 7B, partly frozen": BenchModel(
        {**VIT_600M, "freeze": True}, {**LLM_7B, **QWEN}, ("llm.layers.0.*", "llm.layers.29.*", "llm.layers.[1-8].*")
    ),
}
# The same kinds of layers and the same frozen parts, for `--dry-run`.
TINY_VIT: Settings = {**VIT_600M, "layers": 2, "hidden": 32, "heads": 2, "ffn": 64}
TINY_LLM: Settings = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 96}
TINY_MODELS: dict[str, BenchModel] = {
    "tiny": BenchModel(TINY_VIT, {**TINY_LLM, **TIED}),
    "tiny, partly frozen": BenchModel(
        {**TINY_VIT, "freeze": True}, {**TINY_LLM, **QWEN}, ("llm.layers.0.*", "llm.layers.4.*", "llm.layers.1.*")
    ),
}
TOKENS = (8192, 16_384)
DRY_TOKENS = (128, 256)
# Of 80 GB: plans for the 7B model do not fit, and those for 3B recompute layers (`preset_plans.py`).
SMALL_CARD_MODELS = ("0.6B + 1.5B", "0.6B + 3B")
SMALL_CARD_TOKENS = (4096, 8192)
LARGE_CARD_GIB = 100


@dataclass(frozen=True)
class BenchCase:
    """One row of the table."""

    model: str
    tokens: int  # of a packed microbatch of the LLM
    attention: str  # `train.attention`
    kernels: str = "auto"  # `train.kernels`
    dry: bool = False

    @property
    def name(self) -> str:
        """What tables and files call the case."""
        return f"{self.model}, {self.tokens} tokens, {self.attention}, {self.kernels}"

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step, which hold equally many tokens whatever their length."""
        return max(1, (DRY_STEP_TOKENS if self.dry else STEP_TOKENS) // self.tokens)

    def recipe(self) -> Recipe:
        """Return the recipe of the case, for one rank. Its data is made up (`synthetic.py`)."""
        model = (TINY_MODELS if self.dry else MODELS)[self.model]
        train: Settings = {
            "steps": 1000,
            "global_batch": self.num_microbatches,
            "optimizer": {"lr": 1e-5, "weight_decay": 0.1},
            "attention": self.attention,
            "kernels": self.kernels,
            "freeze": model.freeze,
        }
        return Recipe.model_validate(
            {
                "name": "bench-gpu",
                "model": {"vision": model.vision, "llm": model.llm},
                "data": {"sources": [{"path": "none.json"}], "tokenizer": "none.json", "seq_len": self.tokens},
                "parallel": {"placement": "unified"},
                "train": train,
            }
        )


def cases_of_card(memory_gib: float) -> tuple[list[str], tuple[int, int]]:
    """Return the models and lengths to measure on a card with this much memory."""
    if memory_gib > LARGE_CARD_GIB:
        return list(MODELS), TOKENS
    return list(SMALL_CARD_MODELS), SMALL_CARD_TOKENS


def first_cases(memory_gib: float, best: Choice, other: Choice) -> list[BenchCase]:
    """Return the three cases that say most about a card, by value.

    On a large one that is the 3B model, with the best kernels and with the others, and then the 1.5B model. On 80 GB
    the 1.5B model comes first: at 4,096 tokens nothing of it is computed twice.
    """
    if memory_gib > LARGE_CARD_GIB:
        chosen = [("0.6B + 3B", 8192, best), ("0.6B + 3B", 8192, other), ("0.6B + 1.5B", 8192, best)]
    else:
        chosen = [("0.6B + 1.5B", 4096, best), ("0.6B + 3B", 8192, best), ("0.6B + 1.5B", 4096, other)]
    return [BenchCase(model, tokens, *choice) for model, tokens, choice in chosen]


def bench_cases(
    models: Sequence[str], tokens: Sequence[int], attention: Sequence[str], kernels: Sequence[str], dry: bool
) -> list[BenchCase]:
    """Return every combination, those first that say most: time may not suffice for all.

    That is every model with the first choices and the first length, then the other choices for the model in the middle,
    then the other lengths.
    """
    first, *others = [(backend, kernel) for kernel in kernels for backend in attention]
    middle = models[len(models) // 2]
    ordered = [(model, tokens[0], first) for model in models]
    ordered += [(middle, tokens[0], choice) for choice in others]
    ordered += [(model, length, first) for length in tokens for model in models]
    ordered += [(model, length, choice) for choice in others for length in tokens for model in models]
    return [BenchCase(model, length, *choice, dry) for model, length, choice in dict.fromkeys(ordered)]
