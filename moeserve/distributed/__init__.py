"""How ranks are numbered, form groups, and exchange tensors. Knows nothing of layers, requests or processes."""
