"""Base models that adapters are for, as their checkpoints describe them."""
