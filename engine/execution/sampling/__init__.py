"""From the logits of a step to its tokens."""
