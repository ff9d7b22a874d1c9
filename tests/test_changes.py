"""What may be changed through the dashboard, by whom, and the line that each change leaves."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import optuna
import pytest
from dashboard_site import WRITER

from hpo import changes
from hpo.queue import owner_token
from storage import NewTicket

# Every changing request of optuna-dashboard: `S` stands for a study's id, `T` for a trial's.
REQUESTS = [
    ("POST", "/api/studies", {"study_name": "toy", "directions": ["minimize"]}),
    ("DELETE", "/api/studies/S", None),
    ("POST", "/api/studies/S/rename", {"study_name": "other"}),
    ("PUT", "/api/studies/S/note", {"version": 1, "body": "x"}),
    ("PUT", "/api/studies/S/T/note", {"version": 1, "body": "x"}),
    ("POST", "/api/studies/S/T/skip", {}),
    ("POST", "/api/studies/S/preference", {"mode": "ChooseWorst", "clicked": 0}),
    ("PUT", "/api/studies/S/preference_feedback_component", {"output_type": "note"}),
    ("DELETE", "/api/studies/S/preference/1", None),
    ("POST", "/api/studies/S/preference/1", {}),
    ("POST", "/api/trials/T/tell", {"state": "Fail"}),
    ("POST", "/api/trials/T/user-attrs", {"user_attrs": {"a": 1}}),
    ("POST", "/api/artifacts/S", {"file": "data:text/plain;base64,eA==", "filename": "x"}),
    ("POST", "/api/artifacts/S/T", {"file": "data:text/plain;base64,eA==", "filename": "x"}),
]


def running(site, name="toy"):
    """Have a worker of this process take a ticket of a study; return the trial's id."""
    site.db.tickets.write(name, name, "trial", [NewTicket(1000, params={})])
    claim = site.db.tickets.claim(name, owner_token(), "here", 17, 30.0)
    assert claim is not None
    return claim.trial_id


def lines(site):
    return [json.loads(line) for line in (site.home / changes.FILE).read_text().splitlines()]


def trial_id(site, number=0):
    return site.db.studies.get_trial_id_from_study_id_trial_number(site.study_id(), number)


def test_no_request_of_a_reader_changes_anything(site_of):
    site = site_of(writable=True)
    before = site.json(f"/api/studies/{site.study_id()}")
    for method, path, body in REQUESTS:
        path = path.replace("S", str(site.study_id())).replace("T", str(trial_id(site)))
        assert site.reason(path, method, body) == (
            403, "this dashboard only shows to a reader: log in with the writer's token")
    assert site.json(f"/api/studies/{site.study_id()}") == before


def test_a_dashboard_only_shows_unless_it_was_asked_to_change(site_of):
    site = site_of()
    status, reason = site.reason(f"/api/studies/{site.study_id()}", "DELETE")
    assert status == 403 and "--writable" in reason
    assert site.ask(f"/api/studies/{site.study_id()}", "DELETE", cookie=WRITER)[0] == 401
    assert site.study_id()


def test_nothing_of_a_study_is_changed_while_a_worker_is_at_it(site_of):
    site = site_of(writable=True)
    at_work = running(site)
    before = site.json(f"/api/studies/{site.study_id()}")
    for method, path, body in REQUESTS:
        path = path.replace("S", str(site.study_id())).replace("T", str(at_work))
        assert site.reason(path, method, body, cookie=WRITER) == (
            409, "1 worker is alive on study 'toy' (here pid 17): stop them first")
    assert site.json(f"/api/studies/{site.study_id()}") == before
    assert site.reason(f"/api/studies/{site.study_id('toy/grid')}", "DELETE", cookie=WRITER)[0] \
        == 409


def test_a_worker_at_one_study_leaves_the_others_free(site_of):
    site = site_of(writable=True)
    running(site)
    other = optuna.create_study(storage=site.db.studies, study_name="toyshop")
    assert site.ask(f"/api/studies/{other._study_id}", "DELETE", cookie=WRITER)[0] == 204


def test_a_trial_is_not_reached_through_another_study_s_address(site_of):
    """Else an idle study's address would open the door to one that workers are at."""
    site = site_of(writable=True)
    at_work = running(site)
    other = optuna.create_study(storage=site.db.studies, study_name="idle")
    path = f"/api/artifacts/{other._study_id}/{at_work}"
    body = {"file": "data:text/plain;base64,eA==", "filename": "x"}
    assert site.ask(path, "POST", body, cookie=WRITER)[0] == 404


def test_an_artifact_is_deleted_as_its_own_study_s_alone(site_of):
    site = site_of(writable=True)
    body = {"file": "data:text/plain;base64,eA==", "filename": "x"}
    own = f"/api/artifacts/{site.study_id()}"
    made = json.loads(site.ask(own, "POST", body, cookie=WRITER)[2])["artifact_id"]
    assert site.ask(f"/api/artifacts/{site.study_id('toy/grid')}/{made}", "DELETE",
                    cookie=WRITER)[0] == 404
    weights = b"artifacts/toy/search/0.pt".hex()
    assert site.ask(f"{own}/{weights}", "DELETE", cookie=WRITER)[0] == 404
    assert (site.home / "artifacts" / made).exists()
    assert site.ask(f"{own}/{made}", "DELETE", cookie=WRITER)[0] == 204
    assert not (site.home / "artifacts" / made).exists()
    assert site.ask(f"{own}/{made}", "DELETE", cookie=WRITER)[0] == 404


@pytest.mark.parametrize(("method", "path"), [
    ("POST", "/incompatible-rdb-schema"), ("POST", "/api/llm/trial_filter_query"),
    ("PATCH", "/api/studies/1"), ("DELETE", "/api/studies/%D9%A1"), ("POST", "/api/studies/1/x"),
])
def test_a_change_that_nobody_has_looked_at_is_refused(site_of, method, path):
    status, reason = site_of(writable=True).reason(path, method, {}, cookie=WRITER)
    assert status == 403 and "is not served here" in reason


def test_a_study_of_hpo_keeps_its_name_and_another_may_be_renamed(site_of):
    site = site_of(writable=True)
    body = {"study_name": "new"}
    status, reason = site.reason(f"/api/studies/{site.study_id()}/rename", "POST", body,
                                 cookie=WRITER)
    assert status == 409 and "`hpo run --name`" in reason
    plain = optuna.create_study(storage=site.db.studies, study_name="plain")
    assert site.ask(f"/api/studies/{plain._study_id}/rename", "POST", body,
                    cookie=WRITER)[0] == 201
    assert site.study_id("new") and "study_name 'new'" in site.said[-1]


def test_each_change_and_each_refusal_leaves_a_line(site_of):
    site = site_of(writable=True)
    study_id = site.study_id()
    site.ask(f"/api/studies/{study_id}", "DELETE")
    before = datetime.now(UTC).replace(microsecond=0)
    origin = f"http://127.0.0.1:{site.port}"
    assert site.ask(f"/api/studies/{study_id}", "DELETE", cookie=WRITER, Origin=origin)[0] == 204
    refused, done = lines(site)
    assert (refused["role"], refused["status"], refused["what"]) == ("reader", 403, "delete study")
    assert (done["role"], done["address"], done["status"]) == ("writer", "127.0.0.1", 204)
    assert (done["what"], done["study"], done["study_id"]) == ("delete study", "toy", study_id)
    assert done["at"].endswith("Z") and before <= datetime.fromisoformat(done["at"])
    assert re.fullmatch(r"\S+Z writer 127\.0\.0\.1: delete study: 'toy': done \(204\)",
                        site.said[-1])
    with pytest.raises(KeyError):
        site.study_id()


def test_what_a_trial_was_told_stands_in_its_line(site_of):
    site = site_of(writable=True)
    trial = optuna.load_study(study_name="toy", storage=site.db.studies).ask()
    body = {"state": "Complete", "values": [0.5]}
    assert site.ask(f"/api/trials/{trial._trial_id}/tell", "POST", body, cookie=WRITER)[0] == 204
    assert lines(site)[-1]["request"] == body
    assert site.db.studies.get_trial(trial._trial_id).value == 0.5


def test_without_room_for_its_line_no_change_is_made(site_of):
    site = site_of(writable=True)
    (site.home / changes.FILE).mkdir()
    status, reason = site.reason(f"/api/studies/{site.study_id()}", "DELETE", cookie=WRITER)
    assert status == 503 and "nothing is changed without it" in reason
    assert site.study_id()


def test_every_changing_route_of_the_dashboard_is_known_here(site_of):
    """A new optuna-dashboard with further routes fails here, and they are refused until then."""
    import optuna_dashboard

    app = optuna_dashboard.wsgi(site_of().db.studies)
    routes = {(route.method, re.sub("<.*?>", "1", route.rule)) for route in app.routes}
    changing = {(method, path) for method, path in routes if method != "GET"
                and not path.startswith(("/api/llm/", "/incompatible"))}
    assert len(changing) == 16
    for method, path in changing:
        assert any(known == method and pattern.fullmatch(path)
                   for known, pattern, _ in changes._KNOWN), (method, path)
