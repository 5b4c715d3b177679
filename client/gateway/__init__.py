"""The OpenAI-compatible gateway: HTTP in front of Trident's gRPC."""
