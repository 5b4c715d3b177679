"""GPU operations of an LLM step in the Triton language, with torch forms for the CPU."""

import os

# Multiply-adds stay fused. Triton 3.9 warns where nobody says so, for 3.10 will round twice.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
