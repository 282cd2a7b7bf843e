"""Other systems with a burst of requests to many adapters, each in its own processes."""
