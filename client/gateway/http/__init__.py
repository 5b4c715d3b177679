"""What HTTP wants of every route: forms of answers and of streams, their end, their document."""
