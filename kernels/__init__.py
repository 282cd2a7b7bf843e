"""Pure functions on tensors, each with a plain-torch reference. No configs, requests or state."""
