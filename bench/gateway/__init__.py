"""The gateway's cost in front of an engine without a model, beside the cost of another proxy."""
