"""Which meshes and layer partitions exist for `unified` and `disaggregated`, and which of them is fastest.

Start with `best_first_search.search`. `mesh_enumeration` lists the meshes, `layer_partition` cuts layers into stages.
"""
