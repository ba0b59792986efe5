"""The ControllerConfig's certificates reach nodes independently of updates."""

import base64

import pytest

from tests.integration.commands import status
from tests.integration.site import LIMIT_S, Site
from tests.waiting import wait_until
from treenail.api.controllerconfig import NAME
from treenail.config.node_paths import KUBELET_CA, REGISTRY_CAS
from treenail.kube.resources import CONTROLLERCONFIGS
from treenail_lab.apiserver.access.certificates import CertificateAuthority

pytestmark = pytest.mark.integration

REGISTRY_CA = f"{REGISTRY_CAS}/registry.example:5000/ca.crt"


def test_registry_certificates_are_written_while_update_waits(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pem = CertificateAuthority(tmp_path_factory.mktemp("pki")).pem
    handed = base64.b64encode(pem).decode()
    before, goal = site.current, site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_phase("draining")
        hand_out(
            site,
            kubeAPIServerServingCAData=handed,
            imageRegistryBundleData=[{"file": "registry.example..5000", "data": handed}],
        )
        wait_until(lambda: read(site, REGISTRY_CA) == pem, limit_s=LIMIT_S)
        assert read(site, KUBELET_CA) == pem

        (site.machine.root / REGISTRY_CA[1:]).unlink()
        (site.machine.root / KUBELET_CA[1:]).write_bytes(b"foreign")
        wait_until(lambda: read(site, REGISTRY_CA) == read(site, KUBELET_CA) == pem)

        broken = base64.b64encode(pem[:200]).decode()
        hand_out(site, kubeAPIServerServingCAData=broken, imageRegistryBundleData=[])
        wait_until(lambda: read(site, REGISTRY_CA) is None, limit_s=LIMIT_S)
        assert read(site, KUBELET_CA) == pem
        wait_until(
            lambda: f"cannot write {KUBELET_CA}: the ControllerConfig" in status(site).stdout
        )
        wait_until(lambda: "ControllerConfigNotApplied" in {each[1] for each in site.events()})
        assert site.machine.boot_count == site.boots
        site.ask(before)
    site.settle(before)
    site.lab.client.delete(CONTROLLERCONFIGS, NAME)


def hand_out(site: Site, **spec: object) -> None:
    """Apply a ControllerConfig with these fields."""
    client = site.lab.client
    found = {each["metadata"]["name"] for each in client.list(CONTROLLERCONFIGS).items}
    if NAME in found:
        client.patch(CONTROLLERCONFIGS, NAME, {"spec": spec})
        return
    client.create(
        CONTROLLERCONFIGS,
        {
            "apiVersion": "machineconfiguration.openshift.io/v1",
            "kind": "ControllerConfig",
            "metadata": {"name": NAME},
            "spec": spec,
        },
    )


def read(site: Site, path: str) -> bytes | None:
    """Return the content of a file on the machine; None without a file."""
    found = site.machine.root / path[1:]
    return found.read_bytes() if found.exists() else None
