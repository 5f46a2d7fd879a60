"""The playground page at `/` and what it loads: files of this package, served as they are, to everybody."""

from __future__ import annotations

import functools
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_SCRIPT = "text/javascript; charset=utf-8"
MEDIA_TYPES = {
    "/": "text/html; charset=utf-8",
    "/playground/playground.css": "text/css; charset=utf-8",
    **{
        f"/playground/{name}.js": _SCRIPT
        for name in ("playground", "bars", "client", "comparison", "dom", "panel", "run", "tree", "words")
    },
}
# Nothing from anywhere else, no script or style in the page itself, no string that becomes a script, and in no other site's frame.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def serve_file(request: Request) -> Response:
    """One of MEDIA_TYPES; other paths have no route."""
    path = request.url.path
    return Response(_read(path), media_type=MEDIA_TYPES[path], headers=_HEADERS)


@functools.cache
def _read(path: str) -> bytes:
    return (resources.files(__name__) / (path.rpartition("/")[2] or "index.html")).read_bytes()
