"""Ways to run the ranks of one replica."""
