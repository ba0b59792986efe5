"""Versions, dependencies, commands, packages, manuals and units agree with each other."""

import importlib.metadata
import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import treenail
from treenail.api import annotations as key
from treenail.cli.output import EXIT_INSTALL_FAILED, EXIT_USAGE
from treenail.controllers.pools.node_facts import LOCKED_BY, STARTED_AT
from treenail.controllers.pools.rollout_policy import KIND
from treenail.manifests.installation import load_crds

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNIT = ROOT / "systemd" / "treenail.service"
UNITS = {UNIT: "run", UNIT.with_name("treenail-firstboot.service"): "firstboot"}


def run(*command: str | Path) -> str:
    """Run the command and return its output; its errors are the message of the assertion."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_version_is_equal_in_all_files() -> None:
    spec = re.search(r"^Version:\s+(\S+)$", (ROOT / "rpm/treenail.spec").read_text(), re.MULTILINE)
    news = re.search(r"^## (\S+)$", (ROOT / "NEWS.md").read_text(), re.MULTILINE)
    assert spec is not None
    assert news is not None
    assert (treenail.__version__, spec[1], news[1]) == (PROJECT["version"],) * 3


def test_every_dependency_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = [
        *PROJECT["dependencies"],
        *chain.from_iterable(PROJECT["optional-dependencies"].values()),
    ]
    names = {re.split(r"[<>=!]", requirement)[0] for requirement in wanted}
    assert {name.lower() for name in names} - {name.lower() for name in pinned} == set()


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_every_script_can_be_loaded(script: str) -> None:
    entry = importlib.metadata.EntryPoint(script, PROJECT["scripts"][script], "console_scripts")
    assert callable(entry.load())


def test_manual_lists_every_rollout_policy_field() -> None:
    manual = (ROOT / "rpm/man/treenail-controller.8.md").read_text()
    section = manual.split("## ROLLOUT POLICY\n")[1].split("\n## ")[0]
    (crd,) = (each for each in load_crds() if each["spec"]["names"]["kind"] == KIND)  # type: ignore[index]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]  # type: ignore[index]
    fields = schema["properties"]["spec"]["properties"]
    assert {field for field in fields if f"\n- `{field}`: " not in section} == set()


def test_manual_lists_every_controller_annotation() -> None:
    manual = (ROOT / "rpm/man/treenail-controller.8.md").read_text()
    keys = {
        *(STARTED_AT, LOCKED_BY),
        *(key.IMAGE_FILES, key.HEALTH_MODE, key.RETRY, key.POOL_RETRY),
        *(key.PRESTAGE_CONFIG, key.PRESTAGE_IMAGE, key.PRESTAGED, key.PRESTAGE_ERROR),
        *(key.DRAIN, key.DRAIN_BLOCKED, key.LAST_OUTAGE, key.PROGRESS),
    }
    assert {name for name in keys if name not in manual} == set()


@pytest.mark.parametrize(("unit", "verb"), UNITS.items())
def test_unit_starts_shipped_command(unit: Path, verb: str) -> None:
    command = re.search(rf"^ExecStart=/usr/bin/(\S+) {verb}$", unit.read_text(), re.MULTILINE)
    assert command is not None
    assert command[1] in PROJECT["scripts"]


def test_units_are_ordered_without_network() -> None:
    first, agent = (
        UNIT.with_name(name).read_text() for name in ("treenail-firstboot.service", UNIT.name)
    )
    assert re.search(r"^Before=treenail\.service kubelet\.service ", first, re.MULTILINE)
    assert not re.search(r"^(After|Wants)=.*network", first + agent, re.MULTILINE)


def test_security_document_names_capabilities_and_writable_paths_of_unit() -> None:
    document = (ROOT / "SECURITY.md").read_text()
    for setting, label in (
        ("CapabilityBoundingSet", "capabilities"),
        ("ReadWritePaths", "writable"),
    ):
        value = re.search(rf"^{setting}=(.+)$", UNIT.read_text(), re.MULTILINE)
        named = re.search(rf"^- {label}: (.+?) only;", document, re.MULTILINE | re.DOTALL)
        assert value is not None
        assert named is not None
        assert re.findall(r"`(\S+)`", named[1]) == value[1].split()


def test_bootstrap_unit_starts_shipped_command() -> None:
    text = UNIT.with_name("treenail-bootstrap.service").read_text()
    command = re.search(r"^ExecStart=/usr/bin/(\S+) install bootstrap ", text, re.MULTILINE)
    assert command is not None
    assert command[1] in PROJECT["scripts"]
    codes = re.search(r"^RestartPreventExitStatus=(.+)$", text, re.MULTILINE)
    assert codes is not None
    assert codes[1].split() == [str(EXIT_INSTALL_FAILED), str(EXIT_USAGE)]


@pytest.mark.parametrize("unit", [*UNITS, UNIT.with_name("treenail-bootstrap.service")])
def test_unit_restarts_without_limit(unit: Path) -> None:
    text = unit.read_text()
    assert re.search(r"^StartLimitIntervalSec=0$", text, re.MULTILINE)
    assert re.search(r"^Restart=on-failure$", text, re.MULTILINE)
