"""Dense feed-forward networks."""
