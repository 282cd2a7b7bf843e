"""Model families: what their config.json says, their rope, and the tensors of a checkpoint."""
