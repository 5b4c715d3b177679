"""Malformed requests: how they are made, sent, and their replies judged."""
