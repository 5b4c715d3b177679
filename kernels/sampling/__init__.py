"""From the logits of a step to its tokens: adjusted, drawn and, where asked for, explained."""
