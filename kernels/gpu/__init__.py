"""Triton kernels, each with the host function that launches it. `kernels.reference` has their
references in torch, under the same names. No configs, requests or state.
"""
