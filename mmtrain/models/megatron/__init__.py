"""The adapter to Megatron-core: the only package that imports it.

Importing it takes about two seconds, so the rest of mmtrain imports it inside the functions that build modules.
"""

# Imported first: it silences warnings that Megatron-core raises when the other modules import it.
from mmtrain.models.megatron import compat as compat
from mmtrain.models.megatron.block_segments import run_pieces, start_tp_communication
from mmtrain.models.megatron.compat import optimizer_scope, prepare_megatron, restore_cuda
from mmtrain.models.megatron.layer_factory import LayerFactory, set_tp_chunks
from mmtrain.models.megatron.parallel_groups import ParallelGroups

__all__ = [
    "LayerFactory",
    "ParallelGroups",
    "optimizer_scope",
    "prepare_megatron",
    "restore_cuda",
    "run_pieces",
    "set_tp_chunks",
    "start_tp_communication",
]
