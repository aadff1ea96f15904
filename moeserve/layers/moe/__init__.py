"""The mixture-of-experts layer, the placement of experts on ranks, and the dispatch of tokens to experts."""
