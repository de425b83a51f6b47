"""The meshes and layer partitions of `unified` and `disaggregated`, and the search for the fastest of them.

Start with `pipelined.PipelinedStrategy`: `mesh_enumeration` lists its candidates, `best_first_search` decides among
them, and `layer_partition` divides their layers into stages. `constraints` is what the recipe allows.
"""
