"""A search finds no secret of an installation in its bundle, logs, layers, objects and status."""

import base64
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builder.builds import push_base
from tests.fixtures.files import read_parts
from tests.installer.failures import BrokenSite
from tests.installer.pool_builds import InstallSite
from tests.installer.processes import run_install
from tests.installer.test_failed_installs import run_bootstrap, start_cluster
from tests.installer.test_killed_bootstrap import can_build
from tests.registry.real_registry import (
    PULLER,
    PUSHER,
    RegistryService,
    lab_registry,
    needs_docker_registry,
)
from treenail.api.component_names import NAMESPACE

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
TOKEN = "Canary-of-the-kubelet"
TEXT = "FROM configs AS final\nRUN find / -xdev -type f | sort > /usr/lib/list\n"


def list_secrets(site: InstallSite) -> dict[str, bytes]:
    """Return every secret of the installation by a name for messages."""
    private = site.directory.private
    logins = json.loads((private / "registry/secrets/logins.json").read_text())
    found = {f"{name} of the bootstrap registry": text.encode() for name, text in logins.items()}
    for path in private.rglob("*.key"):
        # A line in the middle of the PEM.
        found[path.name] = path.read_bytes().splitlines()[1]
    for user in (PULLER, PUSHER):
        for login in json.loads(site.registry.make_auth_json(user))["auths"].values():
            password = base64.b64decode(login["auth"]).partition(b":")[2]
            found |= {f"password of {user}": password, f"login of {user}": login["auth"].encode()}
    return {**found, "token of kubelets": TOKEN.encode()}


def iter_places(site: InstallSite, bundle: Path) -> Iterator[tuple[str, bytes]]:
    """Yield everything that leaves the bootstrap host, or that other users may read."""
    for name, content in read_parts(bundle.read_bytes()).items():
        yield f"bundle: {name}", content
    private = site.directory.private
    builds = private.glob("cluster-objects/machineosbuild-*.json")
    for path in (private / "install.json", private / "status.json", *builds):
        yield path.name, path.read_bytes()
    for path in private.glob("logs/**/*"):
        if path.is_file():
            yield path.name, path.read_bytes()
    for path in (private / "registry/storage").rglob("data"):
        yield f"layer or manifest: {path.parent.name}", unpack(path.read_bytes())


def unpack(content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return content


@pytest.mark.long
@pytest.mark.parametrize("kind", ["config", "Containerfile"])
def test_search_after_an_installation_finds_no_secret(
    kind: str, tmp_path: Path, lab_registry: RegistryService
) -> None:
    if kind == "Containerfile" and not can_build():
        pytest.skip("this host cannot build a Containerfile")
    root = tmp_path / "cluster"
    root.mkdir()
    install = InstallSite(root, lab_registry, final=lab_registry.host, namespace=NAMESPACE)
    if kind == "Containerfile":
        install.base, install.text = push_base(lab_registry, tmp_path), TEXT
    else:
        install.push_base()
    install.write()
    kubelets = tmp_path / "kubeconfig-kubelet"
    user = {"name": "kubelet", "user": {"token": TOKEN}}
    kubelets.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "users": [user]}))
    bundle = tmp_path / "bundle.tar.gz"
    site = BrokenSite(install, has_controller=True)
    with start_cluster(site, tmp_path / "api"):
        code, errors = run_bootstrap(site, "-v", f"--node-kubeconfig={kubelets}")
        assert code == 0, errors
        # With the objects of the cluster.
        gathered = run_install("gather", "--dir", root, "-o", bundle)
    assert gathered.returncode == 0
    waited = run_install("wait-for", "bootstrap-complete", "--dir", root)
    places = dict(iter_places(install, bundle))
    places |= {"log": errors.encode(), "wait-for": waited.stdout.encode()}
    assert any(name.startswith("bundle: cluster/") for name in places)
    assert sum(name.startswith("layer") for name in places) >= 3
    assert all(len(text) > 6 for text in list_secrets(install).values())
    found = [
        f"{secret} in {place}"
        for place, content in places.items()
        for secret, text in list_secrets(install).items()
        if text in content or base64.b64encode(text)[:-4] in content
    ]
    assert found == []
