"""Short convolutions of the updates of other networks."""
