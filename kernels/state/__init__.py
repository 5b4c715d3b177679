"""State layers of hybrid models: a short convolution, and the gated delta rule behind one."""
