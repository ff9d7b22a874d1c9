"""The dashboard's door: who comes in, and as what.

optuna-dashboard has no login: anyone who reaches it can delete a study. So every request needs the
token of a reader or a writer, and foreign hosts and origins are refused.
"""

from __future__ import annotations

import hmac
import html
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from io import BytesIO
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from hpo.errors import InputError

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

READER, WRITER = "reader", "writer"
# Where the request's role stands for the layers behind the door, and whether there are writers.
ROLE, HAS_WRITER = "hpo.role", "hpo.has_writer"
# Requests by these methods change nothing.
SAFE = ("GET", "HEAD", "OPTIONS")
TOKEN_VARIABLES = {READER: "HPO_DASHBOARD_TOKEN", WRITER: "HPO_DASHBOARD_WRITER_TOKEN"}
# 16 characters are 96 bits where they are random, far beyond guessing over a network.
_SHORTEST_TOKEN = 16
# The log-in form holds a token and a path.
_LONGEST_FORM = 16_384


@dataclass(frozen=True)
class Tokens:
    """What each role is asked for.

    Without a reader's token everybody reads; without a writer's nobody writes.
    """

    reader: str | None
    writer: str | None = None

    def role_of(self, given: str | None) -> str | None:
        """Return the role that a token stands for."""
        for role, token in ((WRITER, self.writer), (READER, self.reader)):
            if given and token and hmac.compare_digest(given.encode(), token.encode()):
                return role
        return None


def make_tokens(
    token: str | None, writer_token: str | None, *, no_token: bool, writable: bool
) -> Tokens:
    """Return the tokens to use: those given, those of the HPO_* variables, or new random ones.

    There is a writer where `writable` says so, or where a token for one is given.

    Raises:
        InputError: for a short token, or one for both roles.
    """
    reader = None if no_token else _token(READER, token, draw=True)
    writer = _token(WRITER, writer_token, draw=writable)
    if reader is not None and reader == writer:
        raise InputError(f"{TOKEN_VARIABLES[WRITER]}: readers and writers need different tokens")
    return Tokens(reader, writer)


def _token(role: str, given: str | None, *, draw: bool) -> str | None:
    token = given or os.environ.get(TOKEN_VARIABLES[role])
    if not token:
        return secrets.token_urlsafe(24) if draw else None
    if not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{_SHORTEST_TOKEN},}}", token):
        raise InputError(f"{TOKEN_VARIABLES[role]}: a token has at least {_SHORTEST_TOKEN} "
                         f"characters, letters, digits and -_.~ (got {len(token)} characters)")
    return token


class Door:
    """WSGI middleware that lets in whoever holds a token, and tells the app behind it the role.

    The token comes once, in the address (`/?token=...`) or by the log-in page, then in a cookie;
    scripts send it as `Authorization: Bearer ...`. `hosts` are the names that a request may be
    addressed to, None for any; `public` are those under which a proxy in front serves it.
    """

    def __init__(
        self, app: App, *, tokens: Tokens, hosts: frozenset[str] | None,
        public: frozenset[str] = frozenset(), cookie: str = "hpo_token",
    ) -> None:
        self.app = app
        self.tokens = tokens
        self.hosts = None if hosts is None else hosts | public
        self.public = public
        self.cookie = cookie

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        refused = self._refused(environ)
        if refused:
            return answer(environ, start_response, "403 Forbidden", refused)
        path, method = environ.get("PATH_INFO", ""), environ["REQUEST_METHOD"]
        if path in ("/login", "/logout"):
            return self._at_door(environ, start_response, path, method)
        query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        if method == "GET" and self.tokens.role_of(query.get("token")):
            rest = [(k, v) for k, v in parse_qsl(environ["QUERY_STRING"]) if k != "token"]
            return self._let_in(environ, start_response, query["token"],
                                path + ("?" + urlencode(rest) if rest else ""))
        role = self._role(environ)
        if role is None or "token" in query:
            return _ask(environ, start_response, "401 Unauthorized", "This page needs a token: "
                        "open the address that `hpo dashboard` printed, or give the token here.")
        environ[ROLE], environ[HAS_WRITER] = role, self.tokens.writer is not None
        return self.app(environ, start_response)

    def _refused(self, environ: Environ) -> str | None:
        """Return why a request of anybody is refused, or None."""
        host = environ.get("HTTP_HOST", "").lower()
        if self.hosts is not None and not {host, _name(host)} & self.hosts:
            return f"this dashboard is not served as {host!r}: --public-host names further hosts"
        origin = environ.get("HTTP_ORIGIN")
        if environ["REQUEST_METHOD"] in SAFE or origin is None:
            return None
        sender = urlsplit(origin).netloc.lower()
        if sender != host and not {sender, _name(sender)} & self.public:
            return f"changes from another page ({origin!r}) are refused"
        return None

    def _role(self, environ: Environ) -> str | None:
        scheme, _, bearer = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        given = (bearer.strip() if scheme.lower() == "bearer" else None, self._cookie(environ))
        roles = {self.tokens.role_of(token) for token in given}
        if self.tokens.reader is None:
            roles.add(READER)
        return WRITER if WRITER in roles else READER if READER in roles else None

    def _cookie(self, environ: Environ) -> str | None:
        try:
            jar = SimpleCookie(environ.get("HTTP_COOKIE", ""))
        except CookieError:
            return None
        return jar[self.cookie].value if self.cookie in jar else None

    def _at_door(
        self, environ: Environ, start_response: StartResponse, path: str, method: str
    ) -> Iterable[bytes]:
        """Serve the log-in page and take its answer, or log out."""
        if path == "/logout" and method == "POST":
            return self._redirect(environ, start_response, "/login", "", max_age_s=0)
        if method != "POST":
            return _ask(environ, start_response, "200 OK", "Give the token of a reader or a "
                        "writer.", dict(parse_qsl(environ.get("QUERY_STRING", ""))).get("next"))
        form = dict(parse_qsl(_body(environ).decode("utf-8", "replace")))
        token, then = form.get("token", "").strip(), form.get("next", "/")
        if self.tokens.role_of(token) is None:
            return _ask(environ, start_response, "401 Unauthorized",
                        "That is no token of this dashboard.", then)
        return self._let_in(environ, start_response, token, then)

    def _let_in(
        self, environ: Environ, start_response: StartResponse, token: str, then: str
    ) -> Iterable[bytes]:
        """Move the token into a cookie, so that it stays out of histories."""
        return self._redirect(environ, start_response, _local(then), token)

    def _redirect(
        self, environ: Environ, start_response: StartResponse, to: str, token: str,
        max_age_s: int | None = None,
    ) -> Iterable[bytes]:
        at = environ.get("SCRIPT_NAME", "")
        secure = "; Secure" if environ.get("wsgi.url_scheme") == "https" else ""
        age = "" if max_age_s is None else f"; Max-Age={max_age_s}"
        cookie = f"{self.cookie}={token}; Path={at or '/'}; HttpOnly; SameSite=Lax{secure}{age}"
        start_response("303 See Other", [
            ("Location", at + to), ("Set-Cookie", cookie), ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"), ("Content-Length", "0")])
        return [b""]


def _name(host: str) -> str:
    """Return a Host header's name without its port."""
    return host.rsplit(":", 1)[0] if not host.endswith("]") else host


def _local(path: str) -> str:
    """Return a path on this site: one that began with two slashes would lead to another host."""
    return "/" + "".join(c for c in path if c.isprintable()).lstrip("/\\")


def _body(environ: Environ) -> bytes:
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        length = 0
    return environ.get("wsgi.input", BytesIO()).read(max(0, min(length, _LONGEST_FORM)))


def answer(
    environ: Environ, start_response: StartResponse, status: str, reason: str
) -> Iterable[bytes]:
    """Refuse in the way the caller reads: a small page for a browser, JSON for all others."""
    page = "text/html" in environ.get("HTTP_ACCEPT", "")
    body = (_PAGE.format(text=html.escape(reason), form="") if page
            else json.dumps({"reason": reason})).encode()
    return _send(start_response, status, body, page)


def _ask(
    environ: Environ, start_response: StartResponse, status: str, text: str,
    then: str | None = None,
) -> Iterable[bytes]:
    """Show the log-in page to a browser; tell others that a token is missing."""
    if status.startswith("401") and "text/html" not in environ.get("HTTP_ACCEPT", ""):
        return answer(environ, start_response, status, text)
    query = [(k, v) for k, v in parse_qsl(environ.get("QUERY_STRING", "")) if k != "token"]
    here = str(environ.get("PATH_INFO", "")) + ("?" + urlencode(query) if query else "")
    then = then or ("/" if here.startswith("/login") else here) or "/"
    form = _FORM.format(action=html.escape(quote(environ.get("SCRIPT_NAME", "")) + "/login"),
                        then=html.escape(_local(then), quote=True))
    return _send(start_response, status, _PAGE.format(text=html.escape(text), form=form).encode(),
                 page=True)


def _send(
    start_response: StartResponse, status: str, body: bytes, page: bool
) -> Iterable[bytes]:
    start_response(status, [
        ("Content-Type", "text/html; charset=utf-8" if page else "application/json"),
        ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
        ("X-Frame-Options", "DENY"), ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "same-origin"),
        ("Content-Security-Policy", "default-src 'none'; img-src data:; style-src "
                                    "'unsafe-inline'; form-action 'self'")])
    return [body]


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hpo dashboard</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<body style="font:16px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 1em;\
color:#222">
<h1 style="font-size:1.3em">hpo dashboard</h1><p>{text}</p>{form}</body></html>"""
_FORM = """<form method="post" action="{action}"><input type="hidden" name="next" value="{then}">
<input type="password" name="token" size="36" aria-label="token" autocomplete="current-password"
autofocus style="font:inherit;padding:.3em"> <button style="font:inherit;padding:.3em 1em">Open\
</button></form>"""
