"""The collector of spans, from `--otlp-endpoint` and OpenTelemetry's variables.

The specification of the variables: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from urllib.parse import urlsplit

INSTALL_OTEL = "pip install 'embert[otel]'"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_PATH = "/v1/traces"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # the first is a complete URL


class TracingUnavailable(ValueError):
    """Traces cannot be exported as configured; the message is one sentence for users."""


def traces_url(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Returns the URL that accepts spans, or None without traces.

    `option` is the value of --otlp-endpoint. Raises TracingUnavailable if spans cannot be exported to the URL.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    source = next((name for name in _ENDPOINTS if environment.get(name)), None)
    if option is not None:
        source, url = "--otlp-endpoint", option
    elif source is None or environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp":
        return None
    else:
        url = environment[source]
    if not _is_url(url):
        raise TracingUnavailable(f"{source} must be a URL such as http://collector:4318; it is {shown(url)}")
    _check_protocol(environment)
    if not _is_installed():
        raise TracingUnavailable(f"{source} {shown(url)} needs OpenTelemetry's exporter: {INSTALL_OTEL}")
    if source == _ENDPOINTS[0] or urlsplit(url).path.endswith(_PATH):
        return url
    return url.removesuffix("/") + _PATH


def shown(url: str) -> str:
    """Returns the URL for log lines, without a password or a key."""
    scheme, slashes, rest = url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return scheme + slashes + host.rpartition("@")[2] + slash + path


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_protocol(environment: Mapping[str, str]) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(name, ""):
            if protocol != "http/protobuf":
                raise TracingUnavailable(
                    f"{name} must be http/protobuf, which collectors take on port 4318; it is {protocol}"
                )
            return


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False
