"""Answers with drafts beside answers without: gains where text repeats, costs where it does not."""
