"""skopeo and podman read the generated files as they are meant."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.generated import runtime_objects
from tests.config.generated.runtime_objects import build_entry, build_image_config, build_mirrors
from tests.registry.images import make_client, push_image
from treenail.config.bootstrap_registry import BootstrapRegistryRecord
from treenail.config.generated import container_runtime, registries, sources
from treenail.config.pullsecret import encode_pull_secret
from treenail_lab.registry.service import PULLER, RegistryService

pytestmark = pytest.mark.process

CONF = "/etc/containers/registries.conf"
FINAL = "127.0.0.1:9/final"
"""A source whose registry refuses connections."""


def write_registries(directory: Path, *documents: Any) -> Path:
    found = runtime_objects.read(*documents)
    base = runtime_objects.build_base()
    for file in registries.generate_registry_files(found, base, sources.EMPTY_FACTS):
        path = directory / file.path.removeprefix("/etc/containers/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(file.contents)
    return directory / "registries.conf"


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryService]:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with RegistryService() as service:
        yield service


@pytest.fixture
def podman() -> str:
    program = shutil.which("podman")
    if program is None:
        pytest.skip("podman is not installed")
    return program


def mirror(place: str, *, never: bool = False) -> dict[str, Any]:
    return build_entry(f"{FINAL}/os", place, never=never)


@pytest.mark.parametrize(
    ("documents", "reference", "succeeds"),
    [
        ([build_mirrors("a", mirror("MIRROR/os"))], "FINAL@DIGEST", True),
        ([build_mirrors("a", mirror("MIRROR/os"))], "FINAL:latest", False),
        ([build_mirrors("a", mirror("MIRROR/os"), kind="ImageTagMirrorSet")], "FINAL:latest", True),
        (
            [build_mirrors("a", mirror("MIRROR/os"), kind="ImageTagMirrorSet")],
            "FINAL@DIGEST",
            False,
        ),
        ([build_mirrors("a", mirror("MIRROR/os", never=True))], "FINAL@DIGEST", True),
        # The reasons for what is refused and what is not.
        ([build_mirrors("a", build_entry("MIRROR/os", "127.0.0.1:9/x"))], "MIRROR@DIGEST", True),
        ([build_mirrors("a", build_entry("MIRROR/os", "127.0.0.1:9"))], "MIRROR@DIGEST", False),
        (
            [
                build_mirrors("a", mirror("MIRROR/os")),
                build_mirrors("b", build_entry("MIRROR/os", f"{FINAL}/os")),
            ],
            "FINAL@DIGEST",
            True,
        ),
        (
            [
                build_mirrors("a", mirror("MIRROR/os", never=True)),
                build_mirrors("b", build_entry("MIRROR/os", f"{FINAL}/os", never=True)),
            ],
            "FINAL@DIGEST",
            False,
        ),
        ([build_image_config(blockedRegistries=["MIRROR"])], "MIRROR@DIGEST", False),
        ([build_image_config(insecureRegistries=["MIRROR"])], "MIRROR@DIGEST", True),
    ],
)
def test_skopeo_pulls_as_the_objects_say(
    registry: RegistryService,
    tmp_path: Path,
    documents: list[Any],
    reference: str,
    *,
    succeeds: bool,
) -> None:
    image = push_image(make_client(registry), repository="example/os", tag="latest")
    record = BootstrapRegistryRecord(registry.host, PULLER, registry.passwords[PULLER], (FINAL,))
    (tmp_path / "auth.json").write_bytes(encode_pull_secret(record.make_pull_secret()))
    text = json.dumps(documents).replace("MIRROR", f"{registry.host}/example")
    conf = write_registries(tmp_path, *json.loads(text))
    name = reference.replace("MIRROR", f"{registry.host}/example/os").replace(
        "FINAL", f"{FINAL}/os"
    )
    name = name.replace("DIGEST", image.digest)
    done = subprocess.run(
        ["skopeo", "--registries-conf", conf, "inspect", "--raw",
         "--authfile", tmp_path / "auth.json", "--retry-times", "0",
         "--cert-dir", registry.ca_file.parent, f"docker://{name}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) is succeeds, done.stderr


def test_host_without_a_dot_ends_every_pull(registry: RegistryService, tmp_path: Path) -> None:
    image = push_image(make_client(registry), repository="example/os", tag="latest")
    conf = tmp_path / "registries.conf"
    conf.write_text(
        f'[[registry]]\nlocation = "{registry.host}/example"\n'
        '[[registry.mirror]]\nlocation = "mirror"\n'
    )
    done = subprocess.run(
        ["skopeo", "--registries-conf", conf, "inspect", "--raw",
         f"docker://{registry.host}/example/os@{image.digest}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "repository name must be canonical" in done.stderr


def read_podman_info(podman: str, directory: Path) -> Any:
    environ = {
        **os.environ,
        "HOME": str(directory),
        "CONTAINERS_REGISTRIES_CONF": str(directory / "registries.conf"),
        "CONTAINERS_STORAGE_CONF": str(directory / "storage.conf"),
    }
    done = subprocess.run([podman, "info", "--format", "json"], env=environ, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_podman_reads_registries_and_storage(podman: str, tmp_path: Path) -> None:
    write_registries(
        tmp_path,
        build_mirrors("a", build_entry("b.example/ns", "m.example/b", "n.example", never=True)),
        build_mirrors("b", build_entry("*.c.example", "m.example"), kind="ImageTagMirrorSet"),
        build_image_config(insecureRegistries=["m.example"], blockedRegistries=["b.example"]),
    )
    stores = tmp_path / "stores"
    stores.mkdir()
    (source,) = runtime_objects.read(
        runtime_objects.build_runtime(additionalImageStores=[{"path": str(stores)}])
    )
    text = (
        f'[storage]\ndriver = "vfs"\nrunroot = "{tmp_path}/run"\ngraphroot = "{tmp_path}/graph"\n'
    )
    base = runtime_objects.build_base({container_runtime.STORAGE_CONF: text})
    (file,) = container_runtime.generate_runtime_files(source, base)
    (tmp_path / "storage.conf").write_text(file.contents)
    info = read_podman_info(podman, tmp_path)
    assert info["store"]["graphOptions"] == {"vfs.imagestore": str(stores)}
    found = info["registries"]
    assert found.pop("search") == ["a.example", "docker.io"]
    assert {
        name: (entry["Insecure"], entry["Blocked"],
               [(each["Location"], each["Insecure"], each["PullFromMirror"])
                for each in entry["Mirrors"] or ()])
        for name, entry in found.items()
    } == {
        "b.example": (False, True, []),
        "b.example/ns": (False, True, [("m.example/b", True, "digest-only"),
                                       ("n.example", False, "digest-only")]),
        "*.c.example": (False, False, [("m.example", True, "tag-only")]),
        "m.example": (True, False, []),
    }  # fmt: skip
