"""Chorale's engine on the burst of `bench.multi_lora`, by kernels and precision."""
