"""The index of a dataset: lengths of all usable samples, the quarantined ones, and a cache of both on disk.

`sample_lengths` measures samples from text and headers, `sample_table` keeps them compactly, `index_cache` stores them,
and `stated_lengths` replaces all of it by a CSV file. `stats` and `data_check` serve the commands of these names.

Read `data_index.build_index` first.
"""
