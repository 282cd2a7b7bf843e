"""Checks of untrusted files against a base model, in a confined process."""
