"""Readers of data files: JSON lists and lines, WebDataset tar shards, Parquet; every one yields `Sample`s.

A sample that cannot be used is yielded as `Quarantined`, with one of the `QUARANTINE_REASONS`. `conversation` knows the
layouts of an entry, `allowed_folder` which files an entry may name, and `tar_members` the tar format. Media are located
here and opened later, by the package `media`.

Read `read_source.read_samples` first.
"""
