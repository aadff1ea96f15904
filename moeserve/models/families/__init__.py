"""One file for each family of models. The registry finds every `Family` in this folder."""
