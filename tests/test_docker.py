"""The compose file and the Dockerfile are sound, private by default, and fit the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "db"}


def tool(name):
    """Return a console script beside this Python, or skip."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        pytest.skip(f"{name} is not installed: pip install 'hpo[test]'")
    return str(path)


def test_the_compose_file_follows_the_compose_specification():
    done = subprocess.run(
        [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_passes_its_linter():
    done = subprocess.run([tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_password_and_token_come_from_the_environment_and_have_no_default():
    text = COMPOSE.read_text()
    for name in ("HPO_DB_PASSWORD", "HPO_DASHBOARD_TOKEN"):
        used = re.findall(r"\$\{" + name + r"([^}]*)\}", text)
        assert used and all(rest.startswith(":?") for rest in used)


def test_every_published_port_is_this_machine_s_own():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    assert "ports" not in SERVICES["db"]


def test_the_database_is_awaited_by_its_health_and_kept_in_a_named_volume():
    assert "pg_isready" in SERVICES["db"]["healthcheck"]["test"]
    assert SERVICES["db"]["volumes"] == ["db:/var/lib/postgresql/data"]
    assert SERVICES["init"]["depends_on"]["db"]["condition"] == "service_healthy"
    for name in set(OURS) - {"init"}:
        assert SERVICES[name]["depends_on"]["init"]["condition"] == (
            "service_completed_successfully")


def test_workers_reserve_gpus_and_scale_and_the_cpu_profile_needs_none():
    for name in ("run", "worker"):
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"] and "profiles" not in SERVICES[name]
    for name in ("run-cpu", "worker-cpu"):
        assert SERVICES[name]["profiles"] == ["cpu"] and "deploy" not in SERVICES[name]
    # A container's own name or a port would keep a second one from starting.
    for name in ("worker", "worker-cpu"):
        assert "container_name" not in SERVICES[name] and "ports" not in SERVICES[name]


def test_all_of_ours_share_the_home_folder_and_the_storage():
    for service in OURS.values():
        assert "runs:/home/hpo/runs" in service["volumes"]
        assert service["environment"]["HPO_STORAGE"] == "postgresql://hpo@db/hpo"


@pytest.mark.parametrize("name", sorted(OURS))
def test_each_command_and_its_flags_exist(name):
    command, *words = SERVICES[name]["command"]
    done = subprocess.run([sys.executable, "-m", "hpo", command, "--help"], capture_output=True,
                          text=True, check=False, env={"COLUMNS": "200", "PATH": ""}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words if word.startswith("--"))


def test_the_image_runs_as_no_root_and_installs_in_one_layer():
    lines = DOCKERFILE.read_text().splitlines()
    assert lines.index("USER 1000:1000") < lines.index('ENTRYPOINT ["hpo"]')
    assert sum(line.startswith("RUN ") for line in lines) == 1


def test_the_build_context_holds_what_the_image_copies_and_nothing_else():
    copied = {word.removeprefix("./") for line in DOCKERFILE.read_text().splitlines()
              if line.startswith("COPY ") for word in line.split()[1:-1]}
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines()
              if line and not line.startswith("#")]
    assert ignore[0] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / path).exists() for path in copied)


def test_no_package_registry_is_named():
    for path in (COMPOSE, DOCKERFILE):
        assert not re.search(r"https?://(?!127\.0\.0\.1)|index-url|trusted-host",
                             path.read_text())
