"""Settings: what beats what, what a stored study keeps, and which values are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import InputError
from hpo.settings import (
    PHASES,
    STORED,
    Settings,
    check,
    command,
    home_folder,
    parse_phases,
    storage_url,
)

MODULE: dict[str, Any] = {"epochs": 8, "metric": "loss", "direction": "minimize"}


def settings(**given: Any) -> Settings:
    return Settings(study="s", name="s", home=Path("/h"), storage="sqlite:////h/hpo.db", **given)


def test_what_nobody_said_is_the_default() -> None:
    found = settings().resolved(MODULE, None)
    assert (found.n_trials, found.sampler, found.pruner, found.seed) == (20, "tpe", "rungs", 0)
    assert (found.epochs, found.prune_startup, found.prune_warmup) == (8, 2, 0)
    assert (found.top_k, found.confirm_seeds, found.timeout_s) == (3, 3, None)


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 1), (3, 1), (8, 2), (20, 5)])
def test_the_median_prunes_no_trial_in_its_first_quarter_or_its_first_epoch(
    epochs: int, warmup: int
) -> None:
    """C01: all trials of a study of one epoch are COMPLETE."""
    found = settings(epochs=epochs, pruner="median").resolved(MODULE, None)
    assert (found.prune_startup, found.prune_warmup) == (5, warmup)


def test_the_module_beats_the_default() -> None:
    found = settings().resolved({**MODULE, "n_trials": 7, "sampler": "random", "seed": 3}, None)
    assert (found.n_trials, found.sampler, found.seed) == (7, "random", 3)


def test_a_flag_beats_the_module() -> None:
    found = settings(n_trials=5, prune_warmup=0, epochs=4).resolved(
        {**MODULE, "n_trials": 7, "prune_warmup": 3}, None)
    assert (found.n_trials, found.prune_warmup, found.epochs) == (5, 0, 4)


@pytest.mark.parametrize("what", ["epochs", "seed", "data_fraction"])
def test_another_value_of_what_numbers_depend_on_is_refused(what: str) -> None:
    stored = {"epochs": 8, "seed": 0, "data_fraction": 1.0}
    with pytest.raises(InputError, match=f"made with {what}=.*start a new study with --name"):
        settings(**{what: 0.5 if what == "data_fraction" else 9}).resolved(MODULE, stored)


def test_a_stored_study_keeps_its_epochs_when_the_module_says_others() -> None:
    stored = {"epochs": 8, "seed": 4, "data_fraction": 0.5}
    found = settings(seed=4).resolved({**MODULE, "epochs": 99}, stored)
    assert (found.epochs, found.seed, found.data_fraction) == (8, 4, 0.5)


def test_a_study_goes_on_with_what_its_user_said_before() -> None:
    """A flag given once need not be given again; a new one beats it."""
    first = settings(n_trials=50, sampler="random", allow_duplicates=True).resolved(MODULE, None)
    again = settings().resolved(MODULE, first.stored())
    assert (again.n_trials, again.sampler, again.allow_duplicates) == (50, "random", True)
    more = settings(n_trials=60).resolved(MODULE, again.stored())
    assert (more.n_trials, more.sampler) == (60, "random")
    assert settings().resolved(MODULE, more.stored()).n_trials == 60


@pytest.mark.parametrize("what", ["prune_warmup", "prune_startup", "max_retries"])
def test_a_flag_of_nought_is_a_flag(what: str) -> None:
    """0 == False, and still it was said."""
    first = settings(**{what: 3}).resolved(MODULE, None)
    again = settings(**{what: 0}).resolved(MODULE, first.stored())
    assert getattr(again, what) == 0
    assert getattr(settings().resolved(MODULE, again.stored()), what) == 0


def test_leave_for_duplicates_can_be_taken_back() -> None:
    first = settings(allow_duplicates=True).resolved(MODULE, None)
    again = settings(allow_duplicates=False).resolved(MODULE, first.stored())
    assert again.allow_duplicates is False
    assert settings().resolved(MODULE, again.stored()).allow_duplicates is False


def test_a_run_without_the_search_leaves_the_search_s_flags_as_they_were() -> None:
    first = settings(pruner="percentile").resolved(MODULE, None)
    grid = settings(pruner="none", phases=("grid",)).resolved(MODULE, first.stored())
    assert settings().resolved(MODULE, grid.stored()).pruner == "percentile"


def test_a_search_that_goes_on_otherwise_is_told() -> None:
    first = settings(pruner="median").resolved(MODULE, None)
    again = settings(sampler="random", prune_warmup=0).resolved(MODULE, first.stored())
    assert again.changes(first.stored()) == [
        "search: sampler changes from tpe to random for the trials to come",
        "search: prune-warmup changes from 2 to 0 for the trials to come"]
    assert settings().resolved(MODULE, again.stored()).changes(again.stored()) == []


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "none"])
def test_a_pruner_that_waits_for_no_trials_refuses_a_start_up(pruner: str) -> None:
    with pytest.raises(InputError, match=f"--prune-startup: pruner '{pruner}' waits for no"):
        settings(pruner=pruner, prune_startup=3).resolved(MODULE, None)
    assert settings(pruner=pruner).resolved({**MODULE, "prune_startup": 3}, None).pruner == pruner


def test_a_study_goes_on_with_the_folder_of_its_images(tmp_path: Path) -> None:
    """Else a second run would ask for the published set, which its data are not."""
    first = settings(data_dir=tmp_path).resolved(MODULE, None)
    assert settings().resolved(MODULE, first.stored()).data_dir == tmp_path
    other = settings(data_dir=tmp_path / "moved").resolved(MODULE, first.stored())
    assert other.data_dir == tmp_path / "moved"


def test_a_study_s_command_says_all_that_its_numbers_depend_on(tmp_path: Path) -> None:
    images = tmp_path / "my images"
    asked = settings(n_trials=7, data_dir=images, allow_duplicates=True,
                     max_retries=0).resolved(MODULE, None)
    assert command("cifar", "second try", asked.stored()) == (
        "hpo run --study cifar --name 'second try' --n-trials 7 --epochs 8 --seed 0 --sampler tpe "
        "--pruner rungs --prune-startup 2 --prune-warmup 0 --audit-fraction 0.05 --top-k 3 "
        "--confirm-seeds 3 --confirm-budget 0.15 "
        f"--data-fraction 1.0 --max-retries 0 --allow-duplicates --data-dir '{images}'")


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "none"])
def test_a_study_s_command_is_not_refused_by_its_own_pruner(pruner: str) -> None:
    asked = settings(pruner=pruner).resolved(MODULE, None)
    assert "--prune-startup" not in command("s", "s", asked.stored())
    assert f"--pruner {pruner} " in command("s", "s", asked.stored())


def test_a_module_s_new_setting_holds_where_its_user_said_nothing() -> None:
    first = settings(sampler="random").resolved({**MODULE, "n_trials": 7}, None)
    again = settings().resolved({**MODULE, "n_trials": 9, "sampler": "tpe"}, first.stored())
    assert (again.n_trials, again.sampler) == (9, "random")


def test_every_stored_setting_is_a_setting() -> None:
    assert set(STORED) <= set(Settings.__dataclass_fields__)


@pytest.mark.parametrize(("given", "said"), [
    ({"n_trials": 0}, "--n-trials must be at least 1, got 0"),
    ({"n_trials": -1}, "--n-trials must be at least 1, got -1"),
    ({"workers": 0}, "--workers must be at least 1, got 0"),
    ({"epochs": 0}, "--epochs must be at least 1, got 0"),
    ({"seed": -1}, "--seed must be at least 0, got -1"),
    ({"max_retries": -1}, "--max-retries must be at least 0, got -1"),
    ({"timeout_s": 0.0}, "--timeout must be above 0 seconds, got 0"),
    ({"storage_timeout_s": 0.0}, "--storage-timeout must be above 0 seconds, got 0"),
    ({"storage_timeout_s": float("nan")}, "--storage-timeout must be above 0 seconds, got nan"),
    ({"timeout_s": float("nan")}, "--timeout must be above 0 seconds, got nan"),
    ({"data_fraction": 0.0}, "--data-fraction must be above 0 and at most 1, got 0"),
    ({"data_fraction": 1.5}, "--data-fraction must be above 0 and at most 1, got 1.5"),
    ({"sampler": "tpee"}, "--sampler 'tpee' is unknown; did you mean 'tpe'? (accepted are tpe, "
                          "random, grid, gp, cmaes, qmc)"),
    ({"pruner": "no"}, "--pruner 'no' is unknown; did you mean 'none'? (accepted are rungs, "
                       "median, percentile, asha, hyperband, none)"),
    ({"data_dir": Path("/nowhere/at/all")},
     "--data-dir /nowhere/at/all: there is no such folder"),
], ids=lambda value: str(value)[:30])
def test_a_flag_out_of_range_is_told_with_what_is_accepted(given: dict, said: str) -> None:
    """C11.6: 0 and -1 trials are refused."""
    with pytest.raises(InputError) as raised:
        check(settings(**given))
    assert str(raised.value) == said


def test_sound_flags_are_not_refused() -> None:
    check(settings(n_trials=1, prune_startup=0, max_retries=0, timeout_s=0.5, data_fraction=1.0))


def test_phases_come_in_their_order_whatever_the_list_says() -> None:
    assert parse_phases(None, None) == PHASES
    assert parse_phases("search, grid", None) == ("grid", "search")


def test_the_grid_sampler_means_the_grid_phase_alone() -> None:
    """C15: `--sampler grid`."""
    assert parse_phases(None, "grid") == ("grid",)
    assert parse_phases("grid,confirm", "grid") == ("grid", "confirm")


def test_the_grid_sampler_cannot_search() -> None:
    with pytest.raises(InputError, match="--sampler grid is the phase grid"):
        parse_phases("grid,search", "grid")


@pytest.mark.parametrize(("text", "said"), [
    ("serch", "'serch' is no phase; did you mean 'search'?"), (" , ", "--phases names no phase"),
    ("", "--phases names no phase"),
])
def test_an_unknown_phase_lists_the_known_ones(text: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_phases(text, None)
    assert said in str(raised.value)
    assert "lr-range, grid, random, search, confirm" in str(raised.value)


def test_home_is_the_flag_then_the_variable_then_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPO_HOME", raising=False)
    assert home_folder(None) == tmp_path / "hpo-runs"
    monkeypatch.setenv("HPO_HOME", "/other")
    assert home_folder(None) == Path("/other")
    assert home_folder("mine") == tmp_path / "mine"


def test_the_database_is_the_flag_then_the_variable_then_a_file_at_home(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    assert storage_url(None, Path("/h")) == "sqlite:////h/hpo.db"
    monkeypatch.setenv("HPO_STORAGE", "postgresql://a/b")
    assert storage_url(None, Path("/h")) == "postgresql://a/b"
    assert storage_url("sqlite:///x", Path("/h")) == "sqlite:///x"


def test_a_worker_s_order_is_plain_data() -> None:
    import json

    found = replace(settings(), seed=1).resolved(MODULE, None).order(MODULE)
    assert json.loads(json.dumps(found)) == found
