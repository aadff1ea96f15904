"""The mixture-of-experts layer, the placement of its experts, and the dispatch of tokens to them."""
