"""Files that optuna-dashboard shows: a report's at the study, checkpoints at its best trials.

Pictures and page are ordinary Optuna artifacts. A checkpoint stays where the run put it: its id as
an artifact is its path in hexadecimal, so that nothing is stored twice and a deleted file is gone.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hpo.results import PHASES, Results, Trial

if TYPE_CHECKING:
    import optuna

    from storage import Database

_STUDY_PREFIX = "artifacts:"
# Where the dashboard also looks for a trial's artifacts; unlike the trial's own attributes these
# can be written after the trial has ended.
_TRIAL_PREFIX = "dashboard:artifacts:"
_N_CHECKPOINTS = 10
_OURS = ("progress.png", "curves.png", "lr_range.png", "importance.png", "params.png",
         "report.html")


class ArtifactFolder:
    """An Optuna artifact store in one folder, which also finds checkpoints by their path's id.

    A file is written aside and renamed. What is not there is `ArtifactNotFound`.
    """

    def __init__(self, home: Path) -> None:
        self.folder = Path(home) / "artifacts"

    def open_reader(self, artifact_id: str) -> BinaryIO:
        from optuna.artifacts.exceptions import ArtifactNotFound

        try:
            return self.path(artifact_id).open("rb")
        except OSError as error:
            raise ArtifactNotFound(f"artifact {artifact_id} is gone") from error

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(artifact_id)
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        aside.write_bytes(content_body.read())
        aside.replace(path)

    def remove(self, artifact_id: str) -> None:
        from optuna.artifacts.exceptions import ArtifactNotFound

        try:
            self.path(artifact_id).unlink()
        except OSError as error:
            raise ArtifactNotFound(f"artifact {artifact_id} is gone") from error

    def path(self, artifact_id: str) -> Path:
        """Return where an artifact lies; a FileNotFoundError for one outside the folder."""
        folder = self.folder.resolve()
        path = (folder / (_hidden_path(artifact_id) or artifact_id)).resolve()
        if folder not in path.parents:
            raise FileNotFoundError(artifact_id)
        return path


def _hidden_path(artifact_id: str) -> str | None:
    """Return the path that an id stands for, or None for an id of Optuna's own."""
    try:
        path = bytes.fromhex(artifact_id).decode()
    except ValueError:
        return None
    return path if path.endswith(".pt") else None


def pictures(db: Database, study: str, home: Path, folder: Path) -> dict[str, str]:
    """Attach a report's pictures and page to an Optuna study; return their addresses there.

    A file of the same name is replaced under its old id, one that is no longer written is
    taken away, and artifacts of anyone else's are left alone.
    """
    from optuna.artifacts.exceptions import ArtifactNotFound

    study_id = db.studies.get_study_id_from_name(study)
    there = _by_name(db.studies.get_study_system_attrs(study_id))
    store, links = ArtifactFolder(home), {}
    for name in _OURS:
        if (folder / name).is_file():
            artifact_id = _put(db, study, store, folder / name, there.get(name))
            links[name] = f"/artifacts/{study_id}/{artifact_id}"
        elif name in there:
            with suppress(ArtifactNotFound):
                store.remove(there[name])
            # The dashboard's own mark of a deleted artifact; Optuna cannot delete an attribute.
            db.studies.set_study_system_attr(study_id, _STUDY_PREFIX + there[name], "null")
    return links


def remove_pictures(db: Database, study: str, home: Path) -> None:
    """Delete the pictures of an Optuna study's reports, which lie under names of their own."""
    from optuna.artifacts.exceptions import ArtifactNotFound

    study_id = db.studies.get_study_id_from_name(study)
    store, there = ArtifactFolder(home), _by_name(db.studies.get_study_system_attrs(study_id))
    for artifact_id in (there[name] for name in _OURS if name in there):
        with suppress(ArtifactNotFound):
            store.remove(artifact_id)


def _by_name(attrs: Mapping[str, Any]) -> dict[str, str]:
    metas = [json.loads(v) for k, v in attrs.items() if k.startswith(_STUDY_PREFIX)]
    return {meta["filename"]: meta["artifact_id"] for meta in metas if meta}


def _put(db: Database, study: str, store: ArtifactFolder, path: Path, old: str | None) -> str:
    from optuna.artifacts import upload_artifact

    if old is not None:
        store.write(old, io.BytesIO(path.read_bytes()))
        return old
    return upload_artifact(artifact_store=store, file_path=os.fspath(path),
                           study_or_trial=_load(db, study))


def _load(db: Database, study: str) -> optuna.Study:
    import optuna

    return optuna.load_study(study_name=study, storage=db.studies)


def checkpoints(db: Database, results: Results, home: Path) -> None:
    """Show the checkpoints of each phase's best trials as artifacts of these trials."""
    for phase in PHASES:
        kept = list(_with_checkpoint(results.phase(phase).trials, Path(home)))
        if not kept:
            continue
        kept.sort(key=lambda t: t.score or 0.0, reverse=results.maximize)
        study_id = db.studies.get_study_id_from_name(results.phase(phase).study)
        known = db.studies.get_study_system_attrs(study_id)
        for trial in kept[:_N_CHECKPOINTS]:
            key, meta = _checkpoint(db, study_id, trial)
            if key not in known:
                db.studies.set_study_system_attr(study_id, key, meta)


def _with_checkpoint(trials: Iterable[Trial], home: Path) -> Iterable[Trial]:
    return (t for t in trials if t.score is not None and t.attrs.get("checkpoint")
            and (home / t.attrs["checkpoint"]).is_file())


def _checkpoint(db: Database, study_id: int, trial: Trial) -> tuple[str, str]:
    path = Path(trial.attrs["checkpoint"])
    inside = path.relative_to("artifacts") if path.parts[0] == "artifacts" else path
    artifact_id = inside.as_posix().encode().hex()
    trial_id = db.studies.get_trial_id_from_study_id_trial_number(study_id, trial.number)
    meta = {"artifact_id": artifact_id, "filename": path.name, "encoding": None,
            "mimetype": "application/octet-stream"}
    return f"{_TRIAL_PREFIX}{trial_id}:{artifact_id}", json.dumps(meta)


def save_note(db: Database, study: str, body: str) -> None:
    """Make a text the study's note, unless it is that already."""
    import optuna_dashboard

    loaded = _load(db, study)
    if optuna_dashboard.get_note(loaded) != body:
        optuna_dashboard.save_note(loaded, body)
