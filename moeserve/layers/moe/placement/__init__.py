"""The placement of experts on ranks: computed from their loads, and changed while the engine runs."""
