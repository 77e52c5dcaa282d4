"""The server: real clients over HTTP, on the engine or on the simulator in real time."""
