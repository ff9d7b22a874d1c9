"""A trial that gets no better ends before its last epoch, as a result, in a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import hpo, strict_json, trials, write_text

# With a rate of nothing no epoch is better than the first; with a usual one the loss falls on.
MODULE = """
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, EarlyStopping, Recipe, digits

    def build(run, *, lr):
        return Recipe(data=digits(run), model=MLP(hidden=16), optimizer=AdamW(lr=lr),
                      batch_size=256, early_stopping=EarlyStopping(patience=2))

    STUDY = StudySpec(space={"lr": Float(1e-12, 1e-1, log=True)}, build=build,
                      minimize="val_loss", epochs=6, grid={"lr": [1e-12, 3e-2]},
                      defaults={"lr": 1e-12})
    """


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    write_text(folder, "early", MODULE)
    hpo(folder, "run", "--study", "early", "--workers", 1, "--phases", "grid,search",
        "--n-trials", 8, "--pruner", "median", "--prune-startup", 2)
    return folder


def test_such_a_trial_is_complete_with_fewer_epochs_and_says_so(home: Path) -> None:
    first, second = trials(home, "early/grid")
    assert [trial.state.name for trial in (first, second)] == ["COMPLETE", "COMPLETE"]
    assert len(second.intermediate_values) == 6 and "stopped_early" not in second.user_attrs
    short = first.user_attrs
    assert short["n_epochs"] == len(first.intermediate_values) < 6
    assert short["stopped_early"] == "no better val_loss for 2 epochs"
    assert first.value == min(first.intermediate_values.values()) and short["reason"] == ""
    # Both are there for what comes after: the search and its pruner have gone on with them.
    assert {trial.state.name for trial in trials(home, "early")} <= {"COMPLETE", "PRUNED"}
    assert len(trials(home, "early")) == 8


def test_its_training_states_are_gone_and_nothing_is_left_to_do(home: Path) -> None:
    assert not list(home.rglob("epoch-*.state"))
    again = hpo(home, "run", "--study", "early")
    assert len(trials(home, "early/grid")) == 2, again.stdout


def test_show_status_and_replay_know_it_as_a_whole_trial(home: Path) -> None:
    n = len(trials(home, "early/grid")[0].intermediate_values)
    text = hpo(home, "show", "grid/0", "--study", "early").stdout
    assert f"{n} of 6 epochs, stopped early (no better val_loss for 2 epochs)" in text
    assert "COMPLETE" in text.splitlines()[0]
    told = strict_json(hpo(home, "show", "grid/0", "--study", "early", "--json").stdout)
    assert told["stopped_early"] == "no better val_loss for 2 epochs"
    assert "grid      2 COMPLETE" in hpo(home, "status", "--study", "early").stdout
    hpo(home, "replay", "grid/0", "--study", "early")
