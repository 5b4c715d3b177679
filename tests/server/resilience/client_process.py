"""A client process to be killed: `python -m tests.server.resilience.client_process GRPC_URL COUNT`.

Opens streams, reports when each has received something, and reads until it is killed.
"""

import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.server.caller import Caller


def main() -> None:
    """Run as a command."""
    url, count = sys.argv[1], int(sys.argv[2])
    caller = Caller(url, "")
    sampling = json.dumps({"ignore_eos": True, "max_tokens": 3000})
    streams = [
        caller.stream(text_input=f"Client {i}", stream=True, sampling_parameters=sampling)
        for i in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(next, streams))
        print("open", flush=True)
        list(pool.map(lambda stream: list(itertools.chain(stream)), streams))


if __name__ == "__main__":
    main()
