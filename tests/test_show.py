"""`hpo show`: one trial on one screen, with nothing in it that is not stored."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import study_samples as samples
from commands import (
    arguments,
    environment,
    hpo,
    search,
    strict_json,
    trials,
    url,
    write,
    write_text,
)

from hpo import ask
from hpo.one_trial import find, parse
from hpo.provenance import how_chosen
from hpo.studies import ensure_study
from hpo.text_curve import draw
from storage import Database, NewTicket

MODULE = """
    from hpo import Categorical, Float, StudySpec
    from hpo.train import MLP, AdamW, Recipe, digits

    def build(run, *, lr, hidden):
        return Recipe(data=digits(run), model=MLP(hidden=hidden), optimizer=AdamW(lr=lr),
                      batch_size=256)

    STUDY = StudySpec(space={"lr": Float(1e-4, 1.0, log=True), "hidden": Categorical(8, 16)},
                      build=build, maximize="val_accuracy", epochs=3,
                      defaults={"lr": 1e-3, "hidden": 16},
                      grid={"lr": [1e-3, 1e-2], "hidden": [16]})
    """


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder in which a whole study was run by one worker."""
    folder = tmp_path_factory.mktemp("show")
    write_text(folder, "s", MODULE)
    hpo(folder, "run", "--study", "s", "--workers", 1, "--n-trials", 13, "--top-k", 1,
        "--confirm-seeds", 1)
    return folder


def shown(folder: Path, trial: object, *words: object) -> str:
    """Return what `hpo show` prints; the log that it quotes may hold a traceback."""
    done = subprocess.run(arguments("show", trial, "--study", "s", *words), cwd=folder, text=True,
                          env=environment(), capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def data(folder: Path, trial: object, *words: object) -> Any:
    return strict_json(shown(folder, trial, *words, "--json"))


def hows(said: Any) -> dict[str, str]:
    return {name: param["how"] for name, param in said["params"].items()}


def test_a_trial_of_the_search_is_told_as_it_is_stored(home: Path) -> None:
    stored = trials(home, "s")[4]
    said = data(home, 4)
    assert (said["trial"], said["phase"], said["state"]) == (4, "search", stored.state.name)
    assert said["value"] == stored.value and said["seed"] == 0 and said["device"] == "cpu"
    assert {n: p["value"] for n, p in said["params"].items()} == stored.params
    assert said["duration_s"] == stored.user_attrs["duration_s"]
    assert [(p["epoch"], p["value"]) for p in said["curve"]] == list(
        stored.intermediate_values.items())
    assert said["ran_with"]["n_threads"] == 1 and "torch" in said["ran_with"]["versions"]
    assert said["replay"] == "hpo replay 4 --study s"


def test_params_before_tpe_has_started_are_told_from_those_it_drew(home: Path) -> None:
    """By one worker, trial k is drawn when exactly k have ended."""
    assert set(hows(data(home, 9)).values()) == {
        "drawn at random: TPE starts after 10 ended trials, 9 had ended"}
    assert set(hows(data(home, 12)).values()) == {"drawn by TPE from 12 ended trials"}


def test_params_of_the_other_phases_are_told_by_where_they_are_from(home: Path) -> None:
    assert hows(data(home, "grid/1")) == {
        "lr": "fixed by the grid, one of 2 values",
        "hidden": "fixed by the grid, the same in all cells"}
    assert hows(data(home, "lr-range/0")) == {
        "lr": "picked by the LR range test", "hidden": "the module's default"}
    confirmed = [data(home, f"confirm/{i}") for i in range(len(trials(home, "s/confirm")))]
    said = {tuple(set(hows(one).values())) for one in confirmed}
    best = json.loads(hpo(home, "best", "--study", "s", "--json").stdout)["trial"]
    assert (f"those of search trial {best}, to be confirmed as search#1",) in said
    assert ("the module's defaults, to be confirmed",) in said


def test_the_median_is_that_of_the_other_complete_trials(home: Path) -> None:
    others = [t for t in trials(home, "s") if t.state.name == "COMPLETE" and t.number != 0]
    for point in data(home, 0)["curve"]:
        values = [t.intermediate_values[point["epoch"]] for t in others]
        assert point["median"] == statistics.median(values)
        assert point["n_others"] == len(others)


def test_a_checkpoint_is_present_missing_or_damaged(home: Path) -> None:
    said = data(home, "confirm/0")
    path = home / "hpo-runs" / said["checkpoint"]
    whole = path.read_bytes()
    try:
        assert said["checkpoint_state"] == "kept"
        path.write_bytes(whole[:-100])
        assert data(home, "confirm/0")["checkpoint_state"] == "damaged"
        path.unlink()
        assert "(missing" in hpo(home, "show", "confirm/0", "--study", "s").stdout
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("width", [80, 120])
def test_a_trial_fits_the_classic_terminal(
    home: Path, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from hpo.show import show

    runs = home / "hpo-runs"
    console = Console(width=width, force_terminal=True, no_color=True)
    for trial in ("4", "grid/0", "confirm/1", "lr-range/0"):
        assert show(trial, "s", runs, f"sqlite:///{runs / 'hpo.db'}", console, as_json=False) == 0
        lines = capsys.readouterr().out.splitlines()
        # The command is whole, however long the folder's name is.
        assert len(lines) <= 23 and max(map(len, lines[:-1])) <= width
        assert lines[0].startswith("trial ") and lines[-1].startswith("run again  hpo replay ")
        assert any("|" in line and "*" in line for line in lines)


def test_an_unknown_trial_is_told_the_range_of_those_there_are(home: Path) -> None:
    for trial, text in (
        ("99", "trial 99: the search of study 's' has trials 0 to 12"),
        ("grid/2", "trial grid/2: the grid of study 's' has trials 0 to 1"),
        ("lr-range/1", "trial lr-range/1: the lr-range of study 's' has trial 0 alone"),
        ("gird/1", "trial 'gird/1': 'gird' is no phase; did you mean 'grid'? (accepted are "
                   "lr-range, grid, random, search, audit, confirm)"),
        ("one", "trial 'one': 'one' is no number; write 7 for a trial of the search, or grid/3 "
                "with another phase's name"),
    ):
        done = hpo(home, "show", trial, "--study", "s", code=2)
        assert done.stderr == f"hpo: {text}\n" and done.stdout == ""
    assert "did you mean 's'?" in hpo(home, "show", 1, "--study", "ss", code=3).stderr


def test_a_phase_that_has_not_begun_is_told(tmp_path: Path) -> None:
    write(tmp_path, "s")
    search(tmp_path, "s", "--n-trials", 1)
    done = hpo(tmp_path, "show", "grid/0", "--study", "s", code=2)
    assert done.stderr == "hpo: trial grid/0: study 's' has no phase grid (it has search)\n"


def test_a_failed_trial_shows_the_end_of_its_log_and_why_it_cannot_be_replayed(
    tmp_path: Path
) -> None:
    write(tmp_path, "s", body='print("a telling line")\nraise ValueError("x is bad")\nyield {}')
    search(tmp_path, "s", "--n-trials", 1, "--max-failures", 0, code=3)
    lines = shown(tmp_path, 0).splitlines()
    assert lines[0] == "trial      0 of the search of study s: FAIL, error: ValueError: x is bad"
    assert "  a telling line" in lines and "  ValueError: x is bad" in lines
    assert lines[-1] == ("run again  not possible: it has no stored epoch to compare with "
                         "(error: ValueError: x is bad)")
    said = data(tmp_path, 0)
    assert said["replay"] is None and said["curve"] == [] and said["log_tail"][-1] == lines[
        lines.index("  ValueError: x is bad")].strip()


def test_a_retry_says_whose_params_it_has_and_both_know_each_other(tmp_path: Path) -> None:
    write(tmp_path, "s", body="""
        if not (HERE / "seen").exists():
            (HERE / "seen").touch()
            raise ValueError("once")
        yield {"loss": x}
    """)
    search(tmp_path, "s", "--n-trials", 1, "--max-retries", 1)
    first, second = data(tmp_path, 0), data(tmp_path, 1)
    assert (first["retried_as"], second["retry_of"], second["origin"]) == (1, 0, 0)
    assert first["chain"] == second["chain"] == [0, 1]
    assert hows(second) == {"x": "those of trial 0, which this one retries"}
    assert hows(first)["x"].startswith("drawn at random")
    text = shown(tmp_path, 1)
    assert "retries    0 FAIL -> 1 (this one)\n" in text


def test_a_pruned_trial_is_told_the_median_that_it_met(tmp_path: Path) -> None:
    """Three trials of losses 1, 2 and 3 are COMPLETE when the fourth, of 9, is pruned."""
    write(tmp_path, "s", body="""
        k = len(list(HERE.glob("seen-*")))
        (HERE / f"seen-{k}").touch()
        for epoch in range(4):
            yield {"loss": [1, 2, 3, 9, 1][k] + epoch / 10}
    """, epochs=4)
    search(tmp_path, "s", "--n-trials", 5,
           "--pruner", "median", "--prune-startup", 3, "--prune-warmup", 1)
    said = data(tmp_path, 3)
    assert said["reason"] == "median at epoch 1"
    assert said["pruned_by"] == {"epoch": 1, "best": 9.0, "bound": 2.1, "percentile": 50.0,
                                 "n_trials": 3}
    text = " ".join(hpo(tmp_path, "show", 3, "--study", "s").stdout.split())
    assert "its best 9 was above 2.1, the median of the 3 trials COMPLETE by then" in text


def test_by_default_a_trial_is_told_how_many_were_better_at_its_rung(tmp_path: Path) -> None:
    """Five of losses 1 to 5, the sixth of 9 ends after its first epoch, the seventh goes on."""
    write(tmp_path, "s", body="""
        k = len(list(HERE.glob("seen-*")))
        (HERE / f"seen-{k}").touch()
        for epoch in range(8):
            yield {"loss": [1, 2, 3, 4, 5, 9, 2.5][k] - epoch / 10}
    """, epochs=8)
    search(tmp_path, "s", "--n-trials", 7, "--prune-startup", 5)
    found = trials(tmp_path, "s")
    assert [len(t.intermediate_values) for t in found] == [8, 8, 8, 8, 8, 1, 8]
    said = data(tmp_path, 5)
    assert said["reason"] == "rungs at epoch 0"
    assert said["pruned_by"] == {"epoch": 0, "best": 9.0, "n_better": 5, "n_trials": 5}
    text = " ".join(hpo(tmp_path, "show", 5, "--study", "s").stdout.split())
    assert ("5 of the 5 other trials that had come as far as epoch 0 had been better than its "
            "best 9; the better half goes on") in text


def test_a_trial_that_an_optuna_script_added_is_shown_without_what_it_lacks(
    tmp_path: Path
) -> None:
    """No seed, ticket, worker, log or epochs of ours: all of it is called so."""
    samples.stored(tmp_path, "toy").close()
    at = ("--study", "toy", "--home", tmp_path)
    text = hpo(tmp_path, "show", 0, *at).stdout
    assert "seed not stored, device not stored" in text and "is not on this machine" in text
    assert "not possible: it has no stored epoch" in " ".join(text.split())
    said = strict_json(hpo(tmp_path, "show", 0, *at, "--json").stdout)
    assert said["worker"] is None and said["seed"] is None and len(said["curve"]) == 8


def test_a_running_trial_is_known_by_its_ticket(db: Database) -> None:
    """On SQLite and PostgreSQL; its own attributes come with its end."""
    db.runs.save_study("s", module="s", metric="loss", direction="minimize", epochs=3,
                       settings={"sampler": "random"}, space={}, data={})
    ensure_study(db, "s", "minimize", "loss")
    db.tickets.write("s", "s", "trial", [NewTicket(0, payload={"seed": 7})])
    db.runs.beat("far|5|1", "s", "far", 5, "gpu 1", {"n_threads": 4})
    claim = db.tickets.claim("s", "far|5|1", "far", 5, 30)
    assert claim is not None and claim.trial_id is not None
    kind = optuna.distributions.FloatDistribution(0, 1)
    db.studies.set_trial_param(claim.trial_id, "x", 0.5, kind)
    db.report(claim.trial_id, "s", 0, 0, 1.5, {"loss": 1.5, "acc": math.nan})
    one = find(db, "s", "0")
    assert one.worker is not None and one.worker["device"] == "gpu 1"
    assert (one.seed, one.owner, one.ran_with) == (7, "far|5|1", {"n_threads": 4})
    assert one.trial.curve == ((0, 1.5),) and "still running" in str(one.why_no_replay)
    assert how_chosen(one) == {
        "x": "drawn at random (--sampler random); by the study's latest sampler, its own is "
             "not stored"}


def test_the_command_that_replays_names_the_home_it_was_asked_at(home: Path) -> None:
    text = hpo(home.parent, "show", 0, "--study", "s", "--home", home / "hpo-runs").stdout
    assert text.splitlines()[-1].endswith(f"--home {home / 'hpo-runs'}")
    said = data(home, 0, "--storage", f"{url(home)}")
    assert said["replay"] == "hpo replay 0 --study s"


def test_a_file_that_is_no_whole_archive_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04 and no more")
    assert ask.checkpoint_state(tmp_path, "x.pt") == "damaged"


@pytest.mark.parametrize(("text", "wanted"), [
    ("7", ("search", 7)), ("search/7", ("search", 7)), ("grid/3", ("grid", 3)),
    ("lr-range/0", ("lr-range", 0)), (" 12 ", ("search", 12))])
def test_a_trial_is_named_by_number_or_by_phase_and_number(text: str, wanted: Any) -> None:
    assert parse(text) == wanted


def test_a_curve_of_text_keeps_its_highest_and_lowest_value() -> None:
    own = [(0, 1.0), (1, 2.0), (2, float("nan")), (3, 3.0)]
    assert draw(own, [(0, 2.0)], width=40, height=3) == [
        "3.0000 |               *", "       |.    *", "1.0000 |*", " epoch  0              3"]
    assert draw([(0, float("nan"))], [], width=40, height=3) == []
    thousand = draw([(e, e) for e in range(1000)], [], width=60, height=5)
    assert max(map(len, thousand)) <= 60 and "0" in thousand[-1] and "999" in thousand[-1]


def test_a_question_about_a_trial_loads_no_torch(home: Path) -> None:
    code = ("import sys\nsys.argv = ['hpo', 'show', '4', '--study', 's']\n"
            "from hpo.cli import main\n"
            "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=home, env=environment(), text=True,
                          capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
