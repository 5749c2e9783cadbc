"""Writes embert.json, the Grafana dashboard: `scripts/document` runs this, a test sees that the file is current.

From top to bottom: is it healthy, how fast, how full, what for, and what does the GPU do. Every panel says what
it shows and what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gpu_panels import dcgm, gpu
from panels import (
    ENGINE,
    GREEN,
    OF_ENGINE,
    OF_MODEL,
    RATE,
    RED,
    SELECT,
    SOURCE,
    WORK,
    WORK_ON_ENGINE,
    YELLOW,
    Panel,
    heat_map,
    lines,
    mean,
    panel,
    quantile,
    rate,
    several,
    stat,
    steps,
    target,
    variable,
    with_exemplars,
)

REPLICAS = SELECT.rpartition(",")[0]  # what is chosen before a replica is

DURATION = "embert_request_duration_seconds"
ANSWERED = f'{WORK}, outcome="answered"'
PARTS = {  # of a request; together they are its duration
    "tokenize": ("embert_tokenize_duration_seconds", WORK),
    "queue": ("embert_queue_duration_seconds", WORK_ON_ENGINE),
    "inference": ("embert_inference_duration_seconds", WORK_ON_ENGINE),
    "encode": ("embert_response_encode_duration_seconds", WORK),
    "other": ("embert_request_other_duration_seconds", WORK),
}


def healthy() -> Iterator[Panel]:
    """Health"""
    yield stat(
        "Engines up",
        "Ready engines ÷ all engines. Below 100 % one restarts, and the log has the reason.",
        f"sum(embert_engine_up{{{SELECT}}}) / count(embert_engine_up{{{SELECT}}})",
        "percentunit",
        steps((RED, None), (GREEN, 1)),
    )
    yield stat(
        "Models ready",
        "Models with a ready engine ÷ all models. Below 100 %: a start, or a model that fails.",
        f"sum(embert_model_ready{{{OF_MODEL}}}) / count(embert_model_ready{{{OF_MODEL}}})",
        "percentunit",
        steps((RED, None), (GREEN, 1)),
    )
    for what, outcome, why in (
        ("Failed requests", "failed", "Share with status 424 or 5xx, the server's own failures."),
        ("Refused requests", "refused", "Share refused because of too much work: add replicas, or find who floods."),
    ):
        bad = rate("embert_requests_total", f'{WORK}, outcome="{outcome}"')
        yield stat(
            what,
            f'{why} Which, and why: "Responses by status" and "Refused, by reason".',
            f"({bad} or vector(0)) / ({rate('embert_requests_total', WORK)} > 0)",
            "percentunit",
            steps((GREEN, None), (YELLOW, 0.001), (RED, 0.01)),
        )
    yield stat(
        "99 of 100 served within",
        "The slow end of latency, HTTP included, of requests with a result; refusals are not included. When it is "
        'high, "Where the time goes" says which part is.',
        quantile(0.99, DURATION, ANSWERED),
        "s",
        steps((GREEN, None), (YELLOW, 0.5), (RED, 1)),
    )
    yield stat(
        "Requests a second",
        "Requests to a model, with any status.",
        rate("embert_requests_total", WORK),
        "reqps",
        steps(("blue", None)),
    )
    yield stat(
        "Queue full",
        "Tokens admitted ÷ the limit, of the fullest queue: of a model on a replica. At 100 % requests get 429: add "
        "replicas before.",
        f"max(embert_admitted_tokens{{{OF_MODEL}}} / embert_queue_limit_tokens{{{OF_MODEL}}})",
        "percentunit",
        steps((GREEN, None), (YELLOW, 0.5), (RED, 0.8)),
    )
    yield stat(
        "Processes lost, last hour",
        'Times an engine or HTTP process had to be started again; "Processes lost" below says which. Look at the log.',
        f"sum(increase(embert_engine_restarts_total{{{SELECT}}}[1h])) "
        f"+ sum(increase(embert_http_restarts_total{{{SELECT}}}[1h]))",
        "none",
        steps((GREEN, None), (YELLOW, 1), (RED, 3)),
    )


def fast() -> Iterator[Panel]:
    """Latency by stage"""
    yield lines(
        "Latency of requests",
        "From a request's headers to its response's end. Half, 90 % and 99 % of responses stay below the curves. A dot "
        "is a request, with the id of its trace, or its own: the access log has it (--access-log).",
        [
            with_exemplars(target(quantile(share, DURATION, ANSWERED), f"p{share * 100:g}"))
            for share in (0.5, 0.9, 0.99)
        ],
        "s",
    )
    yield heat_map(
        "Latency, all of it",
        "Responses by duration. Two bands mean two kinds of requests, such as queries next to low-priority jobs.",
        rate(f"{DURATION}_bucket", ANSWERED, "le"),
        "s",
    )
    yield lines(
        "Where the time goes, on average",
        "The whole stack is the time spent for each response: its mean duration, and that of requests that got none, "
        "such as requests that waited in vain. Tokenize and encode run in the HTTP processes, queue is "
        "waiting for a batch, inference is the batch itself, other is HTTP and the client. "
        "Thick queue: too little capacity, add replicas. Thick inference: long texts, or batches that are too large. "
        "Thick tokenize or encode: add --workers. Thick other: slow clients, or the same.",
        [
            target(f"{rate(f'{metric}_sum', WORK)} / {rate(f'{DURATION}_count', ANSWERED)}", part)
            for part, (metric, _) in PARTS.items()
        ],
        "s",
        stacked=True,
    )
    yield lines(
        "Mean latency by model and priority",
        "Which requests are slow. Choose that model and that priority at the top; all of this row then shows theirs.",
        [target(mean(DURATION, ANSWERED, "model, priority"), "{{model}} {{priority}}")],
        "s",
    )
    yield lines(
        "Mean queue by engine",
        "One engine above the others has a slow device, or was just started again.",
        [target(mean("embert_queue_duration_seconds", WORK_ON_ENGINE, "model, engine"), "{{model}} engine {{engine}}")],
        "s",
    )
    yield lines(
        "Mean inference by engine",
        "Time on the encoder of one request. One engine above the others: its device is slower, or throttled.",
        [
            target(
                mean("embert_inference_duration_seconds", WORK_ON_ENGINE, "model, engine"),
                "{{model}} engine {{engine}}",
            )
        ],
        "s",
    )
    for part, (metric, labels) in PARTS.items():
        meaning = {
            "tokenize": "Texts to token ids, the wait for a thread included. Helped by --tokenization-workers.",
            "queue": "Waiting for the encoder. What grows first when there is too little capacity.",
            "inference": "On the encoder. Grows with the tokens of a batch; compare with batch tokens below.",
            "encode": "Vectors to the response's body. JSON numbers are the slow way: ask for base64 or raw rows.",
            "other": "Reading and parsing the body, sockets, sending the response. Slow clients, or too few --workers.",
        }[part]
        yield lines(
            f"Part of the time: {part}",
            meaning,
            [target(quantile(share, metric, labels), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)],
            "s",
        )
    yield lines(
        "A batch on the encoder",
        "Duration of batches; a request waits at least for the running one. --engine-timeout must be well above.",
        [
            target(quantile(share, "embert_batch_duration_seconds", OF_ENGINE), f"p{share * 100:g}")
            for share in (0.5, 0.9, 0.99)
        ],
        "s",
    )


def full() -> Iterator[Panel]:
    """Load and capacity"""
    yield lines(
        "Tokens waiting",
        "Tokens waiting for a batch (the HPA scales on this), all admitted ones, and the limit of those before 429.",
        [
            target(f"sum by (instance, model) (embert_queue_tokens{{{OF_MODEL}}})", "waiting {{instance}} {{model}}"),
            target(f"embert_admitted_tokens{{{OF_MODEL}}}", "admitted {{instance}} {{model}}"),
            target(f"min by (model) (embert_queue_limit_tokens{{{OF_MODEL}}})", "limit of a replica {{model}}"),
        ],
        "short",
    )
    yield lines(
        "Refused, by reason",
        "queue_full (429): add replicas. too_large (413): a client's mistake. deadline: slower than --request-timeout. "
        "draining, loading: deploys and restarts.",
        [target(rate("embert_rejected_total", by="reason"), "{{reason}}")],
        "reqps",
        stacked=True,
    )
    yield lines(
        "Encoder busy",
        "Share of the time spent in forwards. Near 100 % with a growing queue, the replica is at its capacity.",
        [target(f"embert_engine_busy_ratio{{{ENGINE}}}", "{{instance}} engine {{engine}}")],
        "percentunit",
        highest=1,
    )
    yield lines(
        "Encoder's time by model",
        "Which model the engines spend their time on: 100 % is one engine, all of the time.",
        [target(rate("embert_engine_busy_seconds_total", OF_ENGINE, "engine, model"), "engine {{engine}} {{model}}")],
        "percentunit",
        stacked=True,
    )
    yield heat_map(
        "Batch fill",
        "Tokens of a batch ÷ the token budget. Low at little load, which is right: nothing waits to fill a batch.",
        rate("embert_batch_token_fill_ratio_bucket", OF_ENGINE, "le"),
        "percentunit",
    )
    yield lines(
        "A batch, on average",
        "Texts and tokens that run together. They grow with load; tokens stop at --max-batch-tokens.",
        [
            target(mean("embert_batch_texts", OF_ENGINE), "texts"),
            target(mean("embert_batch_tokens", OF_ENGINE), "tokens"),
        ],
        "short",
    )
    yield lines(
        "Requests in flight",
        "HTTP requests in progress, scrapes and probes included.",
        [target(f"embert_requests_in_flight{{{SELECT}}}", "{{instance}}")],
        "short",
    )
    yield lines(
        "Bytes held for clients",
        "Bodies and responses that HTTP processes hold (--max-held-bytes). Clients that do not read responses fill it.",
        [target(f"embert_held_bytes{{{SELECT}}}", "{{instance}}")],
        "bytes",
    )
    yield lines(
        "Connections",
        "Open ones, and the limit (--max-connections of each HTTP process). At the limit, idle ones are closed for new "
        "ones, and then clients get 503.",
        [
            target(f"embert_open_connections{{{SELECT}}}", "open {{instance}}"),
            target(f"min(embert_connections_limit{{{SELECT}}})", "limit of a replica"),
        ],
        "short",
    )


def traffic() -> Iterator[Panel]:
    """Requests"""
    yield lines(
        "Requests by route",
        "Which protocols clients use; without probes and scrapes.",
        [target(f"{rate('embert_requests_total', WORK, 'route')} > 0", "{{route}}")],
        "reqps",
        stacked=True,
    )
    yield lines(
        "Responses by status",
        "And by outcome: answered, refused, failed by the server, expired (the client's own time was over before), "
        "client_error, disconnected.",
        [target(rate("embert_requests_total", WORK, "status, outcome"), "{{status}} {{outcome}}")],
        "reqps",
        stacked=True,
    )
    yield lines(
        "Unknown fields",
        "Fields of requests that this server does not know and ignores; the header x-embert-ignored-fields names them.",
        [target(rate("embert_ignored_fields_total"), "fields")],
        "short",
    )
    yield lines(
        "Texts and tokens",
        "Capacity is measured in tokens a second.",
        [
            target(rate("embert_tokens_total", WORK, "model"), "tokens {{model}}"),
            target(rate("embert_texts_total", WORK, "model"), "texts {{model}}"),
        ],
        "short",
    )
    yield lines(
        "Texts of a request",
        "Number of texts in a request.",
        [target(quantile(share, "embert_request_texts", OF_MODEL), f"p{share * 100:g}") for share in (0.5, 0.99)],
        "short",
        width=6,
    )
    yield lines(
        "Tokens of a text",
        "Length of texts after truncation.",
        [target(quantile(share, "embert_text_tokens", OF_MODEL), f"p{share * 100:g}") for share in (0.5, 0.99)],
        "short",
        width=6,
    )
    yield lines(
        "Texts cut",
        "Share of the texts that were longer than the model reads and lost their end.",
        [target(f"{rate('embert_truncated_texts_total', WORK)} / ({rate('embert_texts_total', WORK)} > 0)", "cut")],
        "percentunit",
        width=6,
    )
    yield lines(
        "Texts of lost clients",
        "Texts whose client disconnected: queued ones did not run, batched ones ran in vain. And responses not read.",
        [
            target(rate("embert_cancelled_texts_total", by="stage"), "{{stage}}"),
            target(rate("embert_unread_answers_total"), "responses not read"),
        ],
        "short",
        width=6,
    )


def runs() -> Iterator[Panel]:
    """Models and processes"""
    hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
    yield panel(
        "table",
        "Models by replica",
        "The model, precision, encoder and device of each replica.",
        [target(f"embert_model_info{{{OF_MODEL}}}", format="table", instant=True, range=False)],
        8,
        9,
        transformations=[{"id": "organize", "options": {"excludeByName": hidden}}],
        fieldConfig={"defaults": {}, "overrides": []},
    )
    yield lines(
        "Replicas by version",
        "Two versions at once: a deploy is under way. Next to them, replicas that start and that drain.",
        [
            target(f"count by (version) (embert_build_info{{{SELECT}}})", "{{version}}"),
            target(f"sum(embert_starting{{{SELECT}}})", "starting"),
            target(f"sum(embert_draining{{{SELECT}}})", "draining"),
        ],
        "none",
    )
    yield lines(
        "Processes lost",
        "Restarts, and among them hung processes that were killed. The log has the reason of each.",
        [
            target(f"increase(embert_engine_restarts_total{{{SELECT}}}{RATE})", "{{instance}} engine {{engine}}"),
            target(f"increase(embert_http_restarts_total{{{SELECT}}}{RATE})", "{{instance}} HTTP process"),
            target(f"increase(embert_hung_processes_total{{{SELECT}}}{RATE})", "{{instance}} hung {{process}}"),
        ],
        "none",
    )
    each = "{{instance}} {{process}}"
    yield lines(
        "CPU of each process",
        "Cores used. An HTTP process at one core is at its limit: --workers. An engine on a CPU uses all that it has.",
        [target(f"rate(process_cpu_seconds_total{{{SELECT}}}{RATE})", each)],
        "none",
    )
    yield lines(
        "Memory of each process",
        "Resident bytes. None of them grows for long: one that does has a leak, so keep its log.",
        [target(f"process_resident_memory_bytes{{{SELECT}}}", each)],
        "bytes",
    )
    yield lines(
        "Open files of each process",
        "Share of the files that the process may open. Connections are files: near 100 %, new ones fail.",
        [target(f"process_open_fds{{{SELECT}}} / process_max_fds{{{SELECT}}}", each)],
        "percentunit",
        highest=1,
    )
    yield lines(
        "Age of each process",
        "Since its start. One that is younger than the others was started again.",
        [target(f"time() - process_start_time_seconds{{{SELECT}}}", each)],
        "s",
    )
    yield lines(
        "Spans of traces",
        "Spans that the collector accepted, and dropped ones. Empty without traces.",
        [
            target(rate("embert_spans_exported_total"), "exported"),
            target(rate("embert_spans_dropped_total"), "dropped"),
        ],
        "short",
    )


def dashboard() -> Panel:
    """The dashboard: rows of panels laid out over Grafana's 24 columns."""
    panels: list[Panel] = []
    y = 0
    for row in (healthy, fast, full, traffic, gpu, dcgm, runs):
        panels.append(
            {"type": "row", "title": row.__doc__, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )  # fmt: skip
        y += 1
        x = height = 0
        for each in row():
            place = each["gridPos"]
            if x + place["w"] > 24:
                x, y, height = 0, y + height, 0
            place |= {"x": x, "y": y}
            x, height = x + place["w"], max(height, place["h"])
            panels.append(each)
        y += height
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": "embert", "title": "embert", "tags": ["embert"], "schemaVersion": 39, "version": 1,
        "description": "An embedding server: health, latency, load, requests, models.", "editable": True,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "15s", "timezone": "browser", "graphTooltip": 1,
        "annotations": {"list": [{
            "name": "engine started again", "enable": True, "iconColor": "red", "datasource": SOURCE,
            "expr": f"changes(embert_engine_restarts_total{{{SELECT}}}[1m]) > 0",
            "titleFormat": "engine {{engine}} started again",
        }]},
        "templating": {"list": [
            {"type": "datasource", "name": "source", "label": "Prometheus", "query": "prometheus", "refresh": 1},
            variable("job", "Job", "label_values(embert_build_info, job)"),
            # On Kubernetes; elsewhere nothing has these two labels, and `All` is the only choice.
            several("namespace", "Namespace", 'label_values(embert_build_info{job="$job"}, namespace)'),
            several("service", "Service",
                    'label_values(embert_build_info{job="$job", namespace=~"$namespace"}, service)'),
            several("instance", "Replica", f"label_values(embert_build_info{{{REPLICAS}}}, instance)"),
            several("model", "Model", f"label_values(embert_model_info{{{SELECT}}}, model)"),
            several("engine", "Engine", f"label_values(embert_engine_up{{{SELECT}}}, engine)"),
            several("priority", "Priority", f"label_values(embert_tokens_total{{{SELECT}}}, priority)", ".+"),
            several("gpu_host", "GPU host (DCGM)", "label_values(DCGM_FI_DEV_GPU_TEMP, Hostname)"),
        ]},
        "links": [], "panels": panels,
    }  # fmt: skip


def main() -> None:
    """Write embert.json next to this file, one panel per line."""
    dump = json.JSONEncoder(ensure_ascii=False).encode
    board = dashboard()
    panels = ",\n".join(map(dump, board.pop("panels")))
    text = dump(board).removesuffix("}") + f', "panels": [\n{panels}\n]}}\n'
    Path(__file__).with_name("embert.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
