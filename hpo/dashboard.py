"""optuna-dashboard on a study's own database, behind a door.

optuna-dashboard has no login: anyone who reaches it can delete a study. So every request needs a
token, foreign hosts and origins are refused, and nothing changes unless that was asked for.
"""

from __future__ import annotations

import hmac
import html
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
import warnings
import webbrowser
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from hpo.errors import HpoError, InputError

if TYPE_CHECKING:
    from storage import Database

TOKEN_VARIABLE = "HPO_DASHBOARD_TOKEN"
# 16 characters are 96 bits where they are random, far beyond guessing over a network.
_SHORTEST_TOKEN = 16
_SAFE = ("GET", "HEAD", "OPTIONS")
_WILDCARDS = ("0.0.0.0", "::")

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class Door:
    """WSGI middleware: token, hosts and origins, and a read-only switch, in front of an app.

    The token comes once in the address (`/?token=...`), then in a cookie; scripts send it as
    `Authorization: Bearer ...`. `hosts` are the names a request may be addressed to, None for any.
    """

    def __init__(
        self, app: Callable[..., Iterable[bytes]], *, token: str | None,
        hosts: frozenset[str] | None, writable: bool = False, cookie: str = "hpo_token",
    ) -> None:
        self.app = app
        self.token = token
        self.hosts = hosts
        self.writable = writable
        self.cookie = cookie

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        refused = self._refused(environ)
        if refused:
            return _answer(environ, start_response, *refused)
        given = dict(parse_qsl(environ.get("QUERY_STRING", ""))).get("token")
        if self.token and given is not None and environ["REQUEST_METHOD"] == "GET":
            return self._let_in(environ, start_response)
        # The dashboard's static files fail on a request without this header.
        environ.setdefault("HTTP_ACCEPT_ENCODING", "")
        return self.app(environ, _hardened(environ, start_response))

    def _refused(self, environ: Environ) -> tuple[str, str] | None:
        """Return the status and the reason of a refusal, or None."""
        host = environ.get("HTTP_HOST", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            return "403 Forbidden", f"this dashboard is not served as {host!r}"
        if self.token and not self._knows_token(environ):
            return "401 Unauthorized", ("this page needs the token: open the address that "
                                        "`hpo dashboard` printed, or give the token here")
        if environ["REQUEST_METHOD"] in _SAFE:
            return None
        origin = environ.get("HTTP_ORIGIN")
        if origin is not None and urlsplit(origin).netloc != host:
            return "403 Forbidden", f"changes from another page ({origin!r}) are refused"
        if not self.writable:
            return "403 Forbidden", "this dashboard only shows: start it with --writable to change"
        return None

    def _knows_token(self, environ: Environ) -> bool:
        query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        scheme, _, bearer = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        given = [query.get("token"), self._cookie(environ),
                 bearer.strip() if scheme.lower() == "bearer" else None]
        expected = (self.token or "").encode()
        return any(hmac.compare_digest(value.encode(), expected) for value in given if value)

    def _cookie(self, environ: Environ) -> str | None:
        try:
            jar = SimpleCookie(environ.get("HTTP_COOKIE", ""))
        except CookieError:
            return None
        return jar[self.cookie].value if self.cookie in jar else None

    def _let_in(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Move the token from the address into a cookie, so that it stays out of histories."""
        rest = [(k, v) for k, v in parse_qsl(environ["QUERY_STRING"]) if k != "token"]
        # A path that began with two slashes would lead to another host.
        path = "/" + environ.get("PATH_INFO", "").lstrip("/")
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax"
        start_response("303 See Other", [
            ("Location", path + ("?" + urlencode(rest) if rest else "")), ("Set-Cookie", cookie),
            ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"),
            ("Content-Length", "0")])
        return [b""]


def _name(host: str) -> str:
    """Return a Host header's name without its port."""
    return host.rsplit(":", 1)[0].lower() if not host.endswith("]") else host.lower()


def _answer(
    environ: Environ, start_response: StartResponse, status: str, reason: str
) -> Iterable[bytes]:
    """Refuse in the way the caller reads: a small page for a browser, JSON for all others."""
    import json

    page = "text/html" in environ.get("HTTP_ACCEPT", "")
    body = (_PAGE.format(reason=html.escape(reason)) if page
            else json.dumps({"reason": reason})).encode()
    start_response(status, [
        ("Content-Type", "text/html; charset=utf-8" if page else "application/json"),
        ("Content-Length", str(len(body))), ("Cache-Control", "no-store")])
    return [body]


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hpo dashboard</title>
<link rel="icon" href="data:,">
<body style="font:16px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 1em">
<h1 style="font-size:1.3em">hpo dashboard</h1><p>{reason}.</p>
<form method="get" action="/"><input type="password" name="token" size="36" aria-label="token"
autofocus> <button>Open</button></form></body></html>"""


def _hardened(environ: Environ, start_response: StartResponse) -> StartResponse:
    """Let no artifact run as a page of this site, and none be read by another."""
    artifact = environ.get("PATH_INFO", "").startswith("/artifacts/")

    def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        kept = [(k, v) for k, v in headers if k.lower() != "access-control-allow-origin"]
        kept += [("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "same-origin"),
                 ("X-Frame-Options", "DENY")]
        if artifact:
            kept.append(("Content-Security-Policy", "sandbox; default-src 'none'"))
        return start_response(status, kept, *rest)

    return start


def make_app(
    db: Database, home: Path, *, token: str | None, hosts: frozenset[str] | None,
    writable: bool = False, cookie: str = "hpo_token",
) -> Door:
    """Return the whole dashboard as a WSGI app."""
    import optuna_dashboard

    app = optuna_dashboard.wsgi(db.studies, artifact_store=_served(home))
    return Door(app, token=token, hosts=hosts, writable=writable, cookie=cookie)


def _served(home: Path) -> Any:
    """Return the artifact store as the dashboard needs it: a lost file is 404, not its fault."""
    import bottle
    from optuna.artifacts.exceptions import ArtifactNotFound

    from hpo.attachments import ArtifactFolder

    class Served(ArtifactFolder):
        def open_reader(self, artifact_id: str) -> Any:
            try:
                return super().open_reader(artifact_id)
            except ArtifactNotFound as error:
                raise bottle.HTTPError(404, f"{error}: its file was deleted or moved") from error

        def remove(self, artifact_id: str) -> None:
            # What is gone already must not keep a study from being deleted.
            try:
                super().remove(artifact_id)
            except ArtifactNotFound:
                return

    return Served(home)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    """Logs method, path and status. Never the query: it may hold the token."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        path = urlsplit(getattr(self, "path", "")).path
        status = getattr(code, "value", code)
        print(f"{self.log_date_time_string()} {getattr(self, 'command', '-')} {path} {status}",
              file=sys.stderr, flush=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing else: the parent's own messages quote the request line."""

    def address_string(self) -> str:
        # The parent's looks the client's name up, which may take seconds.
        return str(self.client_address[0])


def check_token(token: str | None, *, host: str, no_token: bool) -> str | None:
    """Return the token to use: the given one, that of HPO_DASHBOARD_TOKEN, or a new random one.

    Raises:
        InputError: for no token on an address that others can reach, and for a short one.
    """
    if no_token:
        if not _is_loopback(host):
            raise InputError(f"--no-token with --host {host}: others can reach this address; "
                             f"leave out --no-token, or use --host 127.0.0.1")
        return None
    token = token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    if not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{_SHORTEST_TOKEN},}}", token):
        raise InputError(f"{TOKEN_VARIABLE}: a token has at least {_SHORTEST_TOKEN} characters, "
                         f"letters, digits and -_.~ (got {len(token)} characters)")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(host: str) -> frozenset[str] | None:
    """Return the names that a request may be addressed to; any where all addresses are served."""
    if host in _WILDCARDS:
        return None
    shown = f"[{host}]" if ":" in host else host.lower()
    loopback = {"127.0.0.1", "localhost", "[::1]"} if _is_loopback(host) else set()
    return frozenset({shown, *loopback})


def listen(app: Door, host: str, port: int) -> WSGIServer:
    """Return a server that is bound but not yet serving; port 0 takes a free one.

    Raises:
        InputError: where the address is taken or not this machine's.
    """
    kind = _Server6 if ":" in host else _Server
    try:
        return make_server(host, port, app, server_class=kind, handler_class=_Handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {host}:{port} ({getattr(error, 'strerror', error)}); "
                         f"choose another --port, or --port 0 for a free one") from None


def address(host: str, port: int, token: str | None) -> str:
    """Return what to open in a browser."""
    # 0.0.0.0 is no address to open; the machine itself reaches it through loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def serve(
    db_url: str, home: Path, host: str = "127.0.0.1", port: int = 8080, *,
    token: str | None = None, no_token: bool = False, writable: bool = False,
    open_browser: bool = False, say: Callable[[str], None] = print,
) -> None:
    """Serve the dashboard until Ctrl-C; `say` gets the address, with the token in it, once.

    Raises:
        InputError: for no token on an address that others can reach, a short token, a taken port.
        HpoError: where optuna-dashboard is not installed.
    """
    token = check_token(token, host=host, no_token=no_token)
    _require_dashboard()
    # With few trials Optuna warns at every look at a study; the page shows as much itself.
    warnings.filterwarnings("ignore", module=r"optuna\.")
    import storage

    db = storage.Database(db_url)
    try:
        app = make_app(db, Path(home), token=token, hosts=_hosts(host), writable=writable)
        server = listen(app, host, port)
        # Browsers send a cookie to every port of a host: two dashboards need two names.
        app.cookie = f"hpo_token_{server.server_port}"
        url = address(host, server.server_port, token)
        say(f"dashboard: {url}")
        say("it can change studies" if writable else "it only shows (--writable lets it change)")
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        _serve(server)
    finally:
        db.close()


def _serve(server: WSGIServer) -> None:
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return
    finally:
        server.server_close()


def _require_dashboard() -> None:
    try:
        import optuna_dashboard  # noqa: F401
    except ImportError:
        raise HpoError("the dashboard needs the package optuna-dashboard: "
                       "pip install optuna-dashboard") from None
