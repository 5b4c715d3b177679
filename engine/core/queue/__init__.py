"""What waits for a slot: in which order, how much of it, and who gives way."""
