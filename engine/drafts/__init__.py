"""Drafts: guesses at an answer's next tokens, which a step verifies along with the known token.

Drafters are functions of token ids. They read no model and no clock, and what they say never
changes an answer: it only decides how many of its tokens a step can choose at once.
"""
