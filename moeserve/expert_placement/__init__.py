"""The placement of experts on ranks: from their loads, and changed while the engine runs."""
