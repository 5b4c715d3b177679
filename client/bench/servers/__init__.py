"""What is measured: Trident, the engine alone, other servers, and baselines with transformers."""
