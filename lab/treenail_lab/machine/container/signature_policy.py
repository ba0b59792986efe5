"""The signature policy of a machine, as the programs that fetch images keep to it."""

import json
from pathlib import Path

from treenail_lab.images import Image

UNSIGNED_FAULT = "unsigned"
"""The fault of an image that nobody has signed."""
_POLICY = "etc/containers/policy.json"
_SIGNED = {"signedBy", "sigstoreSigned"}


def find_refusal(root: Path, transport: str, image: Image) -> str:
    """Why the image may not be taken from the transport; empty when it may."""
    path = root / _POLICY
    if not path.exists():
        return ""
    policy = json.loads(path.read_text(encoding="utf-8"))
    scopes = policy.get("transports", {}).get(transport, {})
    name = f"{image.registry}/{image.repository}"
    found = next((scopes[each] for each in (name, image.registry, "") if each in scopes), None)
    types = {each["type"] for each in found or policy["default"]}
    if "reject" in types:
        return f"Running image {transport}:{image.pull_spec} is rejected by policy."
    if types & _SIGNED and UNSIGNED_FAULT in image.faults:
        return "A signature was required, but no signature exists"
    return ""


def is_insecure_by_default(root: Path) -> bool:
    """Whether what the policy does not name is taken as it is."""
    path = root / _POLICY
    if not path.exists():
        return True
    default = json.loads(path.read_text(encoding="utf-8"))["default"]
    return any(each["type"] == "insecureAcceptAnything" for each in default)
