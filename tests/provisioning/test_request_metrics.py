"""Metrics of requests; their labels are bounded and contain no address."""

from tests.fakes.clock import FakeClock
from tests.provisioning.logged import NOW, make_refusal, make_row
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.provisioning.machines.logged_requests import RequestOutcome
from treenail.provisioning.machines.request_recorder import (
    RequestMetrics,
    RequestRecorder,
    add_token_metrics,
)
from treenail.provisioning.tokens.tokens import TokenTable, make_token

PREFIX = "treenail_controller_ignition_"


def make_metrics() -> tuple[ControllerMetrics, RequestMetrics]:
    metrics = ControllerMetrics()
    return metrics, RequestMetrics(metrics, {"worker", "infra"}.__contains__)


def test_requests_are_counted() -> None:
    metrics, requests = make_metrics()
    requests.record(make_row(is_cached=False))
    requests.record(make_row(is_cached=True))
    requests.record(make_refusal())
    text = metrics.render_text()
    labels = '{outcome="served",pool="worker",version="3.4.0"}'
    assert f"{PREFIX}requests_total{labels} 2.0" in text
    assert f'{PREFIX}requests_total{{outcome="refused",pool="worker",version=""}} 1.0' in text
    assert f'{PREFIX}response_bytes_total{{pool="worker"}} 330060.0' in text
    assert f'{PREFIX}request_duration_seconds_bucket{{le="0.25",pool="worker"}} 3.0' in text
    assert f'{PREFIX}cache_lookups_total{{result="hit"}} 1.0' in text
    assert f'{PREFIX}cache_lookups_total{{result="miss"}} 1.0' in text


def test_machines_without_a_token_are_counted() -> None:
    metrics, requests = make_metrics()
    for outcome in (RequestOutcome.SERVED, RequestOutcome.CHECKED, RequestOutcome.REFUSED):
        requests.record(make_row(token="", outcome=outcome))
    requests.record(make_row())
    assert f'{PREFIX}served_without_token_total{{pool="worker"}} 1.0' in metrics.render_text()


def test_names_that_clients_choose_add_no_time_series() -> None:
    metrics, requests = make_metrics()
    for number in range(100):
        requests.record(
            make_row(
                address=f"10.9.0.{number}",
                pool=f"pool-{number}",
                token=f"token-{number}",
                machine=f"machine-{number}",
                version=f"3.{number + 100}.0",
                outcome=RequestOutcome.INVALID,
            )
        )
    text = metrics.render_text()
    lines = [line for line in text.splitlines() if line.startswith(f"{PREFIX}requests_total")]
    assert lines == [f'{PREFIX}requests_total{{outcome="invalid",pool="(other)",version=""}} 100.0']
    for name in ("10.9.0", "pool-", "token-", "machine-"):
        assert name not in text


def test_tokens_are_counted_at_each_scrape() -> None:
    metrics, clock = ControllerMetrics(), FakeClock(NOW)
    tables: list[TokenTable | None] = [None]
    add_token_metrics(metrics, lambda: tables[0], clock)
    assert f"{PREFIX}tokens{{" not in metrics.render_text()
    table = TokenTable()
    for age in (10, 20):
        table = table.put(make_token("worker", expires=NOW + age)[1])
    tables[0] = table
    assert f'{PREFIX}tokens{{state="valid"}} 2.0' in metrics.render_text()
    clock.move(15)
    text = metrics.render_text()
    assert f'{PREFIX}tokens{{state="valid"}} 1.0' in text
    assert f'{PREFIX}tokens{{state="expired"}} 1.0' in text
    assert f'{PREFIX}tokens{{state="used"}} 0.0' in text
    assert not [each for each in table.tokens if each in text]


def test_log_that_fails_hides_no_request_from_the_others() -> None:
    metrics, requests = make_metrics()
    recorder = RequestRecorder(RequestMetrics(ControllerMetrics(), _fail), requests)
    recorder.record(make_row())
    assert f"{PREFIX}requests_total" in metrics.render_text()


def _fail(_name: str) -> bool:
    raise RuntimeError("a bug")
