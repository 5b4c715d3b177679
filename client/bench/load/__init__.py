"""The load generator: what is asked when, the processes that ask it, and what came back."""
