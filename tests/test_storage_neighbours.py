"""Stock Optuna's CLI and optuna-dashboard on a database of ours, and ours on one of theirs."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from commands import TIMEOUT_S, arguments, environment
from optuna.trial import TrialState

import storage
from storage import StudyStorage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BIN = Path(sys.executable).parent


def stock_url(url: str) -> str:
    """Return a URL as stock Optuna takes it."""
    return url.replace("postgresql://", "postgresql+psycopg://")


def optuna_cli(url: str, *words: str) -> Any:
    """Run a command of Optuna's and return its JSON."""
    command = [str(BIN / "optuna"), words[0], "--storage", stock_url(url), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120,
                          env=environment(PYTHONWARNINGS="ignore"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 1e-3, 1.0, log=True)
    for step in range(3):
        trial.report(x * step, step)
    trial.set_user_attr("twice", 2 * x)
    return x


@contextmanager
def dashboard(url: str) -> Iterator[str]:
    """Run stock optuna-dashboard on a database and give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(BIN / "optuna-dashboard"), stock_url(url), "--host", "127.0.0.1", "--port",
               str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=environment(PYTHONWARNINGS="ignore"))
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"{base}/api/studies", timeout=10).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield base
    finally:
        process.terminate()
        process.wait(30)


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """GET an address of the dashboard, or POST to it, and return its JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def test_optunas_cli_asks_tells_and_reads_in_a_database_of_ours(storage_url: str) -> None:
    """And our process, which has the study in memory, sees each of its trials."""
    opened = storage.open(storage_url)
    study = optuna.create_study(storage=opened, study_name="s")
    study.optimize(objective, n_trials=3)
    space = {"x": {"name": "FloatDistribution", "attributes": {
        "low": 1e-3, "high": 1.0, "log": True, "step": None}}}
    asked = optuna_cli(storage_url, "ask", "--study-name", "s", "--search-space",
                       json.dumps(space), "-f", "json")
    assert asked["number"] == 3 and study.trials[3].state == TrialState.RUNNING
    optuna_cli(storage_url, "tell", "--study-name", "s", "--trial-number", "3", "--values", "0.5")
    ours = study.trials
    assert (ours[3].state, ours[3].values) == (TrialState.COMPLETE, [0.5])
    assert ours[3].params == asked["params"]
    study.optimize(objective, n_trials=1)
    listed = optuna_cli(storage_url, "trials", "--study-name", "s", "-f", "json")
    assert [trial["number"] for trial in listed] == [0, 1, 2, 3, 4]
    assert [trial["value"] for trial in listed] == [trial.value for trial in study.trials]
    opened.close()


def test_the_dashboard_s_tell_and_attributes_reach_a_process_of_ours(storage_url: str) -> None:
    """It ends a trial that our process is at; the late report is refused, the end stays."""
    opened = storage.open(storage_url)
    study = optuna.create_study(storage=opened, study_name="s")
    study.optimize(objective, n_trials=2)
    trial = study.ask()
    trial.report(0.25, 0)
    opened.flush()
    with dashboard(storage_url) as base:
        shown = call(f"{base}/api/studies/{study._study_id}")
        assert [t["state"] for t in shown["trials"]] == ["Complete", "Complete", "Running"]
        assert shown["trials"][2]["intermediate_values"] == [{"step": 0, "value": 0.25}]
        call(f"{base}/api/trials/{trial._trial_id}/user-attrs", {"user_attrs": {"seen": "yes"}})
        call(f"{base}/api/trials/{trial._trial_id}/tell", {"state": "Complete", "values": [7.0]})
    found = study.trials[2]
    assert (found.state, found.values) == (TrialState.COMPLETE, [7.0])
    assert found.user_attrs["seen"] == "yes"
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        trial.report(0.5, 1)
    opened.close()


def test_a_database_of_stock_optuna_is_set_up_opened_and_written_to(storage_url: str) -> None:
    """Its own tables stay as they are, and it reads on what we add."""
    stock = optuna.storages.RDBStorage(stock_url(storage_url))
    theirs = optuna.create_study(storage=stock, study_name="s")
    theirs.optimize(objective, n_trials=4)
    opened = storage.open(storage_url)
    mine = optuna.load_study(study_name="s", storage=opened)
    assert mine.trials == theirs.trials
    mine.optimize(objective, n_trials=2)
    theirs.optimize(objective, n_trials=2)
    assert mine.trials == theirs.trials and len(mine.trials) == 8
    assert mine.best_trial == theirs.best_trial
    opened.close()
    stock.remove_session()
    stock.engine.dispose()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_stock_dashboard_draws_a_study_of_ours_and_ours_one_of_stock_optuna(
    tmp_path: Path, sqlite_url: str
) -> None:
    """In a browser: the plots and the best trial of both."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    opened = storage.open(sqlite_url)
    optuna.create_study(storage=opened, study_name="of ours").optimize(objective, n_trials=5)
    stock = optuna.storages.RDBStorage(sqlite_url)
    optuna.create_study(storage=stock, study_name="of stock").optimize(objective, n_trials=5)
    stock.remove_session()
    stock.engine.dispose()
    opened.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = subprocess.Popen(arguments("dashboard", "--storage", sqlite_url, "--port", port,
                                      "--no-token"), cwd=tmp_path, env=environment(),
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with dashboard(sqlite_url) as base, sync_api.sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=[
                "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(90_000)
            for address in (base, f"http://127.0.0.1:{port}"):
                for name in ("of ours", "of stock"):
                    study_id = StudyStorage(sqlite_url).get_study_id_from_name(name)
                    _goto(page, f"{address}/dashboard/studies/{study_id}", ours)
                    page.get_by_text("Best Trial").first.wait_for()
                    page.get_by_text("Intermediate values").first.wait_for()
                    page.wait_for_function(
                        "() => document.querySelectorAll('.js-plotly-plot .scatterlayer .trace')"
                        ".length >= 3")
                    page.screenshot(path=tmp_path / f"{name} {address[-5:]}.png")
            browser.close()
    finally:
        ours.terminate()
        ours.wait(30)
    assert len(list(tmp_path.glob("*.png"))) == 4


def _goto(page: Any, address: str, server: subprocess.Popen[bytes]) -> None:
    """Open a page of a server that may still be starting."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            page.goto(address)
            return
        except Exception:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
