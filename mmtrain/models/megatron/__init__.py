"""The adapter to Megatron-core: the only package that imports it.

Importing it takes about two seconds, so the rest of mmtrain imports it inside the functions that build modules.
"""

# First of all, so that no other module here meets the import-time warnings that `compat` silences.
from mmtrain.models.megatron import compat as compat
from mmtrain.models.megatron.compat import optimizer_scope, prepare
from mmtrain.models.megatron.groups import ParallelGroups, unit_scope
from mmtrain.models.megatron.parts import Parts
from mmtrain.models.megatron.pieces import exchanged, run_pieces

__all__ = ["ParallelGroups", "Parts", "exchanged", "optimizer_scope", "prepare", "run_pieces", "unit_scope"]
