"""``install bootstrap`` builds the control plane's image; nodes pull it by its final name."""

import base64
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.installer.pool_builds import FINAL, InstallSite
from tests.installer.processes import Bootstrapping, bootstrap, run_install
from tests.installer.registries import needs_skopeo, run_skopeo
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from tests.waiting import wait_until
from treenail.api.component_names import NAMESPACE
from treenail.controllers.handover.image_mode import (
    ImageMode,
    ImageModePool,
    RegistryType,
)
from treenail.controllers.handover.image_mode_field import build_settings_configmap

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
LIMIT_S = 90.0
MIRROR = "/etc/containers/registries.conf.d/50-treenail-bootstrap.conf"
RECORD = "/etc/treenail/bootstrap-registry.json"
LISTEN = "--registry-listen=127.0.0.1:0"
LIMIT = "--registry-storage-limit=500Mi"


def make_site(
    tmp_path: Path, registry: RegistryService, kind: RegistryType = RegistryType.BOOTSTRAP
) -> InstallSite:
    final = FINAL if kind is RegistryType.BOOTSTRAP else registry.host
    site = InstallSite(tmp_path / "cluster", registry, namespace=NAMESPACE, final=final)
    settings = ImageMode(registry=kind, pools=(ImageModePool("master", "", f"{final}/os/node:1"),))
    site.extra = [dict(build_settings_configmap(settings))]
    return site


def wait_until_serving(process: Bootstrapping) -> None:
    wait_until(
        lambda: (
            "beginning step first-boot" in process.log.read_text()
            or process.process.poll() is not None
        ),
        limit_s=LIMIT_S,
    )
    assert process.process.poll() is None, process.log.read_text()


def read_file(config: dict[str, Any], path: str) -> bytes | None:
    for each in config["storage"]["files"]:
        if each["path"] == path:
            head, _, body = each["contents"]["source"].partition(",")
            return base64.b64decode(body) if head.endswith("base64") else unquote_to_bytes(body)
    return None


def read_served_image(config: dict[str, Any]) -> str:
    content = read_file(config, "/etc/ignition-machine-config-encapsulated.json")
    assert content is not None
    return str(json.loads(content)["spec"]["osImageURL"])


@needs_skopeo
def test_served_config_pulls_the_built_image_by_its_final_name(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = make_site(tmp_path, lab_registry)
    site.push_base()
    site.write()
    with bootstrap(site.root, LISTEN, LIMIT) as process:
        wait_until_serving(process)
        status, config = process.fetch()
        assert status == 200
        image = read_served_image(config)
        assert image.startswith(f"{FINAL}/os/node@sha256:")
        mirror, record = read_file(config, MIRROR), read_file(config, RECORD)
        assert mirror is not None
        assert record is not None
        login = json.loads(record)
        assert login["username"] == "treenail-pull"
        ca = read_file(config, f"/etc/docker/certs.d/{login['registry']}/ca.crt")
        assert ca is not None
        certificates = tmp_path / "certs"
        certificates.mkdir()
        (certificates / "ca.crt").write_bytes(ca)
        (tmp_path / "registries.conf").write_bytes(mirror)
        pair = base64.b64encode(f"{login['username']}:{login['password']}".encode()).decode()
        auth = tmp_path / "auth.json"
        auth.write_text(json.dumps({"auths": {login["registry"]: {"auth": pair}}}))
        done = run_skopeo(
            f"--registries-conf={tmp_path}/registries.conf", "copy", f"--src-authfile={auth}",
            f"--src-cert-dir={certificates}", f"docker://{image}", f"dir:{tmp_path}/copy",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    secrets = json.loads((site.root / ".treenail/registry/secrets/logins.json").read_text())
    log = process.log.read_text()
    assert not [name for name, secret in secrets.items() if secret in log]


@needs_buildah
@needs_busybox
def test_killed_installation_serves_the_same_image_without_a_second_build(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = make_site(tmp_path, lab_registry)
    site.base = push_base(lab_registry, tmp_path)
    site.text = "FROM configs AS final\nRUN echo built > /usr/lib/built\n"
    site.write()
    with bootstrap(site.root, LISTEN, LIMIT) as process:
        assert process.fetch()[0] in {200, 503}
        wait_until_serving(process)
        image = read_served_image(process.fetch()[1])
        process.end(signal.SIGKILL)
    with bootstrap(site.root, LISTEN, LIMIT) as process:
        wait_until_serving(process)
        assert read_served_image(process.fetch()[1]) == image
        assert "kept step build:master" in process.log.read_text()
    assert len(list(site.directory.logs.glob("builds/master/*"))) == 1


def test_failed_build_fails_the_installation_with_reason_and_remedy(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = make_site(tmp_path, lab_registry)
    site.base = f"{lab_registry.host}/os/base@sha256:{'5' * 64}"
    site.write()
    found = run_install(
        "bootstrap", "--dir", site.root, "--listen=127.0.0.1:0", "--host=localhost", LISTEN, LIMIT
    )
    assert found.returncode == 5
    assert "cannot build the image of pool master: BaseNotFound" in found.stderr
    waited = run_install("wait-for", "bootstrap-complete", "--dir", site.root)
    assert waited.returncode == 5
    assert "BaseNotFound" in waited.stdout
    site.push_base()
    site.write()
    with bootstrap(site.root, LISTEN, LIMIT) as process:
        wait_until_serving(process)


def test_external_registry_needs_no_files_on_nodes(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = make_site(tmp_path, lab_registry, RegistryType.EXTERNAL)
    site.push_base()
    site.write()
    with bootstrap(site.root, LISTEN, LIMIT) as process:
        wait_until_serving(process)
        config = process.fetch()[1]
        assert read_served_image(config).startswith(f"{lab_registry.host}/os/node@")
        assert read_file(config, MIRROR) is None
        assert read_file(config, RECORD) is None
    assert not site.directory.registry.exists()


@needs_skopeo
def test_image_is_written_as_oci_directory_with_a_pointer_config(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = make_site(tmp_path, lab_registry)
    site.push_base()
    site.write()
    with bootstrap(site.root, LISTEN, LIMIT) as process:
        wait_until_serving(process)
        image = read_served_image(process.fetch()[1])
    output = tmp_path / "image"
    done = run_install(
        "image", "--dir", site.root, "--pool=master", f"--output={output}",
        "--server=https://api-int.example:22623",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[1].rstrip(",")
    inspected = run_skopeo("inspect", "--format={{.Digest}}", name)
    assert inspected.stdout.strip() == image.partition("@")[2]
    copied = run_skopeo("copy", "--all", "--preserve-digests", name, f"dir:{tmp_path}/copied")
    assert copied.returncode == 0, copied.stderr
    pointer = json.loads((tmp_path / "image.ign").read_text())
    (merged,) = pointer["ignition"]["config"]["merge"]
    assert merged["source"] == "https://api-int.example:22623/config/master"
    if validate := shutil.which("ignition-validate"):
        subprocess.run([validate, tmp_path / "image.ign"], check=True)
    blobs = list((output / "blobs/sha256").iterdir())
    assert [each for each in blobs if each.stat().st_nlink > 1]


def test_image_of_a_pool_without_one_is_refused(tmp_path: Path) -> None:
    found = run_install("image", "--dir", tmp_path, "--pool=master", f"--output={tmp_path}/x")
    assert found.returncode == 64
    assert "install bootstrap" in found.stderr
