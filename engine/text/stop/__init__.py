"""Stop strings, searched at once and piece by piece; what may become one is held back."""
