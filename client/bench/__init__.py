"""`trident bench`: measures a server, with our own load and with the ecosystem's tools."""
