"""The table of Ignition's fields: what a version does not have is dropped, and reported."""

import pytest

from treenail.api.decode import Fields, Json
from treenail.api.ignition.schema import drop_newer_fields, find_ignored_fields


def report(version: str, **sections: object) -> list[str]:
    document: Json = {"ignition": {"version": version}, **sections}
    return [str(found) for found in find_ignored_fields(Fields(document, ""), version)]


def test_known_fields_are_not_reported() -> None:
    tang = {"url": "http://a", "thumbprint": "t", "advertisement": "{}"}
    file = {"path": "/a", "contents": {"source": "data:,", "httpHeaders": [{"name": "a"}]}}
    storage = {"files": [file], "luks": [{"name": "r", "clevis": {"tang": [tang]}}]}
    assert report("3.5.0", storage=storage, kernelArguments={"shouldExist": ["a"]}) == []
    old = {"filesystem": "root", "path": "/a", "append": False, "contents": {"source": ""}}
    assert report("2.2.0", storage={"files": [old]}, networkd=None) == []


def test_misspelt_field_is_reported_with_a_suggestion() -> None:
    dropins = [{"name": "a.conf", "content": "x"}]
    assert report(
        "3.5.0",
        stroage={},
        systemd={"units": [{"name": "a.service", "dropins": dropins, "zzz": 1}]},
        storage={"files": [{"path": "/a", "source": "data:,a"}]},
    ) == [
        "stroage: ignored: unknown field; did you mean storage?",
        "systemd.units[0].dropins[0].content: ignored: unknown field; did you mean contents?",
        "systemd.units[0].zzz: ignored: unknown field",
        "storage.files[0].source: ignored: unknown field; did you mean contents.source?",
    ]


def test_name_in_another_case_is_reported() -> None:
    assert report("3.5.0", Storage={}) == ["Storage: ignored: unknown field; did you mean storage?"]


@pytest.mark.parametrize("version", ["3.0.0", "3.2.0"])
def test_field_of_a_newer_version_is_dropped_and_reported(version: str) -> None:
    document: Json = {"kernelArguments": {"shouldExist": ["a"]}, "storage": {"files": []}}
    assert drop_newer_fields(document, version) == {"storage": {"files": []}}
    assert report(version, **document) == [
        (
            "kernelArguments: ignored: this field needs Ignition 3.3.0 or later; set "
            "ignition.version to it"
        )
    ]
