"""`trident bench gateway`: what the gateway costs, beside gRPC to the same server."""
