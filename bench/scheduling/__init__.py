"""What the scheduler's decisions are worth: each with and without, on the real engine."""
