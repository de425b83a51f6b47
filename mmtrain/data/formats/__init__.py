"""From data files to samples: readers of JSON, WebDataset and Parquet, conversations, tokens, quarantine.

Start with `read_source.read`, which yields the samples of any source.
"""
