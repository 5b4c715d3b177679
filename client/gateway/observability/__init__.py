"""What an operator sees of a gateway: its metrics and its servers', a line for each request."""
