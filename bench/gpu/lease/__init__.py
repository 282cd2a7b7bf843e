"""A GPU of 15 minutes: two commands that need no thought in between, and what they take along.
bench/GPU.md says what they do, and what to do with what they find.
"""
