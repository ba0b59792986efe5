"""The SPDX document of the packages of an image."""

import json

import pytest

from treenail.errors import ConfigError
from treenail.image.oci.attachments import InstalledPackage, PackageList, make_spdx_document

DIGEST = f"sha256:{'a' * 64}"
RPM = InstalledPackage("rpm", "bash", "1:5.2-1.fc41", "x86_64", "GPL-3.0", "bash-5.2.src.rpm")
DEB = InstalledPackage("deb", "libstdc++6", "12.2.0-14+deb12u1", "amd64")


def make_document(packages: PackageList) -> dict[str, list[dict[str, object]]]:
    content = make_spdx_document(
        packages,
        image="quay.io/os/node",
        digest=DIGEST,
        version="0.1.0",
        created="2026-01-01T00:00:00Z",
    )
    return json.loads(content)


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        (RPM, "pkg:rpm/fedora/bash@5.2-1.fc41?arch=x86_64&epoch=1"),
        (DEB, "pkg:deb/fedora/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64"),
    ],
)
def test_package_has_its_url(package: InstalledPackage, expected: str) -> None:
    _, found = make_document(PackageList((package,), "fedora"))["packages"]
    (reference,) = found["externalRefs"]  # type: ignore[misc]
    assert reference["referenceLocator"] == expected


def test_image_contains_each_package_once() -> None:
    document = make_document(PackageList((RPM, DEB)))
    image, *packages = document["packages"]
    assert image["versionInfo"] == DIGEST
    names = [each["SPDXID"] for each in document["packages"]]
    assert len(set(names)) == 3
    related = {each["relatedSpdxElement"] for each in document["relationships"]}
    assert related == set(names)
    licenses = [each.get("licenseComments") for each in packages]
    assert licenses == [None, "GPL-3.0"]


def test_list_round_trips_and_rejects_other_documents() -> None:
    packages = PackageList((RPM, DEB), "fedora")
    assert PackageList.from_json(packages.to_json()) == packages
    for document in ([], {"packages": [1]}, {"packages": {}}):
        with pytest.raises(ConfigError):
            PackageList.from_json(document)
