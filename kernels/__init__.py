"""Kernels of an LLM step in the Triton language, each with a PyTorch implementation for the CPU."""

import os

# Keep multiply-adds fused. Triton 3.9 warns if this is unset: 3.10 will no longer fuse by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
