"""`hpo replay`: a trial trained again is the same to the last bit, or says where it is not."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import grid, hpo, search, strict_json, trials, write, write_text

from hpo.replay import _shortened

MODULE = """
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, OneCycle, Recipe, digits

    def build(run, *, lr, dropout):
        return Recipe(data=digits(run), model=MLP(hidden=16, dropout=dropout),
                      optimizer=AdamW(lr=lr), schedule=OneCycle(), batch_size=256)

    STUDY = StudySpec(space={"lr": Float(1e-4, 1e-1, log=True), "dropout": Float(0.0, 0.5)},
                      build=build, maximize="val_accuracy", epochs=4,
                      defaults={"lr": 1e-3, "dropout": 0.1}, grid={"lr": [1e-2]})
    """
# Draws from Python's and numpy's generators, and leaves a mark for each epoch that it trains.
NOISY = """
    import random, numpy
    for epoch in range(run.epochs):
        with open(HERE / "epochs", "a") as file:
            print(epoch, run.dir, file=file)
        yield {"loss": x + random.random() + numpy.random.rand(), "epoch_s": time.time()}
"""


def replay(folder: Path, trial: object, *words: object, code: int = 0) -> str:
    return hpo(folder, "replay", trial, "--study", "s", *words, code=code).stdout


def told(folder: Path, trial: object, *words: object, code: int = 0) -> Any:
    return strict_json(replay(folder, trial, *words, "--json", code=code))


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(folder.rglob("*")) if path.is_file()}


def rows(folder: Path) -> list[str]:
    return list(sqlite3.connect(folder / "hpo-runs" / "hpo.db").iterdump())


def changed_row(folder: Path, **news: Any) -> None:
    """Overwrite parts of what the workers said they ran with."""
    with sqlite3.connect(folder / "hpo-runs" / "hpo.db") as db:
        for owner, data in db.execute("select owner, data from hpo_worker").fetchall():
            db.execute("update hpo_worker set data = ? where owner = ?",
                       (json.dumps({**json.loads(data), **news}), owner))


def test_a_recipe_repeats_to_the_last_bit_in_every_phase_and_nothing_is_written(
    tmp_path: Path
) -> None:
    write_text(tmp_path, "s", MODULE)
    search(tmp_path, "s", "--n-trials", 3, "--phases", "grid,search", "--pruner", "none")
    before, in_database = files(tmp_path / "hpo-runs" / "artifacts"), rows(tmp_path)
    logs = files(tmp_path / "hpo-runs" / "logs")
    text = replay(tmp_path, 2)
    assert text.splitlines()[-1] == (
        "trial 2: the same to the last bit, 4 epochs of train_loss, val_loss, val_accuracy, lr "
        "(left out: images_per_s, epoch_s)")
    said = told(tmp_path, "grid/0")
    assert said["same"] and said["changes"] == [] and said["n_epochs"] == 4
    for epoch in said["epochs"]:
        for name in ("train_loss", "val_loss", "val_accuracy", "lr"):
            assert epoch["stored"][name] == epoch["now"][name]
    assert said["ran_with"]["then"]["n_threads"] == said["ran_with"]["now"]["n_threads"] == 1
    assert rows(tmp_path) == in_database
    assert files(tmp_path / "hpo-runs" / "artifacts") == before
    assert files(tmp_path / "hpo-runs" / "logs") == logs


def test_an_own_loop_repeats_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "s", body=NOISY, epochs=3)
    search(tmp_path, "s", "--n-trials", 2)
    (tmp_path / "epochs").unlink()
    said = told(tmp_path, 1)
    assert said["same"] and said["left_out"] == ["epoch_s"]
    trained = [line.split() for line in (tmp_path / "epochs").read_text().splitlines()]
    assert [epoch for epoch, _ in trained] == ["0", "1", "2"]
    assert not any("hpo-runs" in folder or Path(folder).exists() for _, folder in trained)


def test_a_changed_module_differs_from_the_epoch_at_which_it_does(tmp_path: Path) -> None:
    write(tmp_path, "s", body='for e in range(4):\n    yield {"loss": x + e}', epochs=4)
    search(tmp_path, "s", "--n-trials", 1)
    write(tmp_path, "s", body='for e in range(4):\n    yield {"loss": x + e + (e > 1)}', epochs=4)
    x = trials(tmp_path, "s")[0].params["x"]
    lines = replay(tmp_path, 0, code=1).splitlines()
    assert [line.split()[3] for line in lines[1:5]] == ["same", "same", "differs:", "differs:"]
    assert lines[5] == (f"trial 0: first differs at epoch 2: loss stored {x + 2!r}, "
                        f"now {x + 3!r} (difference 1)")
    assert lines[6] == "what may explain it: module: the file of 's' has changed"
    said = told(tmp_path, 0, code=1)
    assert not said["same"] and said["first_difference"] == {
        "epoch": 2, "metric": "loss", "stored": x + 2, "now": x + 3}


def test_a_draw_that_the_seed_does_not_reach_is_found(tmp_path: Path) -> None:
    write(tmp_path, "s", body='yield {"loss": x, "noise": os.urandom(1)[0] + time.time()}')
    search(tmp_path, "s", "--n-trials", 1)
    lines = replay(tmp_path, 0, code=1).splitlines()
    assert "first differs at epoch 0: noise stored" in lines[-2]
    assert lines[-1].startswith("nothing that is stored has changed: look for a draw")


def test_a_pruned_trial_is_trained_up_to_its_last_stored_epoch(tmp_path: Path) -> None:
    write(tmp_path, "s", body="""
        for epoch in range(6):
            with open(HERE / "epochs", "a") as file:
                print(epoch, file=file)
            yield {"loss": (9 if x == 3 else x) + epoch / 10}
    """, space="x=Categorical(1, 2, 3)", epochs=6)
    search(tmp_path, "s", "--n-trials", 3,
           "--pruner", "median", "--prune-startup", 1, "--prune-warmup", 1)
    found = trials(tmp_path, "s")
    pruned = next(t for t in found if t.state.name == "PRUNED")
    n = len(pruned.intermediate_values)
    assert 0 < n < 6
    (tmp_path / "epochs").unlink()
    assert told(tmp_path, pruned.number)["n_epochs"] == n
    assert (tmp_path / "epochs").read_text().split() == [str(epoch) for epoch in range(n)]


def test_a_trial_that_failed_or_diverged_is_held_against_the_epochs_it_had(tmp_path: Path) -> None:
    write(tmp_path, "s", "x=Categorical(1, 2)", """
        for epoch in range(5):
            if x == 1 and epoch == 2:
                raise ValueError("bad")
            yield {"loss": math.nan if epoch == 3 else x, "other": math.nan}
    """, epochs=5, more='grid={"x": [1, 2]}')
    grid(tmp_path, "s", "--max-failures", 0, code=3)
    assert [t.user_attrs["reason"] for t in trials(tmp_path, "s/grid")] == [
        "error: ValueError: bad", "diverged at epoch 3"]
    for number, n_epochs in ((0, 2), (1, 3)):
        said = told(tmp_path, f"grid/{number}")
        assert said["same"] and said["n_epochs"] == n_epochs


def test_epochs_that_an_earlier_trial_had_stored_are_trained_and_not_compared(
    tmp_path: Path
) -> None:
    """As of one that went on from a checkpoint: its own first epoch is 2."""
    write(tmp_path, "s", body=NOISY, epochs=4)
    search(tmp_path, "s", "--n-trials", 1)
    with sqlite3.connect(tmp_path / "hpo-runs" / "hpo.db") as db:
        db.execute("delete from hpo_epoch where epoch < 2")
    said = told(tmp_path, 0)
    assert said["same"] and [epoch["epoch"] for epoch in said["epochs"]] == [2, 3]


def test_what_has_changed_is_named_also_where_the_numbers_have_not(tmp_path: Path) -> None:
    write(tmp_path, "s", body=NOISY, epochs=1)
    search(tmp_path, "s", "--n-trials", 1)
    changed_row(tmp_path, versions={"python": "3.10.0", "torch": "1.0"}, processor="VAX")
    lines = replay(tmp_path, 0).splitlines()
    assert "the same to the last bit" in lines[-2]
    assert "although python was 3.10.0, is 3.1" in lines[-1]
    assert "torch was 1.0, is " in lines[-1] and "processor: VAX, now " in lines[-1]


def test_it_runs_with_as_many_threads_as_the_trial_had(tmp_path: Path) -> None:
    write(tmp_path, "s", body='yield {"loss": x, "n": int(os.environ["OMP_NUM_THREADS"])}')
    search(tmp_path, "s", "--n-trials", 1)
    changed_row(tmp_path, n_threads=2)
    said = told(tmp_path, 0, code=1)
    assert said["first_difference"] == {"epoch": 0, "metric": "n", "stored": 1.0, "now": 2.0}
    assert said["ran_with"]["now"]["n_threads"] == 2


def test_a_trial_that_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    write(tmp_path, "s", body='raise ValueError("x is bad")\nyield {}')
    search(tmp_path, "s", "--n-trials", 1, "--max-failures", 0, code=3)
    done = hpo(tmp_path, "replay", 0, "--study", "s", code=2)
    assert done.stderr == ("hpo: trial 0 of study 's' cannot be replayed: it has no stored epoch "
                           "to compare with (error: ValueError: x is bad)\n")
    done = hpo(tmp_path, "replay", 5, "--study", "s", code=2)
    assert done.stderr == "hpo: trial 5: the search of study 's' has trial 0 alone\n"
    assert "not in" in hpo(tmp_path, "replay", 0, "--study", "nosuch", code=3).stderr


def test_a_module_that_does_not_fit_the_trial_any_more_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "s", body='yield {"loss": x}\nyield {"loss": x}', epochs=2)
    search(tmp_path, "s", "--n-trials", 1)
    write(tmp_path, "s", "y=Float(0.0, 1.0)", 'yield {"loss": y}', epochs=2)
    done = hpo(tmp_path, "replay", 0, "--study", "s", code=2)
    assert done.stderr == ("hpo: the module has changed since the trial: param 'x' is gone from "
                           "the space; param 'y' is new in the space\n")
    path = write(tmp_path, "s", body='raise OSError("no disk")\nyield {"loss": x}', epochs=2)
    done = hpo(tmp_path, "replay", 0, "--study", "s", code=2)
    assert done.stderr.startswith(f"hpo: trial 0 of study 's' cannot be run again: {path} line ")
    assert done.stderr.endswith(": OSError: no disk\n")
    write(tmp_path, "s", body='yield {"loss": x}\nraise OSError("no disk")', epochs=2)
    lines = replay(tmp_path, 0, code=1).splitlines()
    assert "first differs at epoch 1: loss " in lines[-3] and "but none now" in lines[-3]
    assert lines[-2].endswith("OSError: no disk") and "it failed this time" in lines[-2]
    path.unlink()
    assert "there is no search_spaces/s.py" in hpo(
        tmp_path, "replay", 0, "--study", "s", code=2).stderr


def test_a_worker_that_dies_in_mid_replay_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, "s", body='yield {"loss": x}\nyield {"loss": x}', epochs=2)
    search(tmp_path, "s", "--n-trials", 1)
    write(tmp_path, "s", body='yield {"loss": x}\nos._exit(7)', epochs=2)
    done = hpo(tmp_path, "replay", 0, "--study", "s", code=1)
    assert done.stderr.startswith("hpo: the worker ended with code 7 in mid-replay")


@pytest.mark.parametrize(("n", "first", "wanted"), [
    (12, 0, "0 1 2 3 4 5 6 7 8 9 10 11"), (100, 50, "0 1 2 ...46 49 50 51 ...45 97 98 99"),
    (13, 0, "0 1 2 ...7 10 11 12")])
def test_a_long_table_shows_its_ends_and_the_first_difference(
    n: int, first: int, wanted: str
) -> None:
    lines = _shortened([str(i) for i in range(n)], first)
    shown = [f"...{line.split()[1]}" if "..." in line else line for line in lines]
    assert " ".join(shown) == wanted


def test_a_library_that_a_trial_imports_is_seeded_as_in_every_other_trial(tmp_path: Path) -> None:
    """A worker's first trial loads torch in its own body, the second finds it loaded."""
    write(tmp_path, "s", body="""
        loaded = "torch" in sys.modules
        import torch
        yield {"loss": x, "drawn": torch.rand(()).item(), "was_loaded": float(loaded)}
    """)
    search(tmp_path, "s", "--n-trials", 2, "--seed", 7)
    assert replay(tmp_path, 0).splitlines()[-1].startswith("trial 0: the same to the last bit")
    # What a replay loads is what differs, and the draw that follows is not.
    second = told(tmp_path, 1, code=1)
    assert second["first_difference"]["metric"] == "was_loaded"
    for trial in (told(tmp_path, 0), second):
        seed = trials(tmp_path, "s")[trial["trial"]].user_attrs["seed"]
        drawn = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
        assert seed and trial["epochs"][0]["stored"]["drawn"] == drawn
        assert trial["epochs"][0]["now"]["drawn"] == drawn
