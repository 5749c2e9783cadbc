// --- the page's head, its views, and the start ---

let outcomes = {}; // view → what its last run returned
const running = new Set();
let view = "similarity";

async function showState() { // the states of the models, unless nothing can be asked
  const state = element("state");
  try {
    const response = await fetch("readyz", { cache: "no-store", headers: authorization() });
    const { status, detail, models: states = {} } = response.status === 401 ? { status: "wants a key" } : await response.json(); // --keyless page
    state.dataset.state = status;
    state.textContent = detail ? `${status}: ${detail}` : status;
    showStates(states);
    return status === "draining" ? {} : states;
  } catch {
    state.dataset.state = "down";
    state.textContent = "does not respond";
    return {};
  }
}

async function showInfo() {
  const served = await (await ask("info")).json();
  models = [served, ...served.models.slice(1)];
  hideKeyForm();
  showChooser();
  showModel();
}

function showModel() {
  info = wantedModel();
  element("chooser").value = info.served_model_name;
  const embeds = info.tasks?.includes("embed") ?? true;
  document.title = `embert · ${info.served_model_name}`;
  element("model").textContent = info.served_model_name;
  const facts = {
    architecture: info.architecture,
    tasks: info.tasks?.join(", ").replaceAll("_", "-"),
    adapters: info.adapters?.join(", "),
    dimensions: embeds && number(info.dimensions),
    pooling: embeds && info.model_type.embedding?.pooling,
    "longest text": `${number(info.max_input_length)} tokens, ${info.auto_truncate ? "longer ones are cut" : "longer ones are refused"}`,
    "texts a request": number(info.max_client_batch_size),
    "batch budget": info.max_batch_tokens && `${number(info.max_batch_tokens)} tokens`,
    encoder: `${info.backend} on ${info.device_name || info.device}, ${info.model_dtype}`,
    version: info.version,
  };
  element("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value).map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
  element("dimensions").max = info.dimensions;
  element("dimensions").placeholder = info.dimensions;
  element("prompt").replaceChildren(element("prompt").options[0], ...info.prompts.map((name) => make("option", name)));
  element("prompt-label").hidden = info.prompts.length === 0;
  showTabs();
}

function showTabs() {
  const tasks = info.tasks ?? ["embed"];
  // A reranker's one label is its score.
  const offered = Object.keys(VIEWS).filter((name) => tasks.includes(VIEWS[name].task) && !(name === "classify" && info.model_type.reranker));
  element("views").replaceChildren(...offered.map((name) => (
    make("button", VIEWS[name].title, { role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, type: "button" })
  )));
  element("views").hidden = offered.length < 2;
  showView(wantedView());
}

function wantedView() { // the address's, where the model has its task
  const offered = tabsOf(element("views")).map(({ id }) => id.slice(4));
  return offered.find((name) => name === address().view) ?? offered[0] ?? view;
}

function showView(name) {
  view = name;
  for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.id !== `view-${name}`;
  selectTab(element("views"), `tab-${name}`);
  showOutcome();
}

function showOutcome() {
  const outcome = outcomes[view];
  if (outcome) {
    showTiming(outcome.calls);
    showAnswer(outcome);
  } else {
    element("timing").hidden = element("code").hidden = true;
  }
}

function leaveModel() { // what is shown is its own
  outcomes = {};
  for (const each of document.querySelectorAll(".panel :is(.result, .message)")) each.hidden = true;
  element("prompt").value = element("dimensions").value = "";
}

async function run(name) {
  if (running.has(name)) return;
  let asked = info;
  const panel = element(`view-${name}`);
  const [message, button, result] = [".message", "button.main", ".result"].map((each) => panel.querySelector(each));
  running.add(name);
  message.hidden = true;
  button.setAttribute("aria-disabled", "true"); // `disabled` would take the focus away
  try {
    if (!info) await showInfo();
    asked = info;
    const outcome = await VIEWS[name].run();
    if (asked !== info) return; // another model has been chosen since
    outcomes[name] = outcome;
    result.hidden = false;
  } catch (error) {
    if (asked !== info) return;
    delete outcomes[name]; // an old response next to an error would look like its response
    result.hidden = true;
    const retry = error.status === 429 || error.status === 503 ? " Try again in a moment." : "";
    message.textContent = error instanceof Refused ? error.message + retry : `The response cannot be read: ${error.message}`;
    message.hidden = false;
  } finally {
    running.delete(name);
    button.removeAttribute("aria-disabled");
    if (asked !== info) runFirst();
    else if (view === name) showOutcome();
  }
}

function runFirst() { // what stands in a form that has no response yet
  if (info && !outcomes[view]) run(view);
}

async function begin() {
  try {
    const states = await showState();
    await showInfo();
    showStates(states);
    if (states[info.served_model_name] === "ready") await run(view);
  } catch (error) {
    if (error.status === 401) focusKey();
    else element("state").textContent = error.message;
  }
}

for (const form of document.querySelectorAll(".panel form")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(form.closest(".panel").id.slice(5));
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}
followTabs(element("views"), (id) => {
  location.hash = addressOf(info.served_model_name, id.slice(4));
});
addEventListener("hashchange", () => {
  if (info && wantedModel() !== info) {
    leaveModel();
    showModel();
  } else {
    showView(wantedView());
  }
  runFirst();
});
startLive();
begin();
