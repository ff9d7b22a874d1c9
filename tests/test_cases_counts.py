"""N is exact for any number of workers and runs, and workers never draw alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import (
    QUAD,
    hpo,
    search,
    search_words,
    states,
    together,
    trials,
    write,
    write_tape,
)

SLOW_QUAD = 'time.sleep(0.05)\nyield {"loss": (x - 0.3) ** 2}'
COUNTED = """
with open(HERE / "calls", "a") as file:
    file.write(f"{x}\\n")
yield {"loss": float(x)}
"""


def numbers_and_states(folder: Path, study: str, storage: str | None = None) -> tuple:
    found = trials(folder, study, storage)
    return [trial.number for trial in found], set(states(found))


def test_n_trials_is_exact_with_four_workers_and_when_it_is_raised(tmp_path: Path) -> None:
    """C11.1, C11.2, C11.3: 10 trials, 10 again with a word about the budget, then 14.

    The ten fresh studies of C11.3 are in test_cases_races.
    """
    write(tmp_path, "s", body=SLOW_QUAD)
    for n, said in ((10, "[10 of 10"), (10, "the budget is used"), (14, "10 done already")):
        done = search(tmp_path, "s", "--n-trials", n, "--workers", 4)
        assert said in done.stdout
        assert numbers_and_states(tmp_path, "s") == (list(range(n)), {"COMPLETE"})


def test_n_trials_is_exact_on_postgresql(tmp_path: Path, postgres_url: str) -> None:
    """C11.1: 10 trials by 4 workers; every epoch is stored."""
    write(tmp_path, "s", body=SLOW_QUAD)
    search(tmp_path, "s", "--n-trials", 10, "--workers", 4, "--storage", postgres_url)
    assert numbers_and_states(tmp_path, "s", postgres_url) == (list(range(10)), {"COMPLETE"})
    assert all(len(t.intermediate_values) == 1 for t in trials(tmp_path, "s", postgres_url))


@pytest.mark.parametrize(("n", "body"), [(10, SLOW_QUAD), (40, QUAD[1])], ids=["C11.4", "C01.2"])
def test_two_runs_at_once_share_the_trials(tmp_path: Path, n: int, body: str) -> None:
    """C11.4, C01.2: two commands at once on a fresh file: as many trials as one asks."""
    write(tmp_path, "s", body=body)
    words = search_words("s", "--n-trials", n, "--workers", 4)
    for output in together(tmp_path, words, words):
        assert "locked" not in output
    assert numbers_and_states(tmp_path, "s") == (list(range(n)), {"COMPLETE"})


def test_many_workers_start_on_a_fresh_file(tmp_path: Path) -> None:
    """C01.1: 40 trials by 8 workers, no gap; five more files are in test_cases_races."""
    write(tmp_path, "s")
    done = search(tmp_path, "s", "--n-trials", 40, "--workers", 8)
    assert "locked" not in done.stdout + done.stderr
    assert numbers_and_states(tmp_path, "s") == (list(range(40)), {"COMPLETE"})


def test_pruned_trials_count(tmp_path: Path) -> None:
    """C11.5: start-up 1, warm-up 0: 1 COMPLETE and 7 PRUNED are the 8 trials."""
    write_tape(tmp_path, "s", [[1, 1], *[[9, 9]] * 7])
    search(tmp_path, "s", "--n-trials", 8,
           "--pruner", "median", "--prune-startup", 1, "--prune-warmup", 0)
    assert states(trials(tmp_path, "s")) == ["COMPLETE"] + ["PRUNED"] * 7


def test_no_trials_are_refused(tmp_path: Path) -> None:
    """C11.6: exit 2, and nothing is made."""
    write(tmp_path, "s")
    for n in (0, -1):
        done = search(tmp_path, "s", "--n-trials", n, code=2)
        assert done.stderr == f"hpo: --n-trials must be at least 1, got {n}\n"
    assert not (tmp_path / "hpo-runs").exists()


def test_workers_with_one_seed_never_draw_alike(tmp_path: Path) -> None:
    """C32.1: 9 different x with 3 workers; five fresh studies are in test_cases_races."""
    write(tmp_path, "s", body='time.sleep(0.1)\nyield {"loss": x}')
    samplers = ("random", "tpe")
    together(tmp_path, *(search_words(
        "s", "--name", sampler, "--sampler", sampler, "--seed", 7, "--workers", 3, "--n-trials", 9)
        for sampler in samplers))
    for sampler in samplers:
        assert len({trial.params["x"] for trial in trials(tmp_path, sampler)}) == 9


def test_one_worker_repeats_to_the_last_bit_also_across_a_resume(tmp_path: Path) -> None:
    """C32.2: equal seeds give equal trials; another seed differs from the first value on."""
    write(tmp_path, "s")
    plans = (("a", 7, 9), ("b", 7, 5), ("c", 8, 9))
    together(tmp_path, *(search_words("s", "--name", name, "--seed", seed, "--n-trials", n)
                         for name, seed, n in plans))
    search(tmp_path, "s", "--name", "b", "--seed", 7, "--n-trials", 9)
    a, b, c = ([trial.params["x"].hex() for trial in trials(tmp_path, name)] for name in "abc")
    assert a == b
    assert all(one != other for one, other in zip(a, c, strict=True))


def test_params_that_are_done_are_not_trained_again(tmp_path: Path) -> None:
    """C34.1, C34.2: 4 trainings by 1 and by 3 workers, each x once; the message has `4 of 4`."""
    for study in ("one", "three"):
        write(tmp_path, study, "x=Int(0, 3)", COUNTED.replace("calls", study))
    words = ("--sampler", "tpe", "--seed", 0, "--n-trials", 30, "--workers")
    for output in together(tmp_path, search_words("one", *words, 1),
                           search_words("three", *words, 3)):
        assert "4 of 4" in output
    for study in ("one", "three"):
        assert sorted((tmp_path / study).read_text().split()) == ["0", "1", "2", "3"]
        assert len(trials(tmp_path, study)) == 4


def test_duplicates_are_trained_where_allowed_and_a_mixed_space_has_none(tmp_path: Path) -> None:
    """C34.3, C34.4: 30 trials with --allow-duplicates, and 30 of x int 0..3 and lr float."""
    write(tmp_path, "s", "x=Int(0, 3)", COUNTED)
    write(tmp_path, "mixed", "x=Int(0, 3), lr=Float(0.0, 1.0)", 'yield {"loss": x + lr}')
    _, mixed = together(tmp_path, search_words("s", "--n-trials", 30, "--allow-duplicates"),
                        search_words("mixed", "--n-trials", 30))
    assert len((tmp_path / "calls").read_text().split()) == 30
    assert "of 4" not in mixed
    assert states(trials(tmp_path, "mixed")) == ["COMPLETE"] * 30


def test_each_worker_keeps_to_its_device_also_after_one_is_killed(tmp_path: Path) -> None:
    """C40.1, C40.2, C40.5: with 4,5 visible, `--devices 0,1` are 4 and 5; trial 3 kills itself."""
    write(tmp_path, "s", body="""
        began = time.time()
        (HERE / f"pid-{os.getpid()}").touch()
        if run.dir.name == "3" and not (HERE / "killed").exists():
            (HERE / "killed").touch()
            os.kill(os.getpid(), 9)
        # Else all trials are done before the third worker has started.
        while int(run.dir.name) > 4 and len(list(HERE.glob("pid-*"))) < 3:
            assert time.time() < began + 120
            time.sleep(0.05)
        time.sleep(0.2)
        with open(HERE / "log", "a") as file:
            file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {began} {time.time()} "
                       f"{run.dir.name}\\n")
        yield {"loss": x}
    """)
    search(tmp_path, "s", "--n-trials", 12, "--workers", 2, "--devices", "0,1",
           env={"CUDA_VISIBLE_DEVICES": "4,5"})
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len(rows) == 12
    for device in ("4", "5"):
        spans = sorted((float(a), float(b)) for d, a, b, _ in rows if d == device)
        assert all(end <= began for (_, end), (began, _) in zip(spans, spans[1:], strict=False))
    # A retry's folder is that of the first try.
    after = [device for device, _, _, number in rows if int(number) > 4]
    assert {row[0] for row in rows} == set(after) == {"4", "5"}
    found = trials(tmp_path, "s")
    assert states(found).count("COMPLETE") == 12
    assert states(found).count("FAIL") == 1
    lost = found[3]
    assert lost.user_attrs["reason"].startswith("worker lost: its process was killed by signal 9")
    again = [trial for trial in found if trial.user_attrs.get("retry_of") == 3]
    # It died before its params were due in the database; the parent had heard of them.
    assert [trial.params for trial in again] == [lost.params] and list(lost.params) == ["x"]


def test_more_workers_than_devices_end_with_code_2(tmp_path: Path) -> None:
    """C40.3: and the message says how to share them."""
    write(tmp_path, "s")
    done = search(tmp_path, "s", "--devices", "0,1", "--workers", 3, code=2,
                  env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "--devices 0,1,0" in done.stderr


def test_a_device_that_is_not_there_ends_with_code_2(tmp_path: Path) -> None:
    """C40.4: `--devices 7` on a machine without it."""
    write(tmp_path, "s")
    done = search(tmp_path, "s", "--devices", 7, code=2, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert "--devices cpu" in done.stderr
    assert not (tmp_path / "hpo-runs").exists()


def test_a_study_that_is_done_says_so_through_the_command(tmp_path: Path) -> None:
    """C11.2: exit 0 and no new trial also when all phases were asked for."""
    write(tmp_path, "s", "x=Int(0, 1)", 'yield {"loss": float(x)}')
    words = ("run", "--study", "s", "--workers", 1, "--n-trials", 2, "--top-k", 1,
             "--confirm-seeds", 1)
    hpo(tmp_path, *words)
    before = [len(trials(tmp_path, name)) for name in ("s", "s/grid", "s/confirm")]
    assert before == [2, 2, 1]
    hpo(tmp_path, *words)
    assert [len(trials(tmp_path, name)) for name in ("s", "s/grid", "s/confirm")] == before


def test_every_trial_is_told_though_they_end_faster_than_they_are_heard_of(
    tmp_path: Path
) -> None:
    """The database knows the last end before the parent has read the events of many."""
    write(tmp_path, "s")
    for k in range(3):
        done = search(tmp_path, "s", "--n-trials", 12, "--name", f"s{k}")
        told = [number for number in range(12) if f"search trial {number}: " in done.stdout]
        assert told == list(range(12)), done.stdout
        assert "[12 of 12" in done.stdout
