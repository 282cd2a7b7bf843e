"""Named checks that only a GPU can prove: `python -m tests.gpu`. They need torch, triton, numpy and
safetensors, and no pytest. A dry run makes the same checks in Triton's interpreter.
"""
