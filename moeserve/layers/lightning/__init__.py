"""Lightning attention: layers with a recurrent state that decays at a constant rate."""
