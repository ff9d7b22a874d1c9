"""Checkpoints that are gone or damaged, and batches too small for a model."""

from __future__ import annotations

import json
from pathlib import Path

from commands import grid, hpo, reasons, states, trials, write_text

RECIPE = """
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, Recipe, digits

    def build(run, *, lr):
        return Recipe(data=digits(run), model=MLP(hidden=16), optimizer=AdamW(lr=lr))

    STUDY = StudySpec(space={"lr": Float(1e-3, 1e-2)}, build=build, minimize="val_loss", epochs=1)
"""


def test_a_checkpoint_that_is_gone_or_damaged_is_named_and_nothing_is_exported(
    tmp_path: Path
) -> None:
    """C47.1, C47.2: the best's file is deleted, the second best's is empty."""
    write_text(tmp_path, "s", RECIPE)
    hpo(tmp_path, "run", "--study", "s", "--workers", 1, "--n-trials", 3, "--top-k", 2,
        "--confirm-seeds", 1, "--phases", "search,confirm", "--data-fraction", 0.2)

    def best(rank: int) -> dict[str, str]:
        return json.loads(hpo(tmp_path, "best", "--study", "s", "--rank", rank, "--json").stdout)

    files = {rank: tmp_path / "hpo-runs" / best(rank)["checkpoint"] for rank in (1, 2)}
    files[1].unlink()
    files[2].write_bytes(b"")
    for rank, state in ((1, "missing"), (2, "damaged")):
        assert best(rank)["checkpoint_state"] == state
        done = hpo(tmp_path, "export", "--study", "s", "--rank", rank, "--to", "x", code=1)
        assert f"checkpoint {files[rank]} is {state}" in done.stderr
        assert not (tmp_path / "x").exists()


TOO_SMALL = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from hpo import Categorical, StudySpec

    ROWS = TensorDataset(torch.rand(65, 4), torch.arange(65) % 2)

    def objective(run, batch):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        for epoch in range(2):
            for rows, labels in DataLoader(ROWS, batch_size=batch):
                loss = nn.functional.cross_entropy(model(rows), labels)
            yield {"loss": loss.item()}

    STUDY = StudySpec(space={"batch": Categorical(64, 65, 128)}, objective=objective,
                      minimize="loss", epochs=2)
"""


def test_a_last_batch_of_one_fails_its_trial_with_torch_s_text_and_the_size(
    tmp_path: Path
) -> None:
    """C58.3: a loader of the user's own; the trials after it run."""
    write_text(tmp_path, "s", TOO_SMALL)
    grid(tmp_path, "s")
    found = trials(tmp_path, "s/grid")
    assert states(found) == ["FAIL", "COMPLETE", "COMPLETE"]
    assert found[0].params == {"batch": 64}
    assert reasons(found)[0] == ("error: ValueError: Expected more than 1 value per channel when "
                                 "training, got input size torch.Size([1, 8])")
