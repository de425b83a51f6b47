"""Run a block of a stage in pieces, so that its TP group communicates beside other pieces."""

from torch import Tensor

from mmtrain.models.shapes.layer_shape import BLOCK_PIECES
from mmtrain.models.stage.generator_input import DrawingContext
from mmtrain.models.stage.stage_module import StageContext, StageModule, carry_on, with_sides


def run_block_pieces(
    stage: StageModule, context: StageContext, state: tuple[Tensor, ...], layer: int, pieces: range
) -> tuple[Tensor, ...]:
    """Run consecutive pieces of a block; see `megatron.block_segments`.

    A microbatch without tokens has nothing to split: the last piece runs the whole block.
    """
    from mmtrain.models.megatron import run_pieces

    assert not isinstance(context, DrawingContext), "layers of a generator run whole"
    shape = stage.shape.layers[layer]
    packing = context.block_packing(shape)
    if not packing.num_tokens:
        is_last = pieces.stop == len(BLOCK_PIECES)
        return (stage.run(context, state[0], range(layer, layer + 1)),) if is_last else state
    if stage.factory.sequence_parallel:
        packing = packing.padded(stage.factory.num_padding_rows(packing.num_tokens))
    if not pieces.start:
        state = tuple(stage.enter(state[0], shape, stage.factory.sequence_parallel))
    first_beside = len(state) - shape.carried_in - len(shape.side_in)
    beside = state[first_beside:]
    packing = with_sides(packing, shape, beside)
    with stage.offloading(layer, packing, context):
        tensors = run_pieces(stage.layers[str(layer)], state[:first_beside], packing, pieces)
    if pieces.stop < len(BLOCK_PIECES):
        return (*tensors, *beside)
    return (stage.leave(carry_on(shape, tensors, beside), shape),)
