"""Engine stage: a thin stub in front of the engine process."""

# ruff: noqa: E402 (imports of ours need the path first)

import sys
from pathlib import Path
from typing import Any

# The stub's Python has the working directory first, whose files are not ours to run.
sys.path[:] = filter(None, sys.path)
ROOT = Path(__file__).resolve().parents[3]
if (ROOT / "engine" / "__init__.py").is_file():  # a checkout or wheel, not a copied repository
    sys.path.insert(0, str(ROOT))

from engine.service.stub.responder import Responder
from engine.service.triton import Stage

REPEATED = ("finish_reason", "num_input_tokens", "num_output_tokens", "sequence_index")


class TritonPythonModel:
    """Hands requests to the engine process; its outputs come back through other threads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine process and wait until it is ready."""
        self._stage = Stage(args, repeated=REPEATED)
        self._responder = self._stage.start(lambda config: Responder(config, self._stage))

    def execute(self, requests: list[Any]) -> None:
        """Submit each request; responses follow from the sender threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._responder.submit(request, sender)
            except Exception as error:
                self._responder.send_error(sender, error)

    def is_ready(self) -> bool:
        """Return to Triton (26.03 and later) whether the engine takes requests now."""
        return self._responder.is_ready

    def finalize(self) -> None:
        """End the engine process."""
        self._responder.close()
