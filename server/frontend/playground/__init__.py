"""The page that a browser gets at `/`: one self-contained document, built once from the files in this folder.

A view is a row of `VIEWS` in views.js: its `title`, the `task` that a model needs for it (as `GET /info` names it), and
`run`, which reads the form in `view-NAME`, asks the chosen model (`route` and `naming` of base.js), draws into that
panel and returns what the sections below it show: `{ calls, python?, vectors? }`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from importlib import resources

_SCRIPTS = ("base.js", "response.js", "live.js", "views.js", "main.js")


def _read(name: str) -> str:
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    # No text in these files begins with a space or with //, or has empty lines.
    return re.sub(r"^ +|^ *//.*\n|^\n", "", text, flags=re.MULTILINE)


def _source(text: str) -> str:
    """Returns the source expression of an inline style or script for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_style = _read("style.css")
_script = "\n".join(_read(name) for name in _SCRIPTS)

PAGE = _read("index.html").replace("{style}", _style).replace("{script}", _script).encode()
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")

HEADERS = {
    "cache-control": "no-cache",
    "vary": "accept, x-forwarded-prefix",
    # Only the page's own script and style run, and they connect only to this server.
    "content-security-policy": f"default-src 'none'; script-src {_source(_script)}; style-src {_source(_style)}; "
    "connect-src 'self'; img-src data:; base-uri 'self'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page(prefix: str = "") -> bytes:
    """The page behind this path of a proxy, as its X-Forwarded-Prefix has it.

    The page has relative links, which suffice where its address ends with a slash. A proxy may serve it without one.
    """
    prefix = prefix.rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        return PAGE
    return PAGE.replace(b"<head>", f'<head><base href="{prefix}/">'.encode(), 1)


def hint(routes: Iterable[tuple[str, str]], models: Iterable[str]) -> bytes:
    """The text for clients other than browsers; `routes` are method and path, and what is there."""
    lines = [f"  {route:<22} {summary}" for route, summary in routes]
    return "\n".join(
        [
            "embert: an embedding server. A browser gets a page to try it here.",
            f"Models: {', '.join(models)}. `model` in a request chooses, or the path: /models/NAME/embed and so on.",
            *lines,
            "",
        ]
    ).encode()
