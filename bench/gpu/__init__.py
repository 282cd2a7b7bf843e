"""Speed of the kernels and the engine on a GPU, as shares of what the same GPU can copy and
multiply. Needs torch, Triton, numpy and safetensors only: no server, no database, no transformers.
"""
