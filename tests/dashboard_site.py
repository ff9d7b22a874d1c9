"""A served dashboard with a study in it, and requests to it: for the tests of all its parts."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import study_samples as samples
from commands import strict_json

from hpo import dashboard
from hpo.dashboard import Address, Server
from hpo.door import Tokens
from hpo.results import Results
from storage import Database

TOKEN, WRITER = "a-token-for-tests-only", "a-writer-for-tests-only"


class Site:
    """A served dashboard, and one request at a time to it."""

    def __init__(self, port: int, db: Database, home: Path, said: list[str]) -> None:
        self.port, self.db, self.home, self.said = port, db, home, said
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self, path: str, method: str = "GET", body: Any = None, *, cookie: bool | str = True,
        **headers: str,
    ) -> tuple[int, Message, bytes]:
        """Return (status, headers, body); header names are written with underscores.

        A reader asks unless `cookie` is another's token, or False. A body is sent as JSON.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        token = TOKEN if cookie is True else cookie
        sent = {"Cookie": f"hpo_token={token}"} if token else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, str):
            body, sent["Content-Type"] = json.dumps(body), "application/json"
        connection.request(method, path, body, headers=sent)
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        return answer.status, answer.headers, found

    def reason(self, *words: Any, **more: Any) -> tuple[int, str]:
        """Return a refusal's status and reason."""
        status, _, body = self.ask(*words, **more)
        return status, json.loads(body)["reason"]

    def json(self, path: str) -> Any:
        """Return an answer that holds strict JSON."""
        status, _, body = self.ask(path)
        assert status == 200, body
        return strict_json(body.decode())

    def study_id(self, name: str = "toy") -> int:
        """Return the id of an Optuna study."""
        return self.db.studies.get_study_id_from_name(name)


@contextmanager
def served(
    folder: Path, sample: Results | None = None, *, writable: bool = False,
    token: str | None = TOKEN, address: Address | None = None,
) -> Iterator[Site]:
    """Give a served study of the samples."""
    db = samples.stored(folder, sample=sample)
    address, said = address or Address(port=0), []
    tokens = Tokens(token, WRITER if writable else None)
    server = Server(address, lambda port: dashboard.make_app(
        db, folder, tokens, address, say=said.append))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield Site(server.port, db, folder, said)
    finally:
        server.stop()
        thread.join()
        db.close()
