"""The MachineConfigs of these tests."""

from collections.abc import Mapping
from urllib.parse import quote

from treenail.kube.client import Json


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
