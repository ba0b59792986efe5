"""Composed Containerfiles on the real buildah: config below the text, arguments, lines."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import make_builder, make_spec, push_base, run_phases
from tests.builder.sandboxing import needs_buildah
from treenail.api.machineconfig import MachineConfig
from treenail.builder.disk_space import DiskSpaceSampler
from treenail.builder.local import BuildFiles
from treenail.builder.phases.build import ContainerfileBuilder, ContainerfilePart
from treenail.clocks import SystemClock
from treenail.image.build_inputs import CONFIG_FILE, TRUST_FILE, BuildInputs, compose_containerfile
from treenail.image.build_result import BuildReason, BuildResult
from treenail.image.config_layer import make_config_layer
from treenail.image.containerfile import find_containerfile_problems
from treenail_lab.registry.service import RegistryService

pytestmark = [needs_buildah, needs_busybox, pytest.mark.process]

ANCHOR = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"
CONFIG = MachineConfig.from_json(
    {
        "metadata": {"name": "rendered-worker-1"},
        "spec": {
            "config": {
                "ignition": {"version": "3.4.0"},
                "storage": {
                    "files": [
                        {
                            "path": "/etc/app.conf",
                            "mode": 0o600,
                            "contents": {
                                "source": "data:;base64,"
                                + base64.b64encode(b"from the config\n").decode()
                            },
                        }
                    ]
                },
            }
        },
    }
)

Base = tuple[RegistryService, str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    """A registry, and the pull spec of a base image in it."""
    with RegistryService() as registry:
        yield registry, push_base(registry, tmp_path_factory.mktemp("base"))


def build(base: Base, place: Path, text: str, **more: bytes) -> tuple[BuildResult, list[str]]:
    """Build a user's text that sees the config and a trust bundle."""
    registry, reference = base
    assert find_containerfile_problems(text) == ()
    layer = make_config_layer(CONFIG)
    inputs = BuildInputs(
        reference, containerfile=text, trust_bundle="PEM\n", config_digest=layer.digest
    )
    composed = compose_containerfile(inputs)
    context = {
        CONFIG_FILE: layer.tar_gz,
        TRUST_FILE: inputs.trust_bundle.encode(),
        "motd": b"welcome\n",
        **more,
    }
    assert set(composed.files) == {CONFIG_FILE, TRUST_FILE}
    lines: list[str] = []
    spec = replace(make_spec(registry), user_line=composed.user_line)
    files = BuildFiles(context)
    with make_builder(registry, place, lines).open_build(composed.text, spec, files) as opened:
        return run_phases(opened), lines


def test_text_sees_config_trust_bundle_and_arguments(base: Base, tmp_path: Path) -> None:
    text = (
        "# escape=`\n"
        "ARG FIRST=configs\n"
        "FROM ${FIRST} AS tools\n"
        "COPY motd /etc/motd\n"
        "FROM configs AS final\n"
        "COPY --from=tools /etc/motd /etc/motd\n"
        "RUN cat /etc/app.conf /etc/motd && `\n"
        "  # a comment between continued lines\n"
        # buildah on a busy host loses output of the last moment.
        f"  cat {ANCHOR} && ls -l /etc/app.conf && sleep 0.5\n"
    )
    result, lines = build(base, tmp_path, text)
    assert result.has_succeeded, lines
    for expected in ("from the config", "welcome", "PEM"):
        assert expected in lines
    assert any(line.startswith("-rw------- ") for line in lines)


def test_failed_instruction_has_the_line_of_the_users_text(base: Base, tmp_path: Path) -> None:
    result, lines = build(base, tmp_path, "FROM configs AS final\n\nRUN true\nRUN false\n")
    assert (result.reason, result.line) == (BuildReason.INSTRUCTION_FAILED, 4), lines


def test_copy_of_the_whole_context_has_no_file_of_our_own(base: Base, tmp_path: Path) -> None:
    # By exit code: buildah 1.28 may lose output of an instruction on a busy host.
    text = (
        "FROM configs AS final\n"
        "COPY . /etc/copied/\n"
        "RUN test -e /etc/copied/motd\n"
        'RUN for file in /etc/copied/.treenail-*; do test ! -e "$file"; done\n'
    )
    results = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        result, lines = build(base, tmp_path / name, text)
        assert result.has_succeeded, lines
        results.append(result.digest)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", [".containerignore", ".dockerignore"])
def test_ignore_file_of_the_user_does_not_hide_own_files(
    base: Base, tmp_path: Path, name: str
) -> None:
    text = (
        "FROM configs AS final\n"
        "COPY . /etc/copied/\n"
        f"RUN ls -A /etc/copied; cat /etc/app.conf {ANCHOR}\n"
    )
    ignored = {name: b"# all but one\n*\n!motd", "secret": b"hidden"}
    result, lines = build(base, tmp_path, text, **ignored)
    assert result.has_succeeded, lines
    assert {"from the config", "PEM", "motd"} <= set(lines)
    assert "secret" not in lines


def test_invalid_ignore_file_fails_as_text_of_the_user(base: Base, tmp_path: Path) -> None:
    text = "FROM configs AS final\nCOPY . /etc/copied/\n"
    result, lines = build(base, tmp_path, text, **{".containerignore": b"[\n"})
    assert result.exit_code == 64, lines


class RecordingBuildah:
    """Records the Containerfiles that exist when each part is built."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seen: list[set[str]] = []

    def build_image(self, *_: object, **__: object) -> int:
        self.seen.append({path.name for path in self._directory.iterdir()})
        return 0


def test_containerfiles_of_all_parts_exist_before_the_first_instruction(tmp_path: Path) -> None:
    buildah: Any = RecordingBuildah(tmp_path)
    parts = [ContainerfilePart(f"FROM a{number}\n", tmp_path, "x") for number in range(3)]
    builder = ContainerfileBuilder(
        buildah, SystemClock(), DiskSpaceSampler(tmp_path), (), {}, "amd64",
        keeps_layers=False, timeout_s=60.0, show_line=lambda _: None,
    )  # fmt: skip
    builder.build_parts(iter(parts), tmp_path)
    names = {f"Containerfile-{number}" for number in range(3)}
    assert buildah.seen == [names] * 3
