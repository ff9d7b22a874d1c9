"""optuna-dashboard's pages as hpo serves them: with the role on them, and under any path.

The dashboard asks for /api, /static and /artifacts at the root of its host. Under a path prefix
its pages, its script, redirects and the pictures of notes are rewritten on their way.
"""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from hpo.door import HAS_WRITER, READER, ROLE, App, Environ, StartResponse
from hpo.errors import HpoError, InputError

Headers: TypeAlias = list[tuple[str, str]]
# The first parts of the dashboard's own paths: under such a prefix nobody could tell them apart.
_TAKEN = ("api", "artifacts", "csv", "dashboard", "favicon.ico", "incompatible-rdb-schema",
          "login", "logout", "static")
# What the script of optuna-dashboard asks for, whatever its build calls the variables, and how
# often each must be found at least: with fewer it would be half rewritten.
_IN_SCRIPT = (
    (r'(url_prefix:")(/dashboard")', 1), (r"(\$\{this\.baseURL\})(/api/)", 20),
    (r"(\$\{\w+\})(/artifacts/\$\{)", 1), (r"(`)(/artifacts/\$\{)", 2), (r"(`)(/csv/\$\{)", 1),
)
_SCRIPT = "/static/bundle.js"
_NOTE = re.compile(r"/api/studies/\d+(/\d+)?/note", re.ASCII)
# An answer of this many bytes is worth the time to compress it.
_LONG = 500_000


def check_prefix(prefix: str) -> str:
    """Return a path prefix in the form `/hpo`, or an empty one.

    Raises:
        InputError: for one that is no plain path, or that the dashboard uses itself.
    """
    path = prefix.strip().strip("/")
    if not path:
        return ""
    if not re.fullmatch(r"[A-Za-z0-9_.~/-]+", path) or {"", ".", ".."} & set(path.split("/")):
        raise InputError(f"--path-prefix {prefix!r}: a path like /hpo, of letters, digits and "
                         f"-_.~ between slashes")
    if path.split("/")[0] in _TAKEN:
        raise InputError(f"--path-prefix {prefix!r}: the dashboard itself has pages under "
                         f"/{path.split('/')[0]}; choose another, like /hpo")
    return f"/{path}"


class Prefix:
    """WSGI middleware around all others: takes the prefix off requests, and puts it on answers.

    A request that comes without it is served too: some proxies take it off themselves.
    """

    def __init__(self, app: App, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == self.prefix or path.startswith(self.prefix + "/"):
            environ["PATH_INFO"] = path[len(self.prefix):] or "/"
        environ["SCRIPT_NAME"] = self.prefix
        return self.app(environ, start_response)


class Pages:
    """WSGI middleware next to the dashboard's app: what it sends, changed where it must be."""

    def __init__(self, app: App, prefix: str) -> None:
        self.app, self.prefix = app, prefix
        if prefix:
            self._script()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        # The dashboard's static files fail on a request without this header.
        environ.setdefault("HTTP_ACCEPT_ENCODING", "")
        path = environ.get("PATH_INFO", "")
        if self.prefix and path == _SCRIPT:
            return self._send_script(environ, start_response)
        if self.prefix and _NOTE.fullmatch(path) and environ["REQUEST_METHOD"] == "PUT":
            _replace_in_request(environ, f"]({self.prefix}/artifacts/", "](/artifacts/")
        page, api = _is_page(path), path.startswith("/api/")
        if page:
            # The role on it may have changed since the browser kept it.
            for name in ("HTTP_IF_MODIFIED_SINCE", "HTTP_IF_NONE_MATCH", "HTTP_RANGE"):
                environ.pop(name, None)
        said: list[Any] = []
        found = self.app(environ, lambda *args: said.append(args))
        status, headers, *rest = said[-1]
        headers = self._hardened(path, headers)
        if not (page or api) or environ["REQUEST_METHOD"] == "HEAD":
            start_response(status, headers, *rest)
            return found
        body = _whole(found)
        body = self._page(environ, body) if page else self._data(body)
        return _send(environ, start_response, status, headers, body)

    def _page(self, environ: Environ, body: bytes) -> bytes:
        """Return the page with its addresses under the prefix and the role in its corner."""
        icon = f'<link rel="icon" href="{self.prefix}/favicon.ico">\n'
        text = body.decode().replace('src="/static/', f'src="{self.prefix}/static/')
        text = text.replace("</head>", icon + "</head>", 1)
        return text.replace("</body>", _corner(environ, self.prefix) + "</body>", 1).encode()

    def _data(self, body: bytes) -> bytes:
        """Return an answer of the API in which notes find their pictures under the prefix."""
        if not self.prefix:
            return body
        return body.replace(b"](/artifacts/", f"]({self.prefix}/artifacts/".encode())

    def _hardened(self, path: str, headers: Headers) -> Headers:
        """Let no artifact run as a page of this site, and none be read by another."""
        kept = [(k, self._location(v) if k.lower() == "location" else v) for k, v in headers
                if k.lower() != "access-control-allow-origin"]
        kept += [("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "same-origin"),
                 ("X-Frame-Options", "DENY")]
        if path.startswith("/artifacts/"):
            # A report's page has its style sheet inside; nothing is loaded, no script runs.
            kept.append(("Content-Security-Policy",
                         "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"))
        return kept

    def _location(self, url: str) -> str:
        """Return a redirect's path alone: a proxy in front has another scheme and host."""
        path = urlsplit(url).path
        return path if path.startswith(self.prefix + "/") and self.prefix else self.prefix + path

    def _script(self) -> bytes:
        return self._scripts[0]

    @cached_property
    def _scripts(self) -> tuple[bytes, bytes]:
        """The script under the prefix, plain and compressed.

        Raises:
            HpoError: where this optuna-dashboard asks otherwise than those that are known.
        """
        spec = find_spec("optuna_dashboard")
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).with_name("public").joinpath("bundle.js").read_text("utf-8")
        for pattern, least in _IN_SCRIPT:
            text, n = re.subn(pattern, rf"\g<1>{self.prefix}\g<2>", text)
            if n < least:
                raise HpoError(f"--path-prefix does not work with optuna-dashboard "
                               f"{version('optuna-dashboard')}: its script has {n} of "
                               f"{pattern!r}; leave the prefix out, or install another version")
        return text.encode(), gzip.compress(text.encode(), 6)

    def _send_script(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        plain, packed = self._scripts
        headers = [("Content-Type", "text/javascript; charset=utf-8"), ("Vary", "Accept-Encoding"),
                   ("Cache-Control", "private, max-age=3600"),
                   ("X-Content-Type-Options", "nosniff")]
        body = plain
        if "gzip" in environ["HTTP_ACCEPT_ENCODING"]:
            body = packed
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body if environ["REQUEST_METHOD"] == "GET" else b""]


def _is_page(path: str) -> bool:
    return path.rstrip("/") == "/dashboard" or path.startswith("/dashboard/")


def _whole(found: Iterable[bytes]) -> bytes:
    try:
        return b"".join(found)
    finally:
        close = getattr(found, "close", None)
        if close is not None:
            close()


def _replace_in_request(environ: Environ, old: str, new: str) -> None:
    length = environ.get("CONTENT_LENGTH") or "0"
    body = environ["wsgi.input"].read(int(length) if length.isdecimal() else 0)
    body = body.replace(old.encode(), new.encode())
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = BytesIO(body), str(len(body))


def _send(
    environ: Environ, start_response: StartResponse, status: str, headers: Headers, body: bytes
) -> Iterable[bytes]:
    kept = [(k, v) for k, v in headers if k.lower() not in ("content-length", "last-modified",
                                                            "etag", "accept-ranges")]
    if len(body) > _LONG and "gzip" in environ["HTTP_ACCEPT_ENCODING"]:
        # Level 1: an eighth of the size in a hundredth of a second a megabyte.
        body = gzip.compress(body, 1)
        kept.append(("Content-Encoding", "gzip"))
    if not status.startswith("204"):
        kept.append(("Content-Length", str(len(body))))
    start_response(status, [*kept, ("Cache-Control", "no-store")])
    return [body]


def _corner(environ: Environ, prefix: str) -> str:
    """Return what says in the page's corner who is logged in, and lets him change that."""
    role, at = environ.get(ROLE, READER), html.escape(prefix, quote=True)
    button = ('<button style="font:inherit;color:inherit;background:none;border:0;padding:0;'
              'text-decoration:underline;cursor:pointer">')
    change = (f'<form method="get" action="{at}/login" style="display:inline">{button}log in to '
              f'change</button></form> · ' if role == READER and environ.get(HAS_WRITER) else "")
    return (f'<div id="hpo-role" style="position:fixed;right:8px;bottom:6px;z-index:2000;'
            f'font:12px/1.6 system-ui,sans-serif;color:#fff;background:#444c;border-radius:4px;'
            f'padding:1px 8px">{role} · {change}<form method="post" action="{at}/logout" '
            f'style="display:inline">{button}log out</button></form></div>')
