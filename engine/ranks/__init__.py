"""The ranks of an engine that share one model: their processes, and how steps reach them."""
