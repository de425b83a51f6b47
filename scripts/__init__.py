"""Tools around mmtrain: benchmarks, checks of its documents, and the first run on a GPU."""
