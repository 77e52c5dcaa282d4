"""The engine: executes the scheduler's plans on a GPU with torch and the Triton kernels."""
