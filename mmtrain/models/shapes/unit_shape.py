"""One unit as planner and cost models know it: its layers in execution order, no torch."""

from dataclasses import dataclass
from typing import Literal

from mmtrain.models.shapes.layer_shape import LayerShape


@dataclass(frozen=True)
class UnitShape:
    """One unit of a model: an encoder, the LLM or a generator.

    The last layer of an encoder is its projector: final norm, class tokens dropped, tokens merged, MLP to the LLM's
    width.
    """

    name: str
    kind: Literal["encoder", "llm", "generator"]
    layers: tuple[LayerShape, ...]  # in execution order
    is_guest: bool = False  # `transformers` builds its modules, for which the layers stand in plans

    @property
    def is_splittable(self) -> bool:
        """Return whether the layers may be split into pipeline stages and over tensor-parallel ranks.

        A U-Net is not split: skip connections join its two ends, and its levels differ in size. Every rank of a
        tensor-parallel group computes all of it. Nor is a guest, whose modules are not ours.
        """
        return not self.is_guest and all(layer.kind != "unet_embed" for layer in self.layers)

    @property
    def first_trainable(self) -> int | None:
        """Return the index of the first trainable layer; layers below it need no backward. None if all are frozen."""
        return next((i for i, layer in enumerate(self.layers) if layer.trainable), None)
