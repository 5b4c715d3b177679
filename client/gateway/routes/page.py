"""The page at `/`: a chat, and a dashboard of the server's metrics."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from client.gateway.errors import ApiError

router = APIRouter(include_in_schema=False)

_FILES = {path.name: path for path in (Path(__file__).parents[1] / "page").iterdir()}
_INDEX = "index.html"
PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})
_HEADERS = {
    # Nothing but the files of this folder runs, and nothing is asked of another machine.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # an update of the gateway shows at once
}


@router.head("/")
@router.get("/")
async def page() -> Response:
    """Return the page."""
    return FileResponse(_FILES[_INDEX], headers=_HEADERS)


@router.get("/page/{name}")
async def file(name: str) -> Response:
    """Return what the page loads."""
    if name not in _FILES:
        raise ApiError(f"there is no file {name!r}", code="not_found")
    return FileResponse(_FILES[name], headers=_HEADERS)
