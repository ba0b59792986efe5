"""Everything that a config may ask of the operating system, each alone and all together."""

from dataclasses import replace

import pytest

from tests.integration.site import LAYERS, LOGIN, SIZE, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.host.rpmostree.extensions import PACKAGES_DIRECTORY, REPOSITORY_FILE
from treenail_lab.cluster import build_rendered_config
from treenail_lab.images import Image, make_image
from treenail_lab.machine.ostree.sysroot import SysrootDeployment

pytestmark = pytest.mark.integration

REALTIME = {"kernel-rt-core", "kernel-rt-modules", "kernel-rt-modules-extra"}
STOCK = {
    "kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra",
}  # fmt: skip
LEFTOVERS = (PACKAGES_DIRECTORY, REPOSITORY_FILE)
LIMIT_S = 30.0


def reach(site: Site, number: int, **spec: object) -> SysrootDeployment:
    """Bring the node to a config of its own, in one reboot; returns what is booted then."""
    name = f"rendered-os-{id(site):x}-{number}"
    boots = site.machine.boot_count
    site.lab.add_config(
        build_rendered_config(name, {"config": {"ignition": {"version": "3.5.0"}}, **spec})
    )
    site.annotate({key.DESIRED_CONFIG: name})

    def there() -> bool:
        notes = site.notes()
        at = notes.get(key.STATE) == "Done" and notes.get(key.CURRENT_CONFIG) == name
        return at and site.calm()

    wait_until(there, limit_s=LIMIT_S)
    assert site.machine.boot_count == boots + 1
    booted = site.machine.booted_deployment
    assert booted is not None
    return booted


def test_packages_are_installed_from_extensions_image(site: Site) -> None:
    """No repository has them; what makes them available is gone when they are."""
    packages = replace(
        make_image("os/extensions", f"{id(site):x}", SIZE, layers=LAYERS, credential=LOGIN),
        packages=("usbguard", *sorted(REALTIME)),
    )
    site.lab.add_image(packages)
    site.machine.change_settings(missing_packages=packages.packages)
    spec = {
        "osImageURL": image(site, 3).pull_spec,
        "baseOSExtensionsContainerImage": packages.pull_spec,
        "extensions": ["usbguard"],
    }
    assert reach(site, 7, **spec).packages == ("usbguard",)
    booted = reach(site, 8, **{**spec, "kernelType": "realtime", "kernelArguments": ["nosmt"]})
    assert (set(booted.packages), booted.kernel_arguments[-1]) == (
        {"usbguard", *REALTIME},
        "nosmt",
    )
    newer = image(site, 4)
    booted = reach(site, 9, **{**spec, "osImageURL": newer.pull_spec})
    assert (booted.digest, booted.packages, booted.removals) == (newer.digest, ("usbguard",), ())
    assert [path for path in LEFTOVERS if (site.machine.root / path[1:]).exists()] == []
    site.machine.change_settings(missing_packages=())
    site.reach(site.goal())


def image(site: Site, number: int) -> Image:
    found = make_image("os/base", f"{id(site):x}.{number}", SIZE, layers=LAYERS, credential=LOGIN)
    site.lab.add_image(found)
    return found


def test_each_change_costs_one_reboot_and_all_together_do(site: Site) -> None:
    base, newer = image(site, 1), image(site, 2)
    spec: dict[str, object] = {"osImageURL": base.pull_spec}
    installed = reach(site, 1, **spec)
    assert installed.digest == base.digest

    # The machine has the first one from its installation, and keeps it whatever a config says.
    spec["kernelArguments"] = ["console=ttyS0", "nosmt", "hugepages=4"]
    own = installed.kernel_arguments
    assert reach(site, 2, **spec).kernel_arguments == (*own, "nosmt", "hugepages=4")

    spec["extensions"] = ["usbguard"]
    assert reach(site, 3, **spec).packages == ("usbguard",)
    (only,) = site.transactions("stage packages")
    assert "successful" in only, "of the kernel arguments there was nothing to change"

    spec["kernelType"] = "realtime"
    booted = reach(site, 4, **spec)
    assert (set(booted.packages), set(booted.removals)) == ({"usbguard", *REALTIME}, STOCK)

    booted = reach(site, 5, osImageURL=newer.pull_spec, kernelArguments=["quiet"])
    assert (booted.checksum, booted.packages, booted.removals) == (newer.commit, (), ())
    assert booted.kernel_arguments == (*own, "quiet")

    booted = reach(site, 6, **spec)
    assert (booted.digest, set(booted.removals)) == (base.digest, STOCK)
    assert set(booted.packages) == {"usbguard", *REALTIME}
    assert booted.kernel_arguments[-2:] == ("nosmt", "hugepages=4")
    site.reach(site.goal())
    assert site.machine.booted_deployment is not None
    assert site.machine.booted_deployment.packages == ()
