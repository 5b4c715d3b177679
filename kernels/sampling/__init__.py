"""From a step's logits to its tokens: penalties and biases, sampling, log-probabilities."""
