"""The MachineConfigs of these tests."""

from collections.abc import Mapping
from urllib.parse import quote, unquote

from treenail.kube.api_client import Json


def with_files(files: Mapping[str, str]) -> Json:
    """The spec of a MachineConfig with these files, by path."""
    entries = [
        {
            "path": path,
            "mode": 0o644,
            "overwrite": True,
            "contents": {"source": f"data:,{quote(text)}"},
        }
        for path, text in files.items()
    ]
    return {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": entries}}}


def read_file(spec: Json, path: str) -> str:
    """Return the content of a file of such a MachineConfig; empty without it."""
    config: Json = spec.get("config") or {}  # type: ignore[assignment]
    storage: Json = config.get("storage") or {}  # type: ignore[assignment]
    entries: list[Json] = storage.get("files") or []  # type: ignore[assignment]
    for each in entries:
        if each["path"] == path:
            source: str = each["contents"]["source"]  # type: ignore[index]
            return unquote(source.removeprefix("data:,"))
    return ""
