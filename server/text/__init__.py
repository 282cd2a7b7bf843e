"""Text to token ids and back: tokenizers and vocabularies.

This room imports nothing of the other rooms, and owns only what it read from a model's folder.
"""
