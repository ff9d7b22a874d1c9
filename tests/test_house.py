"""The house holds its design: imports run down, the light modules stay light, files stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import environment

ROOT = Path(__file__).resolve().parent.parent
# From the top floor to the ground. A module imports those on floors below its own, and those
# before it in the list of its own floor; `hpo.train` stands for all of its modules.
FLOORS = [
    ["search_spaces"],
    ["hpo.__main__"],
    ["hpo.cli"],
    ["hpo.cli_registry"],
    ["hpo.cli_options"],
    ["hpo.doctor"],
    ["hpo.export"],
    ["hpo.picked"],
    ["hpo.trial_run", "hpo.status", "hpo.show", "hpo.replay",
     "hpo.registry", "hpo.registry_diff", "hpo.dashboard", "hpo.live"],
    ["hpo.changes", "hpo.pages"],
    ["hpo.door"],
    ["hpo.launch"],
    ["hpo.ask", "hpo.provenance"],
    ["hpo.one_trial"],
    ["hpo.phases"],
    ["hpo.champions"],
    ["hpo.confirm", "hpo.display", "hpo.reaper", "hpo.watch"],
    ["hpo.pool"],
    ["hpo.worker"],
    ["hpo.rehearsal", "hpo.rerun", "hpo.rank"],
    ["hpo.diagnosis"],
    ["hpo.tasks"],
    ["hpo.attempt"],
    ["hpo.ranks"],
    ["hpo.kept", "hpo.turns", "hpo.first_failures", "hpo.states", "hpo.presence", "hpo.alive"],
    ["hpo.drive", "hpo.search", "hpo.studies", "hpo.channel", "hpo.trial_log"],
    ["hpo.queue", "hpo.samplers", "hpo.tpe", "hpo.pruners", "hpo.causes", "hpo.leftovers",
     "hpo.stop"],
    ["hpo.baselines"],
    ["hpo.train"],
    ["hpo.report", "hpo.plan"],
    ["hpo.report_json"],
    ["hpo.attachments", "hpo.plots", "hpo.importance", "hpo.text_curve", "hpo.audit",
     "hpo.bounds"],
    ["hpo.axes"],
    ["hpo.end_table"],
    ["hpo.standing"],
    ["hpo.verdict"],
    ["hpo.comparison"],
    ["hpo.progress", "hpo.race"],
    ["hpo.read_results"],
    ["hpo.results"],
    ["hpo.paired"],
    ["hpo.range_tested"],
    ["hpo"],
    ["hpo.bundle", "hpo.discover", "hpo.settings", "hpo.devices", "hpo.versions"],
    ["hpo.spec"],
    ["hpo.space"],
    ["storage"],
    ["hpo.errors", "hpo.rungs", "hpo.seeding", "hpo.guard", "hpo.processes"],
]
LEVEL = {name: i for i, floor in enumerate(FLOORS) for name in floor}
HEAVY = ("torch", "torchvision", "optuna", "sqlalchemy", "matplotlib", "sklearn", "scipy")


def sources() -> list[Path]:
    return sorted(path for folder in ("hpo", "storage", "search_spaces")
                  for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str:
    """Return the entry of FLOORS that a module belongs to: itself or its package."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        name = ".".join(parts[:n])
        if name in LEVEL and (name != "hpo" or module == "hpo"):
            return name
    raise AssertionError(f"{module} has no floor: give it one in FLOORS")


MODULES = {module_of(path) for path in sources()}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each module of ours that a file imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [inner if (inner := f"{node.module}.{alias.name}") in MODULES
                     else str(node.module) for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("hpo", "storage", "search_spaces"):
                yield name, node.lineno


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down_the_floors_only(path: Path) -> None:
    own = floor_of(module_of(path))
    for name, line in imports(path):
        other = floor_of(name)
        if own == "search_spaces" and other == "hpo" or own == other:
            continue
        assert LEVEL[other] > LEVEL[own], f"{path}:{line}: {own} imports {name}, a floor above"


@pytest.mark.parametrize("path", [p for p in sources() if p.parts[len(ROOT.parts)] == "storage"],
                         ids=lambda path: path.name)
def test_storage_imports_nothing_of_hpo_but_errors(path: Path) -> None:
    of_hpo = {name for name, _ in imports(path) if name.split(".")[0] == "hpo"}
    assert of_hpo <= {"hpo.errors"}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module_of(path): {name for name, _ in imports(path) if name in MODULES}
             for path in sources() if floor_of(module_of(path)) not in ("hpo.train", "storage")}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module in done or module not in graph:
            return
        for name in graph[module]:
            visit(name, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", [
    "hpo", "hpo.cli", "hpo.train", "search_spaces.digits", "search_spaces.cifar",
    "search_spaces.fashion", "search_spaces.cifar_fast", "hpo.pool", "hpo.worker",
])
def test_importing_a_light_module_loads_nothing_heavy(module: str) -> None:
    code = (f"import sys, {module}; "
            f"print(*[name for name in {HEAVY!r} if name in sys.modules])")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, text=True,
                          env=environment(), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_importing_has_no_side_effect(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    subprocess.run([sys.executable, "-c", "import hpo.cli, hpo.train, search_spaces.digits"],
                   cwd=tmp_path, env=environment(), check=True, timeout=60)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[0].lineno - node.lineno
            assert (node.end_lineno or 0) - node.lineno - body < 50, node.name


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_a_thing_is(path: Path) -> None:
    """A handler of the standard library's server may be called what it is."""
    assert path.name != "utils.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and not any(
                ast.unparse(base).endswith("Handler") for base in node.bases):
            assert not node.name.endswith(("Manager", "Helper", "Handler")), node.name


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))
    assert "TODO" not in text and "FIXME" not in text


@pytest.mark.parametrize("path", sorted((ROOT / "search_spaces").glob("*.py")),
                         ids=lambda path: path.name)
def test_a_study_that_ships_is_at_most_thirty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 30
    assert not (ROOT / "search_spaces" / "__init__.py").exists()


def test_no_file_names_the_host_of_a_package_registry() -> None:
    """A user's own index decides where packages come from."""
    hosts = [".".join(parts) for parts in (
        ("pypi", "org"), ("files", "pythonhosted", "org"), ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"), ("conda", "anaconda", "org"))]
    texts = [path for suffix in ("py", "toml", "md", "yml", "yaml", "cfg", "txt")
             for path in ROOT.rglob(f"*.{suffix}")
             if not {".git", "shared", ".venv", "hpo-runs"} & set(path.parts)]
    for path in [*texts, *ROOT.glob("Dockerfile*")]:
        found = [host for host in hosts if host in path.read_text(errors="replace")]
        assert not found, f"{path} names {found}"
