"""Pure functions on tensors, each beside its plain-torch meaning. No configs, requests or state."""
