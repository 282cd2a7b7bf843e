"""The journal: what an engine generated, on disk before anybody sees it."""
