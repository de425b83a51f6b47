"""Layer scale and norms over all heads work in a block as a whole and piece by piece."""

import pytest
import torch

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.megatron.block_segments import BlockState, run_pieces
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES
from tests.models.factory import SCALED, randomize, settings, stage

LENGTHS = (20, 10)


@pytest.mark.parametrize("vision", [{}, SCALED])
def test_a_block_in_pieces_equals_the_block(vision: dict[str, object]) -> None:
    model = stage(settings(vision=vision), "vision")
    randomize(model)
    block, packing = model.layers["1"], PackedSequences(SequenceLayout(LENGTHS))
    hidden = torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(5))
    state: BlockState = (hidden,)
    for piece in range(len(BLOCK_PIECES)):
        state = run_pieces(block, state, packing, range(piece, piece + 1))
    torch.testing.assert_close(state[0], block(hidden, packing))
