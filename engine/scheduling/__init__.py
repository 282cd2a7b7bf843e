"""Which tokens of which requests the next step computes, and what its results mean."""
