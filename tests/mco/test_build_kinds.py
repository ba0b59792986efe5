"""Each object that the MCO's kinds of image builds accept is accepted by ours.

TREENAIL_TEST_MCO_CRDS names the directory with the MCO's kinds. Their rules in CEL are compared
by the tests of the kinds, with values of both grammars.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mco.programs import KINDS
from treenail.manifests.installation import load_crds

UPPER = ("maxLength", "maxItems", "maximum", "maxProperties")
LOWER = ("minLength", "minItems", "minimum", "minProperties")


def read_schema(crd: Any) -> Any:
    (version,) = crd["spec"]["versions"]
    assert version["subresources"] == {"status": {}}
    return version["schema"]["openAPIV3Schema"]


def find_tighter_limits(theirs: Any, ours: Any, path: str) -> Iterator[str]:
    """Yield each place where our schema rejects what theirs accepts."""
    if theirs.get("type") != ours.get("type"):
        yield f"{path}: {ours.get('type')}"
    for limit in UPPER:
        if limit in ours and ours[limit] < theirs.get(limit, float("inf")):
            yield f"{path}: {limit}"
    for limit in LOWER:
        # Their rule for names rejects an empty one too.
        if limit in ours and ours[limit] > theirs.get(limit, 0) and "pattern" not in ours:
            yield f"{path}: {limit}"
    if not set(ours.get("required", ())) <= set(theirs.get("required", ())):
        yield f"{path}: required"
    if "enum" in ours and not set(theirs.get("enum", ["another"])) <= set(ours["enum"]):
        yield f"{path}: enum"
    for name, schema in theirs.get("properties", {}).items():
        if name not in ours.get("properties", {}):
            if ours.get("properties"):
                yield f"{path}.{name}: absent"
            continue
        yield from find_tighter_limits(schema, ours["properties"][name], f"{path}.{name}")
    if "items" in theirs:
        yield from find_tighter_limits(theirs["items"], ours["items"], f"{path}[]")


def read_kinds(directory: Path) -> Iterator[Any]:
    for path in sorted(directory.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                yield document


@pytest.mark.parametrize("plural", ["machineosbuilds", "machineosconfigs"])
def test_schema_accepts_what_that_of_the_mco_accepts(plural: str) -> None:
    name = f"{plural}.machineconfiguration.openshift.io"
    theirs = next(each for each in read_kinds(KINDS.read()) if each["metadata"]["name"] == name)
    crds: Any = load_crds()
    (ours,) = (each for each in crds if each["metadata"]["name"] == name)
    assert ours["spec"]["names"] == theirs["spec"]["names"]
    assert ours["spec"]["scope"] == theirs["spec"]["scope"]
    assert list(find_tighter_limits(read_schema(theirs), read_schema(ours), "")) == []
