"""optuna-dashboard on a study's own database, served by threads of one process, behind a door.

`hpo.door` says who comes in, `hpo.changes` what may be changed, `hpo.pages` what is shown
otherwise than by optuna-dashboard itself.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
import threading
import warnings
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hpo.changes import Changes, Log
from hpo.door import App, Door, Environ, StartResponse, Tokens, make_tokens
from hpo.errors import HpoError, InputError
from hpo.pages import Pages, Prefix, check_prefix

if TYPE_CHECKING:
    from storage import Database

_WILDCARDS = ("0.0.0.0", "::")
# A browser asks for six things at once; a study of thousands of trials takes a second to write.
_N_THREADS = 8
# How often the serving thread looks whether it is to stop.
_LOOK_S = 0.5
# optuna-dashboard takes artifacts as text inside JSON.
_LONGEST_REQUEST = 64 * 2**20
# What a proxy says of whom it serves, where it is trusted.
_PROXY_SAYS = {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"}


@dataclass(frozen=True)
class Address:
    """Where the dashboard listens, and under which names and path people open it."""

    host: str = "127.0.0.1"
    port: int = 8080
    path_prefix: str = ""
    public_hosts: tuple[str, ...] = ()
    trusted_proxy: str | None = None

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names a request may be addressed to; any where all addresses are served."""
        if self.host in _WILDCARDS:
            return None
        shown = f"[{self.host}]" if ":" in self.host else self.host.lower()
        loopback = {"127.0.0.1", "localhost", "[::1]"} if _is_loopback(self.host) else set()
        return frozenset({shown, *loopback})

    @property
    def is_reached_by_others(self) -> str:
        """The flag by which others than this machine's users come, or an empty text."""
        if not _is_loopback(self.host):
            return f"--host {self.host}"
        return f"--public-host {self.public_hosts[0]}" if self.public_hosts else ""

    def url(self, port: int, token: str | None) -> str:
        """Return what to open in a browser of this machine."""
        # 0.0.0.0 is no address to open; the machine itself reaches it through loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}{self.path_prefix}/" + (f"?token={token}" if token else "")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(
    db: Database, home: Path, tokens: Tokens, address: Address, *, cookie: str = "hpo_token",
    say: Callable[[str], Any] = print,
) -> App:
    """Return the whole dashboard as a WSGI app."""
    import optuna_dashboard

    inner: Any = optuna_dashboard.wsgi(db.studies, artifact_store=_served(home))
    app = Changes(Pages(inner, address.path_prefix), db, Log(home, say))
    door = Door(app, tokens=tokens, hosts=address.hosts, cookie=cookie,
                public=frozenset(host.lower() for host in address.public_hosts))
    return _logged(Prefix(door, address.path_prefix) if address.path_prefix else door)


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


def _logged(app: App) -> App:
    """Write a line a request: method, path and status. Never the query: it may hold a token."""

    def logged(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = quote(environ.get("PATH_INFO", ""), encoding="latin-1")

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            with suppress(OSError, ValueError):
                print(f"{at} {environ.get('REMOTE_ADDR', '?')} {environ['REQUEST_METHOD']} {path} "
                      f"{status.split()[0]}", file=sys.stderr, flush=True)
            return start_response(status, headers, *rest)

        return app(environ, start)

    return logged


class Server:
    """A server that is bound and serves when told to, with several threads."""

    def __init__(self, address: Address, make: Callable[[int], App]) -> None:
        """Bind, and make the app, which is told the port; port 0 takes a free one.

        Raises:
            InputError: where the address is taken or not this machine's.
        """
        import waitress.server

        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family)
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {address.host}:{address.port} "
                             f"({getattr(error, 'strerror', None) or error}); choose another "
                             f"--port, or --port 0 for a free one") from None
        self.port: int = self._socket.getsockname()[1]
        self._sockets: dict[int, Any] = {}
        self._stopping = False
        trust: dict[str, Any] = {} if address.trusted_proxy is None else {
            "trusted_proxy": address.trusted_proxy, "trusted_proxy_headers": _PROXY_SAYS}
        try:
            self._server: Any = waitress.server.create_server(
                make(self.port), map=self._sockets, sockets=[self._socket], threads=_N_THREADS,
                ident=None, max_request_body_size=_LONGEST_REQUEST, **trust)
        except BaseException:
            self._socket.close()
            raise

    def serve(self) -> None:
        """Serve until `stop`, which a signal's handler or another thread may say.

        A KeyboardInterrupt would not do: where it strikes between two steps of the loop it may be
        taken for an error of a connection, and is lost.
        """
        from waitress import wasyncore

        try:
            while self._sockets and not self._stopping:
                wasyncore.loop(timeout=_LOOK_S, use_poll=self._server.adj.asyncore_use_poll,
                               map=self._sockets, count=1)
        finally:
            self._close()
            self._server.task_dispatcher.shutdown()

    def stop(self) -> None:
        """End `serve` within half a second."""
        self._stopping = True

    def _close(self) -> None:
        from waitress import wasyncore

        wasyncore.close_all(self._sockets, ignore_all=True)


def check_door(address: Address, *, no_token: bool) -> None:
    """Hold the flags against each other before anything is opened.

    Raises:
        InputError: for no token on an address that others can reach.
    """
    others = address.is_reached_by_others
    if no_token and others:
        raise InputError(f"--no-token with {others}: others can reach this address; leave out "
                         f"--no-token, or use --host 127.0.0.1 alone")


def _say(text: str) -> None:
    # At once, also into a pipe or a container's log.
    print(text, flush=True)


def serve(
    db_url: str, home: Path, address: Address, *, token: str | None = None,
    writer_token: str | None = None, no_token: bool = False, writable: bool = False,
    open_browser: bool = False, say: Callable[[str], Any] = _say,
) -> None:
    """Serve the dashboard until Ctrl-C; `say` gets the addresses, with the tokens in them, once.

    Raises:
        InputError: for no token on an address that others can reach, a short token, a taken port.
        HpoError: where optuna-dashboard is not installed.
    """
    check_door(address, no_token=no_token)
    tokens = make_tokens(token, writer_token, no_token=no_token, writable=writable)
    _require_dashboard()
    # With few trials Optuna warns at every look at a study; the page shows as much itself.
    warnings.filterwarnings("ignore", module=r"optuna\.")
    import storage

    db = storage.Database(db_url)
    try:
        # Browsers send a cookie to every port of a host: two dashboards need two names.
        server = Server(address, lambda port: make_app(
            db, Path(home), tokens, address, cookie=f"hpo_token_{port}", say=say))
        for line in _lines(address, server.port, tokens):
            say(line)
        if open_browser:
            url = address.url(server.port, tokens.reader)
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        # What stops a container ends it in order, like Ctrl-C.
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, lambda *_: server.stop())
        server.serve()
    finally:
        db.close()


def _lines(address: Address, port: int, tokens: Tokens) -> Sequence[str]:
    reader = f"dashboard: {address.url(port, tokens.reader)}"
    if tokens.writer is None:
        return reader, "it only shows (--writable lets a writer change)"
    return reader, f"to change: {address.url(port, tokens.writer)}"


def make_address(
    host: str, port: int, path_prefix: str, public_hosts: Sequence[str], trusted_proxy: str | None
) -> Address:
    """Return the address that the flags name.

    Raises:
        InputError: for a prefix or a host that is none.
    """
    for name in public_hosts:
        if "/" in name or not name.strip():
            raise InputError(f"--public-host {name!r}: a host's name alone, like hpo.example.org, "
                             f"with :PORT where it has one")
    return Address(host, port, check_prefix(path_prefix), tuple(public_hosts), trusted_proxy)


def _require_dashboard() -> None:
    try:
        import optuna_dashboard  # noqa: F401
    except ImportError:
        raise HpoError("the dashboard needs the package optuna-dashboard: "
                       "pip install optuna-dashboard") from None
