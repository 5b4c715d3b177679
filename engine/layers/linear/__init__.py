"""Linear layers: one file for each way to multiply, by the weight and the device."""
