"""A step on any device: its rows, its runner, the choice of tokens, and how long it takes."""
