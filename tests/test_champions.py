"""The champion of a study: who becomes it, who may replace it, and what is said of both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

import storage
from hpo import champions, registry, standing
from hpo.errors import HpoError, InputError, NoResult
from hpo.results import Scores
from storage import Database


@pytest.fixture
def db(tmp_path: Path, sqlite_template: Path) -> Any:
    (tmp_path / "hpo.db").write_bytes(sqlite_template.read_bytes())
    opened = storage.Database(f"sqlite:///{tmp_path / 'hpo.db'}")
    opened.runs.save_study("s", module="s", metric="val_accuracy", direction="maximize")
    yield opened
    opened.close()


def register(
    db: Database, x: float, val: Sequence[float], test: Sequence[float] = (), *,
    phase: str = "search", rank: int = 1, seeds: Sequence[int] = (1, 2, 3), **extra: Any
) -> str:
    runs = [{"seed": seed, "trial": 0, "val": one, "test_metrics": {}}
            for seed, one in zip(seeds, val, strict=False)]
    for run, one in zip(runs, test, strict=False):
        run["test_metrics"] = {"test_accuracy": one}
    return db.registry.add({
        "study": "s", "phase": phase, "rank": rank, "metric": "val_accuracy", "params": {"x": x},
        "scores": runs, "seeds": list(seeds), "val_mean": statistics.fmean(val) if val else None,
        **extra})


def settle(db: Database) -> str | None:
    return champions.settle(db, "s", "val_accuracy", True)


def held(db: Database) -> dict[str, str]:
    return {row["alias"]: row["row_id"] for row in db.aliases.held("s")}


def test_the_first_confirmed_result_with_the_best_validation_mean_is_champion(
    db: Database
) -> None:
    """The test split has no say in it."""
    register(db, 0.1, [0.8, 0.8, 0.8], [0.9, 0.9, 0.9])
    best = register(db, 0.2, [0.9, 0.9, 0.9], [0.7, 0.7, 0.7], phase="grid")
    said = settle(db)
    assert held(db) == {"champion": best}
    assert said == f"champion: grid ({best[:8]}), the best confirmed"


def test_less_is_better_where_the_study_minimizes(db: Database) -> None:
    low = register(db, 0.1, [0.2, 0.2])
    register(db, 0.2, [0.3, 0.3], phase="grid")
    champions.settle(db, "s", "val_accuracy", False)
    assert held(db) == {"champion": low}


def test_a_later_and_better_result_is_challenger_and_the_champion_stays(db: Database) -> None:
    first = register(db, 0.1, [0.80, 0.81, 0.82])
    settle(db)
    second = register(db, 0.2, [0.83, 0.84, 0.86])
    said = settle(db)
    assert held(db) == {"champion": first, "challenger": second}
    assert said is not None and f"search rank 1 ({second[:8]}), against the champion" in said
    assert "`hpo registry promote s@challenger`" in said and "0.0333 better" in said


def test_the_same_confirmation_again_makes_no_challenger(db: Database) -> None:
    for _ in range(2):
        first = register(db, 0.1, [0.80, 0.81])
        register(db, 0.2, [0.80, 0.81], phase="grid")
        said = settle(db)
    assert held(db) == {"champion": first} and said is None
    assert len(db.aliases.history("s")) == 1


def test_a_challenger_that_a_later_run_has_beaten_by_none_loses_the_name(db: Database) -> None:
    champion = register(db, 0.1, [0.80, 0.81])
    settle(db)
    register(db, 0.2, [0.9, 0.9])
    settle(db)
    register(db, 0.3, [0.7, 0.7])
    assert settle(db) is None
    assert held(db) == {"champion": champion}


@pytest.mark.parametrize("row", [
    {"val": [], "scores": []}, {"val": [0.9, 0.9], "lost_seeds": [3]}, {"val": [float("nan")]}])
def test_a_result_that_is_not_confirmed_never_becomes_champion(
    db: Database, row: dict[str, Any]
) -> None:
    row_id = register(db, 0.2, **{"val": [], **row})
    assert settle(db) is None and held(db) == {}
    with pytest.raises(InputError, match="it is not confirmed, so it cannot be champion"):
        champions.promote(db, row_id, force=True)


def test_a_challenger_that_is_shown_to_be_better_becomes_champion(db: Database) -> None:
    first = register(db, 0.1, [0.80] * 3, [0.80, 0.81, 0.82])
    settle(db)
    second = register(db, 0.2, [0.9] * 3, [0.83, 0.84, 0.86])
    settle(db)
    said = champions.promote(db, "s@challenger", force=False)
    assert held(db) == {"champion": second}
    # By hand: differences 0.03, 0.03, 0.04 with mean 0.03333 and t(2) = 4.3027.
    assert said == (f"s: champion is search rank 1 ({second[:8]}), before it was search rank 1 "
                    f"({first[:8]}) (promoted: test_accuracy 0.0333 better (95 % interval "
                    f"+0.0190 to +0.0477, 3 shared seeds))")
    assert [row["row_id"] for row in db.aliases.history("s")
            if row["alias"] == "champion"] == [first, second]


def test_one_that_may_be_no_better_is_refused_with_the_interval_and_forced_on_request(
    db: Database
) -> None:
    first = register(db, 0.1, [0.80, 0.81, 0.82])
    settle(db)
    second = register(db, 0.2, [0.81, 0.80, 0.84])
    with pytest.raises(HpoError, match=r"not shown to be better .*95 % interval -0.0313 to "
                                       r"\+0.0446, 3 shared seeds\); --force") as told:
        champions.promote(db, second[:8], force=False)
    assert told.value.exit_code == 1 and held(db) == {"champion": first}
    champions.promote(db, second[:8], force=True)
    assert held(db) == {"champion": second}
    assert "by --force" in db.aliases.history("s")[-1]["why"]
    assert champions.promote(db, second, force=False).endswith("is the champion already")


def test_a_result_of_a_deleted_study_or_of_another_metric_cannot_be_champion(
    db: Database
) -> None:
    other = register(db, 0.3, [0.9], metric="val_loss")
    with pytest.raises(InputError, match="confirmed by val_loss, and the study is judged by "
                                         "val_accuracy"):
        champions.promote(db, other, force=True)
    row_id = register(db, 0.1, [0.8, 0.8])
    db.delete("s")
    with pytest.raises(InputError, match="its study was deleted"):
        champions.promote(db, row_id, force=True)


def test_a_name_that_points_at_nothing_is_one_clear_error(db: Database) -> None:
    register(db, 0.1, [0.8, 0.8])
    with pytest.raises(NoResult, match="study 's' has no champion"):
        champions.find(db, "s@champion")
    with pytest.raises(InputError, match="accepted are champion, challenger; did you mean"):
        champions.find(db, "s@champoin")
    with pytest.raises(InputError, match="'17' is the number of a trial"):
        champions.find(db, "17")
    with pytest.raises(InputError, match="'zzzz': 0 rows start so"):
        champions.find(db, "zzzz")
    settle(db)
    with pytest.raises(NoResult, match="studies that have one: s"):
        champions.find(db, "t@champion")


def test_a_paired_interval_is_the_one_of_the_t_distribution() -> None:
    a, b = Scores({1: 0.9, 2: 0.8, 3: 0.95, 9: 0.1}), Scores({1: 0.85, 2: 0.79, 3: 0.9, 7: 0.2})
    found = standing.compared(a, b, "loss")
    by_scipy = stats.ttest_rel([0.9, 0.8, 0.95], [0.85, 0.79, 0.9]).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((by_scipy.low, by_scipy.high))
    assert (found.n_seeds, found.mean) == (3, pytest.approx(0.11 / 3))


def test_without_shared_seeds_nothing_is_shown() -> None:
    found = standing.compared(Scores({1: 0.9, 2: 0.8}), Scores({8: 0.5, 9: 0.6}), "loss")
    assert (found.outcome(False), found.n_seeds) == ("unknown", 0)
    assert found.text(False) == "0.3000 worse (0 shared seeds: too few for an interval)"


def test_a_result_with_an_easy_seed_more_is_not_better_for_it(db: Database) -> None:
    """A race trains those that are close on more seeds than the others."""
    fair = register(db, 0.1, [0.80, 0.81], phase="grid")
    register(db, 0.2, [0.79, 0.80, 0.99])
    settle(db)
    assert held(db) == {"champion": fair}


def test_one_image_is_the_least_noise_of_an_accuracy() -> None:
    """Three seeds that all differ by the same one image show nothing."""
    a, b = Scores({1: 0.91, 2: 0.92, 3: 0.93}), Scores({1: 0.9, 2: 0.91, 3: 0.92})
    assert standing.compared(a, b, "accuracy").outcome(True) == "better"
    assert standing.compared(a, b, "accuracy", 0.01).outcome(True) == "noise"


def test_one_seed_shows_nothing() -> None:
    found = standing.compared(Scores({1: 0.9}), Scores({1: 0.8}), "loss")
    assert found.outcome(False) == "unknown"
    assert found.text(False) == "0.1000 worse (1 shared seed: too few for an interval)"


def test_the_list_and_the_row_say_who_is_champion(
    db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a row that a later confirmation has replaced."""
    first = register(db, 0.1, [0.80, 0.81])
    settle(db)
    second = register(db, 0.2, [0.9, 0.9])
    settle(db)
    asked = (tmp_path, db.url, Console(width=200))
    registry.listing("s", *asked, every=False, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [
        ["alias", "id"], ["champion", first[:8]], ["challenger", second[:8]]]
    registry.show("s@champion", *asked, as_json=False)
    shown = capsys.readouterr().out
    assert first in shown and "champion:          since 20" in shown
    registry.show(first[:8], *asked, as_json=True)
    assert json.loads(capsys.readouterr().out)["aliases"][0]["why"] == "the first confirmed"
