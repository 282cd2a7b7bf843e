"""Answers of a given shape: grammars are compiled and masks are made off the engine's thread."""
