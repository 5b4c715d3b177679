"""What waits for a slot: in which order, when it may run, how much of it, and who gives way."""
