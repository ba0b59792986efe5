"""CertificateSigningRequests: their requester, validation and decision.

The rules are those of kube-apiserver (pkg/registry/certificates, pkg/apis/certificates/validation).
"""

import base64
import binascii
import re
from collections.abc import Sequence

from cryptography import x509

from treenail_lab.apiserver.errors import StatusCause
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import ResourceKind

KIND = "CertificateSigningRequest"
_DECISIONS = ("Approved", "Denied")
_REQUESTER_FIELDS = ("username", "groups", "uid", "extra")
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SIGNER = re.compile(rf"{_LABEL}(\.{_LABEL})+/[A-Za-z0-9._/-]+")
_USAGES = frozenset({
    "signing", "digital signature", "content commitment", "key encipherment", "key agreement",
    "data encipherment", "cert sign", "crl sign", "encipher only", "decipher only", "any",
    "server auth", "client auth", "code signing", "email protection", "s/mime",
    "ipsec end system", "ipsec tunnel", "ipsec user", "timestamping", "ocsp signing",
    "microsoft sgc", "netscape sgc",
})  # fmt: skip


def set_requester(kind: ResourceKind, obj: Json, user: str, groups: Sequence[str]) -> Json:
    """Return a request with the user who creates it; objects of other kinds unchanged."""
    if kind.kind != KIND:
        return obj
    spec = {
        name: value
        for name, value in (obj.get("spec") or {}).items()
        if name not in _REQUESTER_FIELDS
    }
    return obj | {"spec": spec | {"username": user, "groups": list(groups)}}


def complete_decision(kind: ResourceKind, new: Json, now: str) -> Json:
    """Return a request whose conditions have times; objects of other kinds unchanged."""
    conditions = (new.get("status") or {}).get("conditions")
    if kind.kind != KIND or not conditions:
        return new
    times = {"lastUpdateTime": now, "lastTransitionTime": now}
    completed = [times | {k: v for k, v in each.items() if v} for each in conditions]
    return new | {"status": new["status"] | {"conditions": completed}}


def find_request_problems(obj: Json, old: Json | None) -> list[StatusCause]:
    """Return the causes for which a request, or a change of one, is invalid."""
    spec = obj.get("spec") or {}
    if old is not None:
        if old.get("spec") != spec:
            return [_invalid_cause("spec", "", "field is immutable")]
        return _find_decision_problems(obj, old)
    causes = []
    if not _is_pem_request(spec.get("request")):
        causes.append(
            _invalid_cause("spec.request", "", "PEM block type must be CERTIFICATE REQUEST")
        )
    if not spec.get("usages"):
        causes.append(StatusCause("FieldValueRequired", "Required value", "spec.usages"))
    for number, usage in enumerate(spec.get("usages") or []):
        if usage not in _USAGES:
            text = f'Unsupported value: "{usage}"'
            causes.append(StatusCause("FieldValueNotSupported", text, f"spec.usages[{number}]"))
    signer = spec.get("signerName")
    if not signer:
        causes.append(StatusCause("FieldValueRequired", "Required value", "spec.signerName"))
    elif not _SIGNER.fullmatch(signer):
        why = "must be a fully qualified domain and path of the form 'example.com/signer-name'"
        causes.append(_invalid_cause("spec.signerName", signer, why))
    return causes


def _find_decision_problems(obj: Json, old: Json) -> list[StatusCause]:
    before, after = _list_types(old), _list_types(obj)
    where = "status.conditions"
    if set(_DECISIONS) <= set(after):
        return [_invalid_cause(where, "", "Approved and Denied conditions are mutually exclusive")]
    removed = [each for each in before if each not in after]
    return [
        StatusCause(
            "FieldValueForbidden", f"updates may not remove a condition of type {each}", where
        )
        for each in removed
    ]


def _list_types(request: Json) -> list[str]:
    return [each.get("type", "") for each in (request.get("status") or {}).get("conditions") or []]


def _is_pem_request(text: object) -> bool:
    try:
        x509.load_pem_x509_csr(base64.b64decode(str(text or ""), validate=True))
    except (ValueError, binascii.Error):
        return False
    return True


def _invalid_cause(where: str, value: str, why: str) -> StatusCause:
    return StatusCause("FieldValueInvalid", f'Invalid value: "{value}": {why}', where)
