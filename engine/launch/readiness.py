"""Checks whether a starting server accepts requests, without credentials."""

import http.client
from collections.abc import Mapping, Sequence

from engine.launch.arguments import value_of
from engine.launch.ports import Endpoint


def answers(
    endpoints: Mapping[str, Endpoint], model: str, arguments: Sequence[str], log: str
) -> bool:
    """Tell whether the server and `model` take requests.

    Args:
        endpoints: the server's services by name.
        model: the name of the ensemble.
        arguments: tritonserver's flags.
        log: what the server has said so far.
    """
    if "http" not in endpoints:
        # gRPC may want certificates; but nothing listens before every model has loaded.
        return "Started GRPCInferenceService" in log
    # With explicit control the user loads models later, if at all.
    chosen = value_of(arguments, "--model-control-mode") == "explicit"
    pages = [("http", "/v2/health/ready")]
    pages += [] if chosen else [("http", f"/v2/models/{model}/ready")]
    pages += [("metrics", "/metrics")] if "metrics" in endpoints else []  # opened last
    return all(_responds(endpoints[name], path) for name, path in pages)


def _responds(endpoint: Endpoint, path: str) -> bool:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=5)
    try:
        connection.request("GET", path)
        # 403: --http-restricted-api keeps health to those who know the key.
        return connection.getresponse().status in (200, 403)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
