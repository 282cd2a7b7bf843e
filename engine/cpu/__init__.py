"""The engine on a CPU: inputs of a step, decoder, runner. Owns the model's packed weights."""
