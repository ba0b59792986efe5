"""The three phases as processes, with the real buildah and a registry."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builder.base_image import ARCHITECTURE, needs_busybox
from tests.builder.builds import (
    make_builder,
    make_spec,
    open_client,
    push_base,
    run_phases,
)
from tests.builder.sandboxing import needs_buildah
from tests.fixtures.processes import find_processes
from tests.waiting import wait_until
from treenail.builder.images.attachments import read_documents
from treenail.builder.local import BuildFiles
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.image.oci.attachments import SPDX_TYPE
from treenail.image.oci.documents import ImageInstance, make_index
from treenail_lab.registry.front import FaultKind, RegistryFault
from treenail_lab.registry.service import PULLER, RegistryService

pytestmark = [needs_buildah, needs_busybox, pytest.mark.process]

Base = tuple[RegistryService, str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    """A registry, and the pull spec of a base image in it."""
    with RegistryService() as registry:
        yield registry, push_base(registry, tmp_path_factory.mktemp("base"))


def build(
    base: Base, place: Path, text: str, *, context: Path | None = None, **settings: object
) -> tuple[BuildResult, list[str]]:
    """Run all phases; the text follows after the base."""
    registry, reference = base
    lines: list[str] = []
    cache = str(settings.pop("cache_repository", ""))
    builder = make_builder(registry, place, lines, **settings)
    spec = make_spec(registry, cache_repository=cache)
    with builder.open_build(f"FROM {reference} AS configs\n{text}", spec, BuildFiles()) as opened:
        if context is not None:
            (opened.directories.inputs / "context").rmdir()
            (opened.directories.inputs / "context").symlink_to(context)
        result = run_phases(opened)
    assert list((place / "builds").glob("*")) == []
    return result, lines


def test_build_with_context_is_pushed_and_verified(base: Base, tmp_path: Path) -> None:
    context = tmp_path / "context"
    # As the kubelet shows a ConfigMap.
    (context / "..2026_01_01").mkdir(parents=True)
    (context / "..2026_01_01/motd").write_text("welcome\n")
    (context / "..data").symlink_to("..2026_01_01")
    (context / "motd").symlink_to("..data/motd")
    text = "FROM configs AS final\nCOPY . /etc/copied\nRUN ls -A /etc/copied && env\n"
    result, lines = build(base, tmp_path, text, context=context)
    assert result.has_succeeded, lines
    registry, reference = base
    with open_client(registry) as client:
        found = client.head_manifest("os/node", "built")
        assert found.digest == result.digest
        manifest = json.loads(client.get_manifest("os/node", result.digest).content)
        digest = reference.partition("@")[2]
        below = json.loads(client.get_manifest("os/base", digest).content)["layers"]
    assert manifest["layers"][: len(below)] == below
    assert "motd" in lines
    assert "..data" not in lines
    assert "token-of-the-user" not in "".join(lines)
    assert set(result.seconds) == {"push"}


@pytest.mark.parametrize(
    ("text", "reason", "line", "message"),
    [
        # buildah 1.28 may lose output that is written directly before the end, on a busy host.
        (
            "RUN true\nRUN cat /missing || { sleep 0.5; exit 1; }\n",
            "InstructionFailed", 3, "can't open '/missing'",
        ),
        ("RUN sleep 0.5; kill -9 $$\n", "InstructionFailed", 2, "killed by a signal"),
        pytest.param(
            "FROM configs\nCOPY absent /x\n", "InstructionFailed", 3, "absent",
            marks=pytest.mark.long,
        ),
        pytest.param("ADMIRE me\n", "ContainerfileInvalid", 2, "ADMIRE", marks=pytest.mark.long),
        pytest.param(
            "COPY --from=nostage /a /b\n", "ContainerfileInvalid", 0, "nostage",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_build_of_a_wrong_text_names_line_and_cause(
    base: Base, tmp_path: Path, text: str, reason: str, line: int, message: str
) -> None:
    result, _ = build(base, tmp_path, text)
    assert result.reason == reason, result.message
    assert result.exit_code == 64
    assert result.line == line
    assert message in result.message, result.message
    assert not result.digest


@pytest.mark.parametrize(
    "text",
    [
        "FROM scratch\nCOPY motd /etc/motd\n",
        "FROM configs AS tools\nRUN true\nFROM scratch AS final\nCOPY --from=tools /bin /bin\n",
    ],
)
def test_build_of_no_operating_system_is_an_error_of_the_text(
    base: Base, tmp_path: Path, text: str
) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "motd").write_text("welcome\n")
    result, _ = build(base, tmp_path, text, context=context)
    assert result.phase is BuildPhase.BUILD
    assert result.reason == "ContainerfileInvalid"
    assert "begin the last stage with: FROM configs AS final" in result.message


def test_base_by_the_digest_of_a_manifest_list_is_built_on(base: Base, tmp_path: Path) -> None:
    registry, reference = base
    with open_client(registry) as client:
        found = client.get_manifest("os/base", reference.partition("@")[2])
        size = len(found.content)
        own = ImageInstance(found.media_type, found.digest, size, ARCHITECTURE)
        media_type, content = make_index([own, replace(own, architecture="riscv64")])
        digest = client.put_manifest("os/base", "list", media_type, content)
    listed = (registry, f"{registry.host}/os/base@{digest}")
    result, lines = build(listed, tmp_path, "RUN echo built\n")
    assert result.has_succeeded, lines
    plain, _ = build(base, tmp_path, "RUN echo built\n")
    assert plain.digest == result.digest


def test_build_beyond_its_time_ends_and_leaves_nothing(base: Base, tmp_path: Path) -> None:
    result, _ = build(base, tmp_path, "RUN sleep 7654324\n", timeout_s=3.0)
    assert (result.reason, result.line, result.exit_code) == ("DeadlineExceeded", 2, 75)
    wait_until(lambda: not find_processes("7654324"))


def test_build_on_a_full_disk_has_its_reason(base: Base, tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a small tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], check=True)
    try:
        text = "RUN dd if=/dev/zero of=/big bs=1M count=64\n"
        result, _ = build(base, tmp_path, text, directory=disk)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert (result.reason, result.line, result.exit_code) == ("DiskFull", 2, 75), result.message


@pytest.mark.skipif(
    shutil.disk_usage(tempfile.gettempdir()).free < 2 * 1024**3, reason="needs 2 GiB of free space"
)
def test_printed_text_of_a_full_disk_is_no_full_disk(base: Base, tmp_path: Path) -> None:
    result, _ = build(base, tmp_path, "RUN echo No space left on device; exit 3\n")
    assert (result.reason, result.line, result.exit_code) == ("InstructionFailed", 2, 64)


def test_second_build_takes_instructions_from_the_cache(base: Base, tmp_path: Path) -> None:
    registry, _ = base
    text = "RUN echo made > /made\nFROM configs AS final\nRUN echo again > /again\n"
    cache = f"{registry.host}/os/cache"
    results = []
    for name in ("first", "second"):
        directory = tmp_path / name
        directory.mkdir()
        results.append(build(base, directory, text, cache_repository=cache))
    (first, first_lines), (second, second_lines) = results
    assert first.has_succeeded
    assert first.digest == second.digest
    assert not any("Using cache" in line for line in first_lines)
    assert sum("Using cache" in line for line in second_lines) == 2


@pytest.mark.long
def test_build_without_a_reachable_cache_succeeds(base: Base, tmp_path: Path) -> None:
    result, lines = build(base, tmp_path, "RUN true\n", cache_repository="127.0.0.1:1/cache")
    assert result.has_succeeded
    assert any("incomplete cache" in line for line in lines)


def test_killed_local_build_leaves_no_process_and_is_cleaned_up(base: Base, tmp_path: Path) -> None:
    registry, reference = base
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.builder.test_phases import run_until_killed\n"
        "run_until_killed(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))\n"
    )
    lines: list[str] = []
    builder = make_builder(registry, tmp_path, lines)
    output = tmp_path / "output"
    with output.open("wb") as file, subprocess.Popen(
        [
            sys.executable, "-c", script, tmp_path / "builds", reference,
            tmp_path / "pull.json", registry.ca_file,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=file,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        wait_until(lambda: process.poll() or find_processes("7654326"), limit_s=40)
        assert process.poll() is None, output.read_text()
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_processes("7654326"))
    assert len(list((tmp_path / "builds").iterdir())) == 1
    # The phase of the killed build holds no lock, but ends a moment later.
    wait_until(builder.remove_abandoned_builds)
    assert list((tmp_path / "builds").iterdir()) == []


def test_phase_that_was_started_early_waits_until_it_may_run(base: Base, tmp_path: Path) -> None:
    registry, reference = base
    builder = make_builder(registry, tmp_path, [])
    with builder.open_build(f"FROM {reference}\n", make_spec(registry), BuildFiles()) as opened:
        argument = f"--inputs={opened.directories.inputs}"
        opened.start_phase(BuildPhase.FETCH)
        opened.start_phase(BuildPhase.PUSH)
        wait_until(lambda: len(find_processes(argument)) == 2)
        assert not opened.directories.layout.exists()
        assert opened.run_phase(BuildPhase.FETCH).has_succeeded
        assert opened.directories.layout.exists()
        assert len(find_processes(argument)) == 1
    assert find_processes(argument) == []


def test_phase_whose_builder_ends_before_it_may_run_does_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "treenail.builder", "push", "--wait", f"--inputs={tmp_path}",
         f"--work={tmp_path}", f"--result={tmp_path}/result"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 75
    assert list(tmp_path.iterdir()) == []


def test_terminated_fetch_reports_an_eviction_at_once(base: Base, tmp_path: Path) -> None:
    with RegistryService() as registry:
        reference = push_base(registry, tmp_path)
        inputs, work, result = tmp_path / "inputs", tmp_path / "work", tmp_path / "result"
        inputs.mkdir()
        work.mkdir()
        (inputs / "Containerfile").write_text(f"FROM {reference}\n")
        (inputs / "build.json").write_text(json.dumps(make_spec(registry).to_json()))
        (tmp_path / "pull.json").write_bytes(registry.make_auth_json(PULLER))
        with open_client(registry) as client:
            manifest = client.get_manifest("os/base", "1").content
        layer = json.loads(manifest)["layers"][0]["digest"]
        registry.faults.add(RegistryFault(FaultKind.HANG, "GET", layer, times=0))
        argv = [
            sys.executable, "-m", "treenail.builder", "fetch", "--inputs", inputs, "--work", work,
            "--result", result, "--pull-secret", tmp_path / "pull.json",
            "--ca", registry.ca_file,
        ]  # fmt: skip
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline().startswith(b"fetching ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 75
    found = BuildResult.from_text(result.read_bytes())
    assert (found.reason, found.digest) == ("Evicted", "")


def test_build_that_cannot_start_prints_the_remedy(tmp_path: Path) -> None:
    inputs, work, result = tmp_path / "inputs", tmp_path / "work", tmp_path / "result"
    inputs.mkdir()
    work.mkdir()
    (inputs / "Containerfile").write_text("FROM scratch\n")
    (inputs / "build.json").write_text('{"pushSpec": "registry.example.com/os/node:1"}')
    (work / "fetched.json").write_text('{"images": []}')
    done = subprocess.run(
        [sys.executable, "-m", "treenail.builder", "build", f"--inputs={inputs}",
         f"--work={work}", f"--result={result}"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # Without buildah.
            "PATH": str(tmp_path),
        },
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 75
    assert "build failed: BuilderFailed: cannot run buildah" in done.stdout
    assert "allow user namespaces here" in done.stdout


EARLY_SIGNAL = """
import os, signal, sys
sys.path.remove(os.path.dirname(__file__))
del sys.modules["argparse"]
os.kill(os.getpid(), signal.SIGTERM)
import argparse
"""


def test_sigterm_while_modules_are_imported_reports_an_eviction(tmp_path: Path) -> None:
    # The interpreter finds this module first.
    (tmp_path / "argparse.py").write_text(EARLY_SIGNAL)
    result = tmp_path / "result"
    places = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    environ = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run(
        [sys.executable, "-m", "treenail.builder", "fetch", f"--inputs={tmp_path}",
         f"--work={tmp_path}", f"--result={result}"],
        env=environ, check=False,
    )  # fmt: skip
    assert done.returncode == 75
    assert BuildResult.from_text(result.read_bytes()).reason == "Evicted"


def run_until_killed(directory: Path, reference: str, secret: Path, ca: Path) -> None:
    """Run a build that sleeps; the test kills this process."""
    from tests.builder.builds import make_local_builder
    from treenail.builder.build_spec import BuildSpec
    from treenail.builder.local import LocalSettings

    builder = make_local_builder(LocalSettings(directory, pull_secret=secret, ca=ca), print)
    spec = BuildSpec("localhost:5000/os/node:1", ARCHITECTURE)
    with builder.open_build(f"FROM {reference}\nRUN sleep 7654326\n", spec, BuildFiles()) as build:
        assert build.run_phase(BuildPhase.FETCH).has_succeeded
        build.run_phase(BuildPhase.BUILD)


def test_packages_of_the_built_image_are_attached(base: Base, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "status").write_text(
        "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:5.2-1\n"
    )
    # The database is in a layer below the last one.
    text = "FROM configs AS base\nCOPY status /var/lib/dpkg/\nFROM base AS final\nRUN true\n"
    result, lines = build(base, tmp_path, text, context=context)
    assert result.has_succeeded, lines
    assert result.message == ""
    registry, _ = base
    with open_client(registry) as client:
        (document,) = read_documents(client, "os/node", result.digest, SPDX_TYPE)
        plain, _ = build(base, tmp_path, "RUN echo no packages\n")
        assert read_documents(client, "os/node", plain.digest, SPDX_TYPE) == ()
    found = json.loads(document)
    image, package = found["packages"]
    assert image["versionInfo"] == result.digest
    reference = package["externalRefs"][0]
    assert reference["referenceLocator"] == "pkg:deb/test/bash@1:5.2-1?arch=amd64"
