"""Studies by name: a user's own merge with those that ship, and every fault names its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import write, write_text

from hpo import discover
from hpo.errors import InputError, SpecError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder, with the import system as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(discover.PACKAGE):
            del sys.modules[name]


def test_the_studies_that_ship_are_known(here: Path) -> None:
    discover.add_working_directory()
    assert {"cifar", "digits", "fashion"} <= set(discover.known_studies())


def test_a_module_in_the_working_directory_is_found(here: Path) -> None:
    write(here, "mine_found")
    assert discover.load("mine_found").metric == "loss"
    assert discover.source_path("mine_found") == str(here / "search_spaces" / "mine_found.py")


def test_the_studies_that_ship_stay_known_beside_a_user_s_own(here: Path) -> None:
    write(here, "mine_beside")
    discover.add_working_directory()
    assert {"digits", "mine_beside"} <= set(discover.known_studies())


def test_an_unknown_name_lists_what_there_is_and_the_nearest(here: Path) -> None:
    with pytest.raises(InputError, match=r"study 'digit': there is no search_spaces/digit\.py in "
                                         r".*did you mean 'digits'\?.*there are: .*cifar"):
        discover.load("digit")


@pytest.mark.parametrize("name", ["", " ", "../x", "a.b", "x/y", "__init__"])
def test_a_name_that_is_no_module_is_refused(here: Path, name: str) -> None:
    """C08: a name leads to no file outside of search_spaces."""
    with pytest.raises(InputError, match="there is no search_spaces/"):
        discover.load(name)


def test_an_init_file_that_hides_ours_is_told(here: Path) -> None:
    write(here, "mine_hidden")
    (here / "search_spaces" / "__init__.py").touch()
    with pytest.raises(InputError, match="__init__.py hides the studies that ship with hpo: "
                                         "remove that file"):
        discover.load("mine_hidden")


def test_a_module_of_the_same_name_as_ours_is_told(here: Path) -> None:
    """Else it would depend on how hpo is started which of the two runs."""
    write(here, "digits")
    with pytest.raises(InputError, match="study 'digits': .* both define it and differ"):
        discover.load("digits")


def test_every_fault_of_a_spec_has_the_study_s_name(here: Path) -> None:
    """C28: two bad parameters, two lines."""
    write(here, "mine_bad", "x=Float(2.0, 1.0), y=Int(0, 9, log=True)")
    with pytest.raises(SpecError) as raised:
        discover.load("mine_bad")
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [
        "study 'mine_bad', param 'x'", "study 'mine_bad', param 'y'"]


@pytest.mark.parametrize(("text", "said"), [
    ("", "must define STUDY = StudySpec(...), got no STUDY"),
    ("STUDY = 3", "must define STUDY = StudySpec(...), got int"),
    ("import nothing_of_that_name", "line 1: ModuleNotFoundError: No module named"),
    ("def f(:\n    pass", "line 1: SyntaxError"),
    ("\n\nx = 1 / 0", "line 3: ZeroDivisionError: division by zero"),
    ("raise SystemExit(5)", "line 1: SystemExit: 5"),
    ("from hpo import StudySpec\nSTUDY = StudySpec(space={}, epochs=1, direction='max')",
     "line 2: TypeError"),
], ids=lambda value: value[:20])
def test_a_module_that_does_not_import_names_the_line(
    here: Path, request: pytest.FixtureRequest, text: str, said: str
) -> None:
    """C22.4, C28: no traceback, but the place."""
    name = f"broken_{abs(hash(text))}"
    path = write_text(here, name, text)
    with pytest.raises(InputError) as raised:
        discover.load(name)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)
