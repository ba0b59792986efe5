"""Answers with the metadata of objects only, which a client requests in its Accept header."""

from treenail_lab.apiserver.objects import Json

_API_VERSION = "meta.k8s.io/v1"
_KIND = "PartialObjectMetadata"


def is_metadata_requested(accept: str) -> bool:
    """Return whether the first accepted media type names PartialObjectMetadata."""
    media_type, *parameters = (each.strip() for each in accept.partition(",")[0].split(";"))
    values = dict(each.partition("=")[::2] for each in parameters)
    return (
        media_type == "application/json"
        and values.get("as") in {_KIND, f"{_KIND}List"}
        and (values.get("g"), values.get("v")) == ("meta.k8s.io", "v1")
    )


def select_metadata(document: Json) -> Json:
    """Return the metadata of an object or of the objects of a list; a Status stays as it is."""
    if document.get("kind") == "Status":
        return document
    if "items" not in document:
        return {"kind": _KIND, "apiVersion": _API_VERSION, "metadata": document["metadata"]}
    return {
        "kind": f"{_KIND}List",
        "apiVersion": _API_VERSION,
        "metadata": document["metadata"],
        "items": [select_metadata(each) for each in document["items"]],
    }
