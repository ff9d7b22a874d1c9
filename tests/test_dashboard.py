"""The dashboard shows a study to whoever holds the token, and lets nobody else in."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
import study_samples as samples
from dashboard_site import TOKEN, WRITER

from hpo import dashboard, report
from hpo.dashboard import Address
from hpo.errors import InputError
from hpo.read_results import collect
from hpo.results import Phase, Trial


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_token(host):
    """C45.4."""
    with pytest.raises(InputError, match="--no-token with --host") as error:
        dashboard.serve("sqlite:///none.db", Path("x"), Address(host), no_token=True)
    assert error.value.exit_code == 2


def test_a_name_that_a_proxy_serves_needs_a_token():
    with pytest.raises(InputError, match="--no-token with --public-host hpo.example.org"):
        dashboard.check_door(Address(public_hosts=("hpo.example.org",)), no_token=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_s_own_addresses_may_do_without(host):
    dashboard.check_door(Address(host), no_token=True)


def test_a_taken_port_is_said_in_one_line(site_of):
    site = site_of()
    with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.1:{site.port} .*--port 0"):
        dashboard.Server(Address(port=site.port), lambda port: lambda *_: [])


def test_wherever_it_listens_the_printed_address_can_be_opened():
    assert Address("0.0.0.0").url(80, "t") == "http://127.0.0.1:80/?token=t"
    assert Address("::").url(80, None) == "http://[::1]:80/"
    assert Address(path_prefix="/hpo").url(80, "t") == "http://127.0.0.1:80/hpo/?token=t"


def test_several_requests_are_answered_at_once(site_of):
    """One that waits for its body keeps no other waiting."""
    site = site_of()
    slow = socket.create_connection(("127.0.0.1", site.port))
    slow.sendall(b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\ntok")
    with ThreadPoolExecutor(8) as pool:
        path = f"/api/studies/{site.study_id()}"
        assert [status for status, *_ in pool.map(site.ask, [path] * 16)] == [200] * 16
    slow.close()


# What it shows


def published(site):
    results = collect(site.db, "toy")
    report.write(results, site.home / "reports" / "toy")
    report.note(site.db, results, site.home)
    return site.json(f"/api/studies/{site.study_id()}")


def test_the_study_shows_its_trials_its_note_and_its_pictures(site_of):
    site = site_of()
    shown = published(site)
    assert len(shown["trials"]) == 20 and shown["has_intermediate_values"]
    assert "The search won" in shown["note"]["body"]
    for artifact in shown["artifacts"]:
        path = f"/artifacts/{site.study_id()}/{artifact['artifact_id']}"
        assert path in shown["note"]["body"]
        status, headers, body = site.ask(path)
        assert status == 200
        assert body[:4] == (b"<!DO" if artifact["filename"] == "report.html" else b"\x89PNG")
        assert "sandbox" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers


def stored_checkpoint(site):
    """Return the trial that has a checkpoint, the file, and its address in the dashboard."""
    path = site.home / "artifacts" / "toy" / "search" / "0.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    study = optuna.load_study(study_name="toy", storage=site.db.studies)
    study.add_trial(optuna.create_trial(value=0.99, user_attrs={
        "checkpoint": "artifacts/toy/search/0.pt"}))
    shown = published(site)
    (artifact,) = shown["trials"][-1]["artifacts"]
    trial_id = shown["trials"][-1]["trial_id"]
    return artifact, path, f"/artifacts/{site.study_id()}/{trial_id}/{artifact['artifact_id']}"


def test_a_trial_s_checkpoint_can_be_fetched_and_is_stored_once(site_of):
    site = site_of()
    artifact, path, address = stored_checkpoint(site)
    assert artifact["filename"] == "0.pt" and site.ask(address)[2] == b"weights"
    files = [p for p in (site.home / "artifacts").rglob("*") if p.is_file()]
    assert [p for p in files if p.read_bytes() == b"weights"] == [path]


def test_an_artifact_whose_file_is_gone_is_not_found(site_of):
    """C47.3."""
    site = site_of()
    _, path, address = stored_checkpoint(site)
    path.unlink()
    assert site.ask(address)[0] == 404
    picture = published(site)["artifacts"][0]["artifact_id"]
    (site.home / "artifacts" / picture).unlink()
    assert site.ask(f"/artifacts/{site.study_id()}/{picture}")[0] == 404
    assert site.ask(f"/artifacts/{site.study_id()}/{'0' * 32}")[0] == 404


def test_no_artifact_leads_out_of_its_folder(site_of):
    site = site_of()
    (site.home / "secret.pt").write_text("secret")
    outside = b"../secret.pt".hex()
    key = f"artifacts:{outside}"
    site.db.studies.set_study_system_attr(site.study_id(), key, json.dumps(
        {"artifact_id": outside, "filename": "x", "mimetype": "text/plain", "encoding": None}))
    site.db.studies.flush()
    assert site.ask(f"/artifacts/{site.study_id()}/{outside}")[0] == 404


def test_a_study_whose_artifact_files_are_gone_can_still_be_deleted(site_of):
    site = site_of(writable=True)
    published(site)
    shutil.rmtree(site.home / "artifacts")
    status, _, body = site.ask(f"/api/studies/{site.study_id()}", "DELETE", cookie=WRITER)
    assert status == 204, body


def wild():
    """Return a study with infinite values, a NaN epoch and all kinds of choices."""
    inf = float("inf")
    trials = [Trial(i, "COMPLETE", v, {"lr": 0.01 + i / 100}, curve=((0, v),),
                    distributions={"lr": samples.SPACE["lr"]})
              for i, v in enumerate((inf, 1.0, -inf))]
    trials.append(Trial(3, "PRUNED", 0.5, reason="diverged at epoch 0", curve=(
        (0, float("nan")),), attrs={"best": {"loss": float("nan")}}))
    return samples.results(candidates=[], phases={"search": Phase("search", "toy", tuple(trials))})


# Optuna warns of few trials; `serve` keeps that out of the log, as a test cannot.
@pytest.mark.filterwarnings("ignore:.*(quantiles select|number of trials):UserWarning")
@pytest.mark.parametrize("sample", [
    wild(), samples.results(),
    *(samples.results(candidates=[], phases={"search": Phase("search", "toy", trials)})
      for trials in ((), samples.failed(3), samples.trials(1, 0.9))),
])
def test_every_state_of_a_study_is_served_as_strict_json(site_of, sample):
    """C19.2, C48."""
    site = site_of(sample)
    for study in site.json("/api/studies")["study_summaries"]:
        site.json(f"/api/studies/{study['study_id']}")
        site.json(f"/api/studies/{study['study_id']}/param_importances")


def test_choices_of_tuples_and_lists_are_served(site_of):
    """C30.6."""
    from hpo import Categorical

    site = site_of()
    study = optuna.load_study(study_name="toy", storage=site.db.studies)
    for choices in ([(64, 32), (128,)], [[64, 32], [128]], [None, True, 1.5, "a"]):
        param = Categorical(choices)
        study.add_trial(optuna.create_trial(
            value=1.0, params={f"p{len(study.trials)}": param.encode(choices[0])},
            distributions={f"p{len(study.trials)}": param.distribution()}))
    site.db.studies.flush()
    assert "(64, 32)" in json.dumps(site.json(f"/api/studies/{site.study_id()}"))


def test_static_files_are_served_to_clients_that_accept_no_encoding(site_of):
    connection = http.client.HTTPConnection("127.0.0.1", site_of().port, timeout=60)
    connection.putrequest("GET", "/favicon.ico", skip_accept_encoding=True)
    connection.putheader("Cookie", f"hpo_token={TOKEN}")
    connection.endheaders()
    assert connection.getresponse().status == 200
    connection.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_serving_prints_the_address_once_and_ends_with_an_interrupt(tmp_path):
    """C45.1."""
    import signal

    samples.stored(tmp_path).close()
    code = ("import sys\nfrom pathlib import Path\nfrom hpo.dashboard import Address, serve\n"
            "serve(sys.argv[1], Path(sys.argv[2]), Address(port=int(sys.argv[3])))")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", code, f"sqlite:///{tmp_path / 'hpo.db'}", str(tmp_path),
         str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.fullmatch(rf"dashboard: http://127\.0\.0\.1:{port}/\?token=(\S+)\n", line)
        assert found, line
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        asked.request("GET", "/api/studies", headers={"Cookie": f"hpo_token_{port}={found[1]}"})
        assert asked.getresponse().status == 200
        asked.close()
        server.send_signal(signal.SIGINT)
        out, log = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0
    assert found[1] not in out + log and "Traceback" not in log
