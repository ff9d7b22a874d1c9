"""The pool of trainings and the searches that `benchmarks/search.py` replays on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest

from search_spaces.digits import STUDY

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Give the modules `search` and `search_pool`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import search  # type: ignore[import-not-found]
    import search_pool  # type: ignore[import-not-found]

    return search, search_pool


def test_the_pool_that_is_kept_is_whole_and_small(bench: tuple[Any, Any]) -> None:
    _, pools = bench
    pool = pools.load()
    assert pools.PACKED.stat().st_size < 1_000_000
    assert len(pool.params["grid"]) == 5 * 5 * 5 * 3 and len(pool.params["random"]) >= 150
    for kind in ("random", "grid"):
        assert all(STUDY.space[name].contains(value) for params in pool.params[kind]
                   for name, value in params.items())
        assert all(0 in by_seed for by_seed in pool.curves[kind])
    assert {tuple(sorted(by_seed)) for by_seed in pool.curves["random"]} == {(0, 1, 2)}
    assert {len(curve) for by_seed in pool.curves["random"] for curve in by_seed.values()} <= set(
        range(pool.epochs + 1))


def test_training_again_gives_the_curve_that_is_kept(
    bench: tuple[Any, Any], tmp_path: Path
) -> None:
    """To a few images, as another processor adds up in another order."""
    _, pools = bench
    pool = pools.load()
    again = pools.train(pool.params["random"][0], 1, STUDY, tmp_path)
    assert again == pytest.approx(pool.curves["random"][0][1], abs=0.05)


def test_a_line_that_a_kill_has_cut_off_is_trained_again(
    bench: tuple[Any, Any], tmp_path: Path
) -> None:
    _, pools = bench
    path = tmp_path / "curves.jsonl"
    whole = json.dumps({"kind": "grid", "i": 0, "seed": 0, "curve": [0.5]}) + "\n"
    path.write_text(whole + '{"kind": "grid", "i": 1, "se')
    assert [line["i"] for line in pools._lines(path)] == [0]
    assert path.read_text() == whole


def test_a_pick_s_quality_is_that_of_the_seeds_that_did_not_choose_it(
    bench: tuple[Any, Any]
) -> None:
    search, _ = bench
    lucky = {0: [0.2, 0.9], 1: [0.4], 2: [0.6, 0.5]}
    plain = {0: [0.8], 1: [0.8], 2: [0.8]}
    assert search.quality(lucky, 0) == pytest.approx(0.5)
    assert search.picked([lucky, plain], 0) == pytest.approx(0.5)
    assert search.picked([lucky, plain], 1) == pytest.approx(0.8)


def test_the_nearest_params_have_the_same_choices_and_are_free(bench: tuple[Any, Any]) -> None:
    search, pools = bench
    far = {"lr": 1e-2, "weight_decay": 1e-3, "dropout": 0.5, "hidden": 64}
    near = {"lr": 1e-3, "weight_decay": 1e-3, "dropout": 0.0, "hidden": 64}
    other = {**near, "hidden": 32}
    pool = pools.Pool(2, {"random": [far, near, other]}, {"random": [{0: [0.1, 0.2]}] * 3})
    replay = search.Replay(pool, STUDY.space)
    asked = {**near, "lr": 1.1e-3}
    assert replay.nearest(asked, {0, 1, 2}) == 1
    assert replay.nearest(asked, {0, 2}) == 0


def test_a_replay_repeats_and_spends_what_it_may(bench: tuple[Any, Any]) -> None:
    search, pools = bench
    replay = search.Replay(pools.load(), STUDY.space)
    default = search.sides()[-1]
    found = [replay.study(default, 3, 60) for _ in range(2)]
    assert found[0] == found[1]
    spent = [moment.n_epochs for moment in found[0]]
    assert spent == sorted(spent) and spent[-2] < 60 <= spent[-1] < 60 + replay.pool.epochs
    # Start-up: two whole trials.
    assert spent[:2] == [8, 16]
