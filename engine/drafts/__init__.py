"""Drafts: guesses at an answer's next tokens, which a step verifies along with the known token.

Drafters are functions of token ids. They read no clock, and of models only a small one that drafts.
What they say never changes an answer: it only decides how many of its tokens a step can choose at
once.
"""
