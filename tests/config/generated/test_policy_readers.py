"""skopeo obeys the generated policy.json and registries.d.

Debian 12 has containers/image 5.23, which reads keys, and neither Fulcio, Rekor nor PKI. Its build
finds sigstore signatures and verifies none: it refuses every image that has one.
"""

import base64
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_attestations import make_key
from tests.config.generated.random_policies import make_image_config, make_policy
from tests.config.generated.test_policies import generate
from tests.registry.images import make_client, push_image
from tests.registry.real_registry import PULLER, RegistryService, lab_registry
from treenail.builder.images.attachments import sign_image
from treenail.config.generated import policies

__all__ = ["lab_registry"]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed"),
]

SIGNED, UNSIGNED, OUTSIDE, BLOCKED = "os/signed", "os/unsigned", "other/node", "blocked/node"
LIMIT_S = 60.0
MISSING = "A signature was required, but no signature exists"
DISABLED = "sigstore disabled"


class Skopeo:
    """Runs skopeo with generated files and the login of the registry."""

    def __init__(self, registry: RegistryService, directory: Path) -> None:
        self._registry, self._directory = registry, directory
        (directory / "auth.json").write_bytes(registry.make_auth_json(PULLER))

    def install(self, files: Mapping[str, str]) -> None:
        (self._directory / "policy.json").write_text(files[policies.POLICY_PATH])
        place = self._directory / "registries.d"
        place.mkdir(exist_ok=True)
        attachments = files.get(policies.ATTACHMENTS_PATH, "{}")
        (place / "sigstore-registries.yaml").write_text(attachments)

    def pull(self, repository: str) -> str:
        """Copy an image; return the error."""
        words = ["copy", "--src-cert-dir", str(self._registry.ca_file.parent), *self._login()]
        names = [self._name(repository), f"dir:{self._directory / 'image'}"]
        done = subprocess.run(
            [*self._begin(), *words, *names],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.stderr if done.returncode else ""

    def _begin(self) -> list[str]:
        places = (self._directory / "policy.json", self._directory / "registries.d")
        return ["skopeo", "--policy", str(places[0]), "--registries.d", str(places[1])]

    def _login(self) -> list[str]:
        return ["--authfile", str(self._directory / "auth.json")]

    def _name(self, repository: str) -> str:
        return f"docker://{self._registry.host}/{repository}:base"


def test_signatures_are_required_inside_of_the_scopes_only(
    lab_registry: RegistryService, tmp_path: Path
) -> None:
    client = make_client(lab_registry)
    key = make_key()
    for repository in (SIGNED, UNSIGNED, OUTSIDE, BLOCKED):
        image = push_image(client, repository)
        if repository == SIGNED:
            sign_image(client, repository, image.digest, key)
    root = make_root(key.public_key.to_pem())
    identity = {"matchPolicy": "MatchRepository"}
    host = lab_registry.host
    cluster = make_policy(
        policies.CLUSTER_KIND, "p", [f"{host}/os"], rootOfTrust=root, signedIdentity=identity
    )
    lists = make_image_config(blockedRegistries=[f"{host}/blocked"])
    skopeo = Skopeo(lab_registry, tmp_path)
    skopeo.install(generate(cluster, lists))
    is_disabled = DISABLED in skopeo.pull(SIGNED)
    assert bool(skopeo.pull(SIGNED)) is is_disabled
    assert MISSING in skopeo.pull(UNSIGNED)
    assert skopeo.pull(OUTSIDE) == ""
    assert "rejected by policy" in skopeo.pull(BLOCKED)
    # Without the file of registries.d, no signature is found.
    skopeo.install({policies.POLICY_PATH: generate(cluster)[policies.POLICY_PATH]})
    assert MISSING in skopeo.pull(SIGNED)
    # The policy of a namespace is a whole policy.json.
    namespaced = make_policy(policies.NAMESPACE_KIND, "p", [f"{host}/other"], "n")
    files = generate(cluster, namespaced)
    skopeo.install({**files, policies.POLICY_PATH: files["/etc/crio/policies/n.json"]})
    assert bool(skopeo.pull(SIGNED)) is is_disabled
    assert MISSING in skopeo.pull(OUTSIDE)
    assert "rejected by policy" not in skopeo.pull(BLOCKED)


def make_root(pem: bytes) -> dict[str, Any]:
    key = {"keyData": base64.b64encode(pem).decode()}
    return {"policyType": "PublicKey", "publicKey": key}
