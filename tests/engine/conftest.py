"""What holds for the tests of the engine."""

import torch

# The models are tiny: threads would spend their time waiting for each other.
torch.set_num_threads(1)
