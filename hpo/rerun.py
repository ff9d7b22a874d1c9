"""The worker's side of `hpo replay`: the epochs of a trial once more, told and stored nowhere."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo import discover
from hpo.attempt import make_run
from hpo.drive import BadMetrics, Goal, Progress, checked
from hpo.errors import InputError
from hpo.queue import MICRO_BATCH
from hpo.ranks import Ranks
from hpo.spec import Run, StudySpec
from hpo.versions import surroundings


def rerun(
    spec: StudySpec, command: Mapping[str, Any], send: Callable[..., None], ranks: Ranks
) -> None:
    """Train a trial up to an epoch and send each epoch's metrics.

    The events are `replaying` with what this process trains with, `replayed` for each epoch, and
    `replay_over` with the error that ended it, or None.

    Raises:
        InputError: for params that are not those of the module's space.
    """
    order, params = command["order"], _decoded(spec, command["params"])
    goal = Goal(spec.metric, spec.direction == "maximize")
    progress, error = Progress(goal), None
    with tempfile.TemporaryDirectory(prefix="hpo-replay-") as folder:
        run = make_run(order, int(order["seed"]), Path(folder))
        try:
            source, fingerprint = _source(spec, run, params, order, ranks)
            now = surroundings(order["device"], discover.source_path(order["module"]))
            send("replaying", now={**now, "data_fingerprint": fingerprint})
            for metrics in source:
                epoch = progress.begin(metrics if isinstance(metrics, dict) else {})
                send("replayed", epoch=epoch, metrics=checked(metrics, goal, epoch))
                if epoch >= command["last_epoch"]:
                    break
            # A generator's own clean-up runs before its folder goes.
            getattr(source, "close", lambda: None)()
        except (Exception, SystemExit) as failed:
            traceback.print_exc()
            error = f"{discover.where(failed)}: {type(failed).__name__}: {failed}"
    send("replay_over", error=error)


def _decoded(spec: StudySpec, stored: Mapping[str, Any]) -> dict[str, Any]:
    told = [f"param '{name}' is gone from the space" for name in stored if name not in spec.space]
    told += [f"param '{name}' is new in the space" for name in spec.space if name not in stored]
    params = {}
    for name in spec.space if not told else ():
        try:
            params[name] = spec.space[name].decode(stored[name])
        except ValueError as error:
            told.append(f"param '{name}': {error}")
    if told:
        raise InputError("the module has changed since the trial: " + "; ".join(told))
    return params


def _source(
    spec: StudySpec, run: Run, params: dict[str, Any], order: Mapping[str, Any], ranks: Ranks
) -> tuple[Iterator[Any], str | None]:
    """Return the trial's epochs as a worker has them, and the fingerprint of a recipe's data."""
    if spec.objective is not None:
        source = spec.objective(run, **params)
        if not hasattr(source, "__next__"):
            raise BadMetrics(f"the objective returned {type(source).__name__}, no generator")
        return source, None
    from hpo.train.loop import Trainer

    assert spec.build is not None
    micro = order.get(MICRO_BATCH)
    with ranks.watching():
        team = ranks.begin(order, run.seed, vars(run)["dir"], params, micro)
        trainer = Trainer(spec.build(run, **params), run, metric=spec.metric, team=team,
                          maximize=spec.direction == "maximize", micro_batch_size=micro)
    return ranks.watched(trainer.epochs()), trainer.data.fingerprint
