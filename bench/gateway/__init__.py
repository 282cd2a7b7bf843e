"""What the gateway costs in front of an engine without a model, beside another proxy's."""
