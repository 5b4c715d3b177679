"""Messages between the processes of a server, and the arrays in them."""
