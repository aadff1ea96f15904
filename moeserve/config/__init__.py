"""Settings of the engine, their validation and resolution."""
