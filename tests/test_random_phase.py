"""`--phases random`: random search as a baseline beside the search."""

from __future__ import annotations

from pathlib import Path

from commands import hpo, states, trials, write

BODY = """
for epoch in range(run.epochs):
    yield {"loss": (x - 0.3) ** 2 + 1 / (1 + epoch)}
"""
RUN = ("run", "--study", "s", "--workers", 1, "--phases", "random,search,confirm",
       "--confirm-seeds", 2, "--top-k", 1, "--n-trials", 8)


def test_random_search_trains_each_trial_whole_and_is_confirmed(tmp_path: Path) -> None:
    write(tmp_path, "s", body=BODY, epochs=4, more="prune_startup=1")
    out = hpo(tmp_path, *RUN, "--n-random", 6, "--sampler", "random").stdout
    drawn, searched = trials(tmp_path, "s/random"), trials(tmp_path, "s")
    assert states(drawn) == ["COMPLETE"] * 6 and len(searched) == 8
    assert all(len(t.intermediate_values) == 4 for t in drawn)
    assert "PRUNED" in states(searched)
    # A sampler that has learnt nothing yet draws other params.
    assert not {t.params["x"] for t in drawn} & {t.params["x"] for t in searched}
    assert len({t.params["x"] for t in drawn}) == 6
    row = next(line for line in out.splitlines() if line.startswith("random  "))
    best = min(drawn, key=lambda t: t.value or 0.0)
    assert row.split()[1] == str(best.number) and "  6      24  " in row
    confirmed = trials(tmp_path, "s/confirm")
    assert {t.user_attrs["candidate"] for t in confirmed} >= {"random", "search#1"}
    shown = hpo(tmp_path, "show", "random/0", "--study", "s").stdout
    assert "drawn at random (the phase random)" in shown
    assert "random    6 COMPLETE" in hpo(tmp_path, "status", "--study", "s").stdout
    # Again, and with more of them.
    again = hpo(tmp_path, *RUN, "--sampler", "random").stdout
    assert "random: nothing to do, 6 done already" in again
    hpo(tmp_path, *RUN, "--n-random", 7, "--sampler", "random")
    more = trials(tmp_path, "s/random")
    assert [t.params for t in more[:6]] == [t.params for t in drawn] and len(more) == 7


def test_without_a_number_it_has_as_many_trials_as_the_search(tmp_path: Path) -> None:
    write(tmp_path, "s", body=BODY, epochs=1)
    hpo(tmp_path, "run", "--study", "s", "--workers", 1, "--phases", "random", "--n-trials", 5)
    assert len(trials(tmp_path, "s/random")) == 5


def test_a_run_that_is_not_asked_for_it_leaves_it_out_and_says_nothing_of_it(
    tmp_path: Path
) -> None:
    write(tmp_path, "s", body=BODY, epochs=1)
    out = hpo(tmp_path, "run", "--study", "s", "--workers", 1, "--n-trials", 3).stdout
    assert "random" not in out.replace("random pruning", "")


def test_a_number_below_1_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "s")
    done = hpo(tmp_path, *RUN, "--n-random", 0, code=2)
    assert "--n-random must be at least 1, got 0" in done.stderr


def test_a_small_space_is_drawn_once_each(tmp_path: Path) -> None:
    write(tmp_path, "s", space="x=Categorical(0.1, 0.2, 0.3)", body=BODY, epochs=1)
    hpo(tmp_path, "run", "--study", "s", "--workers", 2, "--phases", "random", "--n-trials", 5)
    assert sorted(t.params["x"] for t in trials(tmp_path, "s/random")) == [0.1, 0.2, 0.3]
