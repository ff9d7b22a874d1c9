"""A process of hpo begins and ends quickly, and does at its end what it is to do."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import environment

from hpo.processes import imports, load

MAIN = """
    import atexit, sys, threading, time

    class Torn:
        def __del__(self):
            print("torn down", flush=True)

    HELD = Torn()

    def late():
        time.sleep(0.2)
        print("a thread has ended")

    def main():
        atexit.register(print, "what is registered is done")
        threading.Thread(target=late).start()
        print("main")
        END
"""


def ended(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    """Run a module whose main has this last line as a process of its own."""
    (folder / "mine.py").write_text(textwrap.dedent(MAIN).replace("END", end))
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); " \
           "from hpo.processes import run_alone; run_alone('mine')"
    return subprocess.run([sys.executable, "-c", code], env=environment(), text=True,
                          capture_output=True, timeout=60)


@pytest.mark.parametrize(("end", "code", "said"), [
    ("return 75", 75, ""),
    ("sys.exit(4)", 4, ""),
    ("sys.exit()", 0, ""),
    ("sys.exit('in vain')", 1, "in vain\n"),
], ids=["returns", "exits", "exits well", "exits with a text"])
def test_a_process_ends_with_its_code_and_all_that_it_has_to_do_but_is_not_torn_down(
    tmp_path: Path, end: str, code: int, said: str
) -> None:
    done = ended(tmp_path, end)
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout == "main\na thread has ended\nwhat is registered is done\n"


def test_a_process_that_fails_says_so_and_ends_with_1(tmp_path: Path) -> None:
    done = ended(tmp_path, "raise ValueError('broken')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: broken\n")


def test_what_was_imported_is_left_out_of_later_searches_for_garbage() -> None:
    before = gc.get_freeze_count()
    load("json.tool")
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_nothing_is_searched_for_during_an_import() -> None:
    with imports():
        assert not gc.isenabled()
    assert gc.isenabled()
