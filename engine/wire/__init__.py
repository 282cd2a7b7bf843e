"""The wire: what gateways and engines say to each other, and how it travels."""
