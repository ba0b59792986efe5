"""The whole state as one document."""

from collections.abc import Iterator

from treenail_lab.apiserver.errors import bad_request_error
from treenail_lab.apiserver.objects import Json, read_key
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.storage.store import Store

_FORMAT = 1


def take_snapshot(store: Store) -> Json:
    """All objects of all kinds, secrets included, and the resource version."""
    kinds = [
        {"group": storage[0], "plural": storage[1], "objects": list(objects)}
        for storage, objects in store.dump_objects()
    ]
    return {"format": _FORMAT, "resourceVersion": store.version, "kinds": kinds}


def restore_snapshot(store: Store, document: Json) -> None:
    """Replace the state of a store; 400 for a document that is no snapshot."""
    try:
        if document["format"] != _FORMAT:
            raise bad_request_error(f"snapshot: expected format {_FORMAT}")
        version = int(document["resourceVersion"])
        objects = list(_parse_objects(document))
    except (KeyError, TypeError, ValueError) as error:
        raise bad_request_error(f"snapshot: {error!r}") from None
    # The version goes on in any case, which ends the watches that are open now.
    store.load_objects(max(version, store.version) + 1, iter(objects))


def _parse_objects(document: Json) -> Iterator[tuple[StorageKey, Json]]:
    for kind in document["kinds"]:
        for obj in kind["objects"]:
            read_key(obj)
            yield (kind["group"], kind["plural"]), obj
