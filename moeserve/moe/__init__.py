"""The mixture-of-experts layer: router, dispatch, experts, shared experts."""
