"""Settings of the engine, and how they are resolved."""
