"""Short convolutions as token mixers (LFM2)."""
