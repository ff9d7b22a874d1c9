"""Spaces through whole runs: bad ones, changed ones, and choices of any kind."""

from __future__ import annotations

import json
from pathlib import Path

from commands import dashboard_json, hpo, search, states, trials, url, write

BATCH = 'yield {"loss": float(batch)}'


def test_other_choices_on_resume_end_with_code_2_and_leave_the_study(tmp_path: Path) -> None:
    """C26: the message has `batch`, both lists and the way to a new study; still 2 trials."""
    def run(choices: str, n: int, code: int) -> str:
        write(tmp_path, "s", f"batch=Categorical({choices})", BATCH)
        return search(tmp_path, "s", "--n-trials", n, "--allow-duplicates", code=code).stderr

    run("[16, 32]", 2, 0)
    for choices in ("[16, 32, 64]", "[32, 16]", "[16]", "['16', '32']"):
        said = run(choices, 3, 2)
        assert "batch" in said
        assert "[16, 32]" in said and choices in said
        assert "--name" in said
        assert len(trials(tmp_path, "s")) == 2
    run("[16, 32]", 3, 0)
    assert states(trials(tmp_path, "s")) == ["COMPLETE"] * 3


def test_other_bounds_are_allowed_when_asked_for(tmp_path: Path) -> None:
    """C26: float or int bounds may change with --allow-space-change, choices never."""
    write(tmp_path, "s", "x=Float(0.0, 1.0)")
    search(tmp_path, "s", "--n-trials", 1)
    write(tmp_path, "s", "x=Float(0.0, 2.0)")
    assert "--allow-space-change" in search(tmp_path, "s", "--n-trials", 2, code=2).stderr
    search(tmp_path, "s", "--n-trials", 2, "--allow-space-change")
    assert len(trials(tmp_path, "s")) == 2


def test_bad_bounds_end_run_and_check_alike_before_a_file_is_made(tmp_path: Path) -> None:
    """C28.1, C28.2, C30.5: all faults in one message, exit 2, and no database."""
    write(tmp_path, "s", "x=Float(0.0, 1.0, log=True), y=Categorical(1, 1, 2), "
                         "z=Categorical([{'a': 1}])")
    ran = hpo(tmp_path, "run", "--study", "s", "--n-trials", 1, code=2)
    checked = hpo(tmp_path, "check", "--study", "s", code=2)
    assert ran.stderr == checked.stderr == (
        "hpo: study 's', param 'x': low must be > 0 with log, got low=0.0\n"
        "hpo: study 's', param 'y': choices must differ, got 1 twice\n"
        "hpo: study 's', param 'z': a choice must be None, a bool, a finite number, a text, or a "
        "tuple or list of them, got {'a': 1}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["search_spaces"]


def test_a_bound_that_leaves_one_value_runs(tmp_path: Path) -> None:
    """C28: low = high is allowed."""
    write(tmp_path, "s", "x=Float(0.5, 0.5), n=Int(3, 3), lr=Float(0.1, 0.1, log=True), "
                         "y=Float(0.0, 1.0)", 'yield {"loss": x + n + lr + y}')
    search(tmp_path, "s", "--n-trials", 2)
    found = trials(tmp_path, "s")
    assert states(found) == ["COMPLETE"] * 2
    assert {(t.params["x"], t.params["n"], t.params["lr"]) for t in found} == {(0.5, 3, 0.1)}


def test_tuples_and_lists_come_back_as_what_they_are(tmp_path: Path) -> None:
    """C30.1, C30.2, C30.6: also in a new process; the dashboard answers 200."""
    write(tmp_path, "s", "sizes=Categorical([(64, 32), (128,)]), dims=Categorical([[1, 2], [3]]), "
                         "x=Float(0.0, 1.0)", """
        assert isinstance(sizes, tuple) and all(isinstance(n, int) for n in sizes)
        assert isinstance(dims, list) and all(isinstance(n, int) for n in dims)
        yield {"loss": x}
    """)
    for n in (4, 8):
        search(tmp_path, "s", "--n-trials", n)
    found = trials(tmp_path, "s")
    assert states(found) == ["COMPLETE"] * 8
    assert {trial.params["sizes"] for trial in found} == {"(64, 32)", "(128,)"}
    listed = dashboard_json(url(tmp_path))["study_summaries"]
    for study in listed:
        dashboard_json(url(tmp_path), str(study["study_id"]))


def test_numpy_choices_run_as_plain_numbers(tmp_path: Path) -> None:
    """C30.3, C30.4, C30.6: 8 COMPLETE; int and float in the JSON."""
    write(tmp_path, "s", "lr=Categorical(__import__('numpy').array([.1, .01])), "
                         "width=Categorical(__import__('numpy').arange(8, 33, 8))", """
        import numpy
        assert type(lr) is float and type(width) is int
        yield {"loss": numpy.float32(0.5), "acc": numpy.ones((1, 1))}
    """)
    hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", "--workers", 1)
    assert states(trials(tmp_path, "s/grid")) == ["COMPLETE"] * 8
    status = json.loads(hpo(tmp_path, "status", "--study", "s", "--json").stdout)
    params = [trial["params"] for trial in status["phases"]["grid"]["trials"]]
    assert {(type(p["lr"]), type(p["width"])) for p in params} == {(float, int)}
    study = dashboard_json(url(tmp_path))["study_summaries"][0]
    assert len(dashboard_json(url(tmp_path), str(study["study_id"]))["trials"]) == 8
