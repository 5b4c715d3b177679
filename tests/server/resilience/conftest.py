"""Servers for the short versions of the drills."""

import shutil

import pytest

from engine.launch.installation import model_repository
from engine.launch.server import TritonServer
from tests.server.conftest import Share
from tests.server.resilience.kill_engine import SETTINGS
from tests.server.resilience.service import serving

# The requests whose prompt is so long fail: at the first response, in the middle, at the last.
FAILING = """

from engine.errors import TridentError

_postprocess = Postprocessor.__call__


def _failing(self, message):
    length = _lengths.setdefault(message.uid, len(message.chunks[0].text_prefix))
    if length == 31 and not message.last:
        raise ZeroDivisionError("a bug")
    if length == 32 and not message.last and not message.chunks[0].text_prefix:
        raise TridentError("the tokenizer cannot decode the tokens: oops")
    if length == 33 and message.last:
        raise ZeroDivisionError("a bug")
    return _postprocess(self, message)


_lengths = {}
Postprocessor.__call__ = _failing
"""


@pytest.fixture(scope="session")
def killable(
    share: Share, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TritonServer:
    """One whose engine process is killed and whose detokenizer fails; its queue is short."""
    repository = tmp_path_factory.mktemp("killable")
    shutil.copytree(model_repository(), repository, dirs_exist_ok=True)
    with (repository / "detokenizer" / "1" / "model.py").open("a") as model:
        model.write(FAILING)
    settings = {**SETTINGS, "max_num_seqs": 64, "max_num_queued_reqs": 4}
    return share(request, serving(repository=repository, **settings))
