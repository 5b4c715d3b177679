"""The processes of a gateway: one server, or several workers that serve one port."""
