"""From the logits of a step to its tokens, planned by a host that may not have seen the last ones.

`Sampler.plan` says on the host what the rows of a step ask for, `Sampler.sample` does it on the
device, and `SamplePlan.read` turns into tokens what has come back.
"""

from engine.execution.sampling.plan import SamplePlan, Samples
from engine.execution.sampling.sampler import Sampler

__all__ = ["SamplePlan", "Sampler", "Samples"]
