"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the code. They are others in
# each run.
settings.register_profile(
    "trident", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile("episodes", settings.get_profile("trident"), max_examples=10_000)
settings.load_profile("trident")

# Background jobs of a script are started with SIGINT ignored, those of nohup with SIGHUP, and hand
# that on to their children. Tests of both need Python's default, here and in what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of servers that fail in a test do not take the place of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
