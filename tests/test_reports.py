"""The documents that are written from records of tests and benchmarks."""

import json
from pathlib import Path

import pytest

from bench.baseline import Baseline
from bench.committed import compare, read_committed, write_committed
from bench.result import Result
from bench.run import format_record, format_row
from tools.reports import (
    DOCS,
    RECORDS,
    SUITES,
    describe_costs,
    describe_identities,
    describe_survival,
    replace_identities,
    write_reports,
)
from treenail.manifests.permissions import CONTROLLER_VERBS

BASELINE = Baseline(work_s=0.125, interpreter_mib=10.0)


def make_figure(
    name: str, value: float, *, unit: str = "ms", target: float | None = None, module: str = "node"
) -> dict[str, object]:
    result = Result(name, unit, value, target)
    return dict(format_record(result, module, f"{module}: {name}: 1", BASELINE))


def test_documents_are_current() -> None:
    for name, text in write_reports().items():
        assert (DOCS / name).read_text() == text, "run: make reports"


def test_committed_records_belong_to_a_heading() -> None:
    names = {path.stem for path in RECORDS.glob("*.json")}
    assert names <= {*SUITES, "bench", "misses"}


def test_missed_limits_have_a_reason() -> None:
    assert "Not explained yet" not in (DOCS / "what-it-costs.md").read_text()


def test_survival_lists_cases_and_says_what_was_not_recorded() -> None:
    record = {
        "what": "states | after a cut", "count": 12_345, "result": "old or new",
        "command": "make test-long", "day": "2026-01-02", "revision": "abc",
    }  # fmt: skip
    text = describe_survival({**dict.fromkeys(SUITES, ()), "crash": [record]})
    row = "| states \\| after a cut | 12,345 | old or new | `make test-long` | 2026-01-02, abc |"
    assert row in text.splitlines()
    assert text.count("Not recorded yet.") == len(SUITES) - 1


def test_survival_sums_records_of_one_kind() -> None:
    record = {"result": "", "command": "", "day": "", "revision": ""}
    found = [{**record, "what": f"states: {name}", "count": 900} for name in ("a", "b")]
    text = describe_survival({**dict.fromkeys(SUITES, ()), "crash": [*found, found[0] | {
        "what": "other: a"}]})  # fmt: skip
    assert "| **states: all** | **1,800** | | | |" in text.splitlines()
    assert "other: all" not in text


@pytest.mark.process
def test_costs_name_missed_limits_with_their_reason() -> None:
    met = make_figure("import", 90.0, target=100.0)
    missed = make_figure("RSS", 40.0, unit="MiB", target=32.0)
    text = describe_costs([met, missed], {"node: RSS: 1": "modules of the interpreter."})
    assert "| import | 90 ms | 100 | 0.72 |" in text
    assert "| RSS | 40 MiB | 32, missed | 4 |" in text
    assert "- modules of the interpreter.\n  - **RSS** (node): 40 MiB, limit 32\n" in text


@pytest.mark.process
def test_figure_is_compared_by_its_ratio(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_committed([{**make_figure("import", 50.0), "ratio": 0.2}], path)
    committed = read_committed(path)
    # On a machine that is twice as slow both the figure and the baseline are twice as high.
    assert compare(make_figure("import", 100.0), committed) == 4.0
    assert compare(make_figure("another", 100.0), committed) is None
    assert format_row(Result("import", "ms", 100.0), 4.0).endswith("x4.00")


@pytest.mark.process
def test_recording_replaces_the_measured_modules_only(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_committed([make_figure("old", 1.0), make_figure("kept", 1.0, module="once")], path)
    write_committed([make_figure("new", 2.0)], path)
    assert [each["name"] for each in json.loads(path.read_text())] == ["new", "kept"]


def test_ratio_divides_time_and_memory_by_the_baseline() -> None:
    assert BASELINE.divide(Result("a", "s", 1.0)) == 8.0
    assert BASELINE.divide(Result("a", "ms", 250.0)) == 2.0
    assert BASELINE.divide(Result("a", "MiB", 25.0)) == 2.5
    assert BASELINE.divide(Result("a", "calls", 25.0)) is None


def make_identity(name: str, count: int, **allowed: str) -> dict[str, object]:
    found = {what.replace("_", " "): verbs for what, verbs in allowed.items()}
    return {"what": name, "count": count, "identity": name, "allowed": found}


def test_identities_show_reads_and_changes_of_the_larger_record() -> None:
    node = {"nodes.example.io in default": "get list patch watch", "pods": "get"}
    records = [
        {**make_identity("a node", 9, pods="get"), "what": "lab"},
        {**make_identity("a node", 1_000), "allowed": node},
        make_identity("anonymous", 9),
        {"what": "another", "count": 1},
    ]
    assert describe_identities(records).splitlines()[2:] == [
        "| a node | `nodes in default`, `pods` (get) | `nodes in default` (patch) | 9 and 1,000 |",
        "| anonymous | nothing | nothing | 9 |",
    ]


def test_page_without_marks_is_refused() -> None:
    with pytest.raises(SystemExit, match="expected <!-- identities"):
        replace_identities("# Text", [])


def test_every_identity_of_the_tests_is_recorded() -> None:
    records = json.loads((RECORDS / "privilege.json").read_text())
    identities = {each["identity"] for each in records if "identity" in each}
    assert identities == {
        *(f"the controller {name}" for name in CONTROLLER_VERBS),
        "the server of configs",
        "the server of hosted clusters, in a control plane",
        "a Job that builds an image",
        "a node, beyond what Kubernetes gives each kubelet",
        "a new machine with a bootstrap token",
        "an editor of pools",
        "a reader of the page or of metrics",
        "a user without a role",
        "a client without a credential",
        "a client with a wrong token",
    }
