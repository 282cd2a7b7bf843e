"""The engine on a CUDA device: static inputs, captured graphs, steps beside their scheduling."""
