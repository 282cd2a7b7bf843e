"""The scheduler: which tokens of which requests the next step computes, and what came of them."""
