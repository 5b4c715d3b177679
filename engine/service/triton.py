"""Conversions between Triton's requests and responses and our types, for all Python models.

Importable only inside Triton's Python backend, which provides `triton_python_backend_utils`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from engine.config.engine_config import EngineConfig
from engine.errors import RequestError, TridentError, shown
from engine.service import interpreter
from engine.service.garbage import spare_startup_objects
from engine.service.logs import configure_logging
from engine.service.parameters import decode_parameters
from engine.service.parent import end_with_parent
from engine.service.tensors import Tensors

T = TypeVar("T")

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# As TensorRT-LLM's backend has it: its clients read text i at [i], and of all other outputs [0][i].
_WITHOUT_BATCH_DIMENSION = frozenset({"text_output"})
_MAX_REPEATED = 256  # tensors that are kept, each in a few hundred bytes of shared memory


class Stage:
    """The settings and arguments that one model of the repository was started with."""

    def __init__(self, args: Mapping[str, str], repeated: Collection[str] = ()) -> None:
        """Read `args` of `initialize`; logs go to the server's stderr from here on.

        The process ends with the server, even if that is killed.

        Args:
            args: Triton's.
            repeated: outputs with few different values, whose tensors are kept.
        """
        interpreter.adapt()
        configure_logging()
        end_with_parent()
        self.model, self.version = args["model_name"], args["model_version"]
        self.log = logging.getLogger(f"trident.{self.model}")
        self._settings = Path(args["model_repository"]).parent / "engine" / "1" / "engine.json"
        config = json.loads(args["model_config"])
        self._repeated = frozenset(repeated)
        # For each thread its own: what one thread sends, no other one may send at the same time.
        self._tensors = _Kept()
        self._batched = config["max_batch_size"] > 0
        self._dtypes = {
            output["name"]: pb_utils.triton_string_to_numpy(output["data_type"])
            for output in config["output"]
        }

    def start(self, make: Callable[[EngineConfig], T]) -> T:
        """Return what `make` makes of the settings in `engine.json` and `TRIDENT_*`.

        Raises:
            pb_utils.TritonModelException: one line with the reason why it cannot be made.
        """
        try:
            config = EngineConfig.load(self._settings)
            configure_logging(config.log_format)
            made = make(config)
        except TridentError as error:
            raise pb_utils.TritonModelException(shown(str(error))) from None
        except Exception as error:
            self.log.exception("start-up failed")
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from None
        spare_startup_objects()
        return made

    def tensors(self, arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
        """Return `arrays` as output tensors: of the types that the model's configuration declares,
        and with a batch dimension if it has one.
        """
        return [self._tensor(name, array) for name, array in arrays.items()]

    def _tensor(self, name: str, array: NDArray[Any]) -> Any:
        """Return `array` as a tensor; the same one for small values that come again and again.

        To make a tensor and to put it into shared memory takes longer than all else here.
        """
        if array.size != 1 or name not in self._repeated:
            return self._new_tensor(name, array)
        key = (name, array.item())
        kept = self._tensors.by_value
        tensor = kept.get(key)
        if tensor is None:
            if len(kept) >= _MAX_REPEATED:
                kept.clear()
            tensor = kept[key] = self._new_tensor(name, array)
        return tensor

    def _new_tensor(self, name: str, array: NDArray[Any]) -> Any:
        if array.dtype != self._dtypes[name]:
            array = array.astype(self._dtypes[name])
        has_batch_dimension = self._batched and name not in _WITHOUT_BATCH_DIMENSION
        return pb_utils.Tensor(name, array[np.newaxis] if has_batch_dimension else array)

    def response(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """Return a response of `arrays`."""
        return pb_utils.InferenceResponse(output_tensors=self.tensors(arrays))

    def error_response(self, error: Exception) -> Any:
        """Return a response for a client: our errors as they are, others only for the log."""
        known = self.for_client(error)
        code = getattr(pb_utils.TritonError, known.triton_code)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(known.text(), code))

    def for_client(self, error: Exception) -> TridentError:
        """Return what a client may see of `error`; what it may not is logged."""
        if isinstance(error, TridentError):
            return error
        self.log.error("internal error", exc_info=error)
        return TridentError("internal error")


class _Kept(threading.local):
    """Tensors by name and value."""

    def __init__(self) -> None:
        self.by_value: dict[tuple[str, object], Any] = {}


def send(sender: Any, response: Any, *, last: bool) -> None:
    """Send a response; nothing may follow the `last`."""
    # Release 24.10 removes what the client has not asked for after it has released the GIL. Were
    # these the last references, that would free Python objects without the GIL, which crashes
    # Python 3.12 and corrupts the memory of 3.11.
    tensors = response.output_tensors()
    # The flag goes with the last response: alone, it would arrive as an empty response.
    sender.send(response, flags=FINAL if last else 0)
    del tensors


def input_tensors(request: Any) -> Tensors:
    """Return the input tensors of a request by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def request_id(request: Any) -> str:
    """Return the request's id; empty if it has none.

    Over HTTP's generate, release 24.10 passes an `id` as a request parameter.
    """
    return request.request_id() or str(request_parameters(request).get("id", ""))


def request_parameters(request: Any) -> dict[str, Any]:
    """Return the request parameters; raises `RequestError` if they are not acceptable."""
    try:
        text: str = request.parameters()
    except UnicodeDecodeError:  # Triton passes on whatever bytes came
        raise RequestError("the request parameters are not valid UTF-8") from None
    return decode_parameters(text)
