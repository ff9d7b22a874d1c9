"""The study that searches the training toolkit: all of its parts work together."""

from __future__ import annotations

from pathlib import Path

from commands import hpo, states, trials


def test_forty_trials_of_everything_at_once_end_without_a_failed_one(tmp_path: Path) -> None:
    hpo(tmp_path, "run", "--study", "toolkit", "--phases", "search", "--workers", 2)
    found = trials(tmp_path, "toolkit")
    assert len(found) == 40 and set(states(found)) <= {"COMPLETE", "PRUNED"}
    drawn = {name: {trial.params[name] for trial in found} for name in found[0].params}
    assert drawn["precision"] == {"fp32", "bf16", "fp16"}
    assert all(len(values) > 1 for values in drawn.values())
    assert max(trial.value or 0 for trial in found if trial.state.name == "COMPLETE") > 0.95
