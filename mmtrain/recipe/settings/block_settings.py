"""What some blocks of an LLM have in another way than the others: settings of `model.llm` (Gemma 4)."""

from mmtrain.recipe.settings.base import PositiveInt, Section, setting


class FullAttentionSettings(Section):
    """Attention of blocks without a window, where it has other heads than that of blocks with one."""

    head_dim: PositiveInt = setting(affects={"plan", "resume"}, description="Width of one head.")
    kv_heads: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Key and value heads. Must divide `llm.heads`. Default: `llm.kv_heads`.",
    )
    keys_as_values: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Values are what keys are made of: the outputs of the keys' linear, before norm and rotation.",
    )
    rope_width: PositiveInt | None = setting(
        None,
        affects={"resume"},
        description="Features of a head that rotary positions turn, an even number, at the frequencies of a head that "
        "turns whole. Default: all.",
    )
