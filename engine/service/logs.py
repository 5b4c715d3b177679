"""One log format for the engine process and the stubs: both write to the server's stderr."""

import logging


def configure_logging() -> None:
    """Log from INFO on to stderr, with local time to the millisecond."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
