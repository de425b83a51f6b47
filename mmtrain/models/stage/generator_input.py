"""One microbatch of a generator: which images it denoises, and what its layers derive from that."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_dataclass

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.index_tables import HostTables, brought_or_computed
from mmtrain.models.shapes.layer_shape import NUM_MODULATION_VECTORS, LayerShape


@dataclass(frozen=True)
class GeneratorInput:
    """I images with N cells in total, packed one after another, row by row.

    A cell of a diffusion transformer is a patch, features in the order (channel, row, column); one of a U-Net is a
    position of the latent image, features are its channels.
    """

    rows: tuple[int, ...]  # (I,) cells of each image
    cols: tuple[int, ...]  # (I,)
    cells: Tensor | None = None  # (N, features of a cell), with noise; only for the stage with the embedding
    timesteps: Tensor | None = None  # (I,) as the generator reads them; only for the stage with the embedding
    targets: Tensor | None = None  # (N, features of a cell) to predict; only for the stage with the loss
    counted: Tensor | None = None  # (N,) 1 for cells whose loss counts, 0 for those of images that cannot be decoded
    kept_contexts: Tensor | None = None  # (I,) 1, or 0 for images that are drawn without their context
    tables: Mapping[str, Tensor] | None = None  # index tables that came with the microbatch; None: computed in forward


@dataclass(frozen=True)
class GeneratorContext:
    """What the layers of a generator's stage need to know about one microbatch."""

    inputs: GeneratorInput
    device: torch.device
    _contexts: dict[int, SequenceLayout] = field(default_factory=dict, repr=False)  # by tokens of each

    @cached_property
    def layout(self) -> SequenceLayout:
        """Each image is a sequence of cells."""
        return SequenceLayout(self.item_lengths, (), "images", self.inputs.tables)

    def contexts(self, num_context_tokens: int) -> SequenceLayout:
        """Return where the context tokens of the images lie: equally many of each, in the images' order."""
        if num_context_tokens not in self._contexts:
            lengths = (num_context_tokens,) * self.num_images
            self._contexts[num_context_tokens] = SequenceLayout(lengths, (), "contexts", self.inputs.tables)
        return self._contexts[num_context_tokens]

    @cached_property
    def item_lengths(self) -> tuple[int, ...]:
        """Return the cells of each image."""
        return tuple(rows * cols for rows, cols in zip(self.inputs.rows, self.inputs.cols, strict=True))

    @property
    def num_tokens(self) -> int:
        """Return the number of cells of all images together."""
        return self.layout.num_tokens

    @property
    def num_images(self) -> int:
        """Return the number of images."""
        return len(self.inputs.rows)

    def index_tables(self) -> HostTables:
        """Compute on the host the tables that layers need: the image of each token, where sizes of images differ."""
        if self._common_length is not None:
            return {}
        return {"image_of_token": np.repeat(np.arange(self.num_images), self.item_lengths)}

    @cached_property
    def images_by_size(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the images of each size (rows, columns)."""
        images: dict[tuple[int, int], tuple[int, ...]] = {}
        for image, size in enumerate(zip(self.inputs.rows, self.inputs.cols, strict=True)):
            images[size] = (*images.get(size, ()), image)
        return images

    def size_tables(self) -> HostTables:
        """Compute on the host which images have each size, where there are several sizes."""
        if len(self.images_by_size) < 2:
            return {}
        return {_size_table(size): np.asarray(images) for size, images in self.images_by_size.items()}

    def of_size(self, rows: Tensor, size: tuple[int, int]) -> Tensor:
        """Return of a tensor with one row for each image the rows of the images of this size."""
        if len(self.images_by_size) < 2:
            return rows
        tables = brought_or_computed(self.inputs.tables, self.size_tables, self.device)
        return rows.index_select(0, tables[_size_table(size)])

    def modulate(self, tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Return tokens * (1 + scale) + shift for tokens (T, width), with one shift and scale (I, width) an image."""
        if (length := self._common_length) is not None:
            by_image = tokens.view(self.num_images, length, -1)
            return torch.addcmul(shift[:, None], by_image, 1 + scale[:, None]).view_as(tokens)
        return torch.addcmul(self._of_tokens(shift), tokens, 1 + self._of_tokens(scale))

    def add_gated(self, residual: Tensor, tokens: Tensor, gate: Tensor) -> Tensor:
        """Return residual + gate * tokens for rows (T, width), with one gate (I, width) an image."""
        if (length := self._common_length) is not None:
            by_image = (self.num_images, length, -1)
            return torch.addcmul(residual.view(by_image), gate[:, None], tokens.view(by_image)).view_as(residual)
        return torch.addcmul(residual, self._of_tokens(gate), tokens)

    @cached_property
    def _common_length(self) -> int | None:
        """Return the number of cells that all images have; None if they differ, or if there are none."""
        lengths = set(self.item_lengths)
        return lengths.pop() if len(lengths) == 1 else None

    def _of_tokens(self, vectors: Tensor) -> Tensor:
        """Return the vector (I, width) of each token's image: (T, width)."""
        # The backward of `F.embedding` sums the gradients of an image's tokens by sorting, not one after another.
        return F.embedding(self._image_of_token, vectors)

    @cached_property
    def _image_of_token(self) -> Tensor:
        return brought_or_computed(self.inputs.tables, self.index_tables, self.device)["image_of_token"]


def _size_table(size: tuple[int, int]) -> str:
    return f"images of {size[0]} x {size[1]}"


@dataclass(frozen=True)
class DrawingContext:
    """What the layers of a generator's stage know about a microbatch, and the LLM's outputs at its queries."""

    generator: GeneratorContext
    outputs: Tensor | None  # (I * context tokens, llm_hidden); only for the stage with the projector

    @property
    def inputs(self) -> GeneratorInput:
        """The microbatch."""
        return self.generator.inputs


@dataclass(frozen=True)
class GeneratorState:
    """What passes from layer to layer of a diffusion transformer; None for what no layer has made yet."""

    context: Tensor | None  # (I * context tokens, features): outputs of the LLM until a layer projects them
    hidden: Tensor | None = None  # (T, width)
    modulation: Tensor | None = None  # (I, 6, width) shifts, scales and gates of all blocks, from the timestep
    embedded_timestep: Tensor | None = None  # (I, width)

    def with_hidden(self, hidden: Tensor) -> "GeneratorState":
        """Return the state with other hidden states."""
        return replace(self, hidden=hidden)


# FSDP looks for tensors in what layers take and return as torch's own tree functions do, which must know the class.
register_dataclass(GeneratorState)


def join_state(state: GeneratorState, next_layer: LayerShape) -> Tensor:
    """Flatten what `next_layer` and the layers behind it read to one tensor: (`next_layer.input_elements(...)`,)."""
    return torch.cat([tensor.flatten() for tensor in _travelling(state, next_layer)])


def _travelling(state: GeneratorState, next_layer: LayerShape) -> list[Tensor]:
    by_kind = {
        "context_projector": (state.context,),
        "dit_embed": (state.context,),
        "dit_block": (state.hidden, state.embedded_timestep, state.modulation, state.context),
        "dit_out": (state.hidden, state.embedded_timestep),
    }
    tensors = by_kind[next_layer.kind]
    assert all(tensor is not None for tensor in tensors), f"{next_layer.kind} reads what no layer made"
    return [tensor for tensor in tensors if tensor is not None]


def split_state(joined: Tensor, layer: LayerShape, num_tokens: int, num_images: int) -> GeneratorState:
    """Undo `join_state` for the stage that starts with `layer`."""
    width, rows = layer.hidden, num_images * layer.generator.context
    if layer.kind == "context_projector":
        return GeneratorState(joined.view(rows, width))
    if layer.kind == "dit_embed":
        return GeneratorState(joined.view(rows, layer.generator.context_width))
    sizes = [num_tokens * width, num_images * width]
    if layer.kind == "dit_out":
        hidden, timestep = torch.split(joined, sizes)
        return GeneratorState(None, hidden.view(-1, width), None, timestep.view(-1, width))
    assert layer.kind == "dit_block", f"a stage cannot start with {layer.kind}"
    sizes += [num_images * NUM_MODULATION_VECTORS * width, rows * layer.generator.context_width]
    hidden, timestep, modulation, context = torch.split(joined, sizes)
    return GeneratorState(
        context.view(rows, layer.generator.context_width),
        hidden.view(num_tokens, width),
        modulation.view(num_images, NUM_MODULATION_VECTORS, width),
        timestep.view(num_images, width),
    )
