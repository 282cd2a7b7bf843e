"""What drafts bring, and what they cost where they bring nothing."""
