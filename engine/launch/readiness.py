"""Checks whether a starting server accepts requests, without credentials, and ever can."""

import http.client
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.launch.arguments import value_of
from engine.launch.errors import ServerStartError
from engine.launch.model_configs import ENSEMBLE
from engine.launch.ports import Endpoint


def require_model(repository: Path, model: str, arguments: Sequence[str]) -> None:
    """Check that the model that `answers` waits for is there: tritonserver starts without any.

    Raises:
        ServerStartError: it is not in `repository`, by its own name or as the ensemble.
    """
    if not repository.is_dir():
        raise ServerStartError(f"model repository {repository} does not exist")
    found = any((repository / name / "config.pbtxt").is_file() for name in (model, ENSEMBLE))
    if not found and not _loads_later(arguments):
        raise ServerStartError(
            f"model repository {repository} has no model {model}",
            "--model-repository takes a folder of Triton's models; a checkpoint goes with --model",
        )


def answers(
    endpoints: Mapping[str, Endpoint], model: str, arguments: Sequence[str], log: str
) -> bool:
    """Return whether the server and `model` take requests.

    Args:
        endpoints: the server's services by name.
        model: the name of the ensemble.
        arguments: tritonserver's flags.
        log: what the server has said so far.
    """
    if "http" not in endpoints:
        # gRPC may want certificates; but nothing listens before every model has loaded.
        return "Started GRPCInferenceService" in log
    pages = [("http", "/v2/health/ready")]
    pages += [] if _loads_later(arguments) else [("http", f"/v2/models/{model}/ready")]
    pages += [("metrics", "/metrics")] if "metrics" in endpoints else []  # opened last
    return all(responds(endpoints[name], path) for name, path in pages)


def _loads_later(arguments: Sequence[str]) -> bool:
    """With explicit control the user loads models later, if at all."""
    return value_of(arguments, "--model-control-mode") == "explicit"


def responds(endpoint: Endpoint, path: str) -> bool:
    """Return whether an HTTP service of this machine answers a GET of `path` well, asked directly.

    No proxy is asked, whatever the environment names.
    """
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=5)
    try:
        connection.request("GET", path)
        # 403: --http-restricted-api keeps health to those who know the key.
        return connection.getresponse().status in (200, 403)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
