"""The command line: exit codes, one clear line on stderr, and help that loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import answered, environment, hpo, search, trials, write, write_text

COMMANDS = ("run", "worker", "check", "doctor", "lr-range", "status", "show", "replay", "best",
            "report", "export", "delete", "registry", "dashboard", "init")


def test_help_lists_every_command_and_loads_neither_torch_nor_optuna(tmp_path: Path) -> None:
    code = ("import sys; sys.argv = ['hpo', '--help']\n"
            "from hpo.cli import main\n"
            "try:\n    main()\n"
            "finally:\n    assert not {'torch', 'optuna', 'sqlalchemy'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f" {command} " in done.stdout


def test_every_flag_of_run_is_in_its_help(tmp_path: Path) -> None:
    text = hpo(tmp_path, "run", "--help").stdout
    for flag in ("study", "name", "n-trials", "workers", "devices", "sampler", "pruner",
                 "prune-startup", "prune-warmup", "seed", "epochs", "timeout",
                 "epoch-timeout", "phases", "top-k", "confirm-seeds", "max-retries",
                 "max-failures", "allow-duplicates", "allow-space-change", "data-dir",
                 "data-fraction", "home", "storage"):
        assert f"--{flag} " in text, flag


@pytest.mark.parametrize(("words", "said"), [
    (("run",), "Missing option '--study'"),
    (("run", "--study", "digits", "--n-trial", "3"), "--n-trials"),
    (("run", "--study", "digits", "--workers", "two"), "--workers"),
    (("nosuch",), "No such command 'nosuch'"),
    (("run", "--study", "digts"), "did you mean 'digits'?"),
    (("run", "--study", "digits", "--sampler", "tpee"), "did you mean 'tpe'?"),
    (("run", "--study", "digits", "--phases", "serch"), "did you mean 'search'?"),
    (("run", "--study", "digits", "--storage", "nonsense"), "nonsense"),
    (("run", "--study", "digits", "--data-dir", "nowhere"), "nowhere: there is no such folder"),
    (("best", "--study", "s", "--rank", "0"), "--rank must be at least 1, got 0"),
    (("check", "--study", "nosuch"), "there is no search_spaces/nosuch.py"),
    (("lr-range", "--study", "digits", "--low", "1", "--high", "0.1"),
     "--low must be below --high"),
])
def test_bad_input_ends_with_code_2_and_one_clear_message(
    tmp_path: Path, words: tuple, said: str
) -> None:
    done = hpo(tmp_path, *words, code=2)
    assert said in done.stderr
    assert not (tmp_path / "hpo-runs" / "hpo.db").exists()


@pytest.mark.parametrize("words", [("run", "--study", "quad"), ("lr-range", "--study", "digits")])
def test_a_home_that_cannot_be_made_ends_with_code_2(tmp_path: Path, words: tuple) -> None:
    write(tmp_path, "quad")
    (tmp_path / "file").touch()
    done = hpo(tmp_path, *words, "--home", tmp_path / "file" / "x", code=2)
    assert done.stderr == f"hpo: --home {tmp_path / 'file' / 'x'}: Not a directory\n"


def test_a_server_that_is_not_there_is_told_within_seconds_without_the_password(
    tmp_path: Path
) -> None:
    started = time.monotonic()
    done = hpo(tmp_path, "status", "--study", "s", "--storage",
               "postgresql://me:secret@127.0.0.1:1/x", code=1)
    assert time.monotonic() - started < 30
    assert "127.0.0.1" in done.stderr and "refused" in done.stderr
    assert "secret" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_registry_of_an_unknown_study_names_the_near_one(tmp_path: Path) -> None:
    write(tmp_path, "quad")
    search(tmp_path, "quad", "--n-trials", 1)
    done = hpo(tmp_path, "registry", "list", "--study", "quod", code=None)
    assert done.returncode != 0 and "did you mean 'quad'" in done.stderr
    assert "nothing is registered yet" in hpo(tmp_path, "registry", "list", "--study",
                                              "quad").stdout


def test_a_variable_stands_for_a_flag_and_the_flag_beats_it(tmp_path: Path) -> None:
    write(tmp_path, "quad", more="n_trials=1")
    variables = {"HPO_N_TRIALS": "2", "HPO_HOME": str(tmp_path / "other"), "HPO_WORKERS": "1",
                 "HPO_PHASES": "search", "HPO_STUDY": "quad"}
    storage = f"sqlite:///{tmp_path / 'other' / 'hpo.db'}"
    hpo(tmp_path, "run", env=variables)
    assert len(trials(tmp_path, "quad", storage)) == 2
    hpo(tmp_path, "run", "--n-trials", 3, env=variables)
    assert len(trials(tmp_path, "quad", storage)) == 3
    assert not (tmp_path / "hpo-runs").exists()


def test_a_debug_flag_shows_the_traceback_of_bad_input(tmp_path: Path) -> None:
    write_text(tmp_path, "s", "STUDY = 3")
    done = subprocess.run([sys.executable, "-m", "hpo", "--debug", "run", "--study", "s"],
                          cwd=tmp_path, env=environment(), capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "hpo: study 's'" in done.stderr


def test_check_says_what_the_study_is_and_makes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "quad")
    done = hpo(tmp_path, "check", "--study", "quad")
    assert "study quad" in done.stdout and done.stdout.rstrip().endswith("ok")
    assert [path.name for path in tmp_path.iterdir()] == ["search_spaces"]


def test_a_range_test_prints_its_pick_and_draws_its_curve(tmp_path: Path) -> None:
    """C49: within the module's bounds, at most one epoch's steps, and no database is made."""
    words = ("lr-range", "--study", "digits", "--devices", "cpu", "--json")
    found = json.loads(hpo(tmp_path, *words).stdout)
    assert found["low"] <= found["pick"] <= found["high"]
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.db"))


def test_a_study_that_is_deleted_is_gone_and_can_be_made_anew(tmp_path: Path) -> None:
    write(tmp_path, "quad")
    search(tmp_path, "quad", "--n-trials", 1)
    hpo(tmp_path, "delete", "--study", "quad", "--yes")
    hpo(tmp_path, "best", "--study", "quad", code=3)
    for folder in ("artifacts", "logs", "reports"):
        assert not (tmp_path / "hpo-runs" / folder / "quad").exists()
    search(tmp_path, "quad", "--n-trials", 2)
    assert len(trials(tmp_path, "quad")) == 2


def test_nothing_is_deleted_without_an_answer(tmp_path: Path) -> None:
    """Neither a pipe nor an answer that nobody could give is a yes."""
    write(tmp_path, "quad")
    search(tmp_path, "quad", "--n-trials", 1)
    done = hpo(tmp_path, "delete", "--study", "quad", code=2)
    assert done.stderr.endswith("give --yes\n")
    assert len(trials(tmp_path, "quad")) == 1


@pytest.mark.parametrize("answer", ["y", "n"])
def test_who_deletes_is_told_before_what_would_be_gone(tmp_path: Path, answer: str) -> None:
    write(tmp_path, "quad")
    hpo(tmp_path, "run", "--study", "quad", "--n-trials", 2, "--top-k", 1, "--confirm-seeds", 1,
        "--phases", "search,confirm", "--workers", 1)
    done = answered(tmp_path, answer, "delete", "--study", "quad")
    assert ("delete study 'quad', its trials (2 of search, 1 of confirm) and its files? [y/N]"
            in done.stdout), done
    gone = answer == "y"
    assert done.returncode == (0 if gone else 1)
    hpo(tmp_path, "best", "--study", "quad", code=3 if gone else 0)


def test_registered_results_outlive_their_study_and_its_pictures_do_not(tmp_path: Path) -> None:
    write(tmp_path, "quad")
    words = ("run", "--study", "quad", "--n-trials", 2, "--top-k", 1, "--confirm-seeds", 1,
             "--phases", "search,confirm", "--workers", 1)
    hpo(tmp_path, *words)
    [row] = json.loads(hpo(tmp_path, "registry", "list", "--json").stdout)
    hpo(tmp_path, *words)
    [again] = json.loads(hpo(tmp_path, "registry", "list", "--json").stdout)
    assert (again["id"], again["created_at"]) == (row["id"], row["created_at"])
    hpo(tmp_path, "delete", "--study", "quad", "--yes")
    assert not [path for path in (tmp_path / "hpo-runs/artifacts").rglob("*") if path.is_file()]
    assert "--all` shows them" in hpo(tmp_path, "registry", "list").stdout
    assert "study deleted" in hpo(tmp_path, "registry", "list", "--all").stdout
    assert row["id"] in hpo(tmp_path, "registry", "show", row["id"][:8]).stdout


@pytest.mark.parametrize(("body", "said"), [
    ('yield {"accuracy": x}', "'loss' is missing, got 'accuracy'"),
    ("yield x", "expected a dict with 'loss', got float"),
    ("return\nyield", "it ended without yielding 'loss'"),
    ("return {'loss': x}", "returned dict"),
    ('yield {"loss": open("nowhere.csv")}', "s.py line"),
])
def test_check_takes_an_objective_s_first_epoch(tmp_path: Path, body: str, said: str) -> None:
    write(tmp_path, "s", body=body)
    done = hpo(tmp_path, "check", "--study", "s", code=2)
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    write(tmp_path, "s")
    assert "its first epoch gives loss=0.09" in hpo(tmp_path, "check", "--study", "s").stdout


def test_init_sets_a_database_up_and_may_be_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        done = hpo(tmp_path, "init", "--home", tmp_path / "h")
        assert done.stdout == f"sqlite:///{tmp_path / 'h' / 'hpo.db'} is set up\n"
    assert (tmp_path / "h" / "hpo.db").exists()


def test_a_study_reads_as_text_and_as_json(tmp_path: Path) -> None:
    write(tmp_path, "quad")
    search(tmp_path, "quad", "--n-trials", 2)
    status = hpo(tmp_path, "status", "--study", "quad").stdout
    assert "2 COMPLETE" in status
    data = json.loads(hpo(tmp_path, "status", "--study", "quad", "--json").stdout)
    assert data["phases"]["search"]["states"] == {"COMPLETE": 2}
    assert "not confirmed on fresh seeds yet" in hpo(tmp_path, "best", "--study", "quad").stdout
    assert json.loads(hpo(tmp_path, "registry", "list", "--json").stdout) == []
    shown = hpo(tmp_path, "registry", "show", "nosuch", code=2)
    assert "hpo registry list" in shown.stderr


def test_a_timeout_stops_in_order_and_says_how_to_go_on(tmp_path: Path) -> None:
    write(tmp_path, "s", body='time.sleep(0.2)\nyield {"loss": x}')
    done = search(tmp_path, "s", "--n-trials", 500, "--timeout", 6)
    assert "the same command goes on from here" in done.stdout
    found = trials(tmp_path, "s")
    assert 0 < len(found) < 500
    assert {trial.state.name for trial in found} <= {"COMPLETE", "PRUNED", "FAIL"}
