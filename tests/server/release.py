"""Tells from a server's log whether Triton released every request before it ended."""

from engine.launch.server import TritonServer


def released_all(server: TritonServer) -> bool:
    """Tell whether the stopped `server` saw no request in flight within its exit timeout.

    "Exit timeout expired" alone does not mean a request: unloading models counts in that timeout
    too, and can exceed it on a loaded machine. Triton unloads once no request is in flight.
    """
    return "All models are stopped, unloading models" in server.log
