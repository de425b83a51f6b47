"""Seconds and bytes of layers, and how layers are divided over pipeline ranks and recomputed.

Start with `layer_costs.LayerCosts`, which prices every layer of a problem on its sampled batches. `layer_partition`
divides the layers of a unit into stages; `tp_chunks` and `sequence_parallel` choose how tokens are split.
"""
