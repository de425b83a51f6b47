"""Decide whether a config with a section for its LLM ties the embeddings: it may say so in both places.

Each family follows its config class in `transformers`: for most of them the outer config holds alone. Configs of older
versions said it in the inner section only, so some classes also look there.
"""

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings

_KEY = "tie_word_embeddings"


def tied_by_outer(config: ConfigSection, llm: Settings, default: bool = False) -> Settings:
    """Return the LLM with embeddings tied as the outer config says, whatever the inner section does."""
    return {**llm, "tie_embeddings": config.flag(_KEY, default)}


def tied_by_either(config: ConfigSection, llm: Settings) -> Settings:
    """Return the LLM with embeddings tied if the outer config or the inner section ties them."""
    return {**llm, "tie_embeddings": config.flag(_KEY, False) or llm["tie_embeddings"]}


def never_tied(config: ConfigSection, llm: Settings) -> Settings:
    """Return the LLM with an output matrix of its own, whatever the config says."""
    config.value(_KEY)
    return {**llm, "tie_embeddings": False}
