"""Pruning through whole runs: different lengths, directions and epoch numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import hpo, reasons, search, states, trials, write, write_tape

ACCURACIES = [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3], [0.15, 0.9], [0.25, 0.25]]
METRICS = '{"acc": value, "loss": 1 - value}'


def test_one_long_trial_does_not_cut_the_others_short(tmp_path: Path) -> None:
    """C21.1: at epoch 2 there is one trial to compare with: trial 5 is COMPLETE, 3 values."""
    write_tape(tmp_path, "s", [*[[5, 4]] * 4, [5, 4, 1], [4, 3.5, 3]])
    search(tmp_path, "s", "--n-trials", 6,
           "--pruner", "median", "--prune-startup", 5, "--prune-warmup", 0)
    last = trials(tmp_path, "s")[5]
    assert last.state.name == "COMPLETE"
    assert last.intermediate_values == {0: 4, 1: 3.5, 2: 3}


def test_a_trial_is_pruned_where_enough_others_came_as_far(tmp_path: Path) -> None:
    """C21.2: five trials reached epoch 2, so trial 5 is PRUNED there."""
    write_tape(tmp_path, "s", [*[[5, 4, 1]] * 5, [4, 3.5, 3]])
    search(tmp_path, "s", "--n-trials", 6,
           "--pruner", "median", "--prune-startup", 5, "--prune-warmup", 0)
    last = trials(tmp_path, "s")[5]
    assert (last.state.name, last.user_attrs["reason"]) == ("PRUNED", "median at epoch 2")


@pytest.mark.parametrize(("goal", "best"), [('maximize="acc"', 0.3), ('minimize="loss"', 0.7)])
def test_pruning_follows_the_direction_of_the_metric(
    tmp_path: Path, goal: str, best: float
) -> None:
    """C22.1, C22.2: trial 3 is PRUNED at epoch 0, trial 4 COMPLETE, trial 2 the best."""
    write_tape(tmp_path, "s", ACCURACIES, goal=goal, metrics=METRICS)
    done = search(tmp_path, "s", "--n-trials", 5,
                  "--pruner", "median", "--prune-startup", 3, "--prune-warmup", 0)
    found = trials(tmp_path, "s")
    assert states(found) == ["COMPLETE"] * 3 + ["PRUNED", "COMPLETE"]
    assert reasons(found)[3] == "median at epoch 0"
    assert found[2].value == pytest.approx(best)
    assert f"best {best} (trial 2)" in done.stdout
    assert "warning" not in done.stdout


def test_a_loss_that_is_maximized_is_one_warning(tmp_path: Path) -> None:
    """C22.3: it names both words."""
    write_tape(tmp_path, "s", ACCURACIES, goal='maximize="loss"', metrics=METRICS)
    done = search(tmp_path, "s", "--n-trials", 1)
    warnings = [line for line in done.stdout.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "loss" in warnings[0] and "maximize" in warnings[0]


@pytest.mark.parametrize("goal", ['direction="max"', 'minimize=None', 'maximize="", minimize=""'])
def test_a_missing_or_misspelt_direction_ends_with_code_2(tmp_path: Path, goal: str) -> None:
    """C22.4: before any trial."""
    write(tmp_path, "s", goal=goal)
    done = hpo(tmp_path, "run", "--study", "s", "--n-trials", 1, code=2)
    assert done.stderr.startswith("hpo: study 's'")
    assert not (tmp_path / "hpo-runs").exists()


def test_epoch_numbers_that_are_broken_fail_and_no_value_is_dropped(tmp_path: Path) -> None:
    """C23: whole numbers that rise; the reason holds the two numbers, e.g. 0 after 0."""
    write(tmp_path, "s", "kind=Categorical(list(range(8)))", """
        import numpy
        rows = {0: (0, 0, 1), 1: (0, 1.5, 2), 2: (2, 1, 0), 3: (-1, 0, 1), 4: ("0", "1", "2"),
                5: numpy.arange(3)}
        if kind == 6:
            for loss in (3, 2, 1):
                yield {"loss": loss}
        elif kind == 7:
            for fold in range(3):
                for k in range(4):
                    yield {"loss": 4 - k}
        else:
            for epoch in rows[kind]:
                yield {"epoch": epoch, "loss": 1.0}
    """, epochs=3)
    hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", "--workers", 1,
        "--max-failures", 0)
    found = {trial.params["kind"]: trial for trial in trials(tmp_path, "s/grid")}
    assert [found[k].state.name for k in range(8)] == ["FAIL"] * 5 + ["COMPLETE"] * 3
    for k, said in enumerate(["epoch 0 after epoch 0", "epoch 1.5 after epoch 0",
                              "epoch 1 after epoch 2", "epoch -1 after", "epoch '0' after"]):
        assert said in found[k].user_attrs["reason"]
    assert found[5].intermediate_values == {0: 1, 1: 1, 2: 1}
    assert found[6].intermediate_values == {0: 3, 1: 2, 2: 1}
    assert found[7].intermediate_values == {k: 4 - k % 4 for k in range(12)}
