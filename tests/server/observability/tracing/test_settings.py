"""Options and OpenTelemetry's variables: where spans go, which requests have some, and what is refused at the start."""

from __future__ import annotations

import pytest

from embert.server.observability.tracing import settings
from embert.server.observability.tracing.settings import TracingUnavailable, shown, traces_url

ANY, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("option", "environment", "url"),
    [
        (None, {}, None),
        ("http://a:4318", {}, "http://a:4318/v1/traces"),
        ("https://a/otlp/", {}, "https://a/otlp/v1/traces"),
        ("http://a:4318/v1/traces", {}, "http://a:4318/v1/traces"),
        (None, {ANY: "http://a:4318"}, "http://a:4318/v1/traces"),
        (None, {TRACES: "http://b/spans", ANY: "http://a:4318"}, "http://b/spans"),
        ("http://c:1", {TRACES: "http://b/spans"}, "http://c:1/v1/traces"),
        (None, {ANY: ""}, None),
        (None, {ANY: "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {ANY: "http://a:4318", "OTEL_TRACES_EXPORTER": "otlp"}, "http://a:4318/v1/traces"),
        ("http://a:4318", {"OTEL_TRACES_EXPORTER": "none"}, "http://a:4318/v1/traces"),
        ("http://a:4318", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://a:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://a:4318/v1/traces"),
        (
            "http://a:4318",
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "http://a:4318/v1/traces",
        ),
    ],
)
def test_where_spans_go(option: str | None, environment: dict[str, str], url: str | None) -> None:
    assert traces_url(option, environment) == url


@pytest.mark.parametrize("url", ["", "collector:4318", "grpc://a:4317", "http://", "http://[::1", "http://a:0", "/x"])
def test_a_value_that_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(TracingUnavailable, match=r"--otlp-endpoint must be a URL such as http://collector:4318; it is"):
        traces_url(url, {})


def test_another_protocol_is_refused() -> None:
    with pytest.raises(TracingUnavailable, match=r"OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf.*; it is grpc"):
        traces_url("http://a:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_no_password_is_shown() -> None:
    assert shown("https://me:secret@host:4318/v1/traces?key=secret") == "https://host:4318/v1/traces"
    assert shown("http://host:4318") == "http://host:4318"
    with pytest.raises(TracingUnavailable) as told:
        traces_url("ftp://me:secret@host", {})
    assert "secret" not in str(told.value)


# --- the command line ---


def test_without_the_extra_a_variable_for_all_programs_costs_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not keep a server from starting that has served without traces until now."""
    from embert.server.cli import serve
    from embert.server.config import ConfigError, ServeConfig

    said: list[str] = []
    monkeypatch.setattr(settings, "_EXPORTER", "opentelemetry.exporter.of.nobody")
    monkeypatch.setattr(serve.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setenv(ANY, "http://a:4318")
    assert serve._traces_url(ServeConfig()) is None
    assert said == [
        f"{ANY} http://a:4318 needs OpenTelemetry's exporter: pip install 'embert[otel]'; serving without traces"
    ]
    with pytest.raises(ConfigError, match="--otlp-endpoint http://b:1 needs"):
        serve._traces_url(ServeConfig(otlp_endpoint="http://b:1"))


def test_a_variable_that_the_sdk_refuses_costs_traces_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from embert.server.observability.tracing.span_export import start_span_export

    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "xray")
    assert start_span_export("http://127.0.0.1:1/v1/traces", "a") is None
    assert "max_export_batch_size" in caplog.text
    assert "sampler xray" in caplog.text
