"""Which samples share a group, and in which order groups are trained.

Start with `methods.Grouping`, which names the methods; `pack_groups` is the type of their result and its packing.
"""
