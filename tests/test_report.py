"""The end table, the verdict, the Markdown and the JSON say what the numbers say, and no more."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import optuna
import pytest
import study_samples as samples
from optuna.distributions import FloatDistribution, IntDistribution
from study_samples import candidate

from hpo import report
from hpo.comparison import compare
from hpo.read_results import collect
from hpo.results import Phase, Trial

BASELINES = ("grid", "lr-range", "default")
NAMES = {"grid": "the grid", "lr-range": "the LR-range pick", "default": "the defaults"}


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def strict(text: str) -> dict:
    """Parse JSON as a reader does who knows neither NaN nor Infinity."""
    return json.loads(text, parse_constant=refuse)


def confirmed(results, source) -> Any:
    """Return the source's best candidate's validation scores."""
    found = results.candidate(source)
    return found and found.val


def best(results) -> Any:
    """Return the search's best trial, which these tests know to be there."""
    return results.best("search")


# The verdict


def test_a_search_clearly_above_every_baseline_has_won():
    said = report.verdict(samples.results())
    assert said.startswith("Worth it. The search won: on test_accuracy its best is clearly better "
                           "than the grid (by 0.0150 ± 0.0032), the LR-range pick (by 0.0210 ± ")
    assert "after" in said and "the grid spent 72" in said


def test_a_search_below_a_baseline_has_lost():
    found = [candidate("search#1", 0.90, 0.901, 0.902), candidate("grid", 0.95, 0.951, 0.952)]
    said = report.verdict(samples.results(candidates=found))
    assert said.startswith("Not worth it. The search lost: on val_accuracy its best is clearly "
                           "worse than the grid (by 0.0500 ± ")


def test_a_difference_inside_the_noise_is_called_that():
    found = [candidate("search#1", 0.95, 0.97, 0.96), candidate("grid", 0.94, 0.96, 0.965)]
    said = report.verdict(samples.results(candidates=found))
    assert said.startswith("Not worth it. No difference that these seeds can show:")
    assert "the grid (0.0050 ± 0.0215 better) by no more than the noise of 3 seeds" in said


def test_one_seed_decides_nothing():
    found = [candidate("search#1", 0.99), candidate("grid", 0.5)]
    said = report.verdict(samples.results(candidates=found))
    assert said.startswith("Not decided:")
    assert "with one seed too few to tell that from noise" in said


def test_equal_scores_are_called_the_same():
    found = [candidate("search#1", 0.9, 0.9), candidate("grid", 0.9, 0.9)]
    assert "scores the same as the grid" in report.verdict(samples.results(candidates=found))


def test_missing_baselines_are_named():
    found = [candidate("search#1", 0.98, 0.981), candidate("grid", 0.90, 0.901)]
    assert report.verdict(samples.results(candidates=found)).endswith(
        "Not compared, for want of confirmed scores: the LR-range pick and the defaults.")


def test_without_any_baseline_nothing_is_claimed():
    said = report.verdict(samples.results(candidates=[candidate("search#1", 0.98, 0.99)]))
    assert "No baseline was confirmed" in said and "0.9850 (2 seeds)" in said
    assert "best, trial 3 (rank 1), has" in said and "#" not in said
    assert "better" not in said


def test_an_unconfirmed_search_quotes_no_score():
    said = report.verdict(samples.results(candidates=[]))
    number = best(samples.results()).number
    assert said.startswith(f"The search's best, trial {number}, was not confirmed on fresh seeds")
    assert "0." not in said


def test_a_failed_confirmation_is_told():
    lost = samples.results(candidates=[report_candidate_without_scores()])
    assert "no COMPLETE confirmation on fresh seeds" in report.verdict(lost)


def report_candidate_without_scores():
    from hpo.results import Candidate

    return Candidate("search#1", {"lr": 0.1})


def test_a_search_of_failures_says_what_failed():
    """C48.2."""
    phases = {"search": Phase("search", "toy", samples.failed(3))}
    said = report.verdict(samples.results(candidates=[], phases=phases))
    assert "FAIL: 3" in said and "boom" in said


@pytest.mark.parametrize(("found", "words"), [
    ((), "No search trial has run yet"),
    (tuple(Trial(i, "PRUNED", 0.5, reason="median at epoch 1") for i in range(3)), "PRUNED: 3"),
])
def test_a_search_without_a_complete_trial_has_no_result(found, words):
    """C48.1, C48.3."""
    said = report.verdict(samples.results(
        candidates=[], phases={"search": Phase("search", "toy", found)}))
    assert words in said and "there is no result" in said


def test_less_is_better_where_the_metric_is_minimized():
    found = [candidate("search#1", 0.10, 0.11), candidate("grid", 0.50, 0.51)]
    said = report.verdict(samples.results(candidates=found, metric="val_loss", maximize=False))
    assert "clearly better than the grid (by 0.4000 ± " in said


def generated_case(seed: int):
    """Return a study with drawn scores: any difference, noise, number of seeds and baselines."""
    rng = random.Random(seed)
    noise, n = rng.choice((0.0, 0.001, 0.02)), rng.choice((1, 2, 3, 8))
    top_k, mean = rng.choice((1, 3)), {name: rng.choice((0.9, 0.9, 0.91, 0.99))
                                       for name in ("search", *BASELINES)}
    found = [candidate(name, *(mean[name.split("#")[0]] + rng.gauss(0, noise) for _ in range(n)))
             for name in (*(f"search#{i + 1}" for i in range(top_k)), *BASELINES)
             if rng.random() < 0.85 or name == "search#1"]
    return samples.results(candidates=found, maximize=rng.random() < 0.5,
                           data={"n_val": 359} if rng.random() < 0.5 else {},
                           phases=samples.results().phases if rng.random() < 0.7 else {})


@pytest.mark.parametrize("seed", range(200))
def test_every_verdict_agrees_with_the_means_and_the_test(seed):
    """Each baseline is named exactly once, under the word that its own numbers call for."""
    results = generated_case(seed)
    said = report.verdict(results)
    found: dict[str, Any] = {c.source: c for c in compare(results)}
    ours = confirmed(results, "search")
    # What follows is about costs and about what is missing.
    headline = re.split(r" To show| The search had| Fresh seeds| It passed| It reached| Its \d+"
                        r"| Not compared", said)[0]
    n_choices = sum(c.source == "search" for c in results.candidates)
    assert (f"chosen among {n_choices} by" in headline) == (bool(found) and n_choices > 1)
    for source in BASELINES:
        if source not in found:
            assert NAMES[source] not in headline
            continue
        theirs = confirmed(results, source)
        clause = next(part for part in headline.split("; it ") if NAMES[source] in part)
        gain = (ours.mean - theirs.mean) * (1 if results.maximize else -1)
        if "clearly better" in clause:
            assert gain > 0 and found[source].p_corrected < 0.05 and ours.n > 1
        elif "clearly worse" in clause:
            assert gain < 0 and found[source].p_corrected < 0.05 and ours.n > 1
        elif "scores the same" in clause:
            assert gain == pytest.approx(0)
        elif "one seed" in clause:
            assert ours.n == 1
        else:
            assert "noise" in clause and found[source].p_corrected >= 0.05
            coarse = found[source].grain or 0
            assert coarse > max(ours.sd, theirs.sd) or not coarse


def test_the_best_of_the_search_is_the_best_by_its_confirmed_mean():
    found = [candidate("search#1", 0.90, 0.92), candidate("search#2", 0.95, 0.97)]
    chosen = samples.results(candidates=found).candidate("search")
    assert chosen and chosen.name == "search#2"


def test_equal_means_do_not_read_as_noise_of_minus_zero():
    found = [candidate("search#1", 0.9, 0.9), candidate("default", 0.9, 0.9)]
    assert "-0.0" not in report.verdict(samples.results(candidates=found))


# The table


def test_the_table_has_a_row_each_with_scores_trials_and_epochs():
    rows: list[Any] = report.summary(samples.results())
    assert [row.source for row in rows] == ["search", *BASELINES]
    assert rows[0].val.mean == pytest.approx(0.982) and rows[0].test.mean == pytest.approx(0.979)
    assert (rows[1].n_trials, rows[1].n_epochs) == (9, 72)
    assert (rows[3].n_trials, rows[3].n_epochs) == (0, 0)
    assert rows[2].n_epochs == 9  # one trial of 8 epochs, and the sweep's one


def test_the_plain_table_is_aligned_and_never_shows_the_search_score_as_the_result():
    text = report.plain_table(samples.results())
    score = best(samples.results()).score
    assert len(text.splitlines()) == 5
    assert "0.9820 ± 0.0010" in text and "0.9790 ± 0.0010" in text
    assert f"{score:.4f}" not in text


def test_the_terminal_table_shows_the_same_cells():
    from rich.console import Console

    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(report.summary_table(samples.results()))
    title, *lines = capture.get().splitlines()
    assert title.rstrip() == "toy: mean ± sd over 3 fresh seeds" and len(lines) == 6
    assert [" ".join(line.split()) for line in lines] == [
        "passed search minus it", "trial test_accuracy trials epochs after (95 %)",
        "search 3 0.9790 ± 0.0010 20 132",
        "grid 3 0.9640 ± 0.0010 9 72 32 +0.0150 ± 0.0032",
        "LR range 3 0.9580 ± 0.0010 1 9 8 +0.0210 ± 0.0032",
        "defaults 3 0.9470 ± 0.0010 0 0 +0.0320 ± 0.0032"]


def test_the_terminal_table_fits_80_columns_whole_where_numbers_are_long():
    from rich.console import Console

    phases = samples.results().phases
    long = Phase("search", "toy", samples.trials(400, 0.985), 400)
    found = [*samples.results().candidates]
    found[0] = candidate("search#1", 0.98, 0.983, 0.982, test=(0.978, 0.980, 0.979))
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(report.summary_table(samples.results(
            candidates=found, phases={**phases, "search": long})))
    assert "…" not in capture.get() and len(capture.get().splitlines()) == 7
    assert long.n_epochs > 1000 and f" {long.n_epochs:.0f} " in capture.get()


def test_the_terminal_table_counts_seeds_by_row_where_some_were_lost():
    from rich.console import Console

    console = Console(width=100, no_color=True)
    found = [candidate("search#1", 0.98, 0.983), candidate("grid", 0.9, 0.91, 0.92)]
    with console.capture() as capture:
        console.print(report.summary_table(samples.results(candidates=found)))
    assert "seeds" in capture.get().splitlines()[2] and "over fresh seeds" in capture.get()


def test_what_has_not_run_is_said_so_and_not_that_it_failed():
    text = report.plain_table(samples.results(candidates=[], phases={}))
    assert text.count("not run") == 4 and "never" not in text


def test_a_sweep_that_found_no_pick_has_run():
    from dataclasses import replace

    phases = {name: p for name, p in samples.results().phases.items() if name != "lr-range"}
    found = [c for c in samples.results().candidates if c.name != "lr-range"]
    flat = samples.results(phases=phases, candidates=found,
                           sweep=replace(samples.sweep(), pick=None))
    assert "LR range  no pick" in report.plain_table(flat)
    assert "not run" not in report.plain_table(flat)
    assert report.verdict(flat).endswith("The LR range test found no learning rate to pick.")
    assert report.plain_table(replace(flat, sweep=None)).count("not run") == 1


def raced(search: float, grid: float, **other: Any):
    """Return a study whose search and grid have one trial of one epoch each."""
    phases = {name: Phase(name, name, (Trial(0, "COMPLETE", value, curve=((0, value),)),))
              for name, value in (("search", search), ("grid", grid))}
    return samples.results(phases=phases, **other)


@pytest.mark.parametrize(("search", "grid", "cell", "sentence"), [
    (0.95, 0.94, "1", "It passed the grid's best validation score after 1 of 1 epochs;"),
    (0.94, 0.94, "1 (tied)", "It reached the grid's best validation score after 1 of 1 epochs "
                             "and did not pass it;"),
    (1.0, 1.0, "1 (tied)", "It reached the grid's best validation score after 1 of 1 epochs, and "
                           "none is higher;"),
    (0.93, 0.94, "never", "Its 1 epochs never reached the grid's best validation score;"),
])
def test_a_tie_with_the_grid_reads_neither_as_a_loss_nor_as_a_win(search, grid, cell, sentence):
    study = raced(search, grid)
    head, _, row, *_ = report.plain_table(study).splitlines()
    assert "search passed it after" in head and f"  {cell}  " in row
    assert f" {sentence} the grid spent 1, and by then the search stood at {search:.4f} against " \
           f"{grid:.4f}." in report.verdict(study)


def test_a_loss_of_one_is_not_called_the_best_there_can_be():
    study = raced(1.0, 1.0, metric="val_loss", maximize=False)
    assert "and did not pass it;" in report.verdict(study)


# Words


def test_a_verdict_breaks_between_words_at_a_terminal_s_width():
    text = report.verdict(samples.results())
    lines = report.wrapped(text, 60).splitlines()
    assert max(map(len, lines)) <= 60 and len(lines) > 3
    assert " ".join(lines) == text
    assert report.wrapped(text, None) == text
    assert report.wrapped("LR-range pick a" + "b" * 30, 9) == "LR-range\npick\na" + "b" * 30
    assert report.wrapped("a b\nc", 3) == "a b\nc"


def test_a_number_sign_means_nothing_in_a_report():
    """Once `search#1` was rank 1 and `#5` trial 5."""
    found = [candidate("search#1", 0.90, 0.92), candidate("search#2", 0.95, 0.97)]
    text = report.markdown(samples.results(candidates=found, search=samples.failed(2)), {})
    assert not re.search(r"#\d", text) and "`trial 1: error: ValueError: boom`" in text
    assert "The search's row is of its trial 3 (rank 2): by their own one seed the trials were " \
           "ranked, by their mean over fresh seeds one of 2 was chosen." in text


def test_only_a_report_with_test_scores_speaks_of_the_test_split():
    without = samples.results(candidates=[candidate("search#1", 0.98), candidate("grid", 0.97)])
    assert "test split" in report.markdown(samples.results(), {})
    assert "test split" not in report.markdown(without, {})


def test_a_report_says_when_its_numbers_repeat():
    text = report.markdown(samples.results(), {})
    assert "one worker (`--workers 1`)" in text.split("## How to repeat it")[1]


# Importance


def complete(n, params, values):
    distributions = {"x": FloatDistribution(0, 1), "k": IntDistribution(1, 1)}
    return [Trial(i, "COMPLETE", values[i], {name: params[name](i) for name in params},
                  distributions={name: distributions[name] for name in params}) for i in range(n)]


@pytest.mark.parametrize("found", [
    [], samples.failed(3), [Trial(0, "PRUNED", 1.0)],
    complete(1, {"x": lambda i: 0.5}, [1.0]),
    complete(3, {"x": lambda i: i / 3}, [1.0, 1.0, 1.0]),
])
def test_importance_needs_two_different_scores(found):
    """C48.1 to C48.5."""
    assert report.importance(samples.results(search=found)) == {
        "importance": None, "why": "not enough data"}


def test_a_param_that_cannot_vary_has_no_importance():
    """C48.6."""
    found = complete(3, {"x": lambda i: i / 3, "k": lambda i: 1}, [1.0, 2.0, 3.0])
    assert report.importance(samples.results(search=found)) == {"importance": {"x": 1.0, "k": 0.0}}


def test_a_param_of_one_trial_only_breaks_nothing():
    """C48.7."""
    found = complete(4, {"x": lambda i: i / 4}, [1.0, 2.0, 3.0, 4.0])
    extra = complete(5, {"x": lambda i: i / 5, "k": lambda i: 1}, [1, 2, 3, 4, 5.0])[4]
    said = report.importance(samples.results(search=[*found, extra]))
    assert set(said["importance"]) == {"x", "k"}


def test_importance_finds_the_param_that_matters_in_either_direction(capfd):
    rng = random.Random(0)
    rows = [(rng.random(), rng.random()) for _ in range(60)]
    space = {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}
    for sign in (1, -1):
        found = [Trial(i, "COMPLETE", -sign * (a - 0.3) ** 2 + b / 1000, {"a": a, "b": b},
                       distributions=space) for i, (a, b) in enumerate(rows)]
        said = report.importance(samples.results(search=found, maximize=sign > 0))
        assert said["importance"]["a"] > 0.8
        assert sum(said["importance"].values()) == pytest.approx(1)
    assert capfd.readouterr() == ("", "")


# The files


def test_a_report_is_markdown_with_its_pictures_beside_it(tmp_path):
    path = report.write(samples.results(), tmp_path / "r")
    text = path.read_text()
    assert path.name == "report.md" and text.startswith("# toy\n")
    for name in ("progress.png", "curves.png", "lr_range.png", "importance.png", "params.png"):
        assert f"]({name})" in text and (tmp_path / "r" / name).stat().st_size > 5000
    assert report.verdict(samples.results()) in text
    assert "hpo run --study toy --n-trials 20 --seed 0 --sampler tpe" in text
    assert strict((tmp_path / "r" / "report.json").read_text())["name"] == "toy"
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "curves.png", "importance.png", "lr_range.png", "params.png", "progress.png",
        "report.html", "report.json", "report.md"]


def test_a_report_without_data_has_no_pictures_and_says_why(tmp_path):
    report.write(samples.results(), tmp_path)
    text = report.write(samples.results(candidates=[], phases={}, sweep=None),
                        tmp_path).read_text()
    assert not list(tmp_path.glob("*.png"))
    for why in ("no trial is COMPLETE yet", "no trial has reported an epoch yet",
                "there was no LR range test", "not enough data"):
        assert f"No picture: {why}." in text


def test_reasons_are_counted_by_state_and_shown_as_they_were_written(tmp_path):
    odd = samples.failed(2, "error: ValueError: a | b in <module>\nsecond `line`")
    text = report.write(samples.results(search=odd, candidates=[]), tmp_path).read_text()
    assert "| search | 2 | FAIL | `error` | `trial 1: error: ValueError: a \\| b " in text


def test_json_is_strict_whatever_the_values(tmp_path):
    """C19.3: NaN and infinity are null."""
    wild = [Trial(0, "COMPLETE", float("inf"), {"x": float("nan")}, curve=((0, float("nan")),)),
            Trial(1, "PRUNED", float("-inf"), {"x": (64, 32)}, "diverged at epoch 0")]
    data = strict(report.to_json(samples.results(search=wild)))
    first, second = data["phases"]["search"]["trials"]
    assert first["value"] is None and first["curve"] == [[0, None]]
    assert second["params"] == {"x": [64, 32]} and second["reason"] == "diverged at epoch 0"


def test_json_keeps_every_digit_of_a_float():
    """C06."""
    value = 1 / 3 + 1e-16
    found = [Trial(0, "COMPLETE", value, {"lr": 1e-7 / 3}, curve=((0, value),))]
    data = strict(report.to_json(samples.results(search=found)))
    (trial,) = data["phases"]["search"]["trials"]
    assert trial["value"].hex() == value.hex() and trial["params"]["lr"].hex() == (1e-7 / 3).hex()


@pytest.mark.parametrize("search,candidates,phases", list(itertools.product(
    ([], samples.failed(3), samples.trials(1, 0.9)), (None, []), (None, {}))))
def test_every_state_of_a_study_has_a_whole_report(tmp_path, search, candidates, phases):
    other = {} if phases is None else {"phases": phases}
    results = samples.results(search=search, candidates=candidates, **other)
    assert report.write(results, tmp_path).read_text().count("## ") >= 6
    assert strict(report.to_json(results))["verdict"]


# The dashboard's note


@pytest.fixture
def db(tmp_path):
    db = samples.stored(tmp_path)
    yield db
    db.close()


def attrs_of(db):
    return db.studies.get_study_system_attrs(db.studies.get_study_id_from_name("toy"))


def test_the_report_is_the_study_s_note_with_its_pictures(db, tmp_path):
    from optuna_dashboard import get_note

    results = collect(db, "toy")
    report.write(results, tmp_path / "reports" / "toy")
    report.note(db, results, tmp_path)
    body = get_note(optuna.load_study(study_name="toy", storage=db.studies))
    assert report.verdict(results) in body and "](/artifacts/" in body
    metas = [json.loads(v) for k, v in attrs_of(db).items() if k.startswith("artifacts:")]
    assert sorted(m["filename"] for m in metas) == [
        "curves.png", "importance.png", "params.png", "progress.png", "report.html"]
    assert "[All of this as one page, with the module's source](/artifacts/" in body
    for meta in metas:
        start = b"<!DO" if meta["filename"].endswith(".html") else b"\x89PNG"
        assert (tmp_path / "artifacts" / meta["artifact_id"]).read_bytes()[:4] == start


def test_a_second_report_replaces_the_first_one_s_pictures(db, tmp_path):
    results = collect(db, "toy")
    for _ in range(3):
        report.write(results, tmp_path / "reports" / "toy")
        report.note(db, results, tmp_path)
    assert len([k for k in attrs_of(db) if k.startswith("artifacts:")]) == 5
    assert len(list((tmp_path / "artifacts").iterdir())) == 5


def test_a_picture_that_is_no_longer_drawn_is_taken_away(db, tmp_path):
    results = collect(db, "toy")
    folder = tmp_path / "reports" / "toy"
    report.write(results, folder)
    report.note(db, results, tmp_path)
    (folder / "curves.png").unlink()
    report.note(db, results, tmp_path)
    metas = [json.loads(v) for k, v in attrs_of(db).items() if k.startswith("artifacts:")]
    assert sorted(m["filename"] for m in metas if m) == [
        "importance.png", "params.png", "progress.png", "report.html"]
    assert len(list((tmp_path / "artifacts").iterdir())) == 4


def test_a_study_that_has_not_begun_has_no_note(db, tmp_path):
    report.note(db, samples.results(phases={}, candidates=[]), tmp_path)
    assert not attrs_of(db).get("dashboard:note_str:0")
