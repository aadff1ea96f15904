"""Linear attention: layers with a recurrent state."""
