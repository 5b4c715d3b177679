"""LoRA adapters (Hu et al., 2021) in PEFT's format, which are served merged into their base."""
