"""Instructions that leave the directory of their image.

buildah 1.28 follows the link ``/dat`` of another stage to its own root directory, and mounts that.
Newer ones do not; there the attacks fail for two reasons.
"""

import base64
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builder.base_image import ARCHITECTURE, needs_busybox
from tests.builder.builds import make_builder, make_spec, open_client, push_base, run_phases
from tests.builder.sandboxing import needs_buildah
from tests.registry.images import push_image
from treenail.builder.local import BuildFiles
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.registry.images import resolve_image
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

pytestmark = [needs_buildah, needs_busybox, pytest.mark.process]

Base = tuple[RegistryService, str]
LEAVE = """FROM configs AS way
RUN ln -s / /dat
FROM configs AS final
RUN --mount=type=bind,from=way,source=/dat,target=/out,rw """
USER = 47110


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    """A registry, and the pull spec of a base image in it."""
    with RegistryService() as registry:
        yield registry, push_base(registry, tmp_path_factory.mktemp("base"))


def build(base: Base, place: Path, script: str) -> tuple[BuildResult, list[str]]:
    """Build a text whose last instruction sees buildah's root directory as /out."""
    registry, reference = base
    lines: list[str] = []
    text = f"FROM {reference} AS configs\n{LEAVE}{script}\n"
    builder = make_builder(registry, place, lines)
    files = BuildFiles({"motd": b"welcome\n"}, {"gpg": ("/etc/pki/rpm-gpg", {"key": b"KEY"})})
    with builder.open_build(text, make_spec(registry), files) as opened:
        return run_phases(opened), lines


def list_results(lines: list[str]) -> list[str]:
    """Return what the script printed; buildah prints the script, too."""
    return [line for line in lines if line.startswith("result ")]


def make_search(registry: RegistryService) -> str:
    """Return a script that prints each file with a password, in any form, and each process."""
    patterns = [
        part
        for user in (PULLER, PUSHER)
        for part in (
            registry.passwords[user],
            base64.b64encode(f"{user}:{registry.passwords[user]}".encode()).decode(),
        )
    ]
    patterns += ["token-of-the-user"]
    # In halves: the text of the script must not be a result.
    halves = " ".join(f"{text[:6]} {text[6:]}" for text in patterns)
    places = "/tmp /etc /run /var /out/tmp /out/etc /out/run /out/var /out/root /out/home"
    return (
        f"printf '%s%s\\n' {halves} > /patterns; "
        f"for f in $(busybox grep -rlFf /patterns {places} /proc/[0-9]*/environ "
        "/proc/[0-9]*/cmdline 2> /dev/null); do case $f in */patterns) ;; "
        "*) echo result $f;; esac; done; echo result end"
    )


def test_instruction_finds_no_login_in_any_file_or_process(base: Base, tmp_path: Path) -> None:
    result, lines = build(base, tmp_path, make_search(base[0]))
    assert result.has_succeeded, lines
    assert list_results(lines) == ["result end"]


def test_login_of_the_proxy_reaches_instructions_and_no_image_or_message(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://user:canary@proxy.example:1")
    script = 'test "${https_proxy#*:canar}" != "$https_proxy"; echo "result $http_proxy"'
    result, lines = build(base, tmp_path, script)
    assert result.has_succeeded, lines
    assert list_results(lines) == ["result http://proxy.example:1"]
    with open_client(base[0]) as client:
        image = resolve_image(client, "os/node", result.digest, ARCHITECTURE)
    assert b"canary@" not in image.manifest.content + image.config


def test_instruction_reaches_no_file_of_the_host(base: Base, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("of the host")
    outside = f"/out{tmp_path}"
    script = (
        # buildah copies both outputs apart: an error may be in the middle of a result.
        "exec 2> /dev/null; "
        f"for f in /out/root /out/home /out/etc/shadow {outside}/canary; do "
        "if busybox stat $f > /dev/null; then echo result $f; fi; done; "
        f"echo written > {outside}/written; ls -A {outside}/builds/*; "
        f"for f in {outside}/builds/*/*/*; do echo result ${{f##*/}}; done; "
        f"for f in given/context/motd given/Containerfile-0 given/mount-0/key; do "
        f"if echo x >> $(echo {outside}/builds/*/work)/$f; then echo result $f; fi; done; "
        "for f in /out/etc/hosts /out/etc/ld.so.preload /out/usr/bin/sh "
        "/out/sys/kernel/mm/ksm/run; do "
        "if echo > $f; then echo result $f; fi; done; "
        'read a b c < /proc/self/uid_map; echo "result $a $b $c"; echo result $(ulimit -u)'
    )
    result, lines = build(base, tmp_path, script)
    assert result.has_succeeded, lines
    # buildah's own files, and the inputs of the build, which are read-only.
    first = f"result 0 {0x7F000000} 65536"
    assert list_results(lines) == ["result buildah", "result given", first, "result 4096"]
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("kind", ["name", "link", "hard", "repeated"])
def test_layer_of_a_base_writes_and_reads_no_file_of_the_host(
    base: Base, tmp_path: Path, kind: str
) -> None:
    registry, _ = base
    (tmp_path / "canary").write_text("of the host")
    up = "../" * 30
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        add_entry(archive, "etc/first", b"1")
        if kind == "name":
            add_entry(archive, f"{up}{tmp_path}/written", b"x")
        elif kind == "link":
            add_entry(archive, "out", link=str(tmp_path))
            add_entry(archive, "out/written", b"x")
        elif kind == "hard":
            add_entry(archive, "etc/canary", link=f"{up}{tmp_path}/canary", is_hard=True)
        for _ in range(3 if kind == "repeated" else 0):
            add_entry(archive, "etc/first", b"2")
            add_entry(archive, "etc/first", link=str(tmp_path))
            add_entry(archive, "etc/first/written", b"x")
    with open_client(registry) as client:
        layer = gzip.compress(packed.getvalue(), mtime=0)
        image = push_image(client, "os/hostile", kind, layers=[layer], architecture=ARCHITECTURE)
    reference = f"{registry.host}/os/hostile@{image.digest}"
    text = "COPY --from=configs /etc/canary /copied" if kind == "hard" else "COPY motd /motd"
    lines: list[str] = []
    builder = make_builder(registry, tmp_path, lines)
    files = BuildFiles({"motd": b"x"})
    spec = make_spec(registry)
    with builder.open_build(f"FROM {reference} AS configs\n{text}\n", spec, files) as opened:
        result = run_phases(opened)
    assert not (tmp_path / "written").exists()
    assert not (kind == "hard" and result.has_succeeded), lines


def add_entry(
    archive: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    link: str = "",
    is_hard: bool = False,
) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.linkname = len(content), link
    entry.type = tarfile.LNKTYPE if is_hard else tarfile.SYMTYPE if link else tarfile.REGTYPE
    archive.addfile(entry, io.BytesIO(content))


AS_USER = """
import sys
from pathlib import Path
from tests.builder.test_build_root import build_as_user
build_as_user(*sys.argv[1:])
"""


def write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def build_as_user(place: str, host: str, reference: str, script: str) -> None:
    """Build with the files of `test_instruction_of_a_user_reaches_no_file_of_the_user`."""
    from tests.builder.builds import make_local_builder
    from treenail.builder.build_spec import BuildSpec
    from treenail.builder.local import LocalSettings

    directory = Path(place)
    settings = LocalSettings(
        directory / "builds", pull_secret=directory / "pull.json", ca=directory / "ca.pem"
    )
    builder = make_local_builder(settings, write_line)
    text = f"FROM {reference} AS configs\n{LEAVE}{script}\n"
    with builder.open_build(text, BuildSpec(f"{host}/os/node:1", ARCHITECTURE), BuildFiles()) as o:
        assert o.run_phase(BuildPhase.FETCH).has_succeeded
        result = o.run_phase(BuildPhase.BUILD)
        write_line(f"result {result.has_succeeded}")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("newuidmap") is None,
    reason="needs root to become a user with subordinate IDs, setpriv and newuidmap",
)
def test_instruction_of_a_user_reaches_no_file_of_the_user(base: Base) -> None:
    registry, reference = base
    with tempfile.TemporaryDirectory(prefix="treenail-user-") as name:
        place = Path(name)
        (place / "pull.json").write_bytes(registry.make_auth_json(PULLER))
        (place / "ca.pem").write_bytes(registry.ca_file.read_bytes())
        (place / "passwd").write_text(
            Path("/etc/passwd").read_text() + f"builder:x:{USER}:{USER}::/nowhere:/bin/sh\n"
        )
        (place / "subid").write_text(f"{USER}:600000:65536\n")
        for path in (place, *place.iterdir()):
            os.chown(path, USER, USER)
        script = (
            f"for f in /out{place}/pull.json /out/etc/shadow /out/root; do "
            "if busybox stat $f > /dev/null; then echo result $f; fi; done; "
            f"{make_search(registry)}"
        )
        # The IDs of the user are in a mount namespace of the test only.
        mounts = (
            f"mount --bind {place}/passwd /etc/passwd && mount --bind {place}/subid /etc/subuid && "
            f"mount --bind {place}/subid /etc/subgid && exec setpriv --reuid {USER} "
            f'--regid {USER} --clear-groups "$@"'
        )
        python = [sys.executable, "-c", AS_USER, place, registry.host, reference, script]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", mounts, "sh", *python],
            env={
                "PATH": os.environ["PATH"],
                "SESSION_TOKEN": "token-of-the-user",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        lines = done.stdout.splitlines()
        assert list_results(lines) == ["result end", "result True"], done.stdout
        # Files of subordinate IDs, too, are removed.
        assert list((place / "builds").iterdir()) == []
