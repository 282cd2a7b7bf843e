"""What the field claims for engines like this one, measured on ours; a plot each."""
