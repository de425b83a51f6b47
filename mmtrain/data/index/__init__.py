"""The index of a dataset: every usable sample with its lengths, and why the others cannot be used.

Start with `data_index.build`.
"""
