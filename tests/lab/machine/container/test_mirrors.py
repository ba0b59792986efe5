"""Mirrors of a machine, with the emulated skopeo and with the real one."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.registry.images import make_client, push_image
from tests.registry.test_proxies import NAME, TunnelProxy
from treenail.config.bootstrap_registry import (
    MIRROR_FILE,
    BootstrapRegistryRecord,
    format_mirror_file,
)
from treenail.host.system.proxies import PROXY_FILE
from treenail_lab.image_builds import CERTIFICATES
from treenail_lab.images import ImageCatalogue, save_catalogue
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path
from treenail_lab.machine.container.pull import open_image, open_remote
from treenail_lab.machine.container.remote import list_sources
from treenail_lab.machine.ostree.steps import OperationError
from treenail_lab.registry.service import PULLER, RegistryService

# Nothing listens there, as before the cluster has a registry.
FINAL = "127.0.0.1:9/example/os"
DIGEST = "sha256:" + "ab" * 32
Inspect = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def registry() -> Iterator[RegistryService]:
    with RegistryService() as service:
        yield service


def prepare_machine(root: Path, registry: RegistryService) -> None:
    """A machine with the files that an installation gives it."""
    record = BootstrapRegistryRecord(registry.host, PULLER, registry.passwords[PULLER], (FINAL,))
    files = {
        MIRROR_FILE: format_mirror_file(record),
        record.ca_path: registry.ca_file.read_bytes(),
        "/etc/ostree/auth.json": registry.make_auth_json(PULLER),
    }
    for name, content in files.items():
        path = root / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def make_inspect(program: str, root: Path, registry: RegistryService) -> Inspect:
    catalogue = root / "images.json"
    save_catalogue(ImageCatalogue(registries=("127.0.0.1:9",)), catalogue)
    lab = [*PYTHON_MODULE, "treenail_lab.machine.container.skopeo", str(root), str(catalogue)]
    real = ["skopeo", "--registries-conf", str(root / MIRROR_FILE[1:])]
    options = ["--authfile", str(root / "etc/ostree/auth.json"), "--cert-dir"]
    options += [str(registry.ca_file.parent), "--retry-times", "0"]

    def inspect(reference: str) -> "subprocess.CompletedProcess[str]":
        before = lab if program == "lab" else real
        after = [] if program == "lab" else options
        return subprocess.run(
            [*before, "inspect", "--raw", *after, f"docker://{FINAL}{reference}"],
            env={**os.environ, "PYTHONPATH": build_python_path()},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return inspect


@pytest.mark.process
@pytest.mark.parametrize("program", ["lab", "real"])
def test_mirror_answers_for_a_digest_and_not_for_a_tag(
    program: str, registry: RegistryService, tmp_path: Path
) -> None:
    if program == "real" and shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    image = push_image(make_client(registry), repository="example/os", tag="latest")
    prepare_machine(tmp_path, registry)
    inspect = make_inspect(program, tmp_path, registry)
    by_digest = inspect(f"@{image.digest}")
    assert by_digest.returncode == 0, by_digest.stderr
    assert '"layers"' in by_digest.stdout
    by_tag = inspect(":latest")
    assert by_tag.returncode != 0
    assert "Mirrors also failed" not in by_tag.stderr
    unknown = inspect(f"@{DIGEST}")
    assert unknown.returncode != 0
    assert f"(Mirrors also failed: [{registry.host}/example/os@{DIGEST}: " in unknown.stderr
    assert "manifest unknown" in unknown.stderr


@pytest.mark.process
def test_image_of_a_mirror_keeps_its_final_name(registry: RegistryService, tmp_path: Path) -> None:
    pushed = push_image(make_client(registry), repository="example/os", tag="latest")
    prepare_machine(tmp_path, registry)
    pull_spec = f"{FINAL}@{pushed.digest}"
    image = open_image(pull_spec, ImageCatalogue(registries=("127.0.0.1:9",)), tmp_path)
    assert image.pull_spec == pull_spec
    layer = tmp_path / "layer"
    open_remote(pull_spec, tmp_path).download_layer(image.layers[0], layer)
    assert layer.stat().st_size == image.layers[0].size_bytes
    (tmp_path / MIRROR_FILE[1:]).unlink()
    with pytest.raises(OperationError):
        open_remote(pull_spec, tmp_path).resolve()


# tests/integration/test_proxy.py has the real skopeo.
@pytest.mark.process
def test_image_is_pulled_through_the_proxy_of_the_machine(
    registry: RegistryService, tmp_path: Path
) -> None:
    pushed = push_image(make_client(registry), repository="example/os", tag="latest")
    host = f"{NAME}:{registry.port}"
    with TunnelProxy() as proxy:
        for name, content in {
            f"{CERTIFICATES}/{host}/ca.crt": registry.ca_file.read_bytes(),
            "etc/ostree/auth.json": registry.make_auth_json(PULLER, host=host),
            PROXY_FILE[1:]: f"HTTPS_PROXY=http://{proxy.address}\n".encode(),
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        image = open_remote(f"{host}/example/os@{pushed.digest}", tmp_path).resolve()
        assert image.digest == pushed.digest
        assert all(head.startswith(f"CONNECT {host} ") for head in proxy.heads)
        assert proxy.heads


@pytest.mark.parametrize(
    ("pull_spec", "sources"),
    [
        (f"a.example/os@{DIGEST}", ["m.example/one", "m.example/two", "a.example/os"]),
        ("a.example/os:tag", ["m.example/two", "a.example/os"]),
        ("a.example/os", ["m.example/two", "a.example/os"]),
        (f"a.example/os/sub@{DIGEST}", ["m.example/one/sub", "m.example/two/sub",
                                        "a.example/os/sub"]),
        (f"a.example/os2@{DIGEST}", ["a.example/os2"]),
        (f"a.example:5000/os@{DIGEST}", ["a.example:5000/os"]),
    ],
)  # fmt: skip
def test_sources_of_an_image_are_mirrors_then_its_own_registry(
    tmp_path: Path, pull_spec: str, sources: list[str]
) -> None:
    path = tmp_path / MIRROR_FILE[1:]
    path.parent.mkdir(parents=True)
    path.write_text(
        '[[registry]]\nlocation = "a.example/os"\n'
        '[[registry.mirror]]\nlocation = "m.example/one"\npull-from-mirror = "digest-only"\n'
        '[[registry.mirror]]\nlocation = "m.example/two"\n'
    )
    assert [each.name for each in list_sources(tmp_path, pull_spec)] == sources
