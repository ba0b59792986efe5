"""Metrics of a controller process in the text format of Prometheus."""

import pytest

from treenail import __version__
from treenail.controllers.runtime.controller_metrics import ControllerMetrics, MetricTable

INFO = (
    "# HELP treenail_controller_build_info 1, with the version of treenail.\n"
    "# TYPE treenail_controller_build_info gauge\n"
    f'treenail_controller_build_info{{version="{__version__}"}} 1.0\n'
)


def render(metrics: ControllerMetrics) -> str:
    """The text without the build information, which every process has."""
    text = metrics.render_text()
    assert text.startswith(INFO)
    return text.removeprefix(INFO)


def test_all_metrics_are_rendered_with_help_and_type() -> None:
    metrics = ControllerMetrics()
    turns = metrics.add_counter("turns_total", "Turns taken.", ("controller", "result"))
    turns.increment("drain", "error")
    turns.increment("drain", "success", amount=2)
    metrics.add_gauge("leader", "Whether it leads.").set_function(by=lambda: 1)
    took = metrics.add_histogram("turn_seconds", "How long.", ("controller",), buckets=(0.5, 1))
    for seconds in (0.25, 0.5, 7):
        took.observe(seconds, "drain")

    assert render(metrics) == (
        "# HELP treenail_controller_turns_total Turns taken.\n"
        "# TYPE treenail_controller_turns_total counter\n"
        'treenail_controller_turns_total{controller="drain",result="error"} 1.0\n'
        'treenail_controller_turns_total{controller="drain",result="success"} 2.0\n'
        "# HELP treenail_controller_leader Whether it leads.\n"
        "# TYPE treenail_controller_leader gauge\n"
        "treenail_controller_leader 1.0\n"
        "# HELP treenail_controller_turn_seconds How long.\n"
        "# TYPE treenail_controller_turn_seconds histogram\n"
        'treenail_controller_turn_seconds_bucket{controller="drain",le="0.5"} 2.0\n'
        'treenail_controller_turn_seconds_bucket{controller="drain",le="1.0"} 2.0\n'
        'treenail_controller_turn_seconds_bucket{controller="drain",le="+Inf"} 3.0\n'
        'treenail_controller_turn_seconds_count{controller="drain"} 3.0\n'
        'treenail_controller_turn_seconds_sum{controller="drain"} 7.75\n'
    )


def test_table_is_computed_at_each_scrape() -> None:
    metrics = ControllerMetrics()
    values = {("b",): 2.0, ("a",): 1.0}
    metrics.add_tables(lambda: [MetricTable("pools", "Pools.", ("pool",), dict(values))])
    assert render(metrics) == (
        "# HELP treenail_controller_pools Pools.\n"
        "# TYPE treenail_controller_pools gauge\n"
        'treenail_controller_pools{pool="a"} 1.0\n'
        'treenail_controller_pools{pool="b"} 2.0\n'
    )
    values["b",] = 3.0
    assert render(metrics).endswith('treenail_controller_pools{pool="b"} 3.0\n')


def test_label_value_is_escaped() -> None:
    metrics = ControllerMetrics()
    metrics.add_counter("odd_total", "Odd.", ("what",)).increment('a"b\\c\nd')

    assert metrics.render_text().splitlines()[-1] == (
        'treenail_controller_odd_total{what="a\\"b\\\\c\\nd"} 1.0'
    )


def test_gauge_with_other_labels_raises_value_error() -> None:
    gauge = ControllerMetrics().add_gauge("a", "A.", ("x",))
    with pytest.raises(ValueError, match="expected values for"):
        gauge.set_function(by=lambda: 1.0)


def test_duplicate_metric_name_raises_value_error() -> None:
    metrics = ControllerMetrics()
    metrics.add_counter("a_total", "A.")
    with pytest.raises(ValueError, match="duplicate metric treenail_controller_a_total"):
        metrics.add_gauge("a_total", "A.")
