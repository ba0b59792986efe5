"""The Secrets that give a new machine of a NodePool its config: labels, keys and their values.

Keys and annotations are HyperShift's. Its own Ignition server acts on Secrets with the annotation
``hypershift.openshift.io/ignition-config``, which these do not have: it would delete them.
"""

import base64
import binascii
import json
from collections.abc import Mapping

from treenail import clocks
from treenail.api import annotations, decode
from treenail.api.hosted import annotations as hosted_key

TOKEN_LABEL = annotations.OWN_PREFIX + "ignition-token"
"""Label of token Secrets; Ignition servers watch by it. Its value is empty."""
USER_DATA_LABEL = annotations.OWN_PREFIX + "user-data"
"""Label of user-data Secrets; its value is empty."""
UPGRADE_TYPE = hosted_key.PREFIX + "node-pool-upgrade-type"
REACHED = hosted_key.PREFIX + "ignition-reached"
"""Of a token Secret: ``True`` once a machine has fetched its config with it."""
REPLACED_AT = annotations.OWN_PREFIX + "replaced-at"
"""Of a token Secret: since when no template leads to it any longer, in RFC 3339."""

REACHED_CONFIGMAP = "treenail-ignition-reached"
"""ConfigMap in the namespace of a control plane, in which Ignition servers record whom they served.

A key is the name of a NodePool, its value the target hash that a machine of it fetched last.
"""
COPY_SUFFIX = "-userdata"
"""Ends the name of the KubeVirt provider's copy of a user-data Secret."""


def is_expired(metadata_annotations: Mapping[str, str], now: float) -> bool:
    """Return whether the token of a Secret has ended; a time that cannot be read has passed."""
    text = metadata_annotations.get(hosted_key.TOKEN_EXPIRATION)
    end = clocks.parse_rfc3339(text)
    return text is not None and (end is None or now > end)


def read_value(secret: decode.Json, key: str) -> bytes:
    """Return a value of a Secret; empty for none, and for one that is no base64."""
    data = secret.get("data")
    try:
        text = str(data.get(key) or "") if isinstance(data, dict) else ""
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def read_text(secret: decode.Json, key: str) -> str:
    """Return a value of a Secret as text; empty as in `read_value`."""
    return read_value(secret, key).decode(errors="replace")


def read_bearer(secret: decode.Json, key: str) -> bytes:
    """Return the credential in user data: the token in base64; empty for other content."""
    try:
        document = json.loads(read_value(secret, key))
        sources = document["ignition"]["config"]["merge"]
        headers = [header for source in sources for header in source["httpHeaders"]]
        values = [h["value"] for h in headers if h["name"].casefold() == "authorization"]
        return str(values[0]).removeprefix("Bearer ").encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return b""
