"""Token dispatch through DeepEP."""
