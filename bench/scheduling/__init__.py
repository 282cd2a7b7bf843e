"""Benefits of the scheduler's decisions: the real engine with and without each."""
