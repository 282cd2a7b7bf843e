"""What only a GPU can prove, as named checks: `python -m tests.gpu`. Needs torch, triton, numpy and
safetensors, no pytest. A dry run takes the same way, in Triton's interpreter.
"""
