"""GEMMs with quantised weights: FP8 by FP8, and codes of 4 or 8 bits widened in registers."""
