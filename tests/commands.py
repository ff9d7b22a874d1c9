"""Run hpo's commands as a user does, on small modules that a test writes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
from optuna.trial import FrozenTrial

# No command of the tests takes a tenth of this on two idle cores.
TIMEOUT_S = 240
# x float 0..1, one epoch, loss = (x - 0.3)^2: the smallest study there is.
QUAD = ("x=Float(0.0, 1.0)", 'yield {"loss": (x - 0.3) ** 2}')


def environment(**extra: str) -> dict[str, str]:
    """Return this process's variables without any that steers hpo or the devices."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("HPO_") and name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    root = str(Path(__file__).resolve().parent.parent)
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "COLUMNS": "200", **extra}


def arguments(*words: object) -> list[str]:
    """Return the command line of `hpo WORDS`."""
    return [sys.executable, "-m", "hpo", *map(str, words)]


def hpo(
    folder: Path, *words: object, code: int | None = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `hpo WORDS` in a folder and hold its exit code against `code`, unless that is None."""
    done = subprocess.run(arguments(*words), cwd=folder, env=environment(**(env or {})), text=True,
                          capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    if code is not None and done.returncode != code:
        raise AssertionError(f"exit code {done.returncode}, expected {code}\n"
                             f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}")
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def search_words(study: str, *words: object) -> list[object]:
    """Return the words that run a study's search alone, by one worker unless `words` differ."""
    workers = [] if "--workers" in words else ["--workers", 1]
    phases = [] if "--phases" in words else ["--phases", "search"]
    return ["run", "--study", study, *workers, *phases, *words]


def search(
    folder: Path, study: str, *words: object, code: int | None = 0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the search phase of a study alone, with one worker unless `words` say otherwise."""
    return hpo(folder, *search_words(study, *words), code=code, env=env)


def grid_words(study: str, *words: object) -> list[object]:
    """Return the words that run a study's grid alone, by one worker unless `words` differ."""
    workers = [] if "--workers" in words else ["--workers", 1]
    return ["run", "--study", study, "--sampler", "grid", *workers, *words]


def grid(
    folder: Path, study: str, *words: object, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run the grid phase of a study alone, with one worker unless `words` say otherwise."""
    return hpo(folder, *grid_words(study, *words), code=code)


def together(folder: Path, *commands: Sequence[object], code: int = 0) -> list[str]:
    """Run several commands at once and return the output of each; all must end with `code`."""
    outputs = []
    for words, process in [(words, start(folder, *words)) for words in commands]:
        returned, output = finish(process)
        assert returned == code, f"{words}: exit code {returned}, expected {code}\n{output}"
        assert "Traceback" not in output, output
        outputs.append(output)
    return outputs


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start `hpo WORDS` in a folder without waiting for it."""
    return subprocess.Popen(arguments(*words), cwd=folder, env=environment(), text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def answered(folder: Path, answer: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `hpo WORDS` and answer its question, as on a terminal."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        return subprocess.run(arguments(*words), cwd=folder, env=environment(), text=True,
                              stdin=theirs, capture_output=True, timeout=TIMEOUT_S)
    finally:
        os.close(ours)
        os.close(theirs)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the whole output of a started command."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out + err


def write_text(folder: Path, study: str, text: str) -> Path:
    """Write a search-space module as it stands."""
    path = folder / "search_spaces" / f"{study}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def write(
    folder: Path, study: str, space: str = QUAD[0], body: str = QUAD[1], *,
    goal: str = 'minimize="loss"', epochs: int = 1, more: str = "",
) -> Path:
    """Write a module: its space as keyword arguments, and the lines of its objective.

    The lines see `run`, the params, and the modules os, sys, time, math, pathlib.Path and `HERE`,
    the folder of the test.
    """
    text = (f"import math, os, sys, time\nfrom pathlib import Path\n"
            f"from hpo import Categorical, Float, Int, StudySpec\n"
            f"HERE = Path({str(folder)!r})\nSPACE = dict({space})\n"
            f"def objective(run, **params):\n    globals().update(params)\n"
            f"{textwrap.indent(textwrap.dedent(body), '    ')}\n"
            f"STUDY = StudySpec(space=SPACE, objective=objective, {goal}, epochs={epochs}"
            f"{', ' + more if more else ''})\n")
    return write_text(folder, study, text)


def write_tape(
    folder: Path, study: str, tape: Sequence[Sequence[Any]], *, goal: str = 'minimize="loss"',
    metrics: str = '{"loss": value}', epochs: int | None = None, more: str = "",
) -> Path:
    """Write a module whose k-th started trial yields the k-th list, one number an epoch.

    `metrics` is the dict that is yielded for a `value`; the numbers may be inf or nan.
    """
    body = f"""
        inf, nan = math.inf, math.nan
        counter = HERE / "{study}.count"
        k = int(counter.read_text()) if counter.exists() else 0
        counter.write_text(str(k + 1))
        for value in {[list(row) for row in tape]!r}[k]:
            yield {metrics}
    """
    return write(folder, study, body=body, goal=goal, more=more,
                 epochs=epochs or max(len(row) for row in tape))


def url(folder: Path) -> str:
    """Return the URL of the SQLite file that commands in a folder use."""
    return f"sqlite:///{folder / 'hpo-runs' / 'hpo.db'}"


def trials(folder: Path, study: str, storage: str | None = None) -> list[FrozenTrial]:
    """Return a study's trials as stock Optuna reads them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    stock = optuna.storages.RDBStorage(storage or url(folder))
    try:
        return optuna.load_study(study_name=study, storage=stock).get_trials()
    finally:
        stock.remove_session()
        stock.engine.dispose()


def dashboard_json(storage: str, *path: str) -> Any:
    """GET a path of stock optuna-dashboard on a database, and parse it strictly."""
    import optuna_dashboard

    stock = optuna.storages.RDBStorage(storage)
    try:
        app = optuna_dashboard.wsgi(stock)
        said: list[str] = []

        def answered(status: str, *_: Any) -> Any:
            said.append(status)

        environ: dict[str, Any] = {}
        setup_testing_defaults(environ)
        environ["PATH_INFO"] = "/api/studies" + "".join("/" + part for part in path)
        body = b"".join(app(environ, answered))
        assert said == ["200 OK"], (said, body[:500])
        return strict_json(body.decode())
    finally:
        stock.remove_session()
        stock.engine.dispose()


def states(found: Iterable[FrozenTrial]) -> list[str]:
    """Return the names of the trials' states, in their order."""
    return [trial.state.name for trial in found]


def reasons(found: Iterable[FrozenTrial]) -> list[str]:
    """Return why each trial ended, an empty text where it is COMPLETE."""
    return [trial.user_attrs["reason"] for trial in found]


def strict_json(text: str) -> Any:
    """Parse JSON, refusing NaN and Infinity."""
    def refuse(word: str) -> None:
        raise AssertionError(f"JSON holds {word}")

    return json.loads(text, parse_constant=refuse)
