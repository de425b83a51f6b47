"""What it costs to keep activations of blocks in host memory (`LayerShape.offload`).

A block's activations are copied out while the next block computes, and back while the block behind it runs backward. So
a copy costs no more than what it takes longer than a pass of such a block. See `models.host_offload`.
"""

from dataclasses import replace

from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.cost_model import ComputeKind, CostModel, LayerWork, TokenLoad
from mmtrain.costs.hardware import Hardware
from mmtrain.models.shapes.model_shape import LayerShape

# Blocks whose activations are on the device at once: that which computes, its neighbour, whose copy is under way, and
# the last block of the next backward.
NUM_BLOCKS_ON_DEVICE = 3


def without_offload(layer: LayerShape) -> LayerShape:
    """Return the layer that keeps on the device what `layer` would keep in host memory.

    The output of its activation function is among that.
    """
    return replace(layer, offload="none", recomputes_activation=False)


def offloaded_bytes(
    costs: CostModel, hardware: Hardware, layer: LayerShape, tp: int, load: TokenLoad, input_grad: bool
) -> int:
    """Return the bytes that a block with activations in host memory keeps on the device: on a GPU none."""
    if hardware.host_bytes_per_s is not None:
        return 0
    return costs.activation_bytes(without_offload(layer), tp, load, layer.offload == "inputs", input_grad=input_grad)


def offloaded_seconds(costs: CostModel, hardware: Hardware, element_bytes: int, work: LayerWork) -> float:
    """Return the seconds of a pass of a block that may have activations in host memory.

    `recompute` is what it takes longer where it has: it waits for copies, and with `inputs` it is computed again.
    """
    on_device = work._replace(layer=replace(work.layer, offload="none"))
    if work.kind != "recompute":
        return costs.seconds(on_device)
    wait_s = _copy_wait(costs, hardware, element_bytes, work)
    if work.layer.offload == "inputs":
        return wait_s + costs.seconds(on_device)
    # The output of the activation function comes back with the rest.
    kept = work._replace(layer=without_offload(work.layer), kind="backward")
    return wait_s + costs.seconds(kept) - costs.seconds(on_device._replace(kind="backward"))


def _copy_wait(costs: CostModel, hardware: Hardware, element_bytes: int, work: LayerWork) -> float:
    """Return by how much copies to and from host memory lengthen the forward and backward of a block.

    An input comes back while the block behind is computed again, too, so it waits even less.
    """
    kept, copies_inputs = without_offload(work.layer), work.layer.offload == "inputs"
    nbytes = costs.activation_bytes(kept, work.tp, work.load, copies_inputs)
    if work.split.sp:
        nbytes -= analytic.sequence_parallel_savings(kept, work.load, element_bytes, work.tp, copies_inputs)
    if hardware.host_bytes_per_s is None:  # the processor that computes copies: it reads and writes each byte, twice
        return 4 * nbytes / hardware.moved_bytes_per_s
    copy_s = nbytes / hardware.host_bytes_per_s
    passes: tuple[ComputeKind, ComputeKind] = ("forward", "backward")
    kept_work = work._replace(layer=kept, input_grad=True)
    return sum(max(copy_s - costs.seconds(kept_work._replace(kind=kind)), 0.0) for kind in passes)
