"""The packages of an image, and their SPDX document."""

import re
import string
from dataclasses import dataclass

from treenail.api import decode
from treenail.image.oci.documents import encode

SPDX_TYPE = "application/spdx+json"
"""The artifact type and the media type of an attached document."""
MAX_PACKAGES = 20_000
_NONE = "NOASSERTION"
_TEXT_LIMIT = 300
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")


@dataclass(frozen=True, slots=True, order=True)
class InstalledPackage:
    """A package as its database names it."""

    manager: str
    """``rpm`` or ``deb``, as in package URLs."""
    name: str
    version: str
    """With the epoch, as in ``1:2.3-4``."""
    architecture: str = ""
    license: str = ""
    source: str = ""
    """The source package."""


@dataclass(frozen=True, slots=True)
class PackageList:
    """The packages of an image and the ID of its distribution."""

    packages: tuple[InstalledPackage, ...]
    distribution: str = ""

    def to_json(self) -> decode.Json:
        listed: list[decode.Json] = [
            {
                "manager": package.manager,
                "name": package.name,
                "version": package.version,
                "architecture": package.architecture,
                "license": package.license,
                "source": package.source,
            }
            for package in self.packages
        ]
        return {"distribution": self.distribution, "packages": listed}

    @classmethod
    def from_json(cls, document: object) -> "PackageList":
        """Parse the list; raise `ConfigError`. Long texts are shortened."""
        fields = decode.Fields.from_json(document, "package list")
        parsed = fields.map_objects("packages", _parse_package)[:MAX_PACKAGES]
        return cls(tuple(parsed), fields.get_text("distribution")[:_TEXT_LIMIT])


def make_spdx_document(
    packages: PackageList, *, image: str, digest: str, version: str, created: str
) -> bytes:
    """Return an SPDX 2.3 document of the packages of an image.

    ``image`` is its repository with the registry, ``version`` that of treenail, and ``created`` is
    in RFC 3339.
    """
    root = "SPDXRef-Image"
    listed = [
        _describe_package(package, number, packages.distribution)
        for number, package in enumerate(sorted(packages.packages))
    ]
    described: decode.Json = {
        "SPDXID": root,
        "name": image,
        "versionInfo": digest,
        "primaryPackagePurpose": "CONTAINER",
        "downloadLocation": _NONE,
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.partition(":")[2]}],
    }
    return encode(
        {
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": f"{image}@{digest}",
            "documentNamespace": f"https://treenail.io/spdx/{digest.replace(':', '-')}",
            "creationInfo": {"created": created, "creators": [f"Tool: treenail-{version}"]},
            "packages": [described, *listed],
            "relationships": [
                _relate("SPDXRef-DOCUMENT", "DESCRIBES", root),
                *(
                    _relate(root, "CONTAINS", str(described_package["SPDXID"]))
                    for described_package in listed
                ),
            ],
        }
    )


def _describe_package(package: InstalledPackage, number: int, distribution: str) -> decode.Json:
    description: decode.Json = {
        "SPDXID": f"SPDXRef-Package-{number}-{_UNSAFE.sub('-', package.name)}",
        "name": package.name,
        "versionInfo": package.version,
        "downloadLocation": _NONE,
        "filesAnalyzed": False,
        "licenseConcluded": _NONE,
        "licenseDeclared": _NONE,
        "copyrightText": _NONE,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": _make_url(package, distribution),
            }
        ],
    }
    if package.license:
        # Names of distributions, which are no expressions of SPDX.
        description["licenseComments"] = package.license
    if package.source:
        description["sourceInfo"] = f"built from {package.source}"
    return description


def _make_url(package: InstalledPackage, distribution: str) -> str:
    """Return the package URL: the epoch of RPM is a qualifier (purl-spec, rpm-definition)."""
    version, qualifiers = package.version, []
    if package.architecture:
        qualifiers.append(f"arch={_quote(package.architecture)}")
    if package.manager == "rpm":
        epoch, colon, rest = version.partition(":")
        if colon:
            version = rest
            qualifiers.append(f"epoch={_quote(epoch)}")
    namespace = f"{_quote(distribution)}/" if distribution else ""
    name, shown = _quote(package.name), _quote(version, safe=":")
    suffix = f"?{'&'.join(qualifiers)}" if qualifiers else ""
    return f"pkg:{package.manager}/{namespace}{name}@{shown}{suffix}"


def _quote(text: str, *, safe: str = "") -> str:
    """Encode a part of a package URL by percent signs (RFC 3986)."""
    kept = _UNRESERVED | set(safe)
    return "".join(
        char if char in kept else "".join(f"%{byte:02X}" for byte in char.encode()) for char in text
    )


def _relate(subject: str, kind: str, related: str) -> decode.Json:
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": related}


def _parse_package(fields: decode.Fields) -> InstalledPackage:
    values = [
        fields.get_text(name)[:_TEXT_LIMIT]
        for name in ("manager", "name", "version", "architecture", "license", "source")
    ]
    return InstalledPackage(*values)
