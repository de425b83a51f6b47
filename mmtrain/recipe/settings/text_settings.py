"""Settings of a recipe's `data.special_tokens` and `data.thoughts`: special tokens in texts, and what is thought."""

from typing import Literal

from mmtrain.recipe.settings.base import Section, setting

SpecialTokensAllowed = Literal["all", "inline", "none"]


class SpecialTokenSettings(Section):
    """What becomes of a text that spells a special token, such as `<|box_start|>`, with a chat template.

    `all`: it becomes the token, as transformers does. `inline`: only tokens that divide no turns (`<|box_start|>`,
    `<think>`) do; text that spells others (`<|im_end|>`) stays text. `none`: all stays text. What stands for a medium
    (`<|image_pad|>`) always stays text.
    """

    answers: SpecialTokensAllowed = setting(
        "all",
        affects={"plan", "lengths", "steps", "resume"},
        description="Special tokens that answers may spell, which are the trainer's own text. `all`: every one, as "
        "transformers takes them. `inline`: those that divide no turns. `none`: no text becomes a special token. "
        "Tokens whose places media take always stay text.",
    )
    prompts: SpecialTokensAllowed = setting(
        "inline",
        affects={"plan", "lengths", "steps", "resume"},
        description="The same for turns of users, systems and tools, and for descriptions of tools. `all` lets texts "
        "of users forge turns, as transformers does.",
    )


class ThoughtSettings(Section):
    """What assistants think before they answer, with the chat template of a model that thinks."""

    enable_thinking: bool | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="What the chat template gets as `enable_thinking`, in training and in prompts of `evaluate`. "
        "With `false`, Qwen3.5's prompts close an empty thought. Default: nothing, so that the template decides.",
    )
    learn: bool = setting(
        True,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="Whether thoughts that the template writes in front of an answer are learned. Else they are "
        "context, and what is learned starts behind them. Thoughts that a prompt holds are never learned.",
    )
