"""The outputs of a step as a list of objects."""

from engine.protocol.messages import RequestFailed, SequenceOutput
from engine.protocol.step_outputs import StepOutputs


def listed(outputs: StepOutputs) -> list[SequenceOutput | RequestFailed]:
    """Return the rows of `outputs`, then its failures."""
    return [*outputs.rows(), *outputs.failures]
