"""What may be changed through the dashboard, by whom and when; each change leaves a line.

Only requests that are known are let through: what a later optuna-dashboard adds is refused until
somebody has looked at it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import alive
from hpo.door import HAS_WRITER, ROLE, SAFE, WRITER, App, Environ, StartResponse, answer
from hpo.errors import HpoError

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage import Database

# Where the lines are kept, under the home folder.
FILE = "dashboard-changes.jsonl"
_STUDY, _TRIAL = r"(?P<study_id>\d{1,9})", r"(?P<trial_id>\d{1,9})"
_ARTIFACT = "(?P<artifact>[0-9a-fA-F-]+)"
# All changing requests of optuna-dashboard 0.21 but those of its language model and of its schema
# migration, which are not served here.
_KNOWN = [(method, re.compile(path, re.ASCII), what) for method, path, what in (
    ("POST", "/api/studies", "create study"),
    ("DELETE", f"/api/studies/{_STUDY}", "delete study"),
    ("POST", f"/api/studies/{_STUDY}/rename", "rename study"),
    ("PUT", f"/api/studies/{_STUDY}/note", "write study note"),
    ("PUT", f"/api/studies/{_STUDY}/{_TRIAL}/note", "write trial note"),
    ("POST", f"/api/studies/{_STUDY}/{_TRIAL}/skip", "skip trial"),
    ("POST", f"/api/studies/{_STUDY}/preference", "add preference"),
    ("PUT", f"/api/studies/{_STUDY}/preference_feedback_component", "set preference feedback"),
    ("DELETE", f"/api/studies/{_STUDY}/preference/(?P<entry>[0-9A-Za-z-]+)", "remove preference"),
    ("POST", f"/api/studies/{_STUDY}/preference/(?P<entry>[0-9A-Za-z-]+)", "restore preference"),
    ("POST", f"/api/trials/{_TRIAL}/tell", "tell trial"),
    ("POST", f"/api/trials/{_TRIAL}/user-attrs", "set trial attributes"),
    ("POST", f"/api/artifacts/{_STUDY}", "add study artifact"),
    ("POST", f"/api/artifacts/{_STUDY}/{_TRIAL}", "add trial artifact"),
    ("DELETE", f"/api/artifacts/{_STUDY}/{_ARTIFACT}", "delete study artifact"),
    ("DELETE", f"/api/artifacts/{_STUDY}/{_TRIAL}/{_ARTIFACT}", "delete trial artifact"),
)]
# Of these the line also says how: the fields of the request's JSON.
_TOLD = {"create study": ("study_name", "directions"), "rename study": ("study_name",),
         "tell trial": ("state", "values"), "set trial attributes": ("user_attrs",)}
_LONGEST_TOLD = 1_000_000


class Refused(HpoError):
    """A change that may not be made, with the HTTP status that says so."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Change:
    """One change that somebody asks for; `study` is its name, once it is known."""

    what: str
    study_id: int | None = None
    trial_id: int | None = None
    artifact: str | None = None
    study: str | None = None
    told: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the change as one line says it."""
        parts = [self.what if self.study is None else f"{self.what}: {self.study!r}"]
        if self.trial_id is not None:
            parts.append(f"trial id {self.trial_id}")
        return ", ".join([*parts, *(f"{name} {value!r}" for name, value in self.told.items())])


class Changes:
    """WSGI middleware behind the door: lets a writer change a study that nobody works on."""

    def __init__(self, app: App, db: Database, log: Log) -> None:
        self.app, self.db, self.log = app, db, log

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in SAFE:
            return self.app(environ, start_response)
        change = Change("an unknown change")
        try:
            change = _asked(environ)
            _require_writer(environ)
            self._look_up(change)
            self._check(change)
            self.log.open()
        except HpoError as error:
            status = error.status if isinstance(error, Refused) else "503 Service Unavailable"
            self.log.write(environ, change, status, str(error))
            return answer(environ, start_response, status, str(error))
        said: list[str] = []

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            said.append(status)
            return start_response(status, headers, *rest)

        try:
            return self.app(environ, start)
        finally:
            self.log.write(environ, change, said[-1] if said else "500 Internal Server Error")

    def _look_up(self, change: Change) -> None:
        """Find the study's name, and that trial and artifact are its own."""
        if change.what == "create study":
            change.study = str(change.told.get("study_name"))
            return
        try:
            if change.trial_id is not None:
                of_trial = self.db.studies.get_study_id_of_trial(change.trial_id)
                if change.study_id not in (None, of_trial):
                    raise KeyError
                change.study_id = of_trial
            assert change.study_id is not None
            change.study = self.db.studies.get_study_name_from_id(change.study_id)
            if change.artifact is not None and not self._has(change):
                raise KeyError
        except KeyError:
            raise Refused("404 Not Found", "there is no such study, trial or artifact") from None

    def _has(self, change: Change) -> bool:
        """Return whether an artifact is the study's, or the trial's: they share one folder."""
        assert change.study_id is not None
        attrs = self.db.studies.get_study_system_attrs(change.study_id)
        if change.trial_id is None:
            return _is_there(attrs, f"artifacts:{change.artifact}")
        own = self.db.studies.get_trial_system_attrs(change.trial_id)
        return (_is_there(own, f"artifacts:{change.artifact}")
                or _is_there(attrs, f"dashboard:artifacts:{change.trial_id}:{change.artifact}"))

    def _check(self, change: Change) -> None:
        """Refuse what workers would trip over, and what would tear one of hpo's studies apart."""
        assert change.study is not None
        name = change.study.split("/")[0]
        at_it = [worker for worker in alive.workers(self.db, name) if worker.state != "lost"]
        if at_it:
            verb = "worker is" if len(at_it) == 1 else "workers are"
            who = ", ".join(f"{worker.host} pid {worker.pid}" for worker in at_it[:3])
            more = f" and {len(at_it) - 3} more" if len(at_it) > 3 else ""
            raise Refused("409 Conflict", f"{len(at_it)} {verb} alive on study '{name}' "
                                          f"({who}{more}): stop them first")
        if change.what == "rename study" and self.db.runs.study(name) is not None:
            raise Refused("409 Conflict", f"study '{name}' was made by hpo, whose epochs, tickets "
                                          f"and results stand under its name; `hpo run --name` "
                                          f"begins one with another name")


def _is_there(attrs: Mapping[str, Any], key: str) -> bool:
    # The dashboard marks a deleted artifact with null.
    return attrs.get(key) not in (None, "null")


def _asked(environ: Environ) -> Change:
    """Return what a request would change.

    Raises:
        Refused: for a request that is not known.
    """
    path = environ.get("PATH_INFO", "").rstrip("/")
    for method, pattern, what in _KNOWN:
        found = pattern.fullmatch(path)
        if found and method == environ["REQUEST_METHOD"]:
            ids = found.groupdict()
            study_id, trial_id = (int(ids[key]) if key in ids else None
                                  for key in ("study_id", "trial_id"))
            return Change(what, study_id, trial_id, ids.get("artifact"),
                          told=_told(environ, _TOLD.get(what, ())))
    raise Refused("403 Forbidden", f"{environ['REQUEST_METHOD']} {path} is not served here")


def _told(environ: Environ, names: Iterable[str]) -> dict[str, Any]:
    """Return fields of a request's JSON, which stays to be read by the app."""
    if not names:
        return {}
    length = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or int(length) > _LONGEST_TOLD:
        raise Refused("413 Content Too Large", f"a request of {length} bytes is too long")
    body = environ["wsgi.input"].read(int(length))
    environ["wsgi.input"] = BytesIO(body)
    try:
        data = json.loads(body or b"{}")
    except ValueError:
        raise Refused("400 Bad Request", "the request holds no JSON") from None
    return {name: data[name] for name in names if name in data} if isinstance(data, dict) else {}


def _require_writer(environ: Environ) -> None:
    if environ.get(ROLE) == WRITER:
        return
    how = ("log in with the writer's token" if environ.get(HAS_WRITER)
           else "start it with --writable to change")
    raise Refused("403 Forbidden", f"this dashboard only shows to a reader: {how}")


class Log:
    """Who changed what: a JSON line each in a file, and a line of text to `say`."""

    def __init__(self, home: Path, say: Callable[[str], Any] = print) -> None:
        self.path = home / FILE
        self.say = say
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make sure that a line can be written: a change without one is not made.

        Raises:
            Refused: where the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a"):
                return
        except OSError as error:
            raise Refused("503 Service Unavailable", f"{self.path} cannot be written "
                          f"({error.strerror}), and nothing is changed without it") from None

    def write(self, environ: Environ, change: Change, status: str, reason: str = "") -> None:
        """Write one line: when, who, what, and what came of it."""
        code, role = int(status.split()[0]), environ.get(ROLE, "nobody")
        address = environ.get("REMOTE_ADDR", "?")
        line: Mapping[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "role": role, "address": address, "what": change.what, "study": change.study,
            "study_id": change.study_id, "trial_id": change.trial_id, "artifact": change.artifact,
            "request": change.told, "status": code, "reason": reason}
        outcome = "done" if code < 400 else "refused"
        tail = f": {reason}" if reason else ""
        with self._lock:
            self.say(f"{line['at']} {role} {address}: {change.text()}: {outcome} ({code}){tail}")
            try:
                with self.path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                self.say(f"{self.path}: {error.strerror}: the line above is missing there")
