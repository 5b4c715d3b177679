"""How quantised checkpoints store their weights: one file per format."""
