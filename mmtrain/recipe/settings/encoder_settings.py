"""What the settings of all encoders have in common, and those of the projector behind each."""

from typing import Literal

from pydantic import model_validator

from mmtrain.recipe.settings.base import PositiveInt, Section, setting
from mmtrain.recipe.settings.unit_settings import UnitSettings

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]  # that MLPs are built with

MODALITY_DESCRIPTION = (
    "What the encoder reads: `vision` (images and videos) or `audio`. Required under `model.encoders`."
)


class ProjectorSettings(Section):
    """What maps encoder features to the width of the LLM. It trains even if its encoder is frozen."""

    kind: Literal["mlp", "linear", "resampler", "merger"] = setting(
        "mlp",
        affects={"plan", "resume"},
        description="`mlp`: two linear layers with an activation between them. `linear`: one (Qwen2-Audio). "
        "`resampler`: learned queries attend to the features of each image or clip, and one linear follows "
        "(cross-attention, as in Qwen-VL, arXiv 2308.12966). `merger`: a convolution over the merged tokens, which "
        "has a bias, a linear, a layer norm, GELU, and a gated MLP (GLM-4.1V and its successors, arXiv 2507.01006).",
    )
    queries: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="Learned queries of a `resampler`, which needs them: LLM tokens of each item, whatever its size. "
        "Items are images, tiles, frames of a video, and clips.",
    )
    heads: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Attention heads of a `resampler`. Must divide the encoder's `hidden`. Default: the encoder's.",
    )
    bias: bool = setting(True, affects={"plan", "resume"}, description="Bias of the linears. Gemma 3 has none.")
    activation: Literal["gelu", "gelu_tanh", "silu"] = setting(
        "gelu",
        affects={"plan", "resume"},
        description="Activation between the two linear layers; of a `merger`, that of its gated MLP.",
    )
    norm: bool = setting(
        False, affects={"plan", "resume"}, description="Apply a norm to the merged tokens before the first linear."
    )
    norm_kind: Literal["layer", "rms", "zero_centered_rms", "plain_rms"] | None = setting(
        None,
        affects={"plan", "resume"},
        description="Kind of that norm. `zero_centered_rms`: an RMS norm that multiplies by 1 + weight, in fp32 (Gemma "
        "3). `plain_rms`: an RMS norm without weights (Gemma 4). Default: the encoder's.",
    )
    norm_eps: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Epsilon of that norm, and of the layer norm of a `merger`. With downsample `linear`, that of the "
        "norm before it (`post_norm`). Default: the encoder's.",
    )
    ffn: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Width between the two linears, or of the gated MLP of a `merger`. Default: the LLM's width.",
    )
    freeze: bool = setting(False, affects={"plan", "resume"}, description="Do not train the projector.")

    @model_validator(mode="after")
    def _consistent(self) -> "ProjectorSettings":
        problems = []
        is_resampler = self.kind == "resampler"
        if is_resampler and self.queries is None:
            problems.append("queries is not set; kind `resampler` needs the number of LLM tokens of each item, like 64")
        foreign = ("ffn",) if is_resampler else ("queries", "heads")
        for name in foreign:
            if getattr(self, name) is not None:
                allowed = "mlp" if is_resampler else "resampler"
                problems.append(f"{name} is set beside kind `{self.kind}`; allowed with `{allowed}`")
        if self.norm_kind == "plain_rms" and not (self.norm and self.kind in ("mlp", "linear")):
            problems.append("norm_kind is `plain_rms`; allowed with norm, and kind `mlp` or `linear`")
        if self.kind == "merger" and (self.norm or self.norm_kind is not None):
            name = "norm" if self.norm else "norm_kind"
            problems.append(f"{name} is set beside kind `merger`, which has a layer norm of its own; leave it out")
        return self._without(problems)


class EncoderSettings(UnitSettings):
    """What all encoders in front of the LLM have in common.

    Their inputs are items (images, clips), each a grid of rows x cols cells (patches, log-mel frames). The properties
    below say how many tokens of the encoder, and how many features for the LLM, such an item becomes.
    """

    # A key of `settings.modalities.MODALITIES`. Another one brings other settings, which declare their effects.
    modality: str
    heads: PositiveInt = setting(
        affects={"plan", "steps", "resume"}, description="Attention heads. Must divide `hidden`."
    )
    ffn: PositiveInt = setting(affects={"plan", "steps", "resume"}, description="Width of the MLP's hidden layer.")
    activation: Activation = setting(affects={"plan", "steps", "resume"}, description="Activation of the MLP.")
    norm_eps: float = setting(gt=0, affects={"plan", "steps", "resume"}, description="Epsilon of the layer norms.")
    projector: ProjectorSettings = setting(
        ProjectorSettings(),
        affects={"plan", "lengths", "steps", "resume"},
        description="The projector to the width of the LLM.",
    )
    freeze: bool = setting(
        False, affects={"plan", "resume"}, description="Do not train the encoder. Its projector still trains."
    )

    @property
    def cell_features(self) -> int:
        """Return how many numbers one cell holds."""
        raise NotImplementedError

    @property
    def cells_per_token(self) -> int:
        """Return how many cells the embedding layer joins to one token."""
        return 1

    @property
    def partial_cells(self) -> int:
        """Return how many cells may be missing in the last token of an item, which is then a token all the same."""
        return 0

    @property
    def tokens_per_feature(self) -> int:
        """Return how many tokens the projector merges into one feature."""
        return 1

    @property
    def pools(self) -> bool:
        """Return whether the projector averages these tokens instead of joining them."""
        return False

    @property
    def scales_averages(self) -> bool:
        """Return whether it multiplies averages by the square root of their width."""
        return False

    @property
    def pools_before_norm(self) -> bool:
        """Return whether it does so before the last norm instead of behind it."""
        return False

    @property
    def merges_by_linear(self) -> bool:
        """Return whether the projector maps joined tokens to the width of one by a linear first."""
        return False

    @property
    def extra_tokens(self) -> int:
        """Return how many tokens each item has besides its cells."""
        return 0

    @property
    def kept_extra_tokens(self) -> int:
        """Return how many of the extra tokens become features for the LLM. The projector drops the others."""
        return 0

    @property
    def sends_newline(self) -> bool:
        """Return whether the projector puts its learned newline behind the features of every item."""
        return False

    @property
    def extra_features(self) -> int:
        """Return how many rows of the projector's output an item has besides those of its cells."""
        return self.kept_extra_tokens + int(self.sends_newline)

    @property
    def features_per_item(self) -> int | None:
        """Return the LLM tokens of every item; None if they depend on its size."""
        return self.projector.queries

    def item_features(self, merged: int) -> int:
        """Return the LLM tokens of an item with so many tokens, those that are merged counted once."""
        return self.features_per_item or merged + self.extra_features

    @property
    def cells_per_feature(self) -> int:
        """Return how many cells become one feature."""
        return self.cells_per_token * self.tokens_per_feature

    @property
    def query_scale(self) -> float | None:
        """Return the number by whose square root scores are divided; None for the width of a head."""
        return None

    @property
    def has_post_norm(self) -> bool:
        """Return whether a norm follows the last block."""
        return True

    def _resampler_problems(self) -> list[str]:
        """Return what a resampler does not allow beside it: what makes features of tokens in another way."""
        if self.projector.kind != "resampler":
            return []
        problems = []
        heads = self.projector.heads or self.heads
        if self.hidden % heads:
            problems.append(f"hidden {self.hidden} is not divisible by projector.heads {heads}")
        if self.tokens_per_feature > 1:
            problems.append(
                f"projector.kind is `resampler`, but {self.tokens_per_feature} tokens are merged into one; "
                "its queries replace downsampling: leave downsample and merge out"
            )
        if self.extra_features:
            problems.append(
                "projector.kind is `resampler`; its queries leave no place for class tokens and newlines: "
                "leave class_feature and join_tiles out"
            )
        return problems
