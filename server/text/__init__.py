"""Text to token ids and back: tokenizers, vocabularies and chat templates.

It imports nothing of the other rooms, and owns nothing but what it read from a model's folder.
"""
