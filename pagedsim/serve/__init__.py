"""HTTP server: OpenAI's API over the engine, or over the simulator in real time."""
