"""Malformed requests: generating and sending them, and judging the replies."""
