"""The settings of the LLM and of its rotary positions."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmtrain.recipe.settings.base import PositiveInt, Section, setting
from mmtrain.recipe.settings.block_settings import FullAttentionSettings, PerLayerEmbeddingSettings, SharedKvSettings
from mmtrain.recipe.settings.presets import LlmPreset
from mmtrain.recipe.settings.unit_settings import PRESET_DESCRIPTION, UnitSettings

BlockNumber = Annotated[int, Field(ge=0)]
MAX_LOGIT_CAP = 40.0  # exponentials of twice as much, of which the loss makes the logits again, fit fp32 and bf16
EXPERTS_THAT_SCORE_A_GROUP = 2  # its best ones (DeepSeek-V3, arXiv 2412.19437)


class RopeScalingSettings(Section):
    """How rotary positions are stretched over contexts longer than those of pretraining.

    `linear` slows all rotations down (arXiv 2306.15595); `llama3` (Llama 3.1, arXiv 2407.21783) and `yarn` (arXiv
    2309.00071) only those that turn seldom within the context of pretraining. `dynamic` does nothing within that
    context, and longer samples are rejected.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic"] = setting(
        "llama3",
        affects={"resume"},
        description="`linear`: all rotations are slowed down. `llama3`, `yarn`: slow rotations are; between slow and "
        "fast ones the factor changes with the turns (`llama3`) or from one pair of features to the next (`yarn`). "
        "`dynamic`: none are in samples of up to `original_positions` tokens, and longer ones cannot be trained on.",
    )
    factor: float = setting(gt=0, affects={"resume"}, description="Slow rotations are this much slower.")
    low_freq_factor: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Rotations that turn fewer times than this within `original_positions` are slow (`beta_slow` of "
        "YaRN). Not with `linear` and `dynamic`.",
    )
    high_freq_factor: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Rotations that turn more often than this within `original_positions` stay as they are "
        "(`beta_fast` of YaRN). Not with `linear` and `dynamic`.",
    )
    original_positions: PositiveInt | None = setting(
        None, affects={"resume"}, description="Context of pretraining in tokens. Not with `linear`."
    )
    amplitude: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Factor on cosines and sines with `yarn`. Default: 0.1 ln(factor) + 1.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "RopeScalingSettings":
        ramp = {
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_positions": self.original_positions,
        }
        used = {"linear": (), "dynamic": ("original_positions",)}.get(self.kind, tuple(ramp))
        missing = [name for name in used if ramp[name] is None]
        unused = [name for name, value in ramp.items() if value is not None and name not in used]
        problems = []
        if unused:
            problems.append(f"{', '.join(unused)}: `{self.kind}` does not use this; remove it")
        if missing:
            problems.append(f"{self.kind} needs {', '.join(missing)}")
        if self.kind != "yarn" and self.amplitude is not None:
            problems.append(f"amplitude: only `yarn` has one, but kind is `{self.kind}`; remove it")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            problems.append(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
        return self._without(problems)


class MoeSettings(Section):
    """Mixtures of experts in the place of MLPs (arXiv 1701.06538): a router chooses the experts of each token.

    Experts are gated MLPs. No token is dropped, so that a token's output depends on no other token.
    """

    experts: PositiveInt = setting(affects={"plan", "resume"}, description="Experts of a block.")
    top_k: PositiveInt = setting(affects={"plan", "resume"}, description="Experts that compute a token.")
    ffn: PositiveInt = setting(affects={"plan", "resume"}, description="Width of an expert's hidden layer.")
    normalize: bool = setting(
        True,
        affects={"plan", "resume"},
        description="Divide the weights of a token's experts, which are their scores, by their sum.",
    )
    scores: Literal["softmax", "sigmoid"] = setting(
        "softmax",
        affects={"plan", "resume"},
        description="What the router makes of its logits, in fp32: probabilities of all experts, or a score of each by "
        "itself (DeepSeek-V3, arXiv 2412.19437; GLM-4.5), for which logits are in fp32 too.",
    )
    weight_scale: float = setting(
        1.0,
        gt=0,
        affects={"resume"},
        description="Factor on the weights of a token's experts (`routed_scaling_factor`).",
    )
    selection_bias: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Add a bias of each expert to its score where experts are chosen, but not to its weight (arXiv "
        "2408.15664).",
    )
    selection_bias_rate: float = setting(
        0.0,
        ge=0,
        affects={"plan", "resume"},
        description="How much the bias of an expert rises after a step in which it had fewer tokens than the mean of "
        "the block's experts, and falls where it had more. 0: it stays as it is. DeepSeek-V3 was trained with 0.001.",
    )
    groups: PositiveInt = setting(
        1,
        affects={"plan", "resume"},
        description="Groups of neighbouring experts. A group scores as much as its two best experts together.",
    )
    top_groups: PositiveInt = setting(
        1, affects={"plan", "resume"}, description="Groups with the best scores, which a token's experts come from."
    )
    shared_ffn: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Width of the hidden layer of a shared expert, which computes every token. Several shared experts "
        "are one of their widths together. Default: there is none.",
    )
    shared_gate: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Multiply the shared expert's output by the sigmoid of a linear of the token (Qwen2-MoE).",
    )
    balance_loss: float = setting(
        0.0,
        ge=0,
        affects={"plan", "resume"},
        description="Coefficient of the loss that balances the load of experts, in each sample by itself (DeepSeek-V3; "
        "`docs/decisions/models.md`). 0: off. Its gradient is used; the reported loss does not have it.",
    )
    z_loss: float = setting(
        0.0,
        ge=0,
        affects={"plan", "resume"},
        description="Coefficient of the mean over tokens of the squared log-sum-exp of the router's logits (ST-MoE, "
        "arXiv 2202.08906). 0: off. Its gradient is used; the reported loss does not have it.",
    )
    dense_blocks: tuple[BlockNumber, ...] = setting(
        (),
        affects={"plan", "resume"},
        description="Blocks, counted from 0, with an MLP of width `llm.ffn` in the place of a mixture.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "MoeSettings":
        problems = []
        if self.top_k > self.experts:
            problems.append(f"top_k: found {self.top_k}, but there are only {self.experts} experts")
        if self.experts % self.groups:
            problems.append(f"groups: {self.groups} does not divide the {self.experts} experts; use a divisor of them")
        else:
            problems += self._group_problems(self.experts // self.groups)
        if self.selection_bias_rate and not self.selection_bias:
            problems.append("selection_bias_rate: without `selection_bias` there is no bias; remove it")
        if self.shared_gate and self.shared_ffn is None:
            problems.append("shared_gate: without `shared_ffn` there is no shared expert; remove it")
        return self._without(problems)

    def _group_problems(self, size: int) -> Iterator[str]:
        """Yield what is wrong with groups of `size` experts."""
        if self.top_groups > self.groups:
            yield f"top_groups: found {self.top_groups}, but there are only {self.groups} groups"
        elif self.groups > 1 and size < EXPERTS_THAT_SCORE_A_GROUP:
            needed = f"at least {EXPERTS_THAT_SCORE_A_GROUP}"
            yield f"groups: {self.groups} groups of {self.experts} experts have {size} each, but need {needed}"
        elif self.top_k > self.top_groups * size:
            yield f"top_k: found {self.top_k}, but `top_groups` leave a token only {self.top_groups * size} experts"


class DeltaNetSettings(Section):
    """Gated DeltaNet (arXiv 2412.06464) in the place of attention: each head has a state of fixed size.

    State and convolution start anew in every sample.
    """

    key_heads: PositiveInt = setting(affects={"plan", "resume"}, description="Heads of queries and keys.")
    value_heads: PositiveInt = setting(
        affects={"plan", "resume"}, description="Heads of values, a multiple of `key_heads`."
    )
    key_head_dim: PositiveInt = setting(affects={"plan", "resume"}, description="Width of a head's queries and keys.")
    value_head_dim: PositiveInt = setting(affects={"plan", "resume"}, description="Width of a head's values.")
    taps: PositiveInt = setting(
        4,
        affects={"plan", "resume"},
        description="Tokens that the convolution of queries, keys and values reads: a token and those before it.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "DeltaNetSettings":
        problems = []
        if self.value_heads % self.key_heads:
            problems.append(f"value_heads: found {self.value_heads}, no multiple of key_heads, {self.key_heads}")
        return self._without(problems)


class LlmSettings(UnitSettings):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention (Llama, Qwen, Gemma)."""

    preset: LlmPreset | None = setting(None, affects={"resume"}, description=PRESET_DESCRIPTION)
    heads: PositiveInt = setting(affects={"plan", "resume"}, description="Query heads.")
    kv_heads: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Key and value heads. Must divide `heads`. Default: `heads`.",
    )
    head_dim: PositiveInt | None = setting(
        None, affects={"plan", "resume"}, description="Width of one head. Default: hidden / heads."
    )
    ffn: PositiveInt = setting(affects={"plan", "resume"}, description="Width of the MLP's hidden layer.")
    mlp: Literal["swiglu", "geglu", "gelu"] = setting(
        "swiglu",
        affects={"plan", "resume"},
        description="Kind of MLP. `swiglu`: two input projections, one of which gates the other. `geglu`: the same "
        "with the tanh approximation of GELU in place of SiLU (Gemma). `gelu`: one (GPT).",
    )
    moe: MoeSettings | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Mixtures of experts in the place of the MLPs of blocks. Default: none.",
    )
    delta_net: DeltaNetSettings | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Gated DeltaNet in the place of attention, in blocks that `full_attention_blocks` does not name "
        "(Qwen3.5). Default: all blocks have attention.",
    )
    attention_gate: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="Multiply the output of attention by the sigmoid of features that are made as queries are (arXiv "
        "2505.06708; Qwen3.5).",
    )
    vocab: PositiveInt = setting(
        affects={"plan", "lengths", "resume"},
        description="Rows of the embedding table; at least the tokenizer's size. Padded to a multiple of 64. With `hf` "
        "it may be larger than the folder's: weights of new tokens start as the mean of the others.",
    )
    rope_base: float = setting(10000.0, gt=0, affects={"plan", "resume"}, description="Base of the rotary frequencies.")
    rope_scaling: RopeScalingSettings | None = setting(
        None,
        affects={"resume"},
        description="Scaling of the rotary frequencies for long contexts. Default: none.",
    )
    rope_sections: tuple[PositiveInt, PositiveInt, PositiveInt] | None = setting(
        None,
        affects={"resume"},
        description="How many pairs of features of a head are rotated by time, by row and by column (M-RoPE of "
        "Qwen2-VL, arXiv 2409.12191). Features of an image have the position of the text before it, plus their place "
        "in the image. Their sum is half the width of a head. Default: one position for each token.",
    )
    rope_width: PositiveInt | None = setting(
        None,
        affects={"resume"},
        added_later=True,
        description="Features of a head that rotary positions turn, an even number; others stay as they are (GLM-4.5 "
        "turns half of them). Default: all.",
    )
    rope_interleaved: bool = setting(
        False,
        affects={"resume"},
        description="Pairs rotated by time, row and column take turns, and what is left at the end is rotated by time "
        "(Qwen3-VL); else `rope_sections` lie one after another.",
    )
    rope_after_media: Literal["sides", "all"] = setting(
        "sides",
        affects={"steps", "resume"},
        description="Where text goes on behind an image or video with `rope_sections`. `sides`: behind its rows and "
        "columns (Qwen2-VL). `all`: behind the largest of all its positions, those in time too (Qwen2.5-Omni).",
    )
    window: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Tokens of a sliding window: each token attends to itself and to the `window` - 1 before it "
        "(Mistral, arXiv 2310.06825). Default: to all earlier tokens of its sample.",
    )
    window_rope_base: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Base of the rotary frequencies in blocks with a window, which `rope_scaling` leaves as they are "
        "(Gemma 3). Default: `rope_base`, scaled, in all blocks.",
    )
    full_attention_blocks: tuple[BlockNumber, ...] = setting(
        (),
        affects={"plan", "resume"},
        description="Blocks, counted from 0, in which tokens attend to all earlier ones in spite of `window` or "
        "`delta_net`.",
    )
    full_attention: FullAttentionSettings | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Other heads of attention in blocks without a window (Gemma 4). Default: those of all blocks.",
    )
    shared_kv: SharedKvSettings | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Blocks that read the keys and values of earlier ones (Gemma 4). Default: none.",
    )
    per_layer_embeddings: PerLayerEmbeddingSettings | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Inputs of single blocks, made of a token alone (Gemma 3n and 4). Default: none.",
    )
    image_attention: Literal["causal", "bidirectional", "bidirectional_in_windows"] = setting(
        "causal",
        affects={"plan", "resume"},
        description="What the tokens of one image see of each other. `causal`: the earlier ones, as all tokens do. "
        "`bidirectional`: all of them, also in blocks with a window, which then limits how far they see back (Gemma "
        "3). `bidirectional_in_windows`: all of them in blocks with a window, the earlier ones in others (Gemma 4). "
        "Images whose tokens are neighbors count as one.",
    )
    norm_eps: float = setting(1e-5, gt=0, affects={"plan", "resume"}, description="Epsilon of the RMS norms.")
    qkv_bias: bool = setting(
        False, affects={"plan", "resume"}, description="Bias in the query, key and value projections (Qwen2)."
    )
    qk_norm: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Apply an RMS norm to every head of the queries and of the keys, before rotation (Qwen3). Its "
        "weight, of `head_dim`, is the same for all heads of a block.",
    )
    value_norm: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="Apply an RMS norm without weight to every head of the values (Gemma 4).",
    )
    query_scale: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Scores of attention are divided by the square root of this (`query_pre_attn_scalar` of Gemma). "
        "Default: `head_dim`.",
    )
    query_growth: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        added_later=True,
        description="Multiply the queries of a token at position p by 1 + `query_growth` ln(1 + floor(p / "
        "`rope_scaling.original_positions`)), so that attention stays sharp in contexts longer than those of "
        "pretraining (Llama 4, Ministral 3). Default: not.",
    )
    post_norms: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Apply a norm also to the outputs of attention and of the MLP, before they are added to the "
        "residual stream (Gemma 2 and 3).",
    )
    zero_centered_norms: bool = setting(
        False,
        affects={"plan", "resume"},
        description="RMS norms multiply by 1 + weight, in fp32, and their weights start at 0 (Gemma).",
    )
    block_scales: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="Multiply the output of each block by a number of the block, which does not train (Gemma 4).",
    )
    scale_embeddings: bool = setting(
        False,
        affects={"resume"},
        description="Multiply the embeddings of tokens by the square root of `hidden` (Gemma).",
    )
    logit_cap: float | None = setting(
        None,
        gt=0,
        le=MAX_LOGIT_CAP,
        affects={"plan", "resume"},
        added_later=True,
        description="Replace logits x by `logit_cap` * tanh(x / `logit_cap`) (Gemma 2). Default: not.",
    )
    tie_embeddings: bool = setting(
        False, affects={"plan", "resume"}, description="Use the embedding table as output projection too."
    )
    freeze: bool = setting(False, affects={"plan", "resume"}, description="Do not train the LLM.")

    @property
    def all_kv_heads(self) -> tuple[int, ...]:
        """Return the key and value heads that blocks with attention have, each number once."""
        of_most = self.kv_heads or self.heads
        of_full = None if self.full_attention is None else self.full_attention.kv_heads
        return tuple(sorted({of_most, of_full or of_most}))

    @model_validator(mode="after")
    def _consistent(self) -> "LlmSettings":
        problems = []
        if self.heads % (self.kv_heads or self.heads):
            problems.append(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.head_dim is None and self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}; set head_dim")
        if self.full_attention_blocks and self.window is None and self.delta_net is None:
            problems.append("full_attention_blocks: without `window` all blocks have full attention; remove it")
        if self.delta_net is not None and self.window is not None:
            problems.append("window cannot be combined with delta_net; remove one of them")
        if self.delta_net is not None and not self.full_attention_blocks:
            problems.append("delta_net: some blocks must have attention; name them in full_attention_blocks")
        if self.window_rope_base is not None and self.window is None:
            problems.append("window_rope_base: without `window` no block has one; remove it")
        if self.window_rope_base is not None and self.rope_sections is not None:
            problems.append("window_rope_base cannot be combined with rope_sections; remove one of them")
        if self.rope_width is not None:
            problems += self._rope_width_problems(self.rope_width)
        problems += self._query_growth_problems()
        if self.shared_kv is not None:
            problems += self._shared_kv_problems(self.shared_kv)
        if self.full_attention is not None:
            problems += self._full_attention_problems(self.full_attention)
        if self.rope_interleaved and self.rope_sections is None:
            problems.append("rope_interleaved is set, but there are no rope_sections to interleave; remove it")
        if max(self.full_attention_blocks, default=0) >= self.layers:
            last = max(self.full_attention_blocks)
            problems.append(
                f"full_attention_blocks: found {last}, but the last of {self.layers} blocks is {self.layers - 1}"
            )
        if self.moe is not None:
            problems += self._moe_problems(self.moe)
        return self._without(problems)

    def _query_growth_problems(self) -> Iterator[str]:
        if self.query_growth is None:
            return
        if self.rope_scaling is None or self.rope_scaling.original_positions is None:
            yield "query_growth: without `rope_scaling.original_positions` queries have no length to grow by; set it"
        for name in ("rope_sections", "window_rope_base"):
            if getattr(self, name) is not None:
                yield f"query_growth cannot be combined with {name}; remove one of them"

    def _full_attention_problems(self, full: FullAttentionSettings) -> Iterator[str]:
        if self.window is None or not self.full_attention_blocks:
            yield "full_attention: all blocks have one kind of attention; set `window` and full_attention_blocks"
        if full.kv_heads is not None and self.heads % full.kv_heads:
            yield f"full_attention.kv_heads: found {full.kv_heads}, no divisor of heads, {self.heads}"
        if full.rope_width is not None and (full.rope_width % 2 or full.rope_width > full.head_dim):
            allowed = f"an even number up to head_dim, {full.head_dim}"
            yield f"full_attention.rope_width: found {full.rope_width}, allowed: {allowed}"
        if full.keys_as_values and self.attention_gate:
            yield "full_attention.keys_as_values cannot be combined with attention_gate; remove one of them"
        for name in ("rope_sections", "rope_width", "qkv_bias"):
            if getattr(self, name):
                yield f"full_attention cannot be combined with {name}; remove one of them"

    def _shared_kv_problems(self, shared: SharedKvSettings) -> Iterator[str]:
        first = self.layers - shared.blocks
        is_full = [self.window is None or block in self.full_attention_blocks for block in range(self.layers)]
        if first < 1 or set(is_full[first:]) - set(is_full[:first]):
            own = f"{max(first, 0)} of {self.layers} blocks have keys and values of their own"
            yield f"shared_kv.blocks: {own}, but each kind of attention in the others needs one of them"
        for name in ("delta_net", "moe", "attention_gate", "qkv_bias"):
            if getattr(self, name):
                yield f"shared_kv cannot be combined with {name}; remove one of them"

    def _rope_width_problems(self, width: int) -> Iterator[str]:
        head_dim = self.head_dim or self.hidden // self.heads
        if width % 2 or width > head_dim:
            yield f"rope_width: found {width}, allowed: an even number up to head_dim, {head_dim}"
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn":
            yield "rope_width: `yarn` would scale features that do not turn; use another kind of rope_scaling"

    def _moe_problems(self, moe: MoeSettings) -> Iterator[str]:
        last = max(moe.dense_blocks, default=0)
        if last >= self.layers:
            yield f"moe.dense_blocks: found {last}, but the last of {self.layers} blocks is {self.layers - 1}"
        elif len(set(moe.dense_blocks)) == self.layers:
            yield "moe: `dense_blocks` names all blocks, so that none has experts; remove `moe`"
        if self.mlp != "swiglu":
            yield f"moe: experts are gated by SiLU (`mlp: swiglu`), found mlp `{self.mlp}`"
