"""Documents are rejected where Ignition rejects them, beyond what parsing needs."""

from typing import Any

import pytest

from tests.api.configs import ignition, with_files, with_units
from treenail.api.decode import Fields
from treenail.api.ignition.checks import check_document
from treenail.api.ignition.parser import parse_ignition
from treenail.errors import IgnitionError

SHA256 = "sha256-" + 64 * "0"
SHA512 = "sha512-" + 128 * "0"


def check(document: Any) -> None:
    check_document(Fields(document, "", IgnitionError), parse_ignition(document, location=""))


def refusal(document: Any) -> str:
    with pytest.raises(IgnitionError) as raised:
        check(document)
    return str(raised.value)


def file(version: str = "3.5.0", **contents: Any) -> dict[str, Any]:
    return with_files({"path": "/a", "contents": contents}, version=version)


def storage(version: str = "3.5.0", **sections: Any) -> dict[str, Any]:
    return ignition(version, storage=sections)


def disk(*partitions: dict[str, Any]) -> dict[str, Any]:
    return storage(disks=[{"device": "/dev/sda", "partitions": list(partitions)}])


def luks(version: str = "3.5.0", **fields: Any) -> dict[str, Any]:
    return storage(version, luks=[{"name": "r", "device": "/dev/sda", **fields}])


def raid(**fields: Any) -> dict[str, Any]:
    return storage(raid=[{"name": "r", "level": "raid1", "devices": ["/dev/a"], **fields}])


def filesystem(version: str = "3.5.0", **fields: Any) -> dict[str, Any]:
    return storage(version, filesystems=[{"device": "/dev/a", **fields}])


@pytest.mark.parametrize(
    "document",
    [
        file(source="data:,a%20b", verification={"hash": SHA256}),
        file(source="s3://a/b?versionId=1"),
        file(source="http://u@[::1]:80/a%20 b?%#c"),
        file(source="arn:aws:s3:::bucket/key"),
        file(source="https://a", httpHeaders=[{"name": "x", "value": None}]),
        file(source="", compression=""),
        disk({"number": 0, "label": "a"}, {"label": "b"}, {"number": 2, "guid": ""}),
        disk(
            {"number": 1, "startMiB": 1, "sizeMiB": 9}, {"number": 2, "startMiB": 10, "sizeMiB": 0}
        ),
        raid(level="stripe", spares=0),
        filesystem(format="ext4", label=16 * "a", path=""),
        filesystem("3.3.0", format="none"),
        luks(clevis={"custom": {"pin": "sss", "config": "{}"}}, cex={"enabled": False}),
        luks(clevis={"tang": [{"url": "http://a", "thumbprint": "t", "advertisement": "{}"}]}),
        luks(options=["a", "a"], keyFile={"source": "data:,a"}),
        ignition("2.2.0", storage={"filesystems": [{"name": "root", "path": "/"}]}),
    ],
)  # fmt: skip
def test_document_that_ignition_accepts_is_accepted(document: Any) -> None:
    check(document)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            with_files({"path": "/a", "overwrite": True}),
            "storage.files[0].contents.source: expected the contents of the file, found nothing",
        ),
        (
            with_files({"path": "/a", "user": {"id": 1, "name": "a"}}),
            "storage.files[0].user: expected an id or a name, found both",
        ),
        (
            with_units({"name": "a.service", "contents": "[Unit"}),
            "systemd.units[0].contents, line 1: expected ']' after the section name",
        ),
        (
            file(source="data:;base64,%"),
            "storage.files[0].contents.source: expected base64, found other data",
        ),
        (
            file("3.3.0", source="arn:aws:s3:::bucket/key"),
            (
                "storage.files[0].contents.source: expected a URL of http, https, tftp, data, s3, "
                "gs, found scheme 'arn'"
            ),
        ),
        (
            file(source="arn:aws:ec2:::bucket/key"),
            "storage.files[0].contents.source: expected the ARN of an object in S3, found a string",
        ),
        (
            file(source="http://a:x/"),
            (
                "storage.files[0].contents.source: expected a URL of http, https, tftp, data, s3, "
                "gs, arn, found scheme ''"
            ),
        ),
        (
            file(source="data:text/plain;a=%z,x"),
            (
                "storage.files[0].contents.source: malformed escape before the comma of its "
                "data: URL"
            ),
        ),
        (
            file(source="s3://a/b?versionId="),
            "storage.files[0].contents.source: expected a version of the object, found a string",
        ),
        (
            file("3.0.0", source="data:,", verification={"hash": SHA256}),
            (
                "storage.files[0].contents.verification.hash: expected sha512- and as many "
                "digits, found a string"
            ),
        ),
        (
            file(verification={"hash": SHA512}),
            "storage.files[0].contents.verification.hash: needs a source",
        ),
        (
            file(source="data:,", httpHeaders=[{"name": "x", "value": "1"}]),
            "storage.files[0].contents.httpHeaders: need an http or https source",
        ),
        (
            file(source="https://a", httpHeaders=[{"name": "x", "value": ""}]),
            (
                "storage.files[0].contents.httpHeaders[0].value: expected a value, or null to "
                "remove the header, found an empty string"
            ),
        ),
        (
            ignition(ignition={"version": "3.5.0", "config": {"merge": [{}]}}),
            "ignition.config.merge[0].source: expected a URL, found nothing",
        ),
        (
            ignition(ignition={"version": "3.5.0", "proxy": {"httpProxy": "ftp://a"}}),
            "ignition.proxy.httpProxy: expected an http or https URL, found a string",
        ),
        (
            ignition(kernelArguments={"shouldExist": ["a"], "shouldNotExist": ["a"]}),
            (
                "kernelArguments.shouldNotExist[0]: duplicate of kernelArguments.shouldExist[0]"
            ),
        ),
        (disk({"number": 0}), (
            "storage.disks[0].partitions[0]: expected a number or a label, found neither"
        )),
        (
            disk({"number": 1}, {"number": 1, "label": "a"}),
            "storage.disks[0].partitions[1]: duplicate of storage.disks[0].partitions[0]",
        ),
        (
            disk({"number": 1, "label": "a"}, {"label": "a"}),
            "storage.disks[0].partitions: two partitions have the same label",
        ),
        (
            disk({"number": 1, "shouldExist": False}, {"label": "a"}),
            "storage.disks[0].partitions: shouldExist false needs numbers of all partitions",
        ),
        (
            disk({"number": 1, "shouldExist": False, "sizeMiB": 0}),
            (
                "storage.disks[0].partitions[0].shouldExist: a partition to remove has only a "
                "number"
            ),
        ),
        (
            disk(
                {"number": 1, "startMiB": 1, "sizeMiB": 10},
                {"number": 2, "startMiB": 10, "sizeMiB": 0},
            ),
            "storage.disks[0].partitions: two partitions overlap",
        ),
        (
            disk({"label": "a:b"}),
            "storage.disks[0].partitions[0].label: expected at most 36 bytes without colons",
        ),
        (
            raid(level="stripe", spares=1),
            "storage.raid[0].spares: level stripe has no spares",
        ),
        (raid(devices=[]), "storage.raid[0].devices: expected a device, found none"),
        (
            raid(devices=["/dev/../a"]),
            (
                "storage.raid[0].devices[0]: expected an absolute path without '.', '..' "
                "and '//', found '/dev/../a'"
            ),
        ),
        (
            filesystem(format="ext4", label=17 * "a"),
            "storage.filesystems[0].label: expected at most 16 bytes",
        ),
        (
            filesystem(label="a"),
            "storage.filesystems[0].format: expected a format, found nothing",
        ),
        (
            filesystem("3.2.0", format="none"),
            (
                "storage.filesystems[0].format: expected one of ext4, btrfs, xfs, swap, vfat, "
                "none; found 'none'"
            ),
        ),
        (
            luks(clevis={"tpm2": True}, cex={"enabled": True}),
            "storage.luks[0].cex: expected cex or clevis, found both",
        ),
        (
            luks("3.2.0", clevis={"tpm2": True, "custom": {}}),
            "storage.luks[0].clevis: expected custom or other pins, found both",
        ),
        (
            luks(clevis={"custom": {"pin": "sss"}}),
            "storage.luks[0].clevis.custom.config: expected a configuration, found nothing",
        ),
        (
            luks(clevis={"tang": [{"url": "http://a", "thumbprint": "t", "advertisement": "{"}]}),
            "storage.luks[0].clevis.tang[0].advertisement: expected JSON",
        ),
        (
            storage(disks=[{"device": "/dev/sda", "wipeTable": "yes"}]),
            "storage.disks[0].wipeTable: expected true or false, found a string",
        ),
        (
            ignition("2.2.0", storage={"filesystems": [{"name": "root"}]}),
            "storage.filesystems[0]: expected a mount or a path, found both or neither",
        ),
        (
            ignition("2.2.0", storage={"files": [
                {"filesystem": "root", "path": "/a", "append": True, "overwrite": True}]}),
            "storage.files[0].overwrite: cannot append and overwrite",
        ),
    ],
)  # fmt: skip
def test_document_that_ignition_rejects_is_rejected(document: Any, sentence: str) -> None:
    assert refusal(document).removeprefix(".") == sentence
