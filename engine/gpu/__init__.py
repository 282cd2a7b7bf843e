"""The engine on a CUDA device: static inputs, captured graphs, scheduling while steps run."""
