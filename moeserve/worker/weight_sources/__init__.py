"""Sources of a rank's weights, one in each file."""
