"""Claims that the field makes for engines of this kind, measured on ours, with a plot each."""
