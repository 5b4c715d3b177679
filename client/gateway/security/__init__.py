"""Who may ask the gateway what, how much of it, and in requests of what size."""
