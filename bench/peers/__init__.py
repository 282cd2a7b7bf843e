"""Other systems on the burst of `bench.multi_lora`, each in its own processes."""
