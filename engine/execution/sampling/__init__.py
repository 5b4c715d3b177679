"""Sampling: from the logits of a step to its tokens."""
