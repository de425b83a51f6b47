"""Steps prepared ahead of training, in threads and worker processes.

Start with `loader.Loader`; `batch_builder` makes one step from lengths.
"""
