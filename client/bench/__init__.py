"""`trident bench`: measures a server, with our own load generator and NVIDIA's tools."""
