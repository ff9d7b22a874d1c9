"""What an objective yields and raises: which values count, and how the others end a trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import (
    dashboard_json,
    grid,
    hpo,
    reasons,
    search,
    search_words,
    states,
    strict_json,
    together,
    trials,
    url,
    write,
    write_tape,
)

KINDS = """
import numpy, torch
yields = dict(
    nan={"loss": math.nan}, none={"loss": None}, text={"loss": "abc"}, nokey={"other": 1.0},
    array2={"loss": torch.zeros(2)}, ok={"loss": 0.5}, tensor={"loss": torch.tensor([0.5])},
    float32={"loss": numpy.float32(0.5)}, true={"loss": True}, digits={"loss": "0.5"},
)
if kind != "noyield":
    yield {"loss": 0.7}
    yield yields[kind]
"""
MORE = ["ok", "tensor", "float32", "true", "digits"]
BAD = ["nan", "none", "text", "nokey", "noyield", "array2"]


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the URL of the default file and of an empty PostgreSQL database."""
    if request.param == "sqlite":
        return url(tmp_path)
    return request.getfixturevalue("postgres_url")


def test_every_bad_value_ends_its_own_trial_with_a_reason(tmp_path: Path, storage: str) -> None:
    """C18.1, C18.3, C30.4: nan is PRUNED, five and True and '0.5' FAIL, the numbers COMPLETE.

    None stays RUNNING; reasons have `loss` and the epoch.
    """
    write(tmp_path, "s", f"kind=Categorical({BAD + MORE!r})", KINDS, epochs=2)
    grid(tmp_path, "s", "--storage", storage)
    found = {trial.params["kind"]: trial for trial in trials(tmp_path, "s/grid", storage)}
    assert {kind: trial.state.name for kind, trial in found.items()} == {
        **dict.fromkeys(BAD + MORE, "FAIL"), "nan": "PRUNED", "ok": "COMPLETE",
        "tensor": "COMPLETE", "float32": "COMPLETE"}
    assert (found["tensor"].value, found["float32"].value) == (0.5, 0.5)
    said = {kind: trial.user_attrs["reason"] for kind, trial in found.items()}
    assert said["nan"] == "diverged at epoch 1"
    assert found["nan"].value == 0.7
    for kind in ("none", "text", "nokey", "array2", "true", "digits"):
        assert "epoch 1" in said[kind] and "'loss'" in said[kind]
        assert found[kind].intermediate_values == {0: 0.7}
    assert "epoch 0" in said["noyield"] and "'loss'" in said["noyield"]
    assert "'other'" in said["nokey"]


def test_a_study_without_a_usable_trial_ends_with_code_3(tmp_path: Path) -> None:
    """C18.2: 1 PRUNED, 5 FAIL."""
    write(tmp_path, "s", f"kind=Categorical({BAD!r})", KINDS, epochs=2)
    grid(tmp_path, "s", code=3)
    assert sorted(states(trials(tmp_path, "s/grid"))) == ["FAIL"] * 5 + ["PRUNED"]


@pytest.mark.parametrize(("goal", "best"), [("maximize", 2.0), ("minimize", 1.0)])
def test_an_infinite_value_is_never_the_best(tmp_path: Path, goal: str, best: float) -> None:
    """C19: 2 COMPLETE, 2 PRUNED; the dashboard and the commands hold to strict JSON."""
    write_tape(tmp_path, "s", [[float("inf")], [1.0], [float("-inf")], [2.0]],
               goal=f'{goal}="score"', metrics='{"score": value}')
    search(tmp_path, "s", "--n-trials", 4)
    found = trials(tmp_path, "s")
    assert states(found) == ["PRUNED", "COMPLETE", "PRUNED", "COMPLETE"]
    assert reasons(found)[::2] == ["diverged at epoch 0"] * 2
    shown = strict_json(hpo(tmp_path, "best", "--study", "s", "--json").stdout)
    assert shown["value"] == best
    status = strict_json(hpo(tmp_path, "status", "--study", "s", "--json").stdout)
    assert status["phases"]["search"]["states"] == {"COMPLETE": 2, "PRUNED": 2}
    study_id = str(dashboard_json(url(tmp_path))["study_summaries"][0]["study_id"])
    assert len(dashboard_json(url(tmp_path), study_id)["trials"]) == 4


def test_floats_keep_every_digit_on_their_way(tmp_path: Path) -> None:
    """C06: file, Optuna, status, best and registry agree to the last bit, also after a resume."""
    write(tmp_path, "s", "lr=Float(1e-7, 1e-1, log=True), wd=Float(0.0, 1.0)", """
        loss = lr * wd + 1 / 3
        with open(HERE / "seen", "a") as file:
            print(run.dir.parent.name, run.dir.name, lr.hex(), wd.hex(), loss.hex(), file=file)
        yield {"loss": loss}
    """)
    words = ("--sampler", "random", "--seed", 3)
    search(tmp_path, "s", *words, "--n-trials", 20, "--phases", "search,confirm", "--top-k", 1,
           "--confirm-seeds", 1)
    rows = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    seen = {int(row[1]): row[2:] for row in rows if row[0] == "search"}
    assert len(seen) == 20
    at = ("--study", "s", "--json")
    listed = json.loads(hpo(tmp_path, "status", *at).stdout)["phases"]["search"]["trials"]
    best = json.loads(hpo(tmp_path, "best", *at).stdout)
    registered = json.loads(hpo(tmp_path, "registry", "list", *at).stdout)[0]
    search(tmp_path, "s", *words, "--n-trials", 21)
    stock = [(t.number, t.params, t.value) for t in trials(tmp_path, "s")[:20]]
    for number, params, value in [*stock, *((t["number"], t["params"], t["value"])
                                            for t in listed)]:
        assert [params["lr"].hex(), params["wd"].hex(), value.hex()] == seen[number]
    for row in (best, registered):
        assert [row["params"]["lr"].hex(), row["params"]["wd"].hex(), row["val_mean"].hex()] == (
            seen[row["trial"]])


def test_an_odd_name_is_found_again(tmp_path: Path) -> None:
    """C08.1: names with blanks, quotes, markup and other scripts."""
    write(tmp_path, "quad")
    names = ("naive-\u5b78\u7fd2", "a b'\"", "[bold]x", "-x")
    together(tmp_path, *(search_words("quad", f"--name={name}", "--n-trials", 1)
                         for name in names))
    outputs = together(tmp_path, *(["best", f"--study={name}", "--json"] for name in names))
    assert [json.loads(output)["study"] for output in outputs] == list(names)


def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    """C08.1, C08.2: exit 2, no study and no file anywhere."""
    write(tmp_path, "quad")
    before = sorted(tmp_path.rglob("*"))
    names = ("x/y", "../../x", "", "   ", "x" * 201, "a\nb", "..")
    for output in together(tmp_path, *(["run", "--study", "quad", "--name", name]
                                       for name in names), code=2):
        assert "a name has 1 to 200 printable characters" in output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_huge_message_leaves_a_short_reason_and_a_whole_log(tmp_path: Path) -> None:
    """C08.3: FAIL, a reason of at most 4 KB, a log with the 2 MB.

    Also where the process dies, and its last line is all that it leaves.
    """
    write(tmp_path, "s", body='raise ValueError("y" * 2_000_000)\nyield {}')
    write(tmp_path, "dies", body='os.write(2, b"z" * 100_000)\nos._exit(3)\nyield {}')
    together(tmp_path, search_words("s", "--n-trials", 1),
             search_words("dies", "--n-trials", 1, "--max-retries", 0), code=3)
    trial, dead = trials(tmp_path, "s")[0], trials(tmp_path, "dies")[0]
    assert (trial.state.name, dead.state.name) == ("FAIL", "FAIL")
    log = tmp_path / "hpo-runs" / trial.user_attrs["log"]
    assert log.read_text().count("y") >= 2_000_000
    assert dead.user_attrs["reason"].startswith(
        "worker lost: its process was ended with code 3")
    assert max(len(reason) for reason in reasons([trial, dead])) <= 4096
