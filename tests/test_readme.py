"""README: its modules run, its commands exist, and CI runs its two set-up commands."""

from __future__ import annotations

import re
from pathlib import Path

from commands import hpo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Return README's fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def written(folder: Path, name: str, start: str) -> None:
    """Write README's module that starts so into a folder's search_spaces."""
    text = next(block for block in blocks("python") if block.startswith(start))
    (folder / "search_spaces").mkdir(exist_ok=True)
    (folder / "search_spaces" / f"{name}.py").write_text(text)


def test_the_module_on_own_arrays_runs_from_check_to_registry(tmp_path: Path) -> None:
    written(tmp_path, "mine", '"""A small network')
    assert hpo(tmp_path, "check", "--study", "mine").returncode == 0
    done = hpo(tmp_path, "run", "--study", "mine", "--workers", "1", "--confirm-seeds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = hpo(tmp_path, "registry", "list", "--study", "mine", "--json").stdout
    assert {'"phase": "search"', '"phase": "grid"', '"phase": "lr-range"',
            '"phase": "default"'} <= set(re.findall(r'"phase": "[a-z-]+"', listed))


def test_the_module_with_its_own_loop_runs(tmp_path: Path) -> None:
    written(tmp_path, "loop", '"""My own loop')
    done = hpo(tmp_path, "run", "--study", "loop", "--workers", "1", "--n-trials", "4")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_own_study_is_25_lines_or_less_of_code() -> None:
    text = next(block for block in blocks("python") if block.startswith('"""A small network'))
    assert len([line for line in text.splitlines() if line.strip()]) <= 25


def test_every_command_in_the_table_exists_and_every_command_is_in_it(tmp_path: Path) -> None:
    named = set(re.findall(r"^\| `hpo ([a-z-]+)", README, re.MULTILINE))
    listed = set(re.findall(r"^│ ([a-z][a-z-]*) ", hpo(tmp_path, "--help").stdout, re.MULTILINE))
    assert named == listed


def test_ci_runs_the_two_commands_that_readme_gives() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert len(re.findall(r"hpo run --study digits$", README, re.MULTILINE)) == 1
    assert len(re.findall(r"python -m pytest -n 2$", README, re.MULTILINE)) == 1
    assert "grep -m1 'hpo run --study digits$' README.md" in ci
    assert "grep -m1 'python -m pytest -n 2$' README.md" in ci


def test_pictures_that_readme_shows_are_there() -> None:
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).is_file(), path
