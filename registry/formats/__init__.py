"""Formats of files: PEFT's configs and tensors, the canonical object, tokenizers, templates."""
