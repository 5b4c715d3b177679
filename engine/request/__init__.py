"""What a request may ask for: its prompts, its sampling parameters and their defaults."""
