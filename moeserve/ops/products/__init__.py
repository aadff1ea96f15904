"""Products of rows with weights."""
