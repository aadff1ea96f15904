"""The operations in plain torch: the reference for every other implementation, on any device."""
