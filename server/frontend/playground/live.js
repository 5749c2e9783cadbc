// --- throughput and latency, from /metrics ---

const EVERY_MS = 3000;
const KEEP = 40; // samples on a curve
const WINDOW = 4; // samples that a rate looks back over
const FEW = 20; // requests; of fewer, quantiles say nothing
const WORK = [
  "/v1/embeddings", "/embeddings", "/embed", "/", "/embed_all", "/similarity", "/rerank", "/v1/rerank", "/v2/rerank",
  "/predict", "/embed_sparse", "/score", "/v1/score", "/classify", "/pooling", "/invocations", "/vertex",
  "/openai/deployments/{name}/embeddings", "/v1/embed", "/v2/embed", "/v1/classify", "/v1/ranking",
  "/api/embed", "/api/embeddings",
];
const TILES = [
  ["requests", "requests per second", (now) => [now.requests]],
  ["tokens", "tokens per second", (now) => [now.tokens]],
  ["latency", "latency, ms", (now) => (now.count < FEW ? [now.mean] : [now.p50, now.p99])],
  ["queue", "tokens waiting · engines up", (now) => [now.queue]],
];

function parseMetrics(text) {
  const found = { time: performance.now() / 1000, requests: 0, tokens: 0, queue: 0, up: 0, count: 0, seconds: 0, buckets: new Map() };
  for (const [, name, labels = "", value] of text.matchAll(/^embert_(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const label = (wanted) => labels.match(`${wanted}="([^"]*)"`)?.[1];
    if (name === "tokens_total") found.tokens += Number(value);
    else if (name === "queue_tokens") found.queue += Number(value);
    else if (name === "engine_up") found.up += Number(value);
    else if (!WORK.includes(label("route"))) continue;
    else if (name === "requests_total") found.requests += Number(value);
    else if (label("outcome") !== "answered") continue; // refusals take no time
    else if (name === "request_duration_seconds_count") found.count += Number(value);
    else if (name === "request_duration_seconds_sum") found.seconds += Number(value);
    else if (name === "request_duration_seconds_bucket") {
      const bound = label("le") === "+Inf" ? Infinity : Number(label("le"));
      found.buckets.set(bound, (found.buckets.get(bound) ?? 0) + Number(value));
    }
  }
  return found;
}

function quantile(share, before, after) { // as Prometheus' histogram_quantile, in milliseconds
  const counts = [...after.buckets].sort(([a], [b]) => a - b).map(([bound, count]) => [bound, count - (before.buckets.get(bound) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * all) return 1000 * (bound === Infinity ? low : low + ((bound - low) * (share * all - below)) / (count - below));
    [low, below] = [bound, count];
  }
  return null;
}

function latencyTitle({ count: requests }) {
  if (requests >= FEW) return "latency, ms: p50 · p99";
  return requests === 0 ? "latency, ms" : `latency, ms: mean of ${count(requests, "request")}`;
}

function shown(value) {
  if (value === null) return "–";
  return value >= 100 || value === 0 ? number(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
}

function curve(values, highest) {
  const points = values.map((value, i) => (value === null ? null : `${KEEP - values.length + i},${40 - (40 * value) / highest}`));
  return `<polyline points="${points.filter(Boolean).join(" ")}"/>`;
}

function startLive() {
  const samples = [];
  let refused = null; // the key that /metrics does not take: not asked again with that one
  const history = [];
  const tiles = TILES.map(([id, title]) => {
    const tile = make("div", "", { id: `live-${id}` });
    tile.append(make("h3", title), make("p", "–"), make("div"));
    return tile;
  });
  element("live").replaceChildren(...tiles);

  async function sample() {
    if (document.hidden || refused === key) return;
    const sent = key;
    const response = await ask("metrics", null, "text/plain").catch((error) => {
      if (error.status === 401) refused = sent;
      throw error;
    });
    samples.push(parseMetrics(await response.text()));
    if (samples.length > WINDOW + 1) samples.shift();
    const [before, after] = [samples[0], samples.at(-1)];
    if (after.requests < before.requests) samples.splice(0, samples.length - 1); // the server was restarted
    const seconds = after.time - before.time;
    if (seconds <= 0) return;
    const requests = after.count - before.count;
    const now = {
      count: requests,
      mean: requests > 0 ? (1000 * (after.seconds - before.seconds)) / requests : null,
      requests: (after.requests - before.requests) / seconds,
      tokens: (after.tokens - before.tokens) / seconds,
      p50: quantile(0.5, before, after),
      p99: quantile(0.99, before, after),
      queue: after.queue,
    };
    history.push(now);
    if (history.length > KEEP) history.shift();
    TILES.forEach(([id, title, values], i) => {
      const current = values(now).map(shown);
      if (id === "queue") current.push(after.up);
      const heading = id === "latency" ? latencyTitle(now) : title;
      // A mean and a half are no one curve.
      const series = values(now).map((_, j) => history.map((past) => (values(past).length === values(now).length ? values(past)[j] : null)));
      const highest = Math.max(1e-9, ...series.flat().filter((value) => value !== null));
      const text = current.join(" · ");
      tiles[i].children[0].textContent = heading;
      tiles[i].children[1].textContent = text;
      tiles[i].children[2].innerHTML = // numbers only
        `<svg viewBox="0 0 ${KEEP - 1} 40" preserveAspectRatio="none" role="img" aria-label="${heading}: ${text}">${series.map((each) => curve(each, highest)).join("")}</svg>`;
    });
  }

  async function loop() {
    try {
      await Promise.all([sample(), document.hidden ? null : showState()]);
    } catch { /* the state above says that the server does not respond */ }
    setTimeout(loop, EVERY_MS);
  }
  loop();
}
