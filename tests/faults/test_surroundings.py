"""What is around a run breaks: its disk, its folder, its database, its clock, its other half.

Each ends in one line with the right code, or not at all; the same command goes on to exactly N.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import (
    TIMEOUT_S,
    arguments,
    environment,
    finish,
    hpo,
    search_words,
    start,
    states,
    together,
    trials,
    url,
    write,
    write_text,
)
from sqlalchemy import update

from hpo.errors import HpoError
from storage import Database, init
from storage.schema import tickets

pytestmark = pytest.mark.faults

# Half a second a trial.
BODY = """
print("said " * int(os.environ.get("TEST_WORDS", "1")))
for epoch in range(4):
    time.sleep(0.12)
    more = {f"m{i}": i + x / 3 for i in range(int(os.environ.get("TEST_METRICS", "0")))}
    yield {"loss": x + epoch, **more}
"""


def plain(folder: Path, *words: object, n: int = 8) -> list[object]:
    """Write the study and return the words that search it with two workers."""
    write(folder, "s", body=BODY, epochs=4)
    return search_words("s", "--workers", 2, "--n-trials", n, "--pruner", "none", *words)


def stock(storage_url: str) -> str:
    """Return a URL as stock Optuna takes it."""
    return storage_url.replace("postgresql://", "postgresql+psycopg://")


def opened(storage_url: str) -> Database | None:
    """Return the database, or None where it is not set up yet."""
    try:
        return Database(storage_url)
    except HpoError:
        return None


def wait_for_ended(storage_url: str, n: int) -> None:
    """Wait until so many trials of a study have ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while (db := opened(storage_url)) is None:
        assert time.monotonic() < deadline, "no database is there"
        time.sleep(0.1)
    while db.tickets.counts("s").get("done", 0) < n:
        assert time.monotonic() < deadline, "no trial has ended"
        time.sleep(0.05)
    db.close()


def check_whole(folder: Path, n: int, storage_url: str | None = None, name: str = "s") -> None:
    """Assert that a study has exactly n COMPLETE trials with all of their epochs, none RUNNING."""
    found = trials(folder, name, storage_url)
    done = [trial for trial in found if trial.state.name == "COMPLETE"]
    assert len(done) == n and "RUNNING" not in states(found), states(found)
    for trial in done:
        assert list(trial.intermediate_values) == list(range(4))


def check_refused(code: int, output: str, words: str) -> None:
    """Assert that a run ended with code 1 and one line that says why."""
    assert code == 1, output
    assert "Traceback" not in output, output
    [last] = [line for line in output.splitlines() if line.startswith("hpo: ")]
    assert words in last, last




def limited(folder: Path, n_kb: int, words: Sequence[object], **env: str) -> tuple[int, str]:
    """Run a command that may write no file beyond so many kilobytes."""
    done = subprocess.run(["bash", "-c", f'ulimit -f {n_kb}; exec "$@"', "bash",
                           *arguments(*words)], cwd=folder, env=environment(**env), text=True,
                          capture_output=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def small_disk(folder: Path, n_kb: int) -> Iterator[list[str]]:
    """Give the words that run a command where `folder / "disk"` is a disk of so many kilobytes."""
    disk = folder / "disk"
    disk.mkdir()
    enter = ["unshare", "-rm", "bash", "-c",
             f'mount -t tmpfs -o size={n_kb}k none "{disk}" || exit 99; '
             f'"$@"; code=$?; cp -r "{disk}" "{folder}/copy"; exit $code', "bash"]
    if shutil.which("unshare") is None or subprocess.run(
            [*enter, "true"], capture_output=True).returncode:
        pytest.skip("only who may mount a disk of his own can fill it")
    shutil.rmtree(folder / "copy")
    yield enter


def test_a_database_on_a_full_disk_ends_the_run_and_room_lets_it_go_on(tmp_path: Path) -> None:
    """What had ended before is there, and no ticket is spent by the disk."""
    words = plain(tmp_path, "--home", tmp_path / "disk")
    env = environment(TEST_METRICS="200")
    with small_disk(tmp_path, 600) as enter:
        done = subprocess.run([*enter, *arguments(*words)], cwd=tmp_path, env=env, text=True,
                              capture_output=True, timeout=240)
    check_refused(done.returncode, done.stdout + done.stderr,
                  "database or disk is full; make room there, and run the same command again")
    n_before = len([line for line in done.stdout.splitlines() if ": COMPLETE" in line])
    assert n_before >= 1
    (tmp_path / "disk").rmdir()
    (tmp_path / "copy").rename(tmp_path / "disk")
    database = f"sqlite:///{tmp_path / 'disk' / 'hpo.db'}"
    assert states(trials(tmp_path, "s", database)).count("COMPLETE") == n_before
    hpo(tmp_path, *words, env={"TEST_METRICS": "200"})
    check_whole(tmp_path, 8, database)


def test_a_database_that_cannot_grow_ends_the_run_in_one_line(tmp_path: Path) -> None:
    words = plain(tmp_path)
    code, output = limited(tmp_path, 400, words, TEST_METRICS="200")
    check_refused(code, output, "make room there, and run the same command again")
    hpo(tmp_path, *words, env={"TEST_METRICS": "200"})
    check_whole(tmp_path, 8)


def test_a_log_that_cannot_grow_costs_its_text_and_no_trial(tmp_path: Path) -> None:
    words = plain(tmp_path, "--storage", f"sqlite:///{tmp_path / 'a.db'}")
    code, output = limited(tmp_path, 1024, words, TEST_WORDS="500000")
    assert code == 0, output
    assert "logs are incomplete, trials go on: [Errno 27] File too large" in output
    assert output.count("logs are incomplete") <= 2, "once a worker"
    check_whole(tmp_path, 8, f"sqlite:///{tmp_path / 'a.db'}")
    assert set(states(trials(tmp_path, "s", f"sqlite:///{tmp_path / 'a.db'}"))) == {"COMPLETE"}


RECIPE = """
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, Recipe, digits

    def build(run, *, lr):
        return Recipe(data=digits(run), model=MLP(hidden=256), optimizer=AdamW(lr=lr))

    STUDY = StudySpec(space={"lr": Float(1e-3, 1e-2)}, build=build, minimize="val_loss", epochs=4)
"""


def test_a_disk_that_is_full_costs_checkpoints_and_the_report_but_no_trial(tmp_path: Path) -> None:
    """Torch's own error for it is no error of the trial, nor one that kills a worker."""
    write_text(tmp_path, "s", RECIPE)
    words = ["run", "--study", "s", "--workers", 1, "--n-trials", 3, "--top-k", 1,
             "--confirm-seeds", 1, "--phases", "search,confirm", "--data-fraction", 0.1,
             "--home", tmp_path / "disk", "--storage", f"sqlite:///{tmp_path / 'a.db'}"]
    with small_disk(tmp_path, 60) as enter:
        done = subprocess.run([*enter, *arguments(*words)], cwd=tmp_path, env=environment(),
                              text=True, capture_output=True, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in output, output
    assert ("trial 0 of s: its checkpoint could not be written: OSError: [Errno 28] No space left "
            "on device") in output
    assert "its report could not be written ([Errno 28] No space left on device)" in output
    assert set(states(trials(tmp_path, "s", f"sqlite:///{tmp_path / 'a.db'}"))) == {"COMPLETE"}
    assert not list((tmp_path / "copy").rglob(".*.pt-*")), "nothing half written is left"


@pytest.mark.parametrize("where", ["full", "gone"])
def test_output_that_nobody_takes_does_not_end_a_run(tmp_path: Path, where: str) -> None:
    """To a full disk, or `hpo run | head -1`: before, trials were left RUNNING."""
    words = plain(tmp_path, n=4)
    to = "> /dev/full 2> /dev/full" if where == "full" else "| head -1"
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "$@" {to}', "bash",
                           *arguments(*words)], cwd=tmp_path, env=environment(), timeout=240,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert done.returncode == 0
    check_whole(tmp_path, 4)




def test_a_home_that_is_removed_in_the_middle_costs_logs_and_no_trial(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'a.db'}"
    process = start(tmp_path, *plain(tmp_path, "--storage", database))
    wait_for_ended(database, 2)
    shutil.rmtree(tmp_path / "hpo-runs", ignore_errors=True)
    code, output = finish(process)
    assert code == 0 and "Traceback" not in output, output
    check_whole(tmp_path, 8, database)


def test_a_place_where_no_log_can_be_made_costs_no_trial(tmp_path: Path) -> None:
    """A file stands where the folder should be, which holds for root as well."""
    words = plain(tmp_path, n=4)
    (tmp_path / "hpo-runs").mkdir()
    (tmp_path / "hpo-runs" / "logs").touch()
    done = hpo(tmp_path, *words)
    assert "logs are incomplete, trials go on: [Errno 20] Not a directory" in done.stdout
    check_whole(tmp_path, 4)


@pytest.mark.parametrize("what", ["hpo-runs", "hpo-runs/hpo.db"])
def test_a_sqlite_file_that_is_deleted_ends_the_run(tmp_path: Path, what: str) -> None:
    """SQLite goes on with a file without a name, so that the run's end would be a lie."""
    words = plain(tmp_path)
    process = start(tmp_path, *words)
    wait_for_ended(url(tmp_path), 2)
    path = tmp_path / what
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    code, output = finish(process)
    check_refused(code, output, "it was deleted or replaced while it was in use")
    hpo(tmp_path, *words)
    check_whole(tmp_path, 8)


def test_a_sqlite_file_locked_for_longer_than_allowed_ends_the_run(tmp_path: Path) -> None:
    words = plain(tmp_path, "--storage-timeout", 1)
    process = start(tmp_path, *words)
    wait_for_ended(url(tmp_path), 2)
    lock = sqlite3.connect(tmp_path / "hpo-runs" / "hpo.db", timeout=30, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    code, output = finish(process)
    check_refused(code, output, "database is locked")
    lock.rollback()
    lock.close()
    hpo(tmp_path, *words)
    check_whole(tmp_path, 8)


def test_a_sqlite_file_locked_for_a_while_costs_a_delay(tmp_path: Path) -> None:
    process = start(tmp_path, *plain(tmp_path))
    wait_for_ended(url(tmp_path), 2)
    lock = sqlite3.connect(tmp_path / "hpo-runs" / "hpo.db", timeout=30, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    time.sleep(3)
    lock.rollback()
    lock.close()
    code, output = finish(process)
    assert code == 0, output
    check_whole(tmp_path, 8)
    assert set(states(trials(tmp_path, "s"))) == {"COMPLETE"}




@pytest.mark.parametrize(("url_fixture", "by_s"), [("sqlite_url", -3600), ("postgres_url", 3600)],
                         ids=["set on", "set back"])
def test_a_clock_that_jumps_by_an_hour_costs_no_trial(
    request: pytest.FixtureRequest, tmp_path: Path, url_fixture: str, by_s: int
) -> None:
    """Leases as a clock wrote them that was an hour off: again and again, past two reapings."""
    database = request.getfixturevalue(url_fixture)
    init(database)
    process = start(tmp_path, *plain(tmp_path, "--storage", database, n=32))
    db = Database(database)
    while process.poll() is None:
        with db.engine.begin() as connection:
            connection.execute(update(tickets).where(tickets.c.state == "running").values(
                lease_until=tickets.c.lease_until + by_s))
        time.sleep(0.4)
    db.close()
    code, output = finish(process)
    assert code == 0, output
    found = trials(tmp_path, "s", stock(database))
    assert states(found) == ["COMPLETE"] * 32



TWO = """
    import time
    from hpo import Float, StudySpec

    def objective(run, x):
        for epoch in range(4):
            time.sleep(0.03)
            yield {"loss": (x - 0.3) ** 2 + epoch}

    STUDY = StudySpec(space={"x": Float(0.0, 1.0)}, objective=objective, minimize="loss",
                      epochs=4, defaults={"x": 0.9}, grid={"x": [0.1, 0.5, 0.7]}, n_trials=8,
                      pruner="none")
"""


def test_two_runs_at_once_do_each_phase_once(ready_url: str, tmp_path: Path) -> None:
    """Grid, search, confirmation and registration: as many trials and rows as one run makes."""
    write_text(tmp_path, "s", TWO)
    words = ["run", "--study", "s", "--workers", 2, "--top-k", 2, "--confirm-seeds", 2,
             "--storage", ready_url]
    for output in together(tmp_path, words, words):
        assert "report: " in output
    # Two of the search, the grid's best and the defaults on two seeds each.
    for name, n in (("s/grid", 3), ("s", 8), ("s/confirm", 8)):
        assert states(trials(tmp_path, name, stock(ready_url))) == ["COMPLETE"] * n
    db = Database(ready_url)
    assert len(db.registry.rows("s")) == 4
    db.close()


def test_a_run_goes_on_when_the_other_one_of_the_study_is_killed(
    ready_url: str, tmp_path: Path
) -> None:
    words = plain(tmp_path, "--storage", ready_url, n=16)
    first, second = start(tmp_path, *words), start(tmp_path, *words)
    wait_for_ended(ready_url, 2)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    code, output = finish(second)
    assert code == 0, output
    check_whole(tmp_path, 16, stock(ready_url))
