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


class PerLayerEmbeddingSettings(Section):
    """An input of its own for each block: a row of a table for the token, plus a linear of the token's embedding.

    Behind its MLP a block multiplies them by a gate, made of its output so far, and adds what a linear makes of the
    product (Gemma 3n and 4).
    """

    width: PositiveInt = setting(affects={"plan", "resume"}, description="Features of a block's input.")


class SharedKvSettings(Section):
    """The last blocks read keys and values of the last block before them that has a window, or that has none."""

    blocks: PositiveInt = setting(
        affects={"plan", "resume"}, description="Blocks without keys and values of their own."
    )
    ffn: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Width of the MLP's hidden layer in these blocks. Default: `llm.ffn`.",
    )
