// --- the page's head, the form, and the start ---

async function showState() {
  const state = element("state");
  try {
    const { status, detail } = await (await fetch("readyz", { cache: "no-store" })).json();
    state.dataset.state = status;
    state.textContent = detail ? `${status}: ${detail}` : status;
    return status === "ready";
  } catch {
    state.dataset.state = "down";
    state.textContent = "does not answer";
    return false;
  }
}

async function showInfo() {
  info = await (await ask("info")).json();
  element("key-form").hidden = true;
  document.title = `embert · ${info.served_model_name}`;
  element("model").textContent = info.served_model_name;
  const facts = {
    architecture: info.architecture,
    dimensions: number(info.dimensions),
    pooling: info.model_type.embedding.pooling,
    "longest text": `${number(info.max_input_length)} tokens, ${info.auto_truncate ? "longer ones are cut" : "longer ones are refused"}`,
    "texts a request": number(info.max_client_batch_size),
    "batch budget": `${number(info.max_batch_tokens)} tokens`,
    encoder: `${info.backend} on ${info.device_name || info.device}, ${info.model_dtype}`,
    version: info.version,
  };
  element("facts").replaceChildren(...Object.entries(facts).map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
  element("dimensions").max = info.dimensions;
  element("dimensions").placeholder = info.dimensions;
  element("prompt").replaceChildren(element("prompt").options[0], ...info.prompts.map((name) => make("option", name)));
  element("prompt-label").hidden = info.prompts.length === 0;
}

async function compare() {
  const texts = element("texts").value.split("\n").map((text) => text.trim()).filter(Boolean);
  const request = { texts, dimensions: Number(element("dimensions").value) || null, prompt: element("prompt").value };
  const body = { inputs: texts };
  if (request.dimensions) body.dimensions = request.dimensions;
  if (request.prompt) body.prompt_name = request.prompt;
  const message = element("message");
  message.hidden = true;
  element("go").disabled = true;
  try {
    if (texts.length === 0) throw new Refused(400, "Write at least one text.");
    const started = performance.now();
    const answer = await ask("embed", body, "application/octet-stream");
    const bytes = await answer.arrayBuffer();
    const total = performance.now() - started;
    const width = Number(answer.headers.get("x-embedding-shape").split(",")[1]);
    showMatrix(texts, rows(bytes, width));
    showTiming(answer.headers.get("server-timing"), total, Number(answer.headers.get("x-compute-tokens")));
    showSnippets(request);
  } catch (error) {
    const retry = error.status === 429 || error.status === 503 ? " Try again in a moment." : "";
    message.textContent = error instanceof Refused ? error.message + retry : `The server cannot be reached: ${error.message}`;
    message.hidden = false;
  } finally {
    element("go").disabled = false;
  }
}

async function begin() {
  try {
    const ready = await showState();
    await showInfo();
    if (ready) await compare();
  } catch (error) {
    if (error.status !== 401) element("state").textContent = error.message;
  }
}

element("compare").addEventListener("submit", (event) => {
  event.preventDefault();
  compare();
});
element("texts").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) compare();
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key").value.trim();
  begin();
});
startLive();
begin();
