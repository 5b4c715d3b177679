"""Runs in the engine stub, the Python process that Triton starts for the model `engine`."""
