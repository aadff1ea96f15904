"""Which rank holds which experts, chosen by expert load, and how experts move between ranks while the engine serves."""
