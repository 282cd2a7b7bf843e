"""Triton kernels, each with the host function that launches it. What they mean is written in torch,
under the same names, in `kernels.reference`. No configs, requests or state.
"""
