"""Metrics in the text format of Prometheus."""

import pytest

from treenail.controllers.runtime.metrics import ControllerMetrics


def test_all_metrics_are_rendered_with_help_and_type() -> None:
    metrics = ControllerMetrics()
    turns = metrics.add_counter("turns_total", "Turns taken.", ("controller", "result"))
    turns.increment("drain", "error")
    turns.increment("drain", "success", amount=2)
    metrics.add_gauge("leader", "Whether it leads.").set_function(by=lambda: 1)
    took = metrics.add_histogram("turn_seconds", "How long.", ("controller",), buckets=(0.5, 1))
    for seconds in (0.25, 0.5, 7):
        took.observe(seconds, "drain")

    assert metrics.render_text() == (
        "# HELP treenail_controller_leader Whether it leads.\n"
        "# TYPE treenail_controller_leader gauge\n"
        "treenail_controller_leader 1\n"
        "# HELP treenail_controller_turn_seconds How long.\n"
        "# TYPE treenail_controller_turn_seconds histogram\n"
        'treenail_controller_turn_seconds_bucket{controller="drain",le="0.5"} 2\n'
        'treenail_controller_turn_seconds_bucket{controller="drain",le="1"} 2\n'
        'treenail_controller_turn_seconds_bucket{controller="drain",le="+Inf"} 3\n'
        'treenail_controller_turn_seconds_sum{controller="drain"} 7.75\n'
        'treenail_controller_turn_seconds_count{controller="drain"} 3\n'
        "# HELP treenail_controller_turns_total Turns taken.\n"
        "# TYPE treenail_controller_turns_total counter\n"
        'treenail_controller_turns_total{controller="drain",result="error"} 1\n'
        'treenail_controller_turns_total{controller="drain",result="success"} 2\n'
    )


def test_label_value_is_escaped() -> None:
    metrics = ControllerMetrics()
    metrics.add_counter("odd_total", "Odd.", ("what",)).increment('a"b\\c\nd')

    assert metrics.render_text().splitlines()[-1] == (
        'treenail_controller_odd_total{what="a\\"b\\\\c\\nd"} 1'
    )


def test_metric_without_observations_has_help_and_type() -> None:
    metrics = ControllerMetrics()
    metrics.add_counter("rare_total", "Rare.")

    assert metrics.render_text() == (
        "# HELP treenail_controller_rare_total Rare.\n"
        "# TYPE treenail_controller_rare_total counter\n"
    )


def test_duplicate_metric_name_raises_value_error() -> None:
    metrics = ControllerMetrics()
    metrics.add_counter("a_total", "A.")
    with pytest.raises(ValueError, match="duplicate metric treenail_controller_a_total"):
        metrics.add_gauge("a_total", "A.")
