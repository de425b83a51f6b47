"""The adapter to Megatron-core: the only package that imports it.

Importing it takes about two seconds, so the rest of mmtrain imports it inside the functions that build modules.
"""

# First of all, so that no other module here meets the import-time warnings that `compat` silences.
from mmtrain.models.megatron import compat as compat
from mmtrain.models.megatron.block_segments import exchanged, run_pieces
from mmtrain.models.megatron.compat import optimizer_scope, prepare
from mmtrain.models.megatron.parallel_groups import ParallelGroups, unit_scope
from mmtrain.models.megatron.parts import Parts

__all__ = ["ParallelGroups", "Parts", "exchanged", "optimizer_scope", "prepare", "run_pieces", "unit_scope"]
