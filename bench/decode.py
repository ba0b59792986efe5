"""Benchmark of parsing a MachineConfig of 1 MiB from JSON and from YAML."""

import base64
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.interpreter import measure_cost
from bench.result import Result
from treenail.api.documents import dump_document

FILES = 256
CONTENT = b"0123456789abcdef" * 184  # 256 of these in base64 are 1 MiB in total

IMPORT = """
from treenail.api.decode import load_json
from treenail.api.documents import load_document
from treenail.api.machineconfig import MachineConfig
"""
READ_JSON = "MachineConfig.from_json(load_json(open({path!r}, 'rb').read(), where='bench'))"
READ_YAML = "MachineConfig.from_json(load_document(open({path!r}, 'rb').read(), where='bench'))"


def measure(_seconds: float) -> Iterator[Result]:
    document = build_machine_config()
    in_json = json.dumps(document)
    yield Result("MachineConfig in JSON: size", "MiB", len(in_json) / 1024**2)
    yield from _measure_reading("MachineConfig in JSON", in_json, READ_JSON)
    yield from _measure_reading("MachineConfig in YAML", dump_document(document), READ_YAML)


def _measure_reading(name: str, text: str, statement: str) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document"
        path.write_text(text)
        modules = measure_cost(IMPORT)
        found = measure_cost(IMPORT + "found = " + statement.format(path=str(path)))
    yield Result(f"{name}: read", "ms", (found.duration_s - modules.duration_s) * 1000)
    yield Result(f"{name}: retained", "MiB", found.rss_mib - modules.rss_mib)
    yield Result(f"{name}: peak", "MiB", found.peak_mib - modules.peak_mib)


def build_machine_config() -> dict[str, object]:
    source = f"data:text/plain;charset=utf-8;base64,{base64.b64encode(CONTENT).decode()}"
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": "rendered-worker-bench"},
        "spec": {
            "config": {
                "ignition": {"version": "3.5.0"},
                "storage": {
                    "files": [
                        {"path": f"/etc/bench/{index}", "mode": 420, "contents": {"source": source}}
                        for index in range(FILES)
                    ]
                },
            },
            "osImageURL": f"quay.io/example/os@sha256:{'a' * 64}",
        },
    }
